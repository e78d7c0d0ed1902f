"""Show how embeddings condense and spread again while a small model trains on a CPU, with
dispersion off and on.

    make figure                                # docs/condensation.png and .json, and a section of docs/measurements.md
    python -m benchmarks.figure --seeds 1 --steps 100 --docs outputs/try

A sweep trains the nano model twice for each seed, with dispersion off and on (λ = 0.1),
from the same initial weights and on the same data. Complete runs are not trained again,
and interrupted runs resume. Each run measures held-out sequences while it trains. After
training, condensation and cross-entropy are measured on more of the validation split.
"""

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import attrgetter, getitem
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch.nn.functional import cross_entropy

from titan_disp.condensation.heatmap import new_figure
from titan_disp.condensation.record import Measurement, blocks_mean
from titan_disp.files import atomic_write
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.lab.inspection.command import CondensationOptions, measure
from titan_disp.lab.inspection.targets import find_targets
from titan_disp.lab.inspection.texts import cut_sequences, read_texts
from titan_disp.lab.plots import MEAN_COSINE, draw_layer_map
from titan_disp.lab.report.charts import (
    Scale,
    as_it_is,
    by_condition,
    draw_lines,
    from_zero,
)
from titan_disp.lab.report.gather import RunRecord, conditions, gather
from titan_disp.lab.report.page import lines_of
from titan_disp.lab.report.series import measured
from titan_disp.lab.statistics import paired_difference
from titan_disp.lab.sweeps.definition import Axis, Listed, Sweep, points
from titan_disp.lab.sweeps.runner import run, summary
from titan_disp.templates import templates

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "measurements.md"
MARKER = "<!-- make figure writes what follows -->\n"
STATES = ("off", "on")
COEFF = 0.1  # λ
BATCH = 16  # number of sequences whose logits are in memory at a time
# The sample corpus is the documentation of this version of Python.
PYTHON = ".".join(platform.python_version_tuple()[:2])


@dataclass
class Options:
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the initial weights and of the order of the data."""
    steps: int = 300
    nproc: int = 2
    """Number of ranks that train."""
    sequences: int = 64
    """Sequences for the measurement after training, of 256 tokens as in training."""
    runs: Path = Path("outputs/figure")
    data: Path = Path("data/sample")
    """The sample corpus, written by titan-disp sample-data."""
    docs: Path = Path("docs")


def train(options: Options) -> dict[str, list[Path]]:
    """Train all runs to the end, and return their folders in the order of the seeds, by
    state (off, on).
    """
    sweep = Sweep(
        config=str(ROOT / "train_configs" / "demo_cpu.toml"),
        folder=options.runs / f"steps-{options.steps}",
        overrides=(
            f"--training.steps={options.steps}",
            f"--training.dataset_path={options.data}",
            f"--model.hf_assets_path={options.data / 'tokenizer'}",
            f"--dispersion.coeff={COEFF}",
        ),
        listed=(
            Listed("off", ("--dispersion.no-enabled",)),
            Listed("on", ("--dispersion.enabled",)),
        ),
        axes=(Axis(("debug.seed", "stream.seed"), options.seeds),),
    )
    outcomes = run(sweep, nproc=options.nproc)
    if any(result.outcome != "finished" for result in outcomes):
        raise SystemExit("\n".join(summary(outcomes)))
    return {
        state: [point.folder for point in points(sweep) if point.condition == state]
        for state in STATES
    }


def measure_after(options: Options, run: Path, texts: Sequence[str]) -> Measurement:
    """Return the measurement of a run's newest checkpoint on the validation split."""
    ((name, target),) = find_targets(
        [str(run)], all_steps=False, tokenizer=None
    ).items()
    tokens = cut_sequences(
        texts, target.encode, options.sequences, target.max_tokens or 0
    )
    model = target.load(torch.device("cpu"), "float32")
    measurement = measure(name, model, tokens, CondensationOptions((), run))
    loss = mean_loss(load_model(find_saved(run)), tokens)
    return replace(measurement, cross_entropy=loss)


@torch.no_grad()
def mean_loss(model: torch.nn.Module, sequences: torch.Tensor) -> float:
    """Return the mean cross-entropy of the next token in nats, given token ids [B, T]."""
    losses = [
        cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
        for ids in sequences.split(BATCH)
    ]
    return float(torch.cat(losses).double().mean())


def results(
    runs: Mapping[str, Sequence[RunRecord]],
    after: Mapping[str, Sequence[Measurement]],
    seeds: Sequence[int],
) -> dict:
    """Return all numbers of the page, for JSON.

    ``runs`` and ``after`` have each state's runs, and measurements of their last
    checkpoints, in the order of the seeds.
    """
    first = runs["off"][0]
    settings = first.settings
    during = next(iter(first.condensation.values()))
    last = after["off"][0]
    while_training: dict[str, Any] = {
        "interval": settings["condensation.interval"],
        "sequences": during.sequences,
        "tokens": during.tokens,
        "steps": list(first.condensation),
    }
    after_training: dict[str, Any] = {
        "sequences": last.sequences,
        "tokens": last.tokens,
    }
    ranks = set()
    for state in STATES:
        while_training[state] = [_over_time(run) for run in runs[state]]
        after_training[state] = [
            {**result.to_json(), "mean_cosine_of": result.by_part()["mean_cosine"]}
            for result in after[state]
        ]
        ranks |= {run.environment["world_size"] for run in runs[state]}
    return {
        "model": {
            "flavor": settings["model.flavor"],
            "parameters": first.parameters,
            "blocks": during.last_block,
        },
        "steps": settings["training.steps"],
        "tokens_per_step": round(first.tokens_per_step),
        "epochs": first.rows[-1]["data"]["epochs_read"],
        "ranks": sorted(ranks),
        "coeff": COEFF,
        "python": PYTHON,
        "seeds": list(seeds),
        "while_training": while_training,
        "after_training": after_training,
    }


