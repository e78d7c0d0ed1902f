"""make figure: what its page says and its picture shows, against numbers made by hand; and the whole of it on short runs."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from benchmarks import figure
from tests.command_line import ROOT, environment
from tests.test_pictures import condensed, shown_at
from tests.test_report import whole, write_run
from titan_disp.lab.report.gather import gather
from titan_disp.run.reader import read_json_lines

DOCS = ROOT / "docs"


def test_the_page_is_made_of_the_numbers_beside_it():
    content = json.loads((DOCS / "condensation.json").read_text())
    assert (DOCS / "condensation.md").read_text() == figure.markdown(content)
    during = content["while_training"]
    assert (content["seeds"], len(during["off"]), len(during["on"])) == ([1, 2, 3], 3, 3)


def seeds(*mean_cosines, cross_entropies):
    """What two seeds measured: by step, the embedding, three blocks and the final norm, whose cosines do not count."""
    layers = [[[0.0, *blocks, 0.0] for blocks in by_step] for by_step in mean_cosines]
    return [
        {"blocks": [np.mean(one[1:4]) for one in m], "mean_cosine": m, "cross_entropy": ce}
        for m, ce in zip(layers, cross_entropies, strict=True)
    ]


def after(*mean_cosines, cross_entropies):
    common = {"layers": ["embedding", "block 0", "block 1", "block 2", "final norm"]}
    common["after_norm"] = {"spearman": 1.0, "kendall": None}
    found = []
    for m, ce in zip(mean_cosines, cross_entropies, strict=True):
        parts = {"blocks": np.mean(m[1:4]), "middle_blocks": m[2], "last_block": m[3]}
        found.append(common | {"mean_cosine": list(m), "cross_entropy": ce, "mean_cosine_of": parts})
    return found


CONTENT = {
    **{"model": {"flavor": "nano", "parameters": 427008, "blocks": 3}, "steps": 20, "tokens_per_step": 4096},
    **{"epochs": 1.886, "ranks": [1], "coeff": 0.1, "python": "3.11", "seeds": [4, 7]},
    "while_training": {
        **{"interval": 10, "sequences": 8, "tokens": 256, "steps": [0, 10, 20]},
        "off": seeds(
            [(0.1, 0.2, 0.3), (0.9, 0.9, 0.9), (0.5, 0.6, 0.7)],
            [(0.1, 0.2, 0.3), (0.7, 0.7, 0.7), (0.5, 0.6, 0.7)],
            cross_entropies=[[8.0, 7.0, 6.0], [8.0, 7.5, 6.25]],
        ),
        "on": seeds(
            [(0.1, 0.2, 0.3), (0.8, 0.8, 0.8), (0.1, 0.1, 0.1)],
            [(0.1, 0.2, 0.3), (0.6, 0.6, 0.6), (0.3, 0.3, 0.3)],
            cross_entropies=[[8.0, 7.0, 6.5], [8.0, 7.0, 6.25]],
        ),
    },
    "after_training": {
        **{"sequences": 59, "tokens": 256},
        "off": after((0, 0.3, 0.6, 0.9, 0.2), (0, 0.4, 0.7, 1.0, 0.2), cross_entropies=[5.0, 5.0]),
        "on": after((0, 0.2, 0.5, 0.8, 0.2), (0, 0.1, 0.4, 0.7, 0.2), cross_entropies=[5.05, 5.15]),
    },
}  # fmt: skip


def test_the_pages_numbers_by_hand():
    """Cross-entropies differ by 0.05 and 0.15: 0.1 ± 12.706 · 0.05, Student's t with one degree of freedom."""
    page = figure.markdown(CONTENT)
    for line in (
        "| 0 | 0.20 (0.20 to 0.20) | 0.20 (0.20 to 0.20) | 8.00 (8.00 to 8.00) | 8.00 (8.00 to 8.00) |",
        "| 10 | 0.80 (0.70 to 0.90) | 0.70 (0.60 to 0.80) | 7.25 (7.00 to 7.50) | 7.00 (7.00 to 7.00) |",
        "| mean cosine of all blocks | 0.650 | 0.450 | -0.200 | -1.471 to +1.071 | 2 of 2 seeds |",  # 0.2 ± 12.706 · 0.1
        "| mean cosine of the last block | 0.950 | 0.750 | -0.200 | -1.471 to +1.071 | 2 of 2 seeds |",
        "| held-out cross-entropy | 5.000 | 5.100 | +0.100 | -0.535 to +0.735 | 0 of 2 seeds |",
        "| off, seed 4 | 0.000 | 0.300 | 0.600 | 0.900 | 0.200 | 1.000 | – |",
        "| on, seed 7 | 0.000 | 0.100 | 0.400 | 0.700 | 0.200 | 1.000 | – |",
    ):
        assert line in page.splitlines()
    said = " ".join(page.split())
    for numbers in (
        "on 1 rank, with seeds 4 and 7.",
        "1.9 times the sample corpus",
        "is 0.80 at step 10 (off) and 0.70 at step 10 (on).",
        "largest at step 20: 0.60 off and 0.20 on.",
        "in 2 of 2 seeds, and held-out cross-entropy is higher in 2 of 2; the mean difference is +0.100.",
    ):
        assert numbers in said


