"""The README.md of an exported model is written from the files of its run."""

import contextlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titan_disp.condensation.record import OF_PAPER, PLACES
from titan_disp.data.fingerprint import read_data_state
from titan_disp.data.listing import list_files
from titan_disp.errors import CheckpointError, ConfigError, counted
from titan_disp.lab.export.saved import SavedModel
from titan_disp.models.baselines import OPTIONS
from titan_disp.run.reader import last_row, read_condensation, read_validation
from titan_disp.tables import written_out
from titan_disp.text import byte_size

SHOWN_FILES = 4  # up to so many files are listed; otherwise the first and the last one
PAPER = "https://arxiv.org/abs/2602.00217"
SHOWN = ("python", "titan-disp", "torch", "torchtitan", "tokenizers", "sentencepiece")


def _files(saved: SavedModel) -> list[tuple[str, int]]:
    """Return name and bytes of every file of training data, from the checkpoint or else
    from this disk, if possible.
    """
    training = saved.config["training"]
    if not saved.in_hf_format:
        with contextlib.suppress(CheckpointError):
            known, _ = read_data_state(str(saved.folder))
            if "files" in known:
                return [(name, size) for name, size in known["files"]]
    if training["dataset_path"]:
        with contextlib.suppress(ConfigError):
            return [
                (file.name, file.size)
                for file in list_files(training["dataset"], training["dataset_path"])
            ]
    return []


def _data(saved: SavedModel) -> str:
    """Describe the files of the data and their origin.

    Only the last part of a path makes sense elsewhere.
    """
    if sources := saved.config["stream"]["sources"]:
        total = sum(source["weight"] for source in sources)
        parts = ", ".join(
            f"{_source(source)} ({source['weight'] / total:.0%})" for source in sources
        )
        return parts + (
            f"; in total {_listed(files)}" if (files := _files(saved)) else ""
        )
    training = saved.config["training"]
    path = training["dataset_path"]
    files = _files(saved)
    dataset = training["dataset"]
    if dataset.startswith("c4"):
        name = "laid out as allenai/c4" if path else "allenai/c4"
    else:
        name = f"`{dataset}`" if dataset.startswith("hf:") else "documents"
    source = name + (
        f", from a local folder or file named `{Path(path).name}`"
        if path
        else ", from the hub"
    )
    return f"{_listed(files)} ({source})" if files else source


def _listed(files: Sequence[tuple[str, int]]) -> str:
    """Describe the number, size and names of files.

    Of many files, only the first and the last are named.
    """
    names = [f"`{name}`" for name, _ in files]
    listed = (
        ", ".join(names) if len(names) <= SHOWN_FILES else f"{names[0]} to {names[-1]}"
    )
    return f"{counted(len(files), 'file')}, {byte_size(sum(size for _, size in files))}: {listed}"


def _condensation(measured: Mapping[str, Any]) -> str:
    """Describe the output of ``Measurement.to_json``."""
    mean = [math.nan if value is None else value for value in measured["mean_cosine"]]
    # older rows have none
    blocks = mean[1:-1]
    over_depth = measured.get(OF_PAPER, {})
    told = (
        f"mean cosine of two tokens {mean[0]:.3f} in the embedding, {sum(blocks) / len(blocks):.3f} on average over the "
        f"blocks, {blocks[-1]:.3f} after the last block, {mean[-1]:.3f} after the final norm"
    )
    if over_depth.get("spearman") is None:
        return told
    return f"{told}; with depth, {PLACES[OF_PAPER]}: ρ {over_depth['spearman']:.2f}, τ {over_depth['kendall']:.2f}"


def _source(source: dict[str, Any]) -> str:
    return f"`{source['name'] or Path(source['path'] or source['dataset']).name}`"


def _dispersion(section: dict[str, Any]) -> str:
    if not section["enabled"]:
        return "off: plain cross-entropy"
    values = {
        name: value
        for name, value in section.items()
        if name not in ("enabled", "options", "losses")
    }
    told = [
        f"{name} = {value}"
        for name, value in (values | section.get("options", {})).items()
    ]
    return ", ".join(
        [*told, *(f"and {written_out(table)}" for table in section.get("losses", []))]
    )