def _over_time(run: RunRecord) -> dict[str, Any]:
    """Return the mean cosine of all blocks and of every layer, and the cross-entropy:
    lists with an entry per measurement, in the order of steps.
    """
    measurements = run.condensation.values()
    return {
        "blocks": list(map(blocks_mean, measurements)),
        "mean_cosine": [m.mean_cosine.tolist() for m in measurements],
        "cross_entropy": [m.cross_entropy for m in measurements],
    }


def to_text(content: Mapping[str, Any]) -> str:
    """Return JSON with five decimals, and with each list of numbers on one line."""
    rounded = json.loads(
        json.dumps(content), parse_float=lambda number: round(float(number), 5)
    )
    text = json.dumps(rounded, indent=1, ensure_ascii=False)
    return re.sub(r"\[[^\[\]{}]*\]", lambda m: " ".join(m[0].split()), text) + "\n"


def draw(runs: Mapping[str, Sequence[RunRecord]], path: Path) -> None:
    """Draw maps of the mean cosine by layer and step, and below them, the mean cosine of
    the blocks and held-out cross-entropy over steps.
    """
    all_runs = list(chain.from_iterable(runs.values()))
    figure = new_figure(9, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.1])
    maps = above.subplots(1, len(runs), sharey=True)
    for axes, (state, of_state) in zip(maps, runs.items(), strict=True):
        title = f"dispersion {state}"
        if len(of_state) > 1:
            title += f", mean of {len(of_state)} seeds"
        mesh = draw_layer_map(
            axes, _mean_over_seeds(of_state), title, max(run.step for run in of_state)
        )
        axes.label_outer()
    above.colorbar(mesh, ax=maps, label=MEAN_COSINE)
    panels: dict[str, tuple[Callable[[Measurement], float], Scale]] = {
        "mean cosine of all blocks": (blocks_mean, from_zero),
        "cross-entropy (held-out text)": (attrgetter("cross_entropy"), as_it_is),
    }
    charts = below.subplots(1, len(panels))
    for axes, (label, (read, scale)) in zip(charts, panels.items(), strict=True):
        draw_lines(
            axes,
            by_condition(
                conditions(all_runs), lines_of(all_runs, "step", measured(read))
            ),
            label,
            scale,
        )
        axes.set_xlabel("step")
    below.legend(
        *charts[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(runs),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _mean_over_seeds(runs: Sequence[RunRecord]) -> dict[int, Measurement]:
    """Return the measurements by step, with the mean cosines averaged over the runs. (All
    other numbers are from the first run; they are not drawn.)
    """
    means = {}
    for step, measurement in runs[0].condensation.items():
        if all(step in run.condensation for run in runs):
            cosines = [run.condensation[step].mean_cosine for run in runs]
            means[step] = replace(measurement, mean_cosine=np.mean(cosines, axis=0))
    return means


def markdown(content: Mapping[str, Any]) -> str:
    """Return docs/measurements.md, whose last section is written from the JSON alone."""
    during = content["while_training"]
    blocks = _by_state(during, "blocks")
    means = {state: values.mean(0) for state, values in blocks.items()}
    facts = {
        "means": means,
        "peaks": {state: int(mean.argmax()) for state, mean in means.items()},
        "apart": int((means["off"] - means["on"]).argmax()),
        "after": _compared(content["after_training"]),
    }
    written_by_hand, marker, _ = PAGE.read_text(encoding="utf-8").partition(MARKER)
    assert marker, f"{PAGE} has no line {MARKER!r}"
    page = templates(__file__, number=format).get_template("condensation.md.j2")
    return written_by_hand + MARKER + page.render({**content, **facts})


def _by_state(results: Mapping[str, Any], *keys: str) -> dict[str, np.ndarray]:
    """Return the number with these nested keys, [seeds, …], by state."""
    return {
        state: np.array([reduce(getitem, keys, run) for run in results[state]])
        for state in STATES
    }


COMPARED = {
    "mean cosine of all blocks": ("mean_cosine_of", "blocks"),
    "mean cosine of the last block": ("mean_cosine_of", "last_block"),
    "held-out cross-entropy": ("cross_entropy",),
}


def _compared(after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the numbers of off and on, [seeds], and their mean difference with its 95 %
    interval, by name.
    """
    compared: dict[str, dict[str, Any]] = {}
    for name, keys in COMPARED.items():
        numbers = _by_state(after, *keys)
        difference = paired_difference(numbers["on"], numbers["off"])
        compared[name] = {**numbers, "difference": difference}
    return compared


def main(options: Options) -> None:
    folders = train(options)
    texts = read_texts(None, str(options.data), seed=0)
    after = {}
    runs = {}
    for state, of_state in folders.items():
        after[state] = [measure_after(options, run, texts) for run in of_state]
        paths = ",".join(map(str, of_state))
        runs[state] = gather([f"dispersion {state}={paths}"])
    draw(runs, options.docs / "condensation.png")
    text = to_text(results(runs, after, options.seeds))
    page = markdown(json.loads(text))
    for name, content in (("condensation.json", text), (PAGE.name, page)):
        with atomic_write(options.docs / name) as partial:
            partial.write_text(content, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