def test_the_picture(tmp_path, monkeypatch):
    levels = {"off": (0.4, 0.6), "on": (0.1, 0.3)}
    folders = {state: [tmp_path / f"{state}-{seed}" for seed in (1, 2)] for state in levels}
    for state, of_state in folders.items():
        for seed, (folder, level) in enumerate(zip(of_state, levels[state], strict=True), start=1):
            write_run(folder, *whole(20), steps=20, debug={"seed": seed}, dispersion={"enabled": state == "on"})
            for step in (0, 10, 20):
                one = condensed(0.05, level, level + step / 100, 0.5)
                replace(one, cross_entropy=7 - level).save(folder / "condensation" / f"step-{step}.npz")
    named = [f"dispersion {state}={','.join(map(str, of_state))}" for state, of_state in folders.items()]
    every = gather(named)
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    figure.draw({"off": every[:2], "on": every[2:]}, tmp_path / "figure.png")
    (shown,) = drawn
    off, on, bar, blocks, losses = shown.axes
    for axes, state, mean in ((off, "off", 0.5), (on, "on", 0.2)):
        assert axes.get_title() == f"dispersion {state}, mean of 2 seeds"
        (mesh,) = axes.collections
        assert [shown_at(mesh, 11, layer) for layer in range(4)] == pytest.approx([0.05, mean, mean + 0.1, 0.5])
        assert axes.get_xlim() == (0, 20)
    assert bar.get_ylabel() == "mean pairwise cosine"
    lines = {line.get_label(): line.get_xydata().round(6).tolist() for line in blocks.lines[::2]}
    assert lines == {
        "dispersion off (2 seeds)": [[0, 0.5], [10, 0.55], [20, 0.6]],
        "dispersion on (2 seeds)": [[0, 0.2], [10, 0.25], [20, 0.3]],
    }
    corners = {tuple(corner) for corner in blocks.collections[1].get_paths()[0].vertices.round(6)}
    assert corners == {(0, 0.1), (10, 0.15), (20, 0.2), (0, 0.3), (10, 0.35), (20, 0.4)}
    assert losses.lines[0].get_ydata() == pytest.approx([6.5] * 3)
    assert (blocks.get_ylabel(), losses.get_ylabel()) == ("mean cosine of all blocks", "cross-entropy (held-out text)")


@pytest.mark.night
def test_figure(sample, tmp_path):
    argv = [sys.executable, "-m", "benchmarks.figure", "--seeds", "5", "--steps", "2", "--nproc", "1"]
    argv += ["--data", str(sample), "--runs", str(tmp_path / "runs"), "--docs", str(tmp_path), "--sequences", "2"]
    for _ in range(2):
        done = subprocess.run(argv, capture_output=True, text=True, env=environment(), cwd=ROOT, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "condensation.json").read_text())
    assert content["while_training"]["steps"] == [0, 2]
    (found,) = content["after_training"]["off"]
    assert found["cross_entropy"] == pytest.approx(np.log(2048), abs=1)  # hardly trained
    # Other sequences of the same split: at two steps' age all are much alike.
    (run,) = content["while_training"]["off"]
    assert run["cross_entropy"][-1] == pytest.approx(found["cross_entropy"], abs=0.3)
    assert run["mean_cosine"][-1] == pytest.approx(found["mean_cosine"], abs=0.1)
    assert f"| off, seed 5 | {found['mean_cosine'][0]:.3f} |" in (tmp_path / "condensation.md").read_text()
    assert imread(tmp_path / "condensation.png").shape[1] >= 800
    runs = [path.parent for path in (tmp_path / "runs").glob("*/*/events.jsonl")]
    assert {run.name for run in runs} == {"off_seed-5", "on_seed-5"}
    for run in runs:
        assert [e["event"] for e in read_json_lines(run / "events.jsonl")].count("complete") == 1
