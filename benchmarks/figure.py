"""Show how embeddings collapse and are released while a small model trains on a CPU,
with dispersion off and on.

    make figure                                # docs/condensation.png and .json, and a section of docs/measurements.md
    python -m benchmarks.figure --seeds 1 --steps 100 --docs outputs/try

A sweep trains the nano model twice for each seed, with the same initial weights and
data, and with dispersion off and on (λ = 0.1). A complete run is not trained again, and
an interrupted one resumes. Each run measures held-out sequences while it trains. At the
end, condensation and cross-entropy are measured on more of the validation split.
"""

import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
BATCH = 16  # sequences whose logits are in memory together
# the sample corpus is the documentation of this version
PYTHON = ".".join(platform.python_version_tuple()[:2])


@dataclass
class Options:
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the initial weights and of the order of the data."""
    steps: int = 300
    nproc: int = 2
    """Number of ranks that train."""
    sequences: int = 64
    """Sequences to measure on after training. They have 256 tokens, as in training."""
    runs: Path = Path("outputs/figure")
    data: Path = Path("data/sample")
    """Folder that titan-disp sample-data has written."""
    docs: Path = Path("docs")


def train(options: Options) -> dict[str, list[Path]]:
    """Train all runs to their ends, and return their folders by state, in the order of
    the seeds.
    """
    sweep = Sweep(
        str(ROOT / "train_configs" / "demo_cpu.toml"),
        options.runs / f"steps-{options.steps}",
        (
            f"--training.steps={options.steps}",
            f"--training.dataset_path={options.data}",
            f"--model.hf_assets_path={options.data / 'tokenizer'}",
            f"--dispersion.coeff={COEFF}",
        ),
        (
            Listed("off", ("--dispersion.no-enabled",)),
            Listed("on", ("--dispersion.enabled",)),
        ),
        (Axis(("debug.seed", "stream.seed"), options.seeds),),
    )
    results = run(sweep, nproc=options.nproc)
    if any(result.outcome != "finished" for result in results):
        raise SystemExit("\n".join(summary(results)))
    return {
        state: [point.folder for point in points(sweep) if point.condition == state]
        for state in STATES
    }


def measure_after(options: Options, run: Path, texts: Sequence[str]) -> Measurement:
    """Measure the newest checkpoint on the validation split."""
    ((name, target),) = find_targets(
        [str(run)], all_steps=False, tokenizer=None
    ).items()
    tokens = cut_sequences(
        texts, target.encode, options.sequences, target.max_tokens or 0
    )
    found = measure(
        name,
        target.load(torch.device("cpu"), "float32"),
        tokens,
        CondensationOptions((), run),
    )
    return replace(found, cross_entropy=mean_loss(load_model(find_saved(run)), tokens))


@torch.no_grad()
def mean_loss(model: torch.nn.Module, sequences: torch.Tensor) -> float:
    """Return the mean cross-entropy of the next token, in nats, of ids, [B, T]."""
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
    """Return all numbers of the page, for JSON: of the runs by state and seed, and of
    their last checkpoints.
    """
    first = runs["off"][0]
    settings = first.settings
    measured = next(iter(first.condensation.values()))
    return {
        "model": {
            "flavor": settings["model.flavor"],
            "parameters": first.parameters,
            "blocks": measured.last_block,
        },
        "steps": settings["training.steps"],
        "tokens_per_step": round(first.tokens_per_step),
        "epochs": first.rows[-1]["data"]["epochs_read"],
        "ranks": sorted(
            {
                run.environment["world_size"]
                for of_state in runs.values()
                for run in of_state
            }
        ),
        "coeff": COEFF,
        "python": PYTHON,
        "seeds": list(seeds),
        "while_training": {
            "interval": settings["condensation.interval"],
            "sequences": measured.sequences,
            "tokens": measured.tokens,
            "steps": list(first.condensation),
            **{
                state: [_over_time(run) for run in of_state]
                for state, of_state in runs.items()
            },
        },
        "after_training": {
            "sequences": after["off"][0].sequences,
            "tokens": after["off"][0].tokens,
            **{
                state: [
                    {**one.to_json(), "mean_cosine_of": one.by_part()["mean_cosine"]}
                    for one in of_state
                ]
                for state, of_state in after.items()
            },
        },
    }


def _over_time(run: RunRecord) -> dict[str, Any]:
    """Return mean cosine of all blocks and of every layer, and cross-entropy, by
    measurement in the order of steps.
    """
    found = run.condensation.values()
    return {
        "blocks": [blocks_mean(one) for one in found],
        "mean_cosine": [one.mean_cosine.tolist() for one in found],
        "cross_entropy": [one.cross_entropy for one in found],
    }


def to_text(content: Mapping[str, Any]) -> str:
    """Write JSON with five decimals, and each list of numbers on one line."""
    rounded = json.loads(
        json.dumps(content), parse_float=lambda number: round(float(number), 5)
    )
    text = json.dumps(rounded, indent=1, ensure_ascii=False)
    return (
        re.sub(r"\[[^\[\]{}]*\]", lambda some: " ".join(some[0].split()), text) + "\n"
    )


def draw(runs: Mapping[str, Sequence[RunRecord]], path: Path) -> None:
    """Draw maps of the mean cosine by layer and step; below, its mean over blocks and
    held-out cross-entropy.
    """
    every = [run for of_state in runs.values() for run in of_state]
    figure = new_figure(9, 6.6)
    above, below = figure.subfigures(2, 1, height_ratios=[1, 1.1])
    maps = above.subplots(1, len(runs), sharey=True)
    for axes, (state, of_state) in zip(maps, runs.items(), strict=True):
        title = f"dispersion {state}" + (
            f", mean of {len(of_state)} seeds" if len(of_state) > 1 else ""
        )
        mesh = draw_layer_map(
            axes, _mean_over_seeds(of_state), title, max(run.step for run in of_state)
        )
        axes.label_outer()
    above.colorbar(mesh, ax=maps, label=MEAN_COSINE)
    panels: dict[str, tuple[Callable[[Measurement], float], Scale]] = {
        "mean cosine of all blocks": (blocks_mean, from_zero),
        "cross-entropy (held-out text)": (lambda found: found.cross_entropy, as_it_is),
    }
    charts = below.subplots(1, len(panels))
    for axes, (label, (read, scale)) in zip(charts, panels.items(), strict=True):
        draw_lines(
            axes,
            by_condition(conditions(every), lines_of(every, "step", measured(read))),
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
    """Return the first run's measurements with the mean cosines averaged over all runs;
    only these are drawn.
    """
    first, *others = (run.condensation for run in runs)
    shared = [step for step in first if all(step in other for other in others)]
    return {
        step: replace(
            first[step],
            mean_cosine=np.mean(
                [run.condensation[step].mean_cosine for run in runs], axis=0
            ),
        )
        for step in shared
    }


def markdown(content: Mapping[str, Any]) -> str:
    """Return docs/measurements.md with its last section written from nothing but the
    JSON.
    """
    during = content["while_training"]
    means = {
        state: np.mean([run["blocks"] for run in during[state]], axis=0)  # [steps]
        for state in STATES
    }
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


def _compared(after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return numbers of off and on, [seeds], and their mean difference with its 95 %
    interval, by name.
    """
    read: dict[str, Callable[[Mapping[str, Any]], float]] = {
        "mean cosine of all blocks": lambda found: found["mean_cosine_of"]["blocks"],
        "mean cosine of the last block": lambda found: found["mean_cosine_of"][
            "last_block"
        ],
        "held-out cross-entropy": lambda found: found["cross_entropy"],
    }
    compared = {}
    for name, number in read.items():
        off, on = (
            np.array([number(found) for found in after[state]]) for state in STATES
        )
        compared[name] = {
            "off": off,
            "on": on,
            "difference": paired_difference(on, off),
        }
    return compared


def main(options: Options) -> None:
    folders = train(options)
    texts = read_texts(None, str(options.data), seed=0)
    after = {
        state: [measure_after(options, run, texts) for run in of_state]
        for state, of_state in folders.items()
    }
    every = iter(
        gather(
            [
                f"dispersion {state}={','.join(map(str, of_state))}"
                for state, of_state in folders.items()
            ]
        )
    )
    runs = {
        state: [next(every) for _ in of_state] for state, of_state in folders.items()
    }
    draw(runs, options.docs / "condensation.png")
    text = to_text(results(runs, after, options.seeds))
    page = markdown(json.loads(text))
    for name, written in (("condensation.json", text), (PAGE.name, page)):
        with atomic_write(options.docs / name) as partial:
            partial.write_text(written, encoding="utf-8")
    print(page)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
