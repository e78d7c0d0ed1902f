"""``titan-disp evaluate`` evaluates models on tasks, compares them, and writes the
results.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from titan_disp.config.command_options import (
    EvaluateOptions,
    ExportOptions,
    check_least,
)
from titan_disp.errors import ConfigError, reported
from titan_disp.files import make_writable, no_bars_in_logs
from titan_disp.lab.evaluate import harness
from titan_disp.lab.evaluate.compare import (
    ModelComparison,
    compare,
    explanation,
    pooled,
    table,
    to_csv,
)
from titan_disp.lab.export.export import export
from titan_disp.lab.inspection.targets import (
    Target,
    find_device,
    find_targets,
    name_of,
    parse_group,
)
from titan_disp.lab.published import HEADINGS, NOTE, Lines, Ours, beside, costs
from titan_disp.lab.report.gather import SEEDS, Seeds, gather
from titan_disp.run.reader import flatten, read_config
from titan_disp.run.storage import write_json
from titan_disp.text import duration, latex_table, markdown_table

PACKAGES = ("titan-disp", "lm_eval", "transformers", "torch", "datasets")
Conditions = Mapping[str, Sequence[str]]
"""The names of models by condition.

The models of a condition differ in their seeds. A single model is a condition of its
own.
"""


def evaluate(options: EvaluateOptions) -> ModelComparison:
    """Evaluate models with lm-evaluation-harness, write the files of ``options.out``,
    and return the comparison with the first model.

    One model at a time is loaded. The files are written after each model: results.json
    (all numbers of the harness and of the comparison, settings, versions),
    samples.jsonl (all metrics of each document), table.md and table.csv.

    Raises ConfigError before the first evaluation if a model, task, data set or device
    does not exist, or if a number is out of range. If weights are missing or damaged,
    or if a run cannot be exported, ConfigError is raised when that model's turn comes.
    """
    settings = _settings(options)
    models, conditions = _find_models(list(map(str, options.models)), options.tokenizer)
    out = options.out
    if (out / "results.json").exists():
        raise ConfigError(
            f"--out {str(out)!r} already holds an evaluation; choose another folder, "
            "or remove this one"
        )
    make_writable(out, "--out")
    # An evaluation that stopped before its first results may have left this file.
    (out / "samples.jsonl").unlink(missing_ok=True)
    with harness.warnings_once(), no_bars_in_logs():
        shots = harness.PROTOCOLS[options.protocol].shots
        suite = harness.build_suite(
            options.tasks, options.include_path, options.num_fewshot, shots
        )
        evaluation = _Evaluation(
            options=options,
            settings=settings,
            suite=suite,
            models=models,
            conditions=conditions,
        )
        results: dict[str, harness.Result] = {}
        for name, model in _with_progress(models):
            results[name] = evaluation.run(model)
            with open(out / "samples.jsonl", "a") as file:
                for sample in results[name].samples:
                    file.write(json.dumps({"model": name, **sample}) + "\n")
            comparison = evaluation.write(results)
    print((out / "table.md").read_text())
    files = ["results.json", "samples.jsonl", "table.md", "table.csv"]
    files += ["table.tex"] * options.latex
    print(f"{out}: {', '.join(files)}")
    return comparison


def _settings(options: EvaluateOptions) -> harness.Settings:
    """Return the settings for all models, after importing the harness.

    Raises ConfigError if the harness is not installed, or if a number or the device is
    wrong.
    """
    check_least(options, limit=1, num_fewshot=0, seed=0)
    if options.batch_size != "auto" and options.batch_size < 1:
        raise ConfigError(
            f"--batch-size is {options.batch_size}, expected auto or at least 1"
        )
    print(
        "loading lm-evaluation-harness and its tasks, which takes up to a minute",
        file=sys.stderr,
        flush=True,
    )
    with reported(
        "evaluate needs EleutherAI's lm-evaluation-harness (pip install lm-eval accelerate)",
        ImportError,
    ):
        # This also imports accelerate, which is not a requirement of lm_eval.
        import_module("lm_eval.models.huggingface")
    protocol = harness.PROTOCOLS[options.protocol]
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype
    if dtype == "auto":
        dtype = protocol.dtype
    tokenizer = None
    if options.tokenizer is not None:
        tokenizer = str(options.tokenizer)
    return harness.Settings(
        limit=options.limit or protocol.limit,
        batch_size=options.batch_size,
        device=str(find_device(options.device or default_device)),
        dtype=dtype,
        seed=options.seed,
        tokenizer=tokenizer,
    )


@dataclass(frozen=True)
class _Evaluation:
    """The models, tasks and settings of an evaluation, and where its files go."""

    options: EvaluateOptions
    settings: harness.Settings
    suite: harness.Suite
    models: Mapping[str, Target]
    conditions: Conditions

    @cached_property
    def seeds(self) -> dict[str, Seeds]:
        """The seeds with which each model was trained."""
        return _seeds_by_model(self.models, self.conditions)

    @cached_property
    def costs(self) -> Lines:
        """The lines of a table: the costs of the models' runs, and published costs."""
        runs = [model.run for model in self.models.values() if model.run is not None]
        with suppress(ConfigError):  # a run that cannot be read has no costs
            records = gather(list(dict.fromkeys(runs)), [])
            return beside(costs(records), "the run's folder")
        return []

    def run(self, model: Target) -> harness.Result:
        """Return the results of one model."""
        settings = self.settings
        if model.run is not None:  # the run's export has the tokenizer
            settings = replace(settings, tokenizer=None)
        with _as_hugging_face(model, self.options) as folder:
            return harness.run_model(folder, self.suite, settings)

    def write(self, results: Mapping[str, harness.Result]) -> ModelComparison:
        """Write all files except samples.jsonl, and return the comparison of the models
        in ``results``.
        """
        out = self.options.out
        comparison = _compare(self.suite, self.conditions, self.seeds, results)
        published = beside(scores(comparison), "this evaluation")
        cells = table(comparison)
        parts = [markdown_table(cells), *explanation(comparison), *_dtype_note(results)]
        if published or self.costs:
            parts += [markdown_table([HEADINGS, *published, *self.costs]), NOTE]
        (out / "table.md").write_text("\n\n".join(parts) + "\n")
        (out / "table.csv").write_text(to_csv(comparison))
        if self.options.latex:
            (out / "table.tex").write_text(latex_table(cells))
        content = {
            "settings": {
                "protocol": self.options.protocol,
                **asdict(self.settings),
                "rows": [asdict(row) for row in self.suite.rows],
            },
            "versions": {name: version(name) for name in PACKAGES},
            "conditions": self.conditions,
            "comparison": asdict(comparison),
            "published": published,
            "models": {
                name: {
                    "folder": str(self.models[name].folder.resolve()),
                    "dtype": result.dtype,
                    "harness": result.harness,
                }
                for name, result in results.items()
            },
        }
        write_json(out / "results.json", content)
        return comparison