def model_card(
    saved: SavedModel,
    name: str,
    parameters: int,
    dtype: str,
    environment: dict[str, Any],
) -> str:
    """Write the text of README.md.

    ``environment`` is the run's environment.json, or {} if it is missing.
    """
    config = saved.config
    training = config["training"]
    schedule = config["lr_scheduler"]
    together = training["global_batch_size"]
    each = training["local_batch_size"]
    model = f"{saved.entry.title}, {parameters:,} parameters (flavor {saved.flavor})"
    facts = {
        "architecture": f"{model}, weights in {dtype}",
        "data": _data(saved),
        "sequence length": f"{training['seq_len']:,}",
        "batch": f"{together:,} sequences"
        if together > 0
        else f"{counted(each, 'sequence')} of each rank",
        "dispersion": _dispersion(config["dispersion"]),
        "optimizer": f"{config['optimizer']['name']}, peak learning rate {config['optimizer']['lr']:g}",
        "schedule": f"{schedule['warmup_steps']:,} steps of warm-up, then {schedule['decay_type']} decay to "
        f"{schedule['min_lr_factor']:g} of the peak",
        "seeds": f"{config['debug']['seed']} (weights), {config['stream']['seed']} (order of the data)",
        "steps": f"{saved.step:,} of {training['steps']:,}",
    }
    if config["stream"].get("document_mask"):
        restart = ", whose positions begin at 0" * config["stream"]["restart_positions"]
        facts["attention in training"] = f"within documents{restart}"
    if (method := config["baseline"]["method"]) != "none":
        options = [
            f"{name} = {value}"
            for name, value in config["baseline"].items()
            if OPTIONS.get(name) == method
        ]
        facts["baseline"] = ", ".join([method, *options])
    if config["checkpoint"]["initial_load_in_hf"]:
        start = (
            config["checkpoint"]["initial_load_path"]
            or config["model"]["hf_assets_path"]
        )
        facts["started from"] = f"the weights of `{Path(start).name}`"
    last = last_row(saved.run, saved.step)
    if last.get("tokens"):
        # the number per step is constant
        facts["tokens seen"] = f"{last['tokens'] * saved.step // last['step']:,}"
    for title, key in (("cross-entropy", "ce"), ("dispersion loss", "dispersion")):
        if last.get(key) is not None:
            facts[f"{title}, training batch"] = (
                f"{last[key]:.4f} at step {last['step']:,}"
            )
    measured = {
        step: one
        for step, one in read_condensation(saved.run).items()
        if step <= saved.step
    }
    validated = {
        step: loss
        for step, loss in read_validation(saved.run).items()
        if step <= saved.step
    }
    if validated:
        step, loss = max(validated.items())
        facts["cross-entropy, validation"] = f"{loss:.4f} at step {step:,}"
    if measured:
        step, one = max(measured.items())
        at = f"at step {step:,} ({counted(one['sequences'], 'sequence')} of"
        if one["cross_entropy"] is not None:
            facts["cross-entropy, held-out text"] = (
                f"{one['cross_entropy']:.4f} {at} {training['seq_len']:,} tokens)"
            )
        facts["condensation, held-out text"] = (
            f"{_condensation(one)}; {at} {one['tokens']:,} tokens)"
        )
    packages = {"python": environment.get("python")} | environment.get("packages", {})
    if versions := [f"{p} {packages[p]}" for p in SHOWN if packages.get(p)]:
        facts["trained with"] = ", ".join(versions)
        devices = ", ".join(sorted(set(environment.get("accelerators", [])))) or "CPU"
        facts["trained on"] = (
            f"{counted(environment.get('world_size', 1), 'rank')}, {devices}"
        )
    table = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- dispersion-loss
- titan-disp
---

# {name}

A language model pre-trained with titan-disp, a TorchTitan plugin for the dispersion loss of
[Dispersion loss counteracts embedding condensation and improves generalization in small language models]({PAPER})
(arXiv 2602.00217).

| | |
|---|---|
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}")
model = AutoModelForCausalLM.from_pretrained("{name}")
inputs = tokenizer("The", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=32)[0]))
```

The weights have no licence yet. If you publish them, choose one that the data allows (`license:` at the top).
"""
