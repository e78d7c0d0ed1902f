"""``titan-disp evaluate`` checks everything, then evaluates models on tasks and writes
its files after each model.
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

The models are the seeds of the condition. A single model is its own condition.
"""


def evaluate(options: EvaluateOptions) -> ModelComparison:
    """Run lm-evaluation-harness on models, compare all with the first, and write the
    files of ``options.out``.

    One model at a time is loaded. The files are written after each model: results.json
    (all numbers of the harness and of the comparison, settings, versions),
    samples.jsonl (every metric of every document), table.md and table.csv.

    Raises ConfigError, before anything is evaluated, if a model, task, data set or
    device does not exist, or a number is out of range; after the models before it, if
    weights are missing or damaged, or a run cannot be exported.
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
    # left by an evaluation that stopped before its first results
    (out / "samples.jsonl").unlink(missing_ok=True)
    with harness.warnings_once(), no_bars_in_logs():
        shots = harness.PROTOCOLS[options.protocol].shots
        suite = harness.build_suite(
            options.tasks, options.include_path, options.num_fewshot, shots
        )
        evaluation = _Evaluation(options, settings, suite, models, conditions)
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
    """Return the settings for all models, once the harness is imported. Raises
    ConfigError if it is missing, or if a number or the device is wrong.
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
        # Also imports accelerate, which lm_eval does not install
        import_module("lm_eval.models.huggingface")
    protocol = harness.PROTOCOLS[options.protocol]
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    return harness.Settings(
        limit=options.limit or protocol.limit,
        batch_size=options.batch_size,
        device=str(find_device(options.device or default_device)),
        dtype=protocol.dtype if options.dtype == "auto" else options.dtype,
        seed=options.seed,
        tokenizer=None if options.tokenizer is None else str(options.tokenizer),
    )


@dataclass(frozen=True)
class _Evaluation:
    """What is evaluated, and where the results go."""

    options: EvaluateOptions
    settings: harness.Settings
    suite: harness.Suite
    models: Mapping[str, Target]
    conditions: Conditions

    @cached_property
    def seeds(self) -> dict[str, Seeds]:
        """The seeds of the models' training."""
        return _seeds_by_model(self.models, self.conditions)

    @cached_property
    def costs(self) -> Lines:
        """The costs of the models' runs beside the published ones."""
        runs = [model.run for model in self.models.values() if model.run is not None]
        with suppress(ConfigError):  # a run that cannot be read has no costs
            records = gather(list(dict.fromkeys(runs)), [])
            return beside(costs(records), "the run's folder")
        return []

    def run(self, model: Target) -> harness.Result:
        settings = self.settings
        if model.run is not None:  # its export has the tokenizer
            settings = replace(settings, tokenizer=None)
        with _as_hugging_face(model, self.options) as folder:
            return harness.run_model(folder, self.suite, settings)

    def write(self, results: Mapping[str, harness.Result]) -> ModelComparison:
        """Write all files but samples.jsonl, and return the comparison of the models
        that have results.
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
    """Find the models by unique names, in the given order, and their conditions."""
    if not names:
        raise ConfigError(
            "no model is given; expected folders of Hugging Face models, as "
            "titan-disp export writes them, models of the hub, runs, or "
            "NAME=MODEL,MODEL,… for seeds of one condition"
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
            f"the numbers of positions differ ({listed}): some lose the beginning of a long prompt",
            file=sys.stderr,
        )
    return models, conditions


def _with_progress(models: Mapping[str, Target]) -> Iterator[tuple[str, Target]]:
    """Yield each model after a line with its name and an estimate of the time left."""
    began = time.monotonic()
    for done, (name, model) in enumerate(models.items()):
        each = (time.monotonic() - began) / max(done, 1)
        pace = f", about {duration(each * (len(models) - done))} left" if done else ""
        print(
            f"model {done + 1} of {len(models)}{pace}: {name}: {model.folder}",
            file=sys.stderr,
        )
        yield name, model


@contextmanager
def _as_hugging_face(model: Target, options: EvaluateOptions) -> Iterator[Path]:
    """Yield the model's folder.

    A run's checkpoint is exported to a temporary folder next to the results.
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
    """Return each model's seeds of training. Where they are unknown, as of a Hugging
    Face folder, or where a condition has them twice, they are the model's name, which
    equals no other.
    """
    by_model: dict[str, Seeds] = {}
    for members in conditions.values():
        for name in members:
            run = models[name].run
            settings = {} if run is None else flatten(read_config(run))
            seeds = tuple(map(settings.get, SEEDS))
            repeated = seeds in [by_model.get(member) for member in members]
            by_model[name] = (name,) if None in seeds or repeated else seeds
    return by_model


def scores(comparison: ModelComparison) -> Ours:
    """Return the scores of each task, and differences to the first model.

    The mean is there if it is of the paper's tasks.
    """

    def points(part: float, error: float | None, sign: str = "") -> str:
        text = f"{100 * part:{sign}.2f}"
        return text if error is None else f"{text} ± {100 * error:.2f}"

    ours = dict[tuple[str, str], Mapping[str, str]]()
    first = next(iter(comparison.seeds))
    rows = comparison.tasks
    if {task.task for task in rows} == harness.PAPER.keys():
        rows = comparison.lines
    for line in rows:
        ours[line.task, "score, %"] = {
            model: points(score, line.seed_errors[model])
            for model, score in line.scores.items()
        }
        differences = ours[line.task, "difference, points"] = {}
        for other, difference in line.differences.items():
            over_seeds = line.over_seeds.get(other)
            error = None if over_seeds is None else over_seeds.standard_error
            differences[f"{other} − {first}"] = points(difference.mean, error, "+")
    return ours


def _dtype_note(results: Mapping[str, harness.Result]) -> list[str]:
    if len({result.dtype for result in results.values()}) < 2:
        return []
    dtypes = ", ".join(f"{name} {result.dtype}" for name, result in results.items())
    return [
        f"The models' dtypes differ ({dtypes}): rounding may be part of a difference. --dtype makes them equal."
    ]
