"""The stages of make gpu and slurm/first_run.sbatch, and what is said of their results."""

import dataclasses
import importlib
import json
import os
import shlex
import subprocess
import sys
import time

import pytest
import tyro

from benchmarks.first_run import TABLE, Options, Stage, command, judge, main, obstacle
from tests.command_line import ROOT
from tests.pages import understood
from titan_disp.checks import check_config
from titan_disp.config.load import load_config

STAGES = {row["name"]: Stage(**row) for row in TABLE["stage"]}
MACHINES = {
    "cpu": {"gpus": 0, "ranks": 2},
    "gpu": {"gpus": 1, "ranks": 1},
    "node": {"gpus": 8, "ranks": 8},
    "nodes": {"gpus": 8, "ranks": 16, "nodes": 2},
}


def options(folder, **more):
    return Options(out=folder, **MACHINES["node"] | more)


def write_rows(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def row(step, loss=2.0, **more):
    numbers = {"grad_norm": 1.0, "tps": 100.0, "time": 1000.0 + step}
    return {"step": step, "loss": loss, **numbers, **more}


@pytest.mark.parametrize("machine", MACHINES)
def test_the_table(machine, tmp_path, monkeypatch):
    """Each command is one that its parser accepts, and each config fits the mesh."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    monkeypatch.chdir(ROOT)
    on = Options(out=tmp_path, **MACHINES[machine])
    for stage in STAGES.values():
        for earlier in filter(None, (stage.run, stage.same_as)):
            assert list(STAGES).index(earlier) < list(STAGES).index(stage.name)
        mode, *words = command(stage, on)
        assert mode == ("process" if stage.process else "ranks")
        if words[0].startswith("benchmarks/"):
            script = importlib.import_module(words[0][:-3].replace("/", "."))
            tyro.cli(script.Options, args=words[1:])
        if "titan_disp.cli" in words:
            understood(words[words.index("titan_disp.cli") + 1 :])
        if "--job.config_file" in words and not obstacle(stage, on):
            argv = words[words.index("--job.config_file") :]
            config = load_config([word for word in argv if "converters" not in word])
            check_config(config, 1 if stage.process else on.ranks)


def test_what_a_machine_can_run(tmp_path):
    def able(machine):
        on = Options(out=tmp_path, **MACHINES[machine])
        return {name for name, stage in STAGES.items() if not obstacle(stage, on)}

    assert {"one", "fsdp", "tp", "resume", "kill", "saves", "selftest"} <= able("cpu")
    assert able("cpu").isdisjoint({"cp", "compile", "hsdp", "kill-node"})
    assert "compile" in able("gpu") - able("cpu")
    assert able("gpu").isdisjoint({"fsdp", "selftest-ranks", "offload"})
    assert {"cp-tp", "hsdp-tp", "offload", "quiet"} <= able("node")
    assert able("nodes") - able("node") == {"kill-node", "kill-node-resume"}
    assert "selftest" not in able("nodes")


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([row(i) for i in (1, 2, 3)], ""),
        ([row(1), row(2), row(2, time=5.0), row(3)], ""),  # resumed at step 2
        ([row(1), row(2, loss=2.001), row(3)], "within 5.0e-04 up to step 3"),
        ([row(1), row(2, grad_norm=1.001), row(3)], "within 1.0e-03"),
        ([row(1), row(2, loss=None), row(3)], "within nan"),
        ([row(1), row(2)], "trained steps [1, 2], expected one start and step 3"),
        ([row(1), row(2, loss=float("nan")), row(3)], "within nan"),
        ([row(1), row(2), row(1), row(3)], "trained steps [1, 2, 1, 3]"),
        ([], "trained steps []"),
    ],
)
def test_a_run_that_must_repeat_another(rows, text, tmp_path):
    on = options(tmp_path)
    write_rows(tmp_path / "runs" / "save", rows)
    resume = dataclasses.replace(STAGES["resume"], steps=3)
    assert not judge(resume, on).good  # nothing to compare with
    write_rows(tmp_path / "runs" / "one", [row(i) for i in (1, 2, 3)])
    finding = judge(resume, on)
    assert finding.good == (not text)
    assert text in finding.text


def test_a_rank_that_is_killed(tmp_path):
    kill = STAGES["kill"]
    run = tmp_path / "runs" / "kill"
    (tmp_path / "kill.log").write_text("the reason\n======\n")
    failed = options(tmp_path, status=1)
    assert judge(kill, failed).text == "status 1 after 0 steps: the reason"
    write_rows(run, [row(6, time=time.time() - 30)])
    assert judge(kill, failed).good
    assert not judge(kill, options(tmp_path, status=0)).good
    write_rows(run, [row(6, time=time.time() - 300)])
    assert not judge(kill, failed).good


def test_the_cost_of_a_save(tmp_path):
    """A step takes a second, the save another 20 (or 40), and the steps after it have
    all of the speed (or 80 % of it).
    """

    def found(lost, speed, gpus=8):
        rows = [row(i) for i in range(1, 31)]
        rows += [row(i, tps=speed, time=1000.0 + lost + i) for i in range(31, 61)]
        folder = tmp_path / f"{lost}-{speed}-{gpus}"
        write_rows(folder / "runs" / "saves", rows)
        return judge(STAGES["saves"], options(folder, gpus=gpus))

    fast = found(20, 100)
    assert fast.good
    expected = "100 tokens/s of a rank, 100% of that after the save, 20.0 s lost"
    assert fast.text == expected
    assert not found(40, 100).good
    assert not found(20, 80).good
    assert found(40, 80, gpus=0).good  # a busy CPU


def test_the_summary(tmp_path, capsys):
    """A stage that cannot run has the reason, one that failed what to do, and each
    command has its name and faults.
    """
    assert main(options(tmp_path, ranks=3, stages="tp kill selftest-ranks")) == 0
    assert capsys.readouterr().out == ""
    assert main(options(tmp_path, stages="kill")) == 0
    name, faults, words = capsys.readouterr().out.split("|")
    assert (name, faults) == ("kill", "kill:7@7")
    assert shlex.split(words)[:3] == ["ranks", str(tmp_path), "tests.faulty_train"]
    with pytest.raises(SystemExit, match="no stage fspd; there are environment "):
        main(options(tmp_path, stages="fspd"))
    (tmp_path / "quiet.log").write_text("")
    (tmp_path / "quiet.txt").write_text("12 passed in 3 s\n")
    assert main(options(tmp_path, stage="quiet")) == 0
    assert main(options(tmp_path, stage="quiet", status=1)) == 1
    summary = (tmp_path / "summary.txt").read_text()
    assert summary.count("it needs a multiple of 2 ranks, not 3") == 3
    assert summary.count("what to do") == 1
    assert "ok     quiet: a step that waits for nothing\n       found: 12" in summary
    assert "FAILED quiet" in summary


@pytest.mark.night
def test_make_gpu_on_a_cpu(sample, tmp_path):
    """The check of the node, a run that is killed, and its resume."""
    paths = (f"--training.dataset_path={sample}", f"--job.dump_folder={tmp_path}/out")
    script = ["bash", "slurm/first_run.sbatch", "train_configs/debug.toml", *paths]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM")}
    done = subprocess.run(
        [*script, f"--model.hf_assets_path={sample}/tokenizer"],
        cwd=ROOT,
        env=environment
        | {
            "TITAN_DISP_PYTHON": sys.executable,
            "TITAN_DISP_STAGES": "nodes one tp kill kill-resume",
        },
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = (tmp_path / "out" / "summary.txt").read_text()
    names = [line.split()[1] for line in summary.splitlines() if line[:2] == "ok"]
    assert names == ["nodes:", "one:", "tp:", "kill:", "kill-resume:"]
    assert "all-reduce of 4 MiB over 2 ranks" in done.stdout
