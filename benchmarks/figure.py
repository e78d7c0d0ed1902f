"""Dispersion off and on, over several seeds, in one picture: a small form of Figure 6 of arXiv 2602.00217, on a CPU.

    make figure                                              # docs/condensation.png, .json and .md
    python benchmarks/figure.py --seeds 1 --steps 100 --docs outputs/try

Trains the nano model twice for each seed, by ``titan-disp train``: the same initial weights, the same data, dispersion off
and on (λ = 0.1). A run that is complete is not trained again, and one that was stopped resumes. Then condensation and
cross-entropy are measured on the validation split of the sample corpus.
"""

import json
import os
import platform
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch.nn.functional import cross_entropy

from titan_disp.condensation.plot import MARKERS, MEAN_COSINE, OKABE_ITO, draw_heatmaps, layer_label, new_figure
from titan_disp.condensation.record import Condensation
from titan_disp.inspection.condensation import measure
from titan_disp.inspection.targets import find_targets
from titan_disp.inspection.texts import cut_sequences, read_texts
from titan_disp.results.saved import find_saved, load_model
from titan_disp.run.folder import read_json_lines, write_json

ROOT = Path(__file__).parent.parent
STATES = ("off", "on")
COEFF = 0.1  # λ
PYTHON = ".".join(platform.python_version_tuple()[:2])  # whose documentation the sample corpus is


@dataclass
class Options:
    seeds: tuple[int, ...] = (1, 2, 3)
    """Of the initial weights and of the data's order."""
    steps: int = 300
    nproc: int = 2
    """Ranks that train."""
    sequences: int = 64
    """To measure on, of 256 tokens, as in training."""
    runs: Path = Path("outputs/figure")
    """Folder of the runs."""
    data: Path = Path("data/sample")
    """As titan-disp sample-data writes it."""
    docs: Path = Path("docs")
    """Folder of the results."""


def train(options: Options, seed: int, state: str) -> Path:
    """The run's folder, trained to the end; one that is complete is left as it is."""
    run = options.runs / f"{state}-seed-{seed}-steps-{options.steps}"
    command = [
        *(sys.executable, "-m", "titan_disp.cli", "train", str(ROOT / "train_configs" / "demo_cpu.toml")),
        *("--nproc", str(options.nproc), "--job.dump_folder", str(run), "--training.steps", str(options.steps)),
        *("--training.dataset_path", str(options.data), "--model.hf_assets_path", str(options.data / "tokenizer")),
        *("--debug.seed", str(seed), "--stream.seed", str(seed), "--dispersion.coeff", str(COEFF)),
        "--dispersion.enabled" if state == "on" else "--dispersion.no-enabled",
    ]
    events = run / "events.jsonl"
    if events.is_file() and any(event["event"] == "complete" for event in read_json_lines(events)):
        print(f"{run}: complete already", flush=True)
        return run
    print(f"{run}: {options.steps} steps", flush=True)
    done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ}, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
    return run


