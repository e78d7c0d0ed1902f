"""Experiment C of docs/preregistration.md: its sweep, its result on made-up scores, and
the whole command on tiny models and a stand-in task.
"""

import json
import subprocess
import sys
import time
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from pandas import DataFrame

from benchmarks import midtraining
from benchmarks.midtraining import main, read_scores, report, task_table
from benchmarks.preregistered import PREDICTIONS
from tests.command_line import DEMO, ROOT, SECONDS, environment
from titan_disp.config.load import read_toml
from titan_disp.errors import ConfigError
from titan_disp.lab.sweeps.definition import points, read_sweep

SWEEP = ROOT / "train_configs/sweeps/paper/gpt2_eight_seeds.toml"
METHODS = SWEEP.with_name("gpt2_methods.toml")
TASK = {
    "task": "capitals",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "The capital of {{country}} is",
    "doc_to_choice": ["Paris", "Rome", "Oslo"],
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
COUNTRIES = ("France", "Italy", "Norway")


def test_the_sweep_is_the_authors_recipe_with_new_seeds():
    found = points(read_sweep(SWEEP))
    assert [point.condition for point in found] == ["default"] * 8 + ["dispersion"] * 8
    other = read_toml(str(METHODS))
    sweep = read_toml(str(SWEEP))
    assert sweep["points"] == other["points"][:2]
    for key in ("config", "overrides", "against"):
        assert sweep["sweep"][key] == other["sweep"][key]
    seeds = {point.seeds["debug.seed"] for point in found}
    assert len(seeds) == 8
    assert not seeds & set(other["grid"]["debug.seed, stream.seed"])


def test_the_power_that_the_page_states():
    page = (ROOT / "docs" / "preregistration.md").read_text()
    high, low = (
        f"{PREDICTIONS['C1'].power(0.0066, deviation):.0%}".replace("%", " %")
        for deviation in (0.0055, 0.01)
    )
    assert f"in {high} of cases" in page
    assert f"in {low} if it is 0.01" in page


def scores_of(**levels):
    """Eight seeds of one task and its mean, by checkpoint around each condition's level."""
    spread = np.linspace(-0.001, 0.001, 8)
    columns = product(levels, ("piqa", "mean"), range(5))
    scores = {column: levels[column[0]][column[2]] + spread for column in columns}
    return DataFrame(scores).rename_axis(columns=["condition", "task", "checkpoint"])


def test_the_last_and_the_best_checkpoint_are_told_apart():
    """Dispersion is better by 0.01 at its second checkpoint, and equal at the last."""
    scores = scores_of(
        default=[0.30, 0.30, 0.30, 0.30, 0.34],
        dispersion=[0.30, 0.35, 0.30, 0.30, 0.34],
    )
    text = report(scores, "default")
    assert "C1, last checkpoint: +0.0000" in text
    assert "C2, best of 5 checkpoints: +0.0100" in text
    assert "dispersion: the best checkpoint scores 0.0100 more" in text
    assert "| piqa |  0.3400 |     0.3400 |" in text


def test_the_scores_of_files(tmp_path):
    """Each score has its place, whatever the order of the tasks; the mean stays last."""
    runs = [
        SimpleNamespace(name=f"{condition}_{seed}", condition=condition, seeds=seed)
        for condition in ("dispersion", "default")
        for seed in (12, 3)
    ]
    tasks = ("piqa", "arc", "mean")
    expected = {}
    for run in runs:
        rows = []
        for task in tasks:
            scores = {f"step-{i}": len(expected) + i / 10 for i in range(5)}
            for checkpoint, score in enumerate(scores.values()):
                expected[run.name, task, checkpoint] = score
            rows.append({"task": task, "scores": scores})
        (tmp_path / run.name).mkdir()
        results = {"comparison": {"tasks": rows[:-1], "mean": rows[-1]}}
        (tmp_path / run.name / "results.json").write_text(json.dumps(results))
    found = read_scores(runs, tmp_path)
    assert found.columns.unique("task").tolist() == list(tasks)
    for (name, task, checkpoint), score in expected.items():
        condition, seed = name.split("_")
        assert found[condition, task, checkpoint][seed] == score
    _, *rows = task_table(found.xs(4, axis=1, level=2), "default", "dispersion")
    assert [row[0] for row in rows] == list(tasks)
    for column, condition in ((1, "default"), (2, "dispersion")):
        of_arc = [expected[f"{condition}_{seed}", "arc", 4] for seed in (12, 3)]
        assert rows[1][column] == f"{np.mean(of_arc):.4f}"


def test_two_evaluations_never_share_a_gpu(tmp_path, monkeypatch):
    """Three evaluations at a time on three GPUs, one of which is slow."""
    names = [f"run-{i}" for i in range(9)]
    (tmp_path / names[4]).mkdir()  # evaluated already
    busy = set()
    evaluated = []

    def evaluate(run, out, options):
        device = options[-1]
        assert device not in busy
        busy.add(device)
        time.sleep(0.1 if device == "cuda:0" else 0.01)
        busy.remove(device)
        evaluated.append(run.name)

    monkeypatch.setattr(midtraining, "evaluate", evaluate)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    runs = [SimpleNamespace(name=name) for name in names]
    midtraining.evaluate_all(runs, tmp_path, ["--tasks", "paper"], jobs=3)
    assert sorted(evaluated) == [name for name in names if name != names[4]]


def test_conditions_are_checked_before_training(tmp_path):
    """A sweep of many conditions, and one without its baseline."""
    other = tmp_path / "sweep.toml"
    other.write_text(
        SWEEP.read_text().replace('against = "default"', 'against = "off"')
    )
    for sweep in (METHODS, other):
        with pytest.raises(
            ConfigError, match=r"expected two conditions|sweep\.against"
        ):
            main(sweep)


@pytest.mark.night
def test_the_whole_command(sample, tmp_path):
    """Two seeds of the nano GPT-2, each with five checkpoints; then the same command
    again, which neither trains nor evaluates anything.
    """
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    rows = [
        {"country": country, "answer": i} for i, country in enumerate(COUNTRIES * 4)
    ]
    documents = tasks / "capitals.jsonl"
    documents.write_text(
        "\n".join(json.dumps(row | {"answer": row["answer"] % 3}) for row in rows)
    )
    data = {"dataset_kwargs": {"data_files": {"test": str(documents)}}}
    (tasks / "capitals.yaml").write_text(json.dumps(TASK | data))
    file = tmp_path / "sweep.toml"
    overrides = [
        *("--model.name=gpt2_disp", f"--model.hf_assets_path={sample / 'tokenizer'}"),
        *(f"--training.dataset_path={sample}", "--training.global_batch_size=4"),
        *("--training.steps=10", "--lr_scheduler.warmup_steps=2"),
        *("--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"),
    ]
    file.write_text(
        f"[sweep]\nconfig = {json.dumps(str(DEMO))}\n"
        f"folder = {json.dumps(str(tmp_path / 'runs'))}\n"
        f"overrides = {json.dumps(overrides)}\nagainst = 'default'\n"
        "[[points]]\nname = 'default'\noverrides = ['--dispersion.no-enabled']\n"
        "[[points]]\nname = 'dispersion'\n"
        "[grid]\n'debug.seed, stream.seed' = [1, 2]\n"
    )
    command = [
        *(sys.executable, "-m", "benchmarks.midtraining", str(file), "--jobs", "2"),
        *("--tasks", "capitals", "--include-path", str(tasks)),
    ]

    def run():
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first = run()
    assert first.count("evaluating the steps [2, 4, 6, 8, 10]") == 4
    evaluation = tmp_path / "runs" / "evaluation"
    result = (evaluation / "result.md").read_text()
    assert result in first
    assert "2 seeds): seeds are missing" in result
    assert "| capitals |" in result
    again = run()
    assert "4 finished, 0 to train" in again
    assert "evaluating" not in again
    assert (evaluation / "result.md").read_text() == result
