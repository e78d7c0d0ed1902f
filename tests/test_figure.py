"""make figure: the page's results against the JSON, the picture against numbers made by
hand, and the whole command on short runs. The picture of the formula is compared with the
loss itself.
"""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from scipy import stats

from benchmarks import figure, formula_figure
from benchmarks.figure import STATES
from tests.command_line import DEMO, ROOT, SECONDS, environment
from tests.test_pictures import condensed, shown_at
from tests.test_report import whole, write_run
from titan_disp.config.load import read_toml
from titan_disp.dispersion import dispersion_loss
from titan_disp.lab.report.gather import gather
from titan_disp.lab.sweeps.definition import points, read_sweep
from titan_disp.run.reader import read_json_lines

DOCS = ROOT / "docs"
SWEEPS = ROOT / "train_configs" / "sweeps"


def test_the_page_has_the_results_of_the_json():
    content = json.loads((DOCS / "condensation.json").read_text())
    page = (DOCS / "measurements.md").read_text().partition("## Dispersion off and on")
    lines = page[2].splitlines()
    said = " ".join(page[2].split())
    during = content["while_training"]
    after = content["after_training"]
    for name, read in (
        (
            "mean cosine of all blocks",
            lambda found: np.mean(found["mean_cosine"][1:-1]),
        ),
        ("mean cosine of the last block", lambda found: found["mean_cosine"][-2]),
        ("held-out cross-entropy", lambda found: found["cross_entropy"]),
    ):
        off, on = (
            np.array([read(found) for found in after[state]]) for state in STATES
        )
        d = on - off
        low, high = d.mean() + stats.t.ppf([0.025, 0.975], len(d) - 1) * stats.sem(d)
        numbers = f"{off.mean():.3f} | {on.mean():.3f} | {d.mean():+.3f} | {low:+.3f} to {high:+.3f}"
        assert f"| {name} | {numbers} | {(d < 0).sum()} of 3 seeds |" in lines
    # Of the embedding, six blocks and the final norm, ρ leaves out the output of the last
    # block before the norm.
    for name, first in (("Spearman's ρ", 1), ("ρ with the embedding", 0)):
        spans = []
        for state in STATES:
            layers = [np.delete(run["mean_cosine"], -2)[first:] for run in after[state]]
            ranks = [
                stats.spearmanr(range(len(cosines)), cosines).statistic
                for cosines in layers
            ]
            spans.append(f"{min(ranks):.3f} to {max(ranks):.3f}")
        assert f"| {name} | {' | '.join(spans)} |" in lines
    assert f"on {after['off'][0]['sequences']} held-out sequences" in said
    cosine = np.array([[run["mean_cosine"] for run in during[s]] for s in STATES])
    assert f"parameters, {cosine.shape[-1] - 2} blocks)" in said
    off, on = cosine[..., 1:-1].mean((1, 3))  # of all blocks and seeds: [steps]
    steps = during["steps"]
    assert (
        f"is {off.max():.2f} at step {steps[off.argmax()]} (off) and "
        f"{on.max():.2f} at step {steps[on.argmax()]} (on)." in said
    )
    apart = (off - on).argmax()
    assert (
        f"largest at step {steps[apart]}: {off[apart]:.2f} off and {on[apart]:.2f} on"
        in said
    )


def test_the_sweep_is_that_of_the_page():
    names = [p.name for p in points(read_sweep(SWEEPS / "figure.toml"))]
    assert names == [f"{state}_seed-{seed}" for state in STATES for seed in (1, 2, 3)]
    page = " ".join((DOCS / "measurements.md").read_text().split())
    assert "seeds 1, 2 and 3" in page
    config = read_toml(str(DEMO))
    interval = config["condensation"]["interval"]
    assert f"(λ = {config['dispersion']['coeff']})" in page
    assert f"The {config['training']['steps']} steps of" in page
    assert (
        f"sequences of {config['training']['seq_len']} tokens every {interval}" in page
    )


def test_the_loss_after_training_is_the_mean_over_all_tokens():
    torch.manual_seed(0)
    bigrams = torch.nn.Linear(10, 10)  # logits of the next token
    sequences = torch.randint(0, 10, (20, 7))
    logits = bigrams(torch.eye(10)).detach().double().numpy()
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    ids = sequences.numpy()
    expected = -np.log(p[ids[:, :-1], ids[:, 1:]]).mean()
    model = SimpleNamespace(forward=lambda ids: torch.eye(10)[ids], head=bigrams)
    assert figure.mean_loss(model, sequences) == pytest.approx(expected, rel=1e-5)


