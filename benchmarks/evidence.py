"""Run the experiment of docs/evidence_design.md: train all runs that are missing, and
write the page about them.

    make evidence                        # all parts in their order; finished runs are not repeated
    make evidence PART=main JOBS=2       # one part of benchmarks/evidence_parts.py
    python -m benchmarks.evidence --part page    # only the pages and their pictures, from docs/evidence.jsonl

This needs data/evidence (python -m benchmarks.corpus data/evidence). An interrupted run
resumes from its newest checkpoint. Each run that has ended, finished or failed, adds a
row to docs/evidence.jsonl. Each call tries a failed run once more, and adds another
row.
"""

import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import tyro

from benchmarks.evidence_page import missing, write_pages
from benchmarks.evidence_parts import (
    CONFIG,
    PARTS,
    RESTORED,
    STEPS,
    Job,
    Row,
    jobs,
    key_of,
    newest,
)
from benchmarks.evidence_score import HeldOut, held_out, history, score
from benchmarks.templates import Refused
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import counted
from titan_disp.files import in_parallel
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.sweeps.definition import Listed, Sweep
from titan_disp.lab.sweeps.runner import Result, run
from titan_disp.run.reader import read_json_lines
from titan_disp.run.storage import append_json

ROOT = Path(__file__).parent.parent
# the folders of the corpus
TEXTS = {"development": "en", "test": "test", "new_test": "held_back/test"}


@dataclass
class Options:
    part: str = "all"
    """all, page, or one or more parts, separated by commas."""
    jobs: int = 2
    """Number of runs at a time."""
    data: Path = Path("data/evidence")
    runs: Path = Path("outputs/evidence")
    rows: Path = Path("docs/evidence.jsonl")
    docs: Path = Path("docs")
    config: Path = Path(CONFIG)


