"""The README.md (model card) of an exported model, written from the files of its run."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import EvalResult, ModelCardData

from titan_disp.condensation.record import OF_PAPER, PLACES, DepthCorrelation
from titan_disp.data.findings import ledger_lines
from titan_disp.data.fingerprint import read_data_state
from titan_disp.data.listing import list_files
from titan_disp.dispersion.formula import AngularFormula
from titan_disp.errors import CheckpointError, ConfigError, counted
from titan_disp.lab.export.saved import SavedModel
from titan_disp.models.baselines import OPTIONS
from titan_disp.run.reader import last_row, read_condensation, read_validation
from titan_disp.tables import written_out
from titan_disp.templates import templates
from titan_disp.text import byte_size

SHOWN_FILES = 4  # of more files, only the first and the last file are named
SHOWN_PACKAGES = (
    "python",
    "titan-disp",
    "torch",
    "torchtitan",
    "tokenizers",
    "sentencepiece",
)


def _files(saved: SavedModel) -> list[tuple[str, int]]:
    """Return (name, bytes) of each file of the training data, or [] if unknown.

    If the checkpoint does not record the files, those now at ``training.dataset_path``
    are returned.
    """
    training = saved.config["training"]
    if not saved.in_hf_format:
        with contextlib.suppress(CheckpointError):
            state, _ = read_data_state(str(saved.folder))
            if "files" in state:
                return [(name, size) for name, size in state["files"]]
    if training["dataset_path"]:
        with contextlib.suppress(ConfigError):
            return [
                (file.name, file.size)
                for file in list_files(training["dataset"], training["dataset_path"])
            ]
    return []


def _data(saved: SavedModel) -> str:
    """Return the files of the data and their origin, as text.

    Only the last part of a path is given, because the other parts mean nothing on other
    machines.
    """
    files = _files(saved)
    if sources := saved.config["stream"]["sources"]:
        total = sum(source["weight"] for source in sources)
        parts = [
            f"{_source(source)} ({source['weight'] / total:.0%})" for source in sources
        ]
        if files:
            parts[-1] += f"; in total {_listed(files)}"
        return ", ".join(parts)
    training = saved.config["training"]
    origin = "documents"
    if training["dataset"].startswith("c4"):
        origin = "allenai/c4"
        if training["dataset_path"]:
            origin = "laid out as allenai/c4"
    elif training["dataset"].startswith("hf:"):
        origin = f"`{training['dataset']}`"
    if training["dataset_path"]:
        local = Path(training["dataset_path"]).name
        origin += f", from a local folder or file named `{local}`"
    else:
        origin += ", from the hub"
    if files:
        return f"{_listed(files)} ({origin})"
    return origin


def _listed(files: Sequence[tuple[str, int]]) -> str:
    """Return the number, total size and names of files, as text.

    Of more than ``SHOWN_FILES`` files, only the first and the last file are named.
    """
    names = [f"`{name}`" for name, _ in files]
    listed_names = ", ".join(names)
    if len(names) > SHOWN_FILES:
        listed_names = f"{names[0]} to {names[-1]}"
    size = byte_size(sum(size for _, size in files))
    return f"{counted(len(files), 'file')}, {size}: {listed_names}"


def _condensation(measured: Mapping[str, Any]) -> str:
    """Return a description of ``measured``, the output of ``Measurement.to_json``."""
    # None stands for a number that is not finite.
    cosines = np.array(measured["mean_cosine"], dtype=np.float64)
    blocks = cosines[1:-1]
    text = (
        f"mean cosine of two tokens {cosines[0]:.3f} in the embedding, "
        f"{blocks.mean():.3f} on average over the blocks, "
        f"{blocks[-1]:.3f} after the last block, {cosines[-1]:.3f} after the final norm"
    )
    ranks = measured.get(OF_PAPER, {})  # older rows have none
    if ranks.get("spearman") is None:
        return text
    return (
        f"{text}; with depth, {PLACES[OF_PAPER]}: "
        f"{DepthCorrelation(**{'range': math.nan} | ranks)}"
    )


def _source(source: dict[str, Any]) -> str:
    return f"`{source['name'] or Path(source['path'] or source['dataset']).name}`"


def _dispersion(section: dict[str, Any]) -> str:
    if not section["enabled"]:
        return "off: plain cross-entropy"
    apart = ("enabled", "options", "losses")
    options = {name: value for name, value in section.items() if name not in apart}
    options |= section.get("options", {})
    parts = [f"{name} = {value}" for name, value in options.items()]
    parts += [f"and {written_out(loss)}" for loss in section.get("losses", [])]
    return ", ".join(parts)


def _baseline(section: dict[str, Any]) -> str:
    options = [
        f"{name} = {value}"
        for name, value in section.items()
        if OPTIONS.get(name) == section["method"]
    ]
    return ", ".join([section["method"], *options])


def _newest(rows: dict[int, Any], last_step: int) -> tuple[int, Any] | None:
    """Return the newest (step, row) with a step of at most ``last_step``, or None."""
    steps = [step for step in rows if step <= last_step]
    if not steps:
        return None
    return max(steps), rows[max(steps)]


def _hub_id(dataset: str) -> str | None:
    """Return the hub's id of the config's ``dataset``, or None if the data set has
    none.
    """
    if dataset.startswith("c4"):
        return "allenai/c4"
    if dataset.startswith("hf:"):
        return dataset.split(":")[1]
    return None


def _metadata(saved: SavedModel, name: str, cross_entropy: float | None) -> str:
    """Return the YAML head of the card, which the Hugging Face hub reads.

    ``cross_entropy`` is measured on held-out text, or None if it was not measured.
    """
    config = saved.config
    training = config["training"]
    sources = config["stream"]["sources"] or [training]
    ids = [_hub_id(source["dataset"]) for source in sources]
    results = None
    if cross_entropy is not None:
        dataset = ids[0] or training["dataset_path"] or training["dataset"]
        result = EvalResult(
            task_type="text-generation",
            dataset_type=ids[0] or "text",
            dataset_name=Path(dataset).name,
            metric_type="cross_entropy",
            metric_name="cross-entropy of held-out text",
            metric_value=round(cross_entropy, 4),
        )
        results = [result]
    base_model = None
    if config["checkpoint"]["initial_load_in_hf"]:
        base_model = _start(config)
    data = ModelCardData(
        # The language of other data sets is unknown.
        language="en" if set(ids) == {"allenai/c4"} else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["dispersion-loss", "titan-disp"],
        datasets=sorted(set(filter(None, ids))) or None,
        base_model=base_model,
        model_name=name,
        eval_results=results,
    )
    return data.to_yaml()


def _start(config: Mapping[str, Any]) -> str:
    """Return the name of the folder that initial weights are loaded from."""
    path = (
        config["checkpoint"]["initial_load_path"] or config["model"]["hf_assets_path"]
    )
    return Path(path).name


def _cross_entropy(
    validated: tuple[int, Any] | None, measured: tuple[int, Any] | None
) -> float | None:
    """Return the cross-entropy of TorchTitan's validation, or else of the condensation
    measurement, or None.
    """
    if validated is not None:
        return validated[1]
    if measured is not None:
        return measured[1]["cross_entropy"]
    return None


def model_card(
    saved: SavedModel,
    name: str,
    parameters: int,
    dtype: str,
    environment: dict[str, Any],
) -> str:
    """Return the text of README.md.

    ``environment`` is the run's environment.json, or {} if it is missing.
    """
    config = saved.config
    validated = _newest(read_validation(saved.run), saved.step)
    measured = _newest(read_condensation(saved.run), saved.step)
    packages = {"python": environment.get("python")} | environment.get("packages", {})
    cards = templates(
        __file__, grouped="{:,}".format, counted=counted, condensation=_condensation
    )
    return cards.get_template("model_card.md.j2").render(
        name=name,
        title=saved.entry.title,
        flavor=saved.flavor,
        parameters=parameters,
        dtype=dtype,
        step=saved.step,
        config=config,
        data=_data(saved),
        ledger=ledger_lines(saved.run),
        dispersion=_dispersion(config["dispersion"]),
        formula=AngularFormula.of_run(config["dispersion"]),
        baseline=_baseline(config["baseline"]),
        start=_start(config),
        last=last_row(saved.run, saved.step),
        validated=validated,
        measured=measured,
        metadata=_metadata(saved, name, _cross_entropy(validated, measured)),
        versions=[f"{p} {packages[p]}" for p in SHOWN_PACKAGES if packages.get(p)],
        environment=environment,
    )
