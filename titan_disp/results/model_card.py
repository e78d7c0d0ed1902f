"""README.md of an exported model: what the run knows of itself."""

from pathlib import Path
from typing import Any

from titan_disp.results.saved import SavedModel
from titan_disp.run.folder import read_condensation, read_metrics

PAPER = "https://arxiv.org/abs/2602.00217"
SHOWN = ("python", "titan-disp", "torch", "torchtitan", "tokenizers", "sentencepiece")


def _data(config: dict[str, Any]) -> str:
    """The data's name; a path tells its last part only, as the rest is about one machine."""
    if sources := config.get("stream", {}).get("sources"):  # older runs know none
        total = sum(source["weight"] for source in sources)
        return ", ".join(f"{_source(source)} ({source['weight'] / total:.0%})" for source in sources)
    training, path = config["training"], config["training"]["dataset_path"]
    return f"`{training['dataset']}`" + (f", a local copy named `{Path(path).name}`" if path else ", from the hub")


def _source(source: dict[str, Any]) -> str:
    return f"`{source['name'] or Path(source['path'] or source['dataset']).name}`"


def _dispersion(section: dict[str, Any]) -> str:
    if not section["enabled"]:
        return "off: plain cross-entropy"
    names = (
        "coeff",
        "tau",
        "layers",
        "final_norm",
        "variant",
        "estimator",
        "clamp",
        "norm_eps",
        "warmup_steps",
        "decay",
        "final_coeff",
    )
    return ", ".join(f"{name} = {section[name]}" for name in names if name in section)  # older runs know fewer


def model_card(saved: SavedModel, name: str, parameters: int, dtype: str, environment: dict[str, Any]) -> str:
    """The text of README.md.

    Args:
        saved: the checkpoint.
        name: of the exported model.
        parameters: a tied embedding counts once.
        dtype: of the exported weights.
        environment: the run's environment.json, {} where it is missing.
    """
    config = saved.config
    training = config["training"]
    logged = {step: record for step, record in read_metrics(saved.run).items() if step <= saved.step}
    facts = {
        "architecture": f"Qwen3, {parameters:,} parameters (flavor {config['model']['flavor']}), weights in {dtype}",
        "data": _data(config),
        "sequence length": f"{training['seq_len']:,}",
        "dispersion": _dispersion(config["dispersion"]),
        "optimizer": f"{config['optimizer']['name']}, peak learning rate {config['optimizer']['lr']:g}",
        "steps": f"{saved.step:,} of {training['steps']:,}",
    }
    if config["checkpoint"]["initial_load_in_hf"]:
        start = config["checkpoint"]["initial_load_path"] or config["model"]["hf_assets_path"]
        facts["started from"] = f"the weights of `{Path(start).name}`"
    if logged:
        step, last = max(logged.items())
        facts["tokens seen"] = f"{last['tokens'] * saved.step // step:,}"  # a constant number per step
        facts["cross-entropy, training batch"] = f"{last['ce']:.4f} at step {step:,}"
        facts["dispersion loss, training batch"] = f"{last['dispersion']:.4f} at step {step:,}"
    measured = {step: one for step, one in read_condensation(saved.run).items() if step <= saved.step}
    if measured and (held_out := max(measured.items()))[1].get("cross_entropy") is not None:
        step, one = held_out
        text = f"{one['sequences']} sequences of {training['seq_len']:,} tokens"
        facts["cross-entropy, held-out text"] = f"{one['cross_entropy']:.4f} at step {step:,} ({text})"
    packages = {"python": environment.get("python")} | environment.get("packages", {})
    if versions := [f"{p} {packages[p]}" for p in SHOWN if packages.get(p)]:
        facts["trained with"] = ", ".join(versions)
        devices = ", ".join(sorted(set(environment.get("accelerators", [])))) or "CPU"
        facts["trained on"] = f"{environment.get('world_size')} ranks, {devices}"
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

The weights carry no licence yet: whoever publishes them chooses one (`license:` at the top), as the data allows.
"""