@torch.no_grad()
def held_out_loss(run: Path, tokens: torch.Tensor) -> float:
    """Mean cross-entropy of the next token, in nats, of the run's newest checkpoint."""
    model = load_model(find_saved(run))
    losses = [
        cross_entropy(model(batch)[:, :-1].flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        for batch in tokens.split(8)
    ]
    return (sum(losses) / tokens[:, 1:].numel()).item()


def middle_blocks(layers: int) -> list[int]:
    """Layer indices (0 = embedding, i + 1 = output of block i) of the middle third of the blocks."""
    blocks = layers - 1
    return [i + 1 for i in range(blocks) if blocks <= 3 * i < 2 * blocks]


def draw(found: dict[str, dict[int, Condensation]], path: Path) -> None:
    seeds = list(found["on"])
    figure = new_figure(8, 7.2)
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.75, 1])
    draw_heatmaps(top, [{f"dispersion {state}, seed {seed}": found[state][seed] for seed in seeds} for state in STATES])
    axes = bottom.subplots()
    for state, color, line in zip(STATES, (OKABE_ITO[1], OKABE_ITO[0]), ("--", "-"), strict=True):
        for seed, marker in zip(seeds, MARKERS, strict=False):
            label = f"{state}, seed {seed}"
            axes.plot(found[state][seed].mean_cosine, line, color=color, marker=marker, markersize=5, label=label)
    layers = middle_blocks(found["on"][seeds[0]].last_block + 1)
    axes.axvspan(layers[0] - 0.5, layers[-1] + 0.5, color="black", alpha=0.07, linewidth=0)
    axes.text(
        (layers[0] + layers[-1]) / 2, 0.97, "middle third", ha="center", va="top", transform=axes.get_xaxis_transform()
    )
    axes.set_xlabel(layer_label([found["on"][seeds[0]]]), fontsize=11)
    axes.set_ylabel(MEAN_COSINE, fontsize=11)
    axes.grid(alpha=0.3)
    bottom.legend(loc="outside right upper", title="dispersion")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def compare(found: dict[str, dict[int, Condensation]], losses: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    rows = []
    for seed, on in found["on"].items():
        layers = middle_blocks(on.last_block + 1)
        middle = {state: float(found[state][seed].mean_cosine[layers].mean()) for state in STATES}
        rows.append(
            {
                "seed": seed,
                "middle_layers": layers,
                "middle_mean_cosine": middle,
                "lowered_by": middle["off"] - middle["on"],
                "held_out_cross_entropy": {state: losses[state][seed] for state in STATES},
                "condensation": {state: found[state][seed].to_json() for state in STATES},
            }
        )
    return rows


def spearman(row: dict[str, Any], state: str) -> float:
    """NaN, of which nothing is true, where the mean cosines differ too little."""
    found = row["condensation"][state]["after_norm"]["spearman"]
    return float("nan") if found is None else found


def markdown(options: Options, rows: list[dict[str, Any]], sequences: int, tokens: int) -> str:
    layers = [*range(len(rows[0]["condensation"]["on"]["layers"]) - 1), "final norm"]
    lowered = sum(row["lowered_by"] > 0 for row in rows)
    dearer = sum(row["held_out_cross_entropy"]["on"] > row["held_out_cross_entropy"]["off"] for row in rows)
    steeper = sum(spearman(row, "on") > spearman(row, "off") for row in rows)
    lines = [
        "# Condensation with dispersion off and on",
        "",
        "![Cosines of token pairs by layer, dispersion off and on](condensation.png)",
        "",
        "Written by `make figure` (`benchmarks/figure.py`): the nano model (0.4 M parameters, 6 blocks) of",
        f"`train_configs/demo_cpu.toml` after {options.steps} steps on the sample corpus",
        f"(Python {PYTHON}'s texts), on a CPU, λ = {COEFF:g}.",
        "Both runs of a seed have the same initial weights and the same data.",
        f"Measured on {sequences} held-out sequences of {tokens} tokens. ρ and τ are up to the final norm, as the paper's are;",
        f"the middle third of the blocks is layers {' and '.join(map(str, rows[0]['middle_layers']))}.",
        "",
        f"With dispersion the mean cosine of the middle third is lower in {lowered} of {len(rows)} seeds.",
        f"Its rank correlation with depth (Spearman's ρ, the paper's measure) is higher in {steeper} of {len(rows)},",
        f"and so is held-out cross-entropy in {dearer} of {len(rows)}.",
        "A very small model, few seeds, little text: what the loss does to embeddings here, not what it is worth at scale.",
        "",
        "| seed | mean cosine, middle third: off | on | lower by | held-out cross-entropy: off | on |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cosine, loss = row["middle_mean_cosine"], row["held_out_cross_entropy"]
        cells = [cosine["off"], cosine["on"], row["lowered_by"], loss["off"], loss["on"]]
        lines.append(f"| {row['seed']} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    lines += [
        "",
        "| mean cosine by layer | " + " | ".join(map(str, layers)) + " | Spearman's ρ | Kendall's τ |",
        "|---" * (len(layers) + 3) + "|",
    ]
    for row in rows:
        for state in STATES:
            numbers = row["condensation"][state]
            cells = [*numbers["mean_cosine"], *(numbers["after_norm"][rank] for rank in ("spearman", "kendall"))]
            shown = ("–" if cell is None else f"{cell:.3f}" for cell in cells)
            lines.append(f"| {state}, seed {row['seed']} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    runs = {state: {seed: train(options, seed, state) for seed in options.seeds} for state in STATES}
    texts = read_texts(None, str(options.data), seed=0)
    found: dict[str, dict[int, Condensation]] = {state: {} for state in STATES}
    losses: dict[str, dict[int, float]] = {state: {} for state in STATES}
    for state, seed in [(state, seed) for state in STATES for seed in options.seeds]:
        run = runs[state][seed]
        ((name, target),) = find_targets([str(run)], all_steps=False, tokenizer=None).items()
        tokens = cut_sequences(texts, target.encode, options.sequences, target.max_tokens or 0)
        found[state][seed] = measure(name, target.load(torch.device("cpu"), "float32"), tokens, 8)
        losses[state][seed] = held_out_loss(run, tokens)
    rows = compare(found, losses)
    draw(found, options.docs / "condensation.png")
    settings = {
        "flavor": "nano",
        "steps": options.steps,
        "coeff": COEFF,
        "python": PYTHON,
        "sequences": len(tokens),
        "tokens": tokens.shape[1],
    }
    write_json(options.docs / "condensation.json", {**settings, "rows": rows})
    (options.docs / "condensation.md").write_text(markdown(options, rows, *tokens.shape))
    for row in rows:
        print(json.dumps({key: value for key, value in row.items() if key != "condensation"}))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
