"""``titan-disp evaluate``: models on tasks, checks first, files after every model."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import torch

from titan_disp.errors import ConfigError
from titan_disp.evaluate.compare import Comparison, compare
from titan_disp.evaluate.harness import Dtype, Result, Settings, run_model
from titan_disp.evaluate.table import to_csv, to_markdown
from titan_disp.evaluate.tasks import Suite, build_suite
from titan_disp.inspection.targets import Target, find_targets
from titan_disp.results.saved import is_run
from titan_disp.run.folder import write_json


def evaluate(
    folders: Sequence[Path],
    tasks: Sequence[str] = ("paper",),
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int | Literal["auto"] = "auto",
    device: str | None = None,
    dtype: Dtype = "auto",
    seed: int = 0,
    include_path: Path | None = None,
    out: Path = Path("evaluation"),
) -> Comparison:
    """Run lm-evaluation-harness on Hugging Face folders, compare all with the first, and write the files of ``out``.

    results.json (all numbers of the harness and of the comparison, settings, versions), samples.jsonl (every metric of
    every document), table.md and table.csv are there after the first model, and anew after each.

    Args:
        folders: of causal language models, such as titan-disp export writes. Each is loaded once, one at a time.
        tasks, include_path, num_fewshot: as ``build_suite`` takes them.
        limit, batch_size, dtype, seed: as in ``Settings``.
        device: default: the GPU where there is one.
        out: a folder without an earlier evaluation.

    Raises:
        ConfigError: no such model, task, data or device, or a number out of range, before anything is evaluated; weights
            that are missing or damaged, when their turn comes.
    """
    for option, number, least in (("--limit", limit, 1), ("--num-fewshot", num_fewshot, 0), ("--seed", seed, 0)):
        if number is not None and number < least:
            raise ConfigError(f"{option} is {number}, expected at least {least}")
    if batch_size != "auto" and batch_size < 1:
        raise ConfigError(f"--batch-size is {batch_size}, expected auto or at least 1")
    _require_harness()
    settings = Settings(limit, batch_size, _find_device(device), dtype, seed)
    models = _find_models(folders)
    _check_out(out)
    suite = build_suite(tasks, include_path, num_fewshot)
    results: dict[str, Result] = {}
    for name, model in models.items():
        print(f"{name}: {model.folder}", file=sys.stderr)
        results[name] = run_model(model.folder, suite, settings)
        with open(out / "samples.jsonl", "a") as file:
            file.writelines(json.dumps({"model": name, **sample}) + "\n" for sample in results[name].samples)
        comparison = compare(suite.rows, {done: result.scores for done, result in results.items()})
        _write(out, comparison, settings, suite, models, results)
    print(to_markdown(comparison))
    print(f"{out}: results.json, samples.jsonl, table.md, table.csv")
    return comparison


def _require_harness() -> None:
    try:
        import_module("lm_eval.models.huggingface")  # and accelerate, which lm_eval alone does not install
    except ImportError as error:
        raise ConfigError(
            f"titan-disp evaluate needs EleutherAI's lm-evaluation-harness: {error}. pip install 'titan-disp[eval]'"
        ) from error


def _find_device(name: str | None) -> str:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name


def _check_out(out: Path) -> None:
    if (out / "results.json").exists():
        raise ConfigError(f"--out {str(out)!r} holds an evaluation already; name another folder, or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
        (out / "samples.jsonl").unlink(missing_ok=True)  # of an evaluation that ended before its first results
    except OSError as error:
        raise ConfigError(f"--out {str(out)!r} is no folder to write into: {error}") from error


def _find_models(folders: Sequence[Path]) -> dict[str, Target]:
    """By names that tell them apart, the first one first."""
    if not folders:
        raise ConfigError(
            "no model is given; expected folders of Hugging Face models, as titan-disp export writes them"
        )
    for folder in folders:
        if (folder / "config.json").is_file() and not is_run(folder):
            continue
        run = next((path for path in (folder, *folder.parents[:2]) if is_run(path)), None)
        if run is not None:
            raise ConfigError(
                f"{str(folder)!r} is a run, not a Hugging Face model; export it first: titan-disp export {folder} DEST"
            )
        what = "has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(
            f"{str(folder)!r} {what}; expected a Hugging Face model's folder, as titan-disp export writes it"
        )
    models = find_targets([str(folder) for folder in folders], all_steps=False, tokenizer=None)
    if len(models) < len(folders):
        raise ConfigError(f"a folder is given twice: {', '.join(map(str, folders))}")
    lengths = {name: model.max_tokens for name, model in models.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        print(
            f"the models' positions differ ({told}): longer prompts lose their beginnings, in some and not in others",
            file=sys.stderr,
        )
    return models


def _write(
    out: Path,
    comparison: Comparison,
    settings: Settings,
    suite: Suite,
    models: Mapping[str, Target],
    results: Mapping[str, Result],
) -> None:
    content = {
        "settings": asdict(settings) | {"rows": [asdict(row) for row in suite.rows]},
        "versions": {name: version(name) for name in ("titan-disp", "lm_eval", "transformers", "torch", "datasets")},
        "comparison": asdict(comparison),
        "models": {
            name: {"folder": str(models[name].folder.resolve()), "harness": result.harness}
            for name, result in results.items()
        },
    }
    (out / "table.md").write_text(to_markdown(comparison))
    (out / "table.csv").write_text(to_csv(comparison))
    write_json(out / "results.json", content)
