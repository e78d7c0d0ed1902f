"""The files of a run's folder survive kills and broken nodes; a second job is refused;
changes of the config are named.
"""

import json
import math
import os
import sys
import tracemalloc
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist
from torchtitan.config import JobConfig

from tests.distributed import spawn
from tests.mesh import build, dims
from titan_disp.checks import check_device
from titan_disp.errors import ConfigError, InUseError
from titan_disp.objective import LossLedger
from titan_disp.run import reader
from titan_disp.run.folder import RunFolder, continue_wandb, read_id
from titan_disp.run.metrics import DispersionMetrics
from titan_disp.run.storage import append_json, write_json
from titan_disp.train import DispTrainer


def job_config(folder):
    config = JobConfig()
    config.job.dump_folder = str(folder)
    return config


def started(config):
    folder = RunFolder(config, 3)
    folder.record_start()
    return folder


def test_lines_that_a_kill_or_a_dead_node_cut(tmp_path):
    assert not reader.is_run(tmp_path)
    assert [
        *reader.read_rows(tmp_path),
        *reader.read_events(tmp_path),
        *reader.read_environment(tmp_path),
    ] == []
    file = tmp_path / "metrics.jsonl"
    append_json(file, {"step": 1, "time": 1, "loss": 3.0})
    append_json(file, {"step": 2, "time": 2, "loss": 2.5})
    with open(file, "ab+") as f:
        f.truncate(f.tell() - 6)
    append_json(file, {"step": 2, "time": 3, "loss": 2.25})
    # Pages that never reached the disk are zeros or what was there before
    with open(file, "ab") as f:
        f.write(b"\0" * 40 + b"\xff\xfe\x80 12\n7\n[1]\n")
    append_json(file, {"step": 3, "time": 4, "loss": 2.0})
    append_json(file, {"step": 2, "time": 5, "loss": 4.5})
    append_json(file, {"step": 2, "time": 6, "condensation": {}})  # no training step
    assert [r["step"] for r in reader.read_json_lines(file)] == [1, 2, 3, 2, 2]
    found = [(step, row["loss"]) for step, row in reader.read_metrics(tmp_path).items()]
    # of a repeated step, the last line counts
    assert found == [(1, 3.0), (2, 4.5), (3, 2.0)]
    assert [
        reader.last_row(tmp_path, last).get("loss") for last in (0, 2, math.inf)
    ] == [None, 4.5, 2.0]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    """NaN is no JSON for other readers. Files of older runs have it."""
    file = tmp_path / "metrics.jsonl"
    append_json(
        file, {"step": 1, "time": 1.5, "ce": math.nan, "data": {"epoch": math.inf}}
    )
    assert (
        file.read_text()
        == '{"step": 1, "time": 1.5, "ce": null, "data": {"epoch": null}}\n'
    )
    file.write_text('{"step": 1, "time": 1.5, "ce": NaN}\n')
    assert math.isnan(reader.last_row(tmp_path)["ce"])