def commit() -> str:
    """Return the checkout's commit, with + if code that runs has changed since."""
    paths = ("titan_disp", "benchmarks", "train_configs")
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    changed = subprocess.run(
        ["git", "status", "--porcelain", *paths],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout
    return (head.strip() or "unknown") + ("+" if changed.strip() else "")


def current(rows: Sequence[Row], config: Path) -> list[Row]:
    """Return the rows that count, by the design: those of the last corpus and with the
    present recipe of their run.
    """
    corpora = [row["sha256"][:12] for row in rows if row["part"] == "corpus"]
    own = [
        row for row in rows if row["part"] == "corpus" or row["corpus"] in corpora[-1:]
    ]
    recipes = {job.key: job.recipe(config) for part in PARTS for job in jobs(part, own)}
    return [
        row
        for row in own
        if row["part"] == "corpus" or recipes.get(key_of(row)) == row["recipe"]
    ]


@cache
def _text(folder: Path, tokenizer: Path, length: int) -> HeldOut:
    loaded = load_tokenizer(tokenizer)
    assert loaded.eos_id is not None
    return held_out(folder, loaded.encode, loaded.eos_id, length)


class Experiment:
    """Trains and measures runs, and writes their rows."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.corpus = json.loads((options.data / "corpus.json").read_text())
        self.common = (
            f"--training.dataset_path={options.data}",
            f"--model.hf_assets_path={options.data}/tokenizer",
        )
        if not any(
            row["part"] == "corpus" and row["sha256"] == self.corpus["sha256"]
            for row in self.rows
        ):
            append_json(options.rows, {"part": "corpus", **self.corpus})

    @property
    def rows(self) -> list[Row]:
        return read_json_lines(self.options.rows)

    def folder(self, job: Job) -> Path:
        part, condition, seed = (
            job.key if job.trained or job.parent is None else job.parent
        )
        return self.options.runs / part / f"{condition}_seed-{seed}"

    def missing(self, part: str) -> list[Job]:
        """Return the runs that have no finished row with their recipe and corpus."""
        known = newest(self.rows)
        config = self.options.config
        corpus = self.corpus["sha256"][:12]
        finished = {
            key: (row["recipe"], row["corpus"])
            for key, row in known.items()
            if row["status"] == "finished"
        }
        return [
            job
            for job in jobs(part, self.rows)
            if finished.get(job.key) != (job.recipe(config), corpus)
        ]

    def _ready(self, job: Job) -> bool:
        return (
            job.parent is None
            or newest(self.rows).get(job.parent, {}).get("status") == "finished"
        )

    def part(self, name: str) -> None:
        """Do all missing runs of a part. A run that fails is not tried again."""
        tried: set[tuple[str, str, int]] = set()
        while todo := [
            job
            for job in self.missing(name)
            if job.key not in tried and self._ready(job)
        ]:
            print(f"{name}: {counted(len(todo), 'run')} to do", flush=True)
            tried |= {job.key for job in todo}
            self._restore_parents(todo)
            for ranks in sorted({job.ranks for job in todo}):
                self._train(
                    name,
                    [job for job in todo if job.ranks == ranks and job.trained],
                    ranks,
                )
            self._measure([job for job in todo if not job.trained])

    def _restore_parents(self, todo: Sequence[Job]) -> None:
        """Train parents again whose checkpoints are gone.

        Their rows stay, and a row says how close the new models are.
        """
        parents = {job.parent for job in todo}  # all of main
        gone = [
            job
            for job in jobs("main", self.rows)
            if job.key in parents and not self._checkpoint(job).is_dir()
        ]
        if not gone:
            return
        count = counted(len(gone), "model")
        print(
            f"training again what other runs start from: {count} without a checkpoint here",
            flush=True,
        )
        self._run("main", gone, 1)
        if lost := [
            self.folder(job) for job in gone if not self._checkpoint(job).is_dir()
        ]:
            raise SystemExit(
                f"{lost[0]} has no checkpoint of step {STEPS}; delete the folder to "
                "train the run again"
            )
        for job, numbers in self._numbers(gone):
            row = {
                "part": RESTORED,
                "of": list(job.key),
                "recipe": job.recipe(self.options.config),
                "commit": commit(),
            }
            self._append(row, numbers=numbers, history=history(self.folder(job)))

    def _checkpoint(self, job: Job) -> Path:
        return self.folder(job) / "checkpoint" / f"step-{STEPS}"

    def _run(self, part: str, todo: Sequence[Job], ranks: int) -> dict[str, Result]:
        """Train, and return the results by the jobs' names."""
        paths = {"data": self.options.data, "runs": self.options.runs}
        sweep = Sweep(
            str(self.options.config),
            self.options.runs / part,
            self.common,
            tuple(
                Listed(
                    job.name, (*(p.format(**paths) for p in job.paths), *job.options)
                )
                for job in todo
            ),
        )
        return {
            result.name: result
            for result in run(sweep, max(1, self.options.jobs // ranks), ranks)
        }

    def _train(self, part: str, todo: Sequence[Job], ranks: int) -> None:
        """Train in groups, so that a part whose process dies keeps the rows of finished
        groups.
        """
        size = self.options.jobs * (1 if part == "long" else 8)
        for some in (todo[i : i + size] for i in range(0, len(todo), size)):
            results = self._run(part, some, ranks)
            for job in some:
                if results[job.name].outcome == "failed":
                    self._write(job, status="failed", error=results[job.name].detail)
            self._measure(
                [job for job in some if results[job.name].outcome == "finished"]
            )
            if stopped := [
                result
                for result in results.values()
                if result.outcome not in ("finished", "failed")
            ]:
                count = counted(len(stopped), "run")
                raise SystemExit(
                    f"{part}: {count} did not finish (stopped or in use); run the "
                    "same command again to continue"
                )

    def _numbers(self, done: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Measure runs in processes of their own, and yield them with their numbers in
        the order in which they end.
        """
        with ProcessPoolExecutor(
            self.options.jobs, mp_context=get_context("spawn")
        ) as pool:
            yield from in_parallel(pool, self._score, done)

    def _score(self, job: Job) -> dict[str, Any]:
        """Return the numbers of a run's last checkpoint by text.

        It is called in a process of its own, on one core.
        """
        torch.set_num_threads(1)
        saved = find_saved(self.folder(job))
        data = self.options.data
        model = load_model(saved)
        length = saved.config["training"]["seq_len"]
        return {
            name: score(
                model, _text(data / TEXTS[name], data / "tokenizer", length), length
            )
            for name in job.texts
        }

    def _measure(self, done: Sequence[Job]) -> None:
        for job, numbers in self._numbers(done):
            how = {"history": history(self.folder(job))} if job.trained else {}
            if all(math.isfinite(found["cross_entropy"]) for found in numbers.values()):
                self._write(job, status="finished", numbers=numbers, **how)
            else:
                self._write(
                    job,
                    status="failed",
                    error="its cross-entropy on held-out text is not finite",
                    **how,
                )

    def _write(self, job: Job, **content: Any) -> None:
        row = {"part": job.part, "condition": job.condition, "seed": job.seed}
        row |= {
            "recipe": job.recipe(self.options.config),
            "options": list(job.options),
            "commit": commit(),
        }
        self._append(row, **content)

    def _append(self, row: Row, **content: Any) -> None:
        append_json(
            self.options.rows, {**row, "corpus": self.corpus["sha256"][:12], **content}
        )


def main(options: Options) -> None:
    parts = (
        tuple(PARTS)
        if options.part == "all"
        else tuple(p for p in options.part.split(",") if p != "page")
    )
    if unknown := set(parts) - set(PARTS):
        raise SystemExit(
            f"there is no part {', '.join(sorted(unknown))}; expected all, page, "
            f"{', '.join(PARTS)}"
        )
    if parts:
        experiment = Experiment(options)
        for part in parts:
            experiment.part(part)
            left = experiment.missing(part)
            state = (
                f"{counted(len(left), 'run')} missing or failed" if left else "complete"
            )
            print(f"{part}: {state}", flush=True)
            if not jobs(part, experiment.rows):
                raise SystemExit(
                    f"{part} needs what tuning finds: run --part tuning first"
                )
    rows = current(read_json_lines(options.rows), options.config)
    page = options.docs / "evidence.md"
    if parts and (left := missing(rows)):
        print(
            f"{page} is not written before all runs have ended; missing:",
            *left,
            sep="\n  ",
            flush=True,
        )
        return
    try:
        write_pages(rows, options.docs)
    except Refused as error:
        raise SystemExit(f"{page} is not written: {error}") from error


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
