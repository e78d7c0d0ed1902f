"""The files of a run's folder survive kills and broken nodes; a second job is refused; changes of the config are named."""

import json
import logging
import math
import os
import re
import shutil
import socket
import threading
import time
import tracemalloc
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchtitan.config import JobConfig

from tests.command_line import ROOT
from tests.distributed import spawn
from tests.pages import loaded
from tests.run_invariants import FILES, pages_names
from titan_disp.errors import ConfigError, InUseError
from titan_disp.run import reader
from titan_disp.run.folder import RunFolder, append_json, write_json
from titan_disp.run.liveness import straggler
from titan_disp.train import DispTrainer


def job_config(folder, **training):
    config = JobConfig()
    config.job.dump_folder = str(folder)
    for key, value in training.items():
        setattr(config.training, key, value)
    return config


def started(config, world_size=1):
    folder = RunFolder(config, world_size)
    folder.record_start()
    return folder


def test_lines_that_a_kill_or_a_dead_node_cut(tmp_path):
    assert not reader.is_run(tmp_path)
    assert [*reader.read_rows(tmp_path), *reader.read_events(tmp_path), *reader.read_environment(tmp_path)] == []
    file = tmp_path / "metrics.jsonl"
    append_json(file, {"step": 1, "time": 1, "loss": 3.0})
    append_json(file, {"step": 2, "time": 2, "loss": 2.5})
    with open(file, "ab+") as f:
        f.truncate(f.tell() - 6)
    append_json(file, {"step": 2, "time": 3, "loss": 2.25})
    with open(file, "ab") as f:  # pages that never reached the disk are zeros or what was there before
        f.write(b"\0" * 40 + b"\xff\xfe\x80 12\n7\n[1]\n")
    append_json(file, {"step": 3, "time": 4, "loss": 2.0})
    append_json(file, {"step": 2, "time": 5, "loss": 4.5})
    append_json(file, {"step": 2, "time": 6, "condensation": {}})  # no training step
    assert [r["step"] for r in reader.read_json_lines(file)] == [1, 2, 3, 2, 2]
    found = [(step, row["loss"]) for step, row in reader.read_metrics(tmp_path).items()]
    assert found == [(1, 3.0), (2, 4.5), (3, 2.0)]  # of a repeated step, the last line counts
    assert [reader.last_row(tmp_path, last).get("loss") for last in (0, 2, math.inf)] == [None, 4.5, 2.0]


def test_numbers_that_are_not_finite_are_null(tmp_path):
    """NaN is no JSON for other readers. Files of older runs have it."""
    file = tmp_path / "metrics.jsonl"
    append_json(file, {"step": 1, "time": 1.5, "ce": math.nan, "data": {"epoch": math.inf}})
    assert file.read_text() == '{"step": 1, "time": 1.5, "ce": null, "data": {"epoch": null}}\n'
    file.write_text('{"step": 1, "time": 1.5, "ce": NaN}\n')
    assert math.isnan(reader.last_row(tmp_path)["ce"])