def test_memory_does_not_grow_with_the_rows(tmp_path):
    row = {"step": 1, "time": 1, "condensation": {}}
    rows = [
        row,
        *(
            {"step": step, "time": 1, "data": {"documents": 1.5}}
            for step in range(20000)
        ),
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    tracemalloc.start()
    assert (reader.read_condensation(tmp_path), reader.last_row(tmp_path)["step"]) == (
        {1: {}},
        19999,
    )
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a node that dies may leave an empty config.json, and no start of the run
    would get past it.
    """
    done = []
    fsync = os.fsync
    replace = os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)),
    )
    monkeypatch.setattr(
        os, "replace", lambda *names: (done.extend(map(str, names)), replace(*names))
    )
    write_json(tmp_path / "config.json", {"a": 1})
    partial = str(tmp_path / ".config.json.partial")
    assert done == [partial, partial, str(tmp_path / "config.json")]
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_a_garbled_config_is_one_error(tmp_path):
    for content, reason in {
        b'{"job": {"dump_fol': "Unterminated string",
        b"\xff\xfe\x00": "codec can't decode",
        b"[1, 2]": "the file holds a list, expected a JSON object",
    }.items():
        file = tmp_path / reason / "config.json"
        file.parent.mkdir()
        file.write_bytes(content)
        with pytest.raises(
            ConfigError, match=f"{reason}.*To continue, check that your config"
        ):
            RunFolder(job_config(file.parent), 1)
        assert file.read_bytes() == content


def test_second_job_is_refused_and_the_first_unharmed(tmp_path, monkeypatch):
    first = started(job_config(tmp_path))
    before = (tmp_path / "config.json").read_bytes()
    second = job_config(tmp_path)
    second.training.steps = 7
    with pytest.raises(InUseError, match="in use by another job.*pid"):
        RunFolder(second, world_size=1)
    assert (tmp_path / "config.json").read_bytes() == before
    assert first.owned
    first.close()
    RunFolder(job_config(tmp_path), world_size=1).close()


def two_jobs(sample, folder):
    """A second start takes the folder over while the first one trains, as if it had
    not shown life.
    """

    second = []

    def take_over():
        (Path(folder) / ".lock").unlink()
        second.append(RunFolder(first.job_config, 1))

    options = (
        "--training.steps",
        "9",
        "--checkpoint.enable",
        "--checkpoint.interval",
        "1",
        "--stream.prefetch",
        "0",
    )
    first = build(
        sample,
        folder,
        *options,
        "--checkpoint.keep_latest_k",
        "2",
        "--condensation.interval",
        "0",
    )
    first.train_step = lambda data: (
        DispTrainer.train_step(first, data),
        take_over() if first.step == 4 else None,
    )
    with pytest.raises(
        InUseError, match=r"was taken by another job \(host .*\) while this job trained"
    ):
        first.train()
    write_json(Path(folder) / "heartbeat.json", {"of": "the second"})
    first.close()


def test_a_start_whose_folder_is_taken_ends_and_deletes_nothing(sample, tmp_path):
    spawn(1, two_jobs, str(sample), str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == [
        "step-2",
        "step-3",
    ]
    assert (tmp_path / "heartbeat.json").exists()
    assert [event["event"] for event in reader.read_events(tmp_path)] == [
        "start",
        *["checkpoint"] * 3,
    ]


def test_no_secret_of_the_environment_is_recorded(tmp_path, monkeypatch):
    recorded = {
        "SLURM_JOB_ID",
        "SLURM_NNODES",
        "TITAN_DISP_SITE",
        "NCCL_SOCKET_IFNAME",
        "TORCH_TRACE",
        "CUDA_HOME",
    }
    secret = {
        "SLURM_JOB_SECRET",
        "SLURM_JWT",
        "TITAN_DISP_NOTIFY",
        "NCCL_API_KEY",
        "TORCH_TOKEN",
        "CUDA_PASSWORD",
    }
    others = {"HF_TOKEN", "AWS_REGION", "SLURM_JOB_COMMENT", "MY_NCCL_DEBUG", "PATH"}
    for name in recorded | secret | others:
        monkeypatch.setenv(name, f"of {name}")
    started(job_config(tmp_path)).close()
    found = reader.read_environment(tmp_path)
    assert {
        name for name, value in found["variables"].items() if value == f"of {name}"
    } == recorded
    assert found["world_size"] == 3


def test_a_folder_that_is_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not writable"):
        RunFolder(job_config(tmp_path / "file" / "run"), world_size=1)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("titan_disp.run.folder.write_json", full)
    with pytest.raises(ConfigError, match="is not writable: .*No space left on device"):
        started(job_config(tmp_path))


# ---- one Weights & Biases run across the starts. The package is a stub; TorchTitan's logger is the real one.


def test_a_requeue_continues_the_run(tmp_path, monkeypatch):
    """A requeued job has the environment that it was submitted with."""
    inits = []
    stub = SimpleNamespace(__spec__=ModuleSpec("wandb", None), run=None)
    stub.init = lambda **settings: inits.append(
        (settings["id"], os.environ["WANDB_RESUME"])
    )
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    (tmp_path / "other").mkdir()
    # it never reached the disk: W&B would begin another run
    (tmp_path / "other" / "wandb_run_id").write_text("\n")
    for folder in ("run", "run", "other"):
        for name in ("WANDB_RUN_ID", "WANDB_RESUME"):
            # So that what is set here is undone after the test
            monkeypatch.setenv(name, "")
            monkeypatch.delenv(name)
        config = job_config(tmp_path / folder)
        config.metrics.enable_wandb = True
        check_device(config)
        DispersionMetrics(config, dims(1), LossLedger()).close()
    ids = [
        (tmp_path / folder / "wandb_run_id").read_text().strip()
        for folder in ("run", "run", "other")
    ]
    assert inits == [(each, "allow") for each in ids]
    assert [len(each) for each in {*ids}] == [32, 32]


def test_what_the_user_has_set_stays():
    for given, rank, added in (
        ({"WANDB_RUN_ID": "mine", "WANDB_RESUME": "must"}, None, {}),
        ({"WANDB_FORK_FROM": "a?_step=1"}, 3, {"WANDB_RUN_ID": "folder-rank3"}),
    ):
        expected = given | added
        continue_wandb("folder", rank, given)
        assert given == expected


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (
            "apptainer exec --env WANDB_API_KEY=0123 --env=A=b,C=d -e X=y x.sif",
            "apptainer exec --env WANDB_API_KEY=… --env=A=… -e X=… x.sif",
        ),
        ("http://me:pass@proxy:3128", "http://me:…@proxy:3128"),
        ("export HF_TOKEN=hf_ab; run", "export HF_TOKEN=… run"),
        (f"run {'hf_' + 'a' * 34} {'0' * 40}", "run … …"),
        ("expandable_segments:True,max=5", "expandable_segments:True,max=5"),
        ("tcp://host:1234/path", "tcp://host:1234/path"),
        ("ib0,ib1:1", "ib0,ib1:1"),
    ],
)
def test_values_of_variables_hold_no_secrets(tmp_path, monkeypatch, value, recorded):
    monkeypatch.setenv("TITAN_DISP_PREFIX", value)
    folder = RunFolder(job_config(tmp_path), 1)
    folder.record_start()
    folder.close()
    variables = reader.read_environment(tmp_path)["variables"]
    assert variables["TITAN_DISP_PREFIX"] == recorded


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("heartbeat.json", reader.read_heartbeat),
        ("requeue.json", reader.read_failures),
        ("config.json", reader.read_config),
        ("metrics.jsonl", reader.read_rows),
        ("events.jsonl", reader.read_events),
    ],
)
def test_a_named_pipe_is_not_waited_for(tmp_path, name, read):
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read(tmp_path)


def test_an_id_that_cannot_be_read(tmp_path):
    file = tmp_path / "run_id"
    file.write_bytes(b"\xff\n")
    assert read_id(file) == "\ufffd"
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="run_id' is not a regular file"):
        read_id(file)