def _find_models(
    names: Sequence[str], tokenizer: Path | None
) -> tuple[dict[str, Target], Conditions]:
    """Return the models by unique names, in order, and their conditions.

    Raises ConfigError if a model does not exist or is repeated, or if two conditions
    have the same name.
    """
    if not names:
        raise ConfigError(
            "no model is given; expected runs, Hugging Face models (ids of the hub, or "
            "folders such as titan-disp export writes), or NAME=MODEL,MODEL,… for "
            "seeds of one condition"
        )
    groups = [parse_group(name) or (None, [name]) for name in names]
    members = list(chain.from_iterable(group for _, group in groups))
    models = find_targets(members, all_steps=False, tokenizer=tokenizer)
    if len(models) < len(members):
        raise ConfigError(f"a model is given twice: {', '.join(members)}")
    conditions = {}
    for condition, group in groups:
        names_of_group = [name_of(member, models) for member in group]
        conditions[condition or names_of_group[0]] = names_of_group
    if len(conditions) < len(groups):
        raise ConfigError(f"two conditions have the same name: {', '.join(names)}")
    lengths = {name: model.max_tokens for name, model in models.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        print(
            f"the numbers of positions differ ({listed}): models with fewer positions "
            "do not see the beginning of a long prompt",
            file=sys.stderr,
        )
    return models, conditions


def _with_progress(models: Mapping[str, Target]) -> Iterator[tuple[str, Target]]:
    """Yield each model after printing its name and an estimate of the time left."""
    began = time.monotonic()
    for done, (name, model) in enumerate(models.items()):
        progress = f"model {done + 1} of {len(models)}"
        if done:
            per_model = (time.monotonic() - began) / done
            remaining = duration(per_model * (len(models) - done))
            progress += f", about {remaining} left"
        print(f"{progress}: {name}: {model.folder}", file=sys.stderr)
        yield name, model


@contextmanager
def _as_hugging_face(model: Target, options: EvaluateOptions) -> Iterator[Path]:
    """Yield the model's Hugging Face folder.

    A checkpoint of a run is exported to a temporary folder next to the results.
    """
    if model.run is None:
        yield model.folder
        return
    with tempfile.TemporaryDirectory(prefix=".export-", dir=options.out) as folder:
        dest = Path(folder) / "model"
        target = f"{model.run}/{model.step}"
        export(ExportOptions(target, dest, tokenizer=options.tokenizer))
        yield dest


def _compare(
    suite: harness.Suite,
    conditions: Conditions,
    seeds: Mapping[str, Seeds],
    results: Mapping[str, harness.Result],
) -> ModelComparison:
    models = {}
    for condition, members in conditions.items():
        done = {
            seeds[name]: results[name].scores for name in members if name in results
        }
        if done:
            models[condition] = {
                row.name: pooled(
                    {seed: scores[row.name] for seed, scores in done.items()}
                )
                for row in suite.rows
            }
    return compare(suite.rows, models)


def _seeds_by_model(
    models: Mapping[str, Target], conditions: Conditions
) -> dict[str, Seeds]:
    """Return the seeds with which each model was trained, for pairs over seeds.

    The model's name, which is unique, stands in for seeds that are unknown (Hugging
    Face folders) or repeated in a condition.
    """
    by_model: dict[str, Seeds] = {}
    for members in conditions.values():
        for name in members:
            run = models[name].run
            settings: dict[str, Any] = {}
            if run is not None:
                settings = flatten(read_config(run))
            seeds = tuple(map(settings.get, SEEDS))
            repeated = seeds in [by_model.get(member) for member in members]
            if None in seeds or repeated:
                seeds = (name,)
            by_model[name] = seeds
    return by_model


def scores(comparison: ModelComparison) -> Ours:
    """Return the scores of each task in percent, and the differences from the first
    model in percentage points, as text.

    The mean over tasks is included if the tasks are the paper's tasks.
    """

    def percent(fraction: float, error: float | None, sign: str = "") -> str:
        text = f"{100 * fraction:{sign}.2f}"
        if error is not None:
            text += f" ± {100 * error:.2f}"
        return text

    ours = dict[tuple[str, str], Mapping[str, str]]()
    first = next(iter(comparison.seeds))
    rows = comparison.tasks
    if {task.task for task in rows} == harness.PAPER.keys():
        rows = comparison.lines
    for line in rows:
        ours[line.task, "score, %"] = {
            model: percent(score, line.seed_errors[model])
            for model, score in line.scores.items()
        }
        differences = ours[line.task, "difference, points"] = {}
        for other, difference in line.differences.items():
            error = None
            if other in line.over_seeds:
                error = line.over_seeds[other].standard_error
            differences[f"{other} − {first}"] = percent(difference.mean, error, "+")
    return ours


def _dtype_note(results: Mapping[str, harness.Result]) -> list[str]:
    if len({result.dtype for result in results.values()}) < 2:
        return []
    dtypes = ", ".join(f"{name} {result.dtype}" for name, result in results.items())
    return [
        f"The dtypes of the models differ ({dtypes}), so that part of a difference may be "
        "rounding. --dtype evaluates all models in one dtype."
    ]