def test_the_picture(tmp_path, monkeypatch):
    levels = {"off": (0.4, 0.6), "on": (0.1, 0.3)}
    folders = {
        state: [tmp_path / f"{state}-{seed}" for seed in (1, 2)] for state in levels
    }
    for state, of_state in folders.items():
        for seed, (folder, level) in enumerate(
            zip(of_state, levels[state], strict=True), start=1
        ):
            write_run(
                folder,
                *whole(20),
                steps=20,
                debug={"seed": seed},
                dispersion={"enabled": state == "on"},
            )
            for step in (0, 10, 20):
                one = condensed(0.05, level, level + step / 100, 0.5)
                replace(one, cross_entropy=7 - level).save(
                    folder / "condensation" / f"step-{step}.npz"
                )
    every = gather(
        [
            f"dispersion {state}={','.join(map(str, of_state))}"
            for state, of_state in folders.items()
        ]
    )
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: drawn.append(self))
    figure.draw({"off": every[:2], "on": every[2:]}, tmp_path / "figure.png")
    (shown,) = drawn
    off, on, _, blocks, losses = shown.axes
    for axes, state, mean in ((off, "off", 0.5), (on, "on", 0.2)):
        assert axes.get_title() == f"dispersion {state}, mean of 2 seeds"
        (mesh,) = axes.collections
        assert [shown_at(mesh, 11, layer) for layer in range(4)] == pytest.approx(
            [0.05, mean, mean + 0.1, 0.5]
        )
        assert axes.get_xlim() == (0, 20)
    lines = {
        line.get_label(): line.get_xydata().round(6).tolist()
        for line in blocks.lines[::2]
    }
    assert lines == {
        "dispersion off (2 seeds)": [[0, 0.5], [10, 0.55], [20, 0.6]],
        "dispersion on (2 seeds)": [[0, 0.2], [10, 0.25], [20, 0.3]],
    }
    assert losses.lines[0].get_ydata() == pytest.approx([6.5] * 3)


def loss_and_slope(cosine):
    """The loss of two tokens with this cosine, and its derivative by the cosine."""
    angle = torch.tensor(cosine, dtype=torch.float64).arccos().requires_grad_()
    zero = torch.zeros((), dtype=torch.float64)
    tokens = torch.stack([zero + 1, zero, angle.cos(), angle.sin()]).view(1, 2, 2)
    loss = dispersion_loss(tokens, norm_eps=1e-12).sum()
    (by_angle,) = torch.autograd.grad(loss, angle)
    return loss.item(), -by_angle.item() / angle.sin().item()


def test_the_picture_of_the_formula():
    (axes,) = formula_figure.picture().axes
    without, with_clamp, above, below, demo, ceiling = (
        line.get_xydata() for line in axes.lines
    )
    np.testing.assert_allclose(without[[0, -1]], [[-1, -1], [1, 0]], atol=1e-9)
    for cosine, kept in ((-0.9, below), (0.3, None), (0.9, above)):
        loss, slope = loss_and_slope(cosine)
        value = np.interp(cosine, *with_clamp.T)
        assert value == pytest.approx(loss, abs=1e-4)
        if kept is not None:
            begin, end = kept
            risen, along = (end - begin)[::-1]
            assert risen / along == pytest.approx(slope)
    for mean, loss in demo:
        assert loss == pytest.approx(loss_and_slope(mean)[0])
    assert demo[:, 0].tolist() == [0.02, 0.99, 0.12]
    assert ceiling[0, 1] == pytest.approx(with_clamp[-1, 1])


def test_the_committed_picture_of_the_formula():
    assert formula_figure.PICTURE.stat().st_size < 100_000
    assert imread(formula_figure.PICTURE).shape[1] >= 1200


SWEEP = """
[sweep]
config = "train_configs/demo_cpu.toml"
folder = "{folder}/runs"
overrides = [
    "--training.steps=2",
    "--training.dataset_path={sample}", "--model.hf_assets_path={sample}/tokenizer",
]

[[points]]
name = "off"
overrides = ["--dispersion.no-enabled"]

[[points]]
name = "on"

[grid]
"debug.seed, stream.seed" = [5]
"""


@pytest.mark.night
def test_figure(sample, tmp_path):
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(SWEEP.format(folder=tmp_path, sample=sample))
    options = f"--sweep {sweep} --nproc 1 --docs {tmp_path} --sequences 2"
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.figure", *options.split()],
            capture_output=True,
            text=True,
            env=environment(),
            cwd=ROOT,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "condensation.json").read_text())
    assert content["while_training"]["steps"] == [0, 2]
    (found,) = content["after_training"]["off"]
    # Hardly trained
    assert found["cross_entropy"] == pytest.approx(np.log(2048), abs=1)
    # Other sequences of the same split: at two steps' age all are much alike.
    (run,) = content["while_training"]["off"]
    assert run["cross_entropy"][-1] == pytest.approx(found["cross_entropy"], abs=0.3)
    assert run["mean_cosine"][-1] == pytest.approx(found["mean_cosine"], abs=0.1)
    assert imread(tmp_path / "condensation.png").shape[1] >= 800
    runs = [path.parent for path in (tmp_path / "runs").glob("*/events.jsonl")]
    assert {run.name for run in runs} == {"off_seed-5", "on_seed-5"}
    for run in runs:
        assert [e["event"] for e in read_json_lines(run / "events.jsonl")].count(
            "complete"
        ) == 1