def test_memory_does_not_grow_with_the_rows(tmp_path):
    row = {"step": 1, "time": 1, "condensation": {}}
    rows = [row, *({"step": step, "time": 1, "data": {"documents": 1.5}} for step in range(20000))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tracemalloc.start()
    assert (reader.read_condensation(tmp_path), reader.last_row(tmp_path)["step"]) == ({1: {}}, 19999)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a node that dies may leave an empty config.json, and no start of the run would get past it."""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names: (done.extend(map(str, names)), replace(*names)))
    write_json(tmp_path / "config.json", {"a": 1})
    partial = str(tmp_path / ".config.json.partial")
    assert done == [partial, partial, str(tmp_path / "config.json")]
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_a_garbled_config_is_one_error(tmp_path):
    for content, reason in {
        b'{"job": {"dump_fol': "Unterminated string",
        b"\xff\xfe\x00": "codec can't decode",
        b"[1, 2]": "it holds a list, expected an object",
    }.items():
        file = tmp_path / reason / "config.json"
        file.parent.mkdir()
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=f"{reason}.*To continue, move it away"):
            RunFolder(job_config(file.parent), 1)
        assert file.read_bytes() == content


def test_second_job_is_refused_and_the_first_unharmed(tmp_path, monkeypatch):
    first = started(job_config(tmp_path))
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(InUseError, match="in use by another job.*pid"):
        RunFolder(job_config(tmp_path, steps=7), world_size=1)
    assert (tmp_path / "config.json").read_bytes() == before
    assert first.locked
    first.close()
    RunFolder(job_config(tmp_path), world_size=1).close()
    # Some network file systems have no locks. The folder may be another job's there.
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(38, "Function not implemented")))
    without = RunFolder(job_config(tmp_path), 1)
    assert not first.locked
    assert not without.locked
    without.close()


def left(folder, monkeypatch, **owner):
    """A heartbeat that looks young, and its start's owner.json. Whether that start lives is watched for 0.3 s."""
    monkeypatch.setattr("titan_disp.run.folder.WATCH", (0.3, 0.02))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    write_json(folder / "owner.json", {"id": "x", "host": "far", "job": "6.0", "time": 1.7e9, **owner})
    write_json(folder / "heartbeat.json", {"allowed_seconds": 100, "step": 1})


def test_a_run_that_lives_on_another_node_is_left_alone(tmp_path, monkeypatch):
    """The lock of some file systems holds only within one node."""
    left(tmp_path, monkeypatch)
    beat = threading.Timer(0.1, write_json, (tmp_path / "heartbeat.json", {"allowed_seconds": 100, "step": 2}))
    beat.start()
    (tmp_path / ".lock").write_text("host far, pid 1, SLURM job 6")
    seen = []  # while the other one is watched, the lock says who holds it
    threading.Timer(0.05, lambda: seen.append((tmp_path / ".lock").read_text())).start()
    before = [(tmp_path / name).read_bytes() for name in ("owner.json", ".lock")]
    with pytest.raises(InUseError, match=r"is in use by another job \(host far, SLURM job 6.0\), whose heartbeat"):
        RunFolder(job_config(tmp_path), 1)
    assert [(tmp_path / name).read_bytes() for name in ("owner.json", ".lock")] == before
    assert seen[0].endswith("SLURM job 7")


@pytest.mark.parametrize("what", ["same job", "same node", "old", "dead", "ended"])
def test_a_start_that_has_died_holds_nobody_up(tmp_path, monkeypatch, what):
    """Only a young heartbeat of another job on another node is watched. Which clock is right is not asked."""
    of = {"same job": {"job": "7.0"}, "same node": {"host": socket.gethostname()}}
    left(tmp_path, monkeypatch, **of.get(what, {}))
    if what == "old":
        os.utime(tmp_path / "heartbeat.json", (time.time() - 101,) * 2)
    if what == "ended":
        threading.Timer(0.1, (tmp_path / "heartbeat.json").unlink).start()
    began = time.monotonic()
    folder = RunFolder(job_config(tmp_path), 1)
    assert (time.monotonic() - began > 0.3) == (what == "dead")
    assert folder.taken_by() is None
    owner = json.loads((tmp_path / "owner.json").read_text())
    assert (owner["host"], owner["job"], owner["id"] != "x") == (socket.gethostname(), "7.0", True)
    folder.close()


def two_jobs(sample, folder):
    """A second start takes the folder, as with locks that hold only within a node, while the first one trains."""
    import fcntl

    from tests.mesh import build

    fcntl.flock = lambda *args: None
    options = ("--training.steps", "9", "--checkpoint.enable", "--checkpoint.interval", "1", "--stream.prefetch", "0")
    first = build(sample, folder, *options, "--checkpoint.keep_latest_k", "2", "--condensation.interval", "0")
    first.checkpointer.hooks.train_step = lambda data: (
        DispTrainer.train_step(first, data),
        RunFolder(first.job_config, 1) if first.step == 4 else None,
    )
    with pytest.raises(InUseError, match=r"was taken by another job \(host .*\) while this one trained"):
        first.train()
    write_json(Path(folder) / "heartbeat.json", {"of": "the second"})
    first.close()


def test_a_start_whose_folder_is_taken_ends_and_deletes_nothing(sample, tmp_path):
    spawn(1, two_jobs, str(sample), str(tmp_path))
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["step-2", "step-3"]
    assert (tmp_path / "heartbeat.json").exists()
    assert [event["event"] for event in reader.read_events(tmp_path)] == ["start", *["checkpoint"] * 3]


def test_a_start_that_is_refused_leaves_the_config_of_the_run(tmp_path):
    """The folder is opened before everything is checked: a refused start closes it without a record of itself."""
    started(job_config(tmp_path, steps=5)).close()
    for act, steps, ranks in ((RunFolder, 5, 1), (started, 9, 3)):
        folder = act(job_config(tmp_path, steps=9), world_size=3)
        assert folder.config_changes == {"training.steps": [5, 9]}
        folder.close()
        assert reader.read_config(tmp_path)["training"]["steps"] == steps
        assert reader.read_environment(tmp_path)["world_size"] == ranks


def test_no_secret_of_the_environment_is_recorded(tmp_path, monkeypatch):
    recorded = {"SLURM_JOB_ID", "SLURM_NNODES", "TITAN_DISP_SITE", "NCCL_SOCKET_IFNAME", "TORCH_TRACE", "CUDA_HOME"}
    secret = {"SLURM_JOB_SECRET", "SLURM_JWT", "TITAN_DISP_NOTIFY", "NCCL_API_KEY", "TORCH_TOKEN", "CUDA_PASSWORD"}
    others = {"HF_TOKEN", "AWS_REGION", "SLURM_JOB_COMMENT", "MY_NCCL_DEBUG", "PATH"}
    for name in recorded | secret | others:
        monkeypatch.setenv(name, f"of {name}")
    started(job_config(tmp_path)).close()
    variables = reader.read_environment(tmp_path)["variables"]
    assert {name for name in variables if variables[name] == f"of {name}"} == recorded


def test_a_folder_that_is_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not writable"):
        RunFolder(job_config(tmp_path / "file" / "run"), world_size=1)
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("titan_disp.run.folder.write_json", full)
    with pytest.raises(ConfigError, match="is not writable: .*No space left on device"):
        started(job_config(tmp_path))


def two_starts(sample, folder):
    """Train four steps in two starts. Keep the last heartbeat, and the console. A start of a copy finds it complete."""
    from tests.mesh import build

    folder = Path(folder)
    logging.basicConfig(filename=folder / "console", level=logging.INFO, format="%(message)s")
    for name, steps, lr in (("run", 2, "8e-4"), ("run", 4, "8e-4"), ("copy", 4, "0.5")):
        if name == "copy":
            shutil.copytree(folder / "run", folder / "copy")
            logging.disable()
        trainer = build(
            *(sample, folder / name, "--training.steps", str(steps), "--stream.prefetch", "0", "--optimizer.lr", lr),
            *("--checkpoint.enable", "--checkpoint.interval", "2", "--metrics.enable_tensorboard"),
            *("--metrics.log_freq", "1", "--guard.max_skipped_steps", "7", "--validation.enable"),
            *("--condensation.interval", "2", "--condensation.sequences", "2", "--validation.freq", "2"),
            *("--validation.dataset", "c4_validation", "--validation.dataset_path", sample),
            *("--validation.steps", "1", "--validation.seq_len", "32", "--validation.local_batch_size", "2"),
        )
        saved, guard = trainer.checkpointer, trainer.optimizers
        assert saved.hooks is saved.states["train_state"] is trainer
        assert json.loads(saved.states["identity"]["json"])["hidden_dim"] == 192
        assert guard.max_skipped_steps == 7
        assert trainer.owns_folder()
        trainer.train()
        assert guard._counts.tolist() == [steps, 0, 0]  # also after the resume
        assert trainer.healthy()
        guard._counts[2] = 1
        assert not trainer.healthy()
        if name == "run":
            shutil.copy(folder / "run" / "heartbeat.json", folder)
        trainer.close()
    assert (folder / "copy" / "config.json").read_bytes() == (folder / "run" / "config.json").read_bytes()


@pytest.fixture(scope="module")
def trained(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    spawn(1, two_starts, str(sample), str(folder))
    return folder / "run"


def named(heading=None, page="run_folder.md"):
    """What a page in docs/ names in `code`, in all of it or below one heading."""
    page = (ROOT / "docs" / page).read_text()
    if heading is not None:
        page = re.split(r"\n(?=## )", page.split(f"\n## {heading}\n")[1])[0]
    return set(re.findall(r"`([^`]+)`", page))


def test_the_page_names_every_file(trained):
    assert FILES.keys() <= named()
    found = set(pages_names(trained).values())
    assert found <= named()
    assert len(found) == 11


def test_the_page_names_every_field(trained):
    config, environment = reader.read_config(trained), reader.read_environment(trained)
    assert config.keys() == loaded("train_configs/demo_cpu.toml").to_dict().keys()
    assert environment.keys() <= named("config.json and environment.json")
    events, rows = reader.read_events(trained), reader.read_rows(trained)
    assert {event["event"] for event in events} == {"start", "checkpoint", "complete", "resume"}
    assert {key for event in events for key in event} <= named("events.jsonl")
    measured = [row for row in reader.read_json_lines(trained / "metrics.jsonl") if "condensation" in row]
    parts = [row["spent"] for row in rows] + [row["condensation"] for row in measured]
    assert {key for row in rows for key in row["data"]} <= named("Metrics", "data.md")
    fields = {key for part in (*rows, *measured, *parts) for key in part}
    assert fields | {"spearman", "kendall", "range"} <= named("metrics.jsonl")
    assert {"rank", "host", "seconds", "median"} == straggler([1.0, 9.0], ["a", "b"]).keys() <= named("metrics.jsonl")
    beat = reader.read_heartbeat(trained.parent)
    assert beat["step"] == 4
    assert beat.keys() <= named("heartbeat.json")
    hashes = json.loads((trained / "checkpoint" / "step-4" / "hashes.json").read_text())
    assert hashes.keys() <= named("Checkpoints")


def test_the_page_names_every_event():
    sources = "".join(path.read_text() for path in (ROOT / "titan_disp").rglob("*.py"))
    written = set(re.findall(r'\bevent\(\s*"(\w+)"(?: if [\w.]+ else "(\w+)")?', sources))
    table = (ROOT / "docs" / "run_folder.md").read_text().split("| `event` |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for names in written for name in names if name} == set(re.findall(r"`(\w+)`", "".join(cells)))


def test_what_is_said_of_a_run(trained):
    console = (trained.parent / "console").read_text()
    assert re.search(
        r"Time spent training \(goodput\) of this start: \d+\.\d%, 0:\d\d:\d\d in steps that count, of 0:.* start-up",
        console,
    )
    for said in (
        "Time spent training (goodput) of all 2 starts: ",
        f"Checkpoints: {trained}/checkpoint",
        f"--logdir {trained}/tb",
    ):
        assert said in console
    eager = dict.fromkeys(("epilogue", "normalize_backward"), "eager: on a CPU")
    assert reader.read_environment(trained)["dispersion"] == {"kernels": eager, "products": ["float32"]}
    said = "Dispersion forms products of float32. Its kernels: epilogue eager: on a CPU; normalize_backward eager: on a CPU"
    assert console.count(said) == 2  # in both starts
    found, rows, losses = (
        reader.read_condensation(trained),
        reader.read_metrics(trained),
        reader.read_validation(trained),
    )
    assert (list(rows), list(found), list(losses)) == ([1, 2, 3, 4], [0, 2, 4], [1, 2, 4])
    assert all(loss == pytest.approx(8.5, abs=0.5) for loss in losses.values())
    cosines = console.split("embedding → last block: ")[-1].split("  ")[0].split()
    assert cosines == [f"{c:.2f}" for c in found[4]["mean_cosine"][:-1]]
    # The last lines: how condensation went.
    numbers = (f"{found[4]['cross_entropy']:.3f}", f"{np.mean(found[4]['mean_cosine'][1:7]):.2f}")
    assert re.search(rf" 4 +{numbers[0]} +{numbers[1]}", console.split("On held-out text")[-1])
    board = EventAccumulator(str(trained / "tb")).Reload()
    tags = {"n_tokens_seen": "tokens", "loss_metrics/dispersion": "dispersion", "grad_norm": "grad_norm"}
    for tag, key in tags.items():
        assert [(e.step, e.value) for e in board.Scalars(tag)] == [(s, pytest.approx(rows[s][key])) for s in rows]
    events = {event["event"]: event for event in reader.read_events(trained)}  # of the second start
    began, end = events["resume"], events["complete"]
    assert began["allocated"] < began["time"]
    assert sum(end["spent"].values()) <= end["time"] - began["allocated"] + 0.01
    assert min(end["spent"].values()) > 0  # steps, checkpoints, condensation and validation
