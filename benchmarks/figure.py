"""Draw how embeddings condense and spread again while a small model trains on a CPU, with
dispersion off and on.

    make figure    # docs/condensation.png and docs/condensation.json

The sweep train_configs/sweeps/figure.toml trains the runs. Complete runs are not trained
again, and interrupted runs resume. Each run measures held-out sequences while it trains.
After training, condensation and cross-entropy are measured on more of the validation
split. docs/measurements.md describes the results, and tests/test_figure.py compares the
results on the page with the JSON.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch.nn.functional import cross_entropy, linear

from titan_disp.condensation.heatmap import new_figure
from titan_disp.condensation.record import Measurement, blocks_mean
from titan_disp.files import atomic_write
from titan_disp.lab.inspection.command import CondensationOptions, measure
from titan_disp.lab.inspection.targets import LoadedModel, find_targets
from titan_disp.lab.inspection.texts import cut_sequences, read_texts
from titan_disp.lab.plots import MEAN_COSINE, draw_layer_map
from titan_disp.lab.report.charts import (
    as_it_is,
    by_condition,
    draw_lines,
    from_zero,
)
from titan_disp.lab.report.gather import RunRecord, conditions, gather
from titan_disp.lab.report.page import lines_of
from titan_disp.lab.report.series import measured
from titan_disp.lab.sweeps import runner
from titan_disp.lab.sweeps.definition import points, read_sweep

ROOT = Path(__file__).parent.parent
STATES = ("off", "on")  # conditions of the sweep
BATCH = 16  # number of sequences whose logits are in memory at a time


def main(
    sweep: Path = ROOT / "train_configs" / "sweeps" / "figure.toml",
    docs: Path = ROOT / "docs",
    nproc: int = 2,
    sequences: int = 64,
) -> None:
    """Train the runs that are missing, then draw and write the results.

    Args:
        sweep: file of a sweep with the conditions off and on.
        docs: folder of the results.
        nproc: number of ranks that train.
        sequences: sequences for the measurement after training.
    """
    definition = read_sweep(sweep)
    outcomes = runner.run(definition, nproc=nproc)
    if any(result.outcome != "finished" for result in outcomes):
        raise SystemExit("\n".join(runner.summary(outcomes)))
    runs = {}
    for state in STATES:
        folders = [p.folder for p in points(definition) if p.condition == state]
        runs[state] = gather([f"dispersion {state}={','.join(map(str, folders))}"])
    first, *_ = runs["off"]
    texts = read_texts(None, first.settings["training.dataset_path"], seed=0)
    during = {state: [over_time(run) for run in runs[state]] for state in STATES}
    after = {
        state: [measure_after(run.path, texts, sequences) for run in runs[state]]
        for state in STATES
    }
    content = {
        "while_training": {"steps": list(first.condensation), **during},
        "after_training": after,
    }
    docs.mkdir(parents=True, exist_ok=True)
    draw(runs, docs / "condensation.png")
    with atomic_write(docs / "condensation.json") as partial:
        partial.write_text(json.dumps(content) + "\n")


def over_time(run: RunRecord) -> dict[str, Any]:
    """Return the mean cosine of every layer and the cross-entropy: lists with an entry per
    measurement, in the order of steps.
    """
    measurements = run.condensation.values()
    return {
        "mean_cosine": [m.mean_cosine.tolist() for m in measurements],
        "cross_entropy": [m.cross_entropy for m in measurements],
    }


def measure_after(run: Path, texts: Sequence[str], sequences: int) -> dict[str, Any]:
    """Return the measurement of a run's newest checkpoint on sequences of these texts, with
    its cross-entropy, as in a JSON file.
    """
    targets = find_targets([str(run)], all_steps=False, tokenizer=None)
    ((name, target),) = targets.items()
    tokens = cut_sequences(texts, target.encode, sequences, target.max_tokens or 0)
    model = target.load(torch.device("cpu"), "float32")
    measurement = measure(name, model, tokens, CondensationOptions((), run))
    return replace(measurement, cross_entropy=mean_loss(model, tokens)).to_json()


@torch.no_grad()
def mean_loss(model: LoadedModel, sequences: torch.Tensor) -> float:
    """Return the mean cross-entropy of the next token in nats, given token ids [B, T]."""
    losses = []
    for ids in sequences.split(BATCH):
        h = model.forward(ids[:, :-1])
        logits = linear(h, model.head.weight, model.head.bias)
        losses.append(cross_entropy(logits.mT, ids[:, 1:], reduction="none"))
    return float(torch.cat(losses).double().mean())


def draw(runs: Mapping[str, Sequence[RunRecord]], path: Path) -> None:
    """Save a picture with maps of the mean cosine by layer and step, and below them, the
    mean cosine of the blocks and held-out cross-entropy over steps.
    """
    all_runs = list(chain.from_iterable(runs.values()))
    figure = new_figure(9, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.1])
    maps = above.subplots(1, len(runs), sharey=True)
    for axes, (state, of_state) in zip(maps, runs.items(), strict=True):
        title = f"dispersion {state}, mean of {len(of_state)} seeds"
        means = _mean_over_seeds(of_state)
        mesh = draw_layer_map(axes, means, title, of_state[0].step)
        axes.label_outer()
    above.colorbar(mesh, ax=maps, label=MEAN_COSINE)
    panels = (
        ("mean cosine of all blocks", blocks_mean, from_zero),
        ("cross-entropy (held-out text)", attrgetter("cross_entropy"), as_it_is),
    )
    charts = below.subplots(1, len(panels))
    for axes, (label, read, scale) in zip(charts, panels, strict=True):
        lines = lines_of(all_runs, "step", measured(read))
        draw_lines(axes, by_condition(conditions(all_runs), lines), label, scale)
        axes.set_xlabel("step")
    below.legend(
        *charts[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(runs),
    )
    figure.savefig(path, dpi=120)


def _mean_over_seeds(runs: Sequence[RunRecord]) -> dict[int, Measurement]:
    """Return the measurements of each step, with the mean cosines averaged over the runs.
    All other numbers are those of the first run, and are not drawn.
    """
    means = {}
    for step, measurement in runs[0].condensation.items():
        cosines = [run.condensation[step].mean_cosine for run in runs]
        means[step] = replace(measurement, mean_cosine=np.mean(cosines, axis=0))
    return means


if __name__ == "__main__":
    tyro.cli(main)
