"""How a run ends, and what is said of it: `complete` and "saved" only after a save that
succeeded.
"""

import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.distributed import spawn
from titan_disp import safe_dcp
from titan_disp.data import passes, storage
from titan_disp.errors import CheckpointError, RefusedError
from titan_disp.run.integrity import checkpoints
from titan_disp.run.reader import (
    read_condensation,
    read_config,
    read_events,
    read_heartbeat,
    read_metrics,
)

CREATE_STREAM = FileSystem.create_stream
LATE = 1000.0  # seconds per step; no machine is so slow that its own would matter
# 256 tokens a step
ONE_RANK = (
    "--training.local_batch_size",
    "8",
    "--checkpoint.interval",
    "100",
    "--stream.prefetch",
    "0",
)


def events(run):
    return [
        (e["event"], e["step"]) for e in read_events(run) if e["event"] != "checkpoint"
    ]


def train(sample, run, *options, faults="", seed=False):
    """Train in the processes that call this, with the faults of tests/faulty_train.py,
    and return the last step.
    """
    from tests.faulty_train import FaultyTrainer
    from tests.mesh import job_config

    os.environ["FAULTS"] = faults
    usual = (
        "--checkpoint.enable",
        "--condensation.interval",
        "0",
        "--metrics.log_freq",
        "1",
    )
    usual += ("--model.overrides", "n_layers=1")
    trainer = FaultyTrainer(job_config(sample, run, *usual, *options))
    heartbeat = run / "heartbeat.json"
    try:
        trainer.save_seed() if seed else trainer.train()
        assert heartbeat.exists() or dist.get_rank() > 0
    finally:
        trainer.close()
        dist.barrier()
    assert not heartbeat.exists()
    return trainer.step


def all_ends(sample, folder):
    folder = Path(folder)
    run = folder / "run"
    steps = (*ONE_RANK, "--training.steps", "2")

    # Step 2 of 2 is skipped: it changed no weights, so that they are saved. Saying
    # "complete" without would lose step 1.
    assert train(sample, run, *steps, faults="nan_loss:2@0") == 2
    assert events(run) == [("start", 0), ("skip", 2), ("complete", 2)]
    assert checkpoints(run / "checkpoint") == [2]

    # Complete, and started again: it says so again, for whoever decides by the events
    # of this start.
    assert train(sample, run, *steps) == 2
    assert events(run)[3:] == [("resume", 2), ("complete", 2)]

    # With other data and the switch for it, the streams begin a new epoch.
    other = (
        *ONE_RANK,
        "--training.steps",
        "3",
        "--training.seq_len",
        "16",
        "--stream.on_mismatch",
        "restart",
    )
    assert train(sample, run, *other) == 3
    assert events(run)[5:] == [("streams_restarted", 2), ("resume", 2), ("complete", 3)]
    assert [row["data"]["epoch"] for row in read_metrics(run).values()] == [0, 0, 1]

    # The same where its last checkpoint holds the model only.
    model = folder / "model"
    for _ in range(2):
        train(sample, model, *steps, "--checkpoint.last_save_model_only")
    assert events(model) == [("start", 0), ("complete", 2), ("complete", 2)]

    # A signal in the last step: the run is complete, and has its last measurement,
    # which a start adds if it is missing.
    measure = (*steps, "--condensation.interval", "9", "--condensation.sequences", "2")
    last = folder / "last"
    assert train(sample, last, *measure, faults="asked_to_stop:2@0") == 2
    assert events(last) == [("start", 0), ("complete", 2)]
    assert list(read_condensation(last)) == [0, 2]
    lines = (last / "metrics.jsonl").read_text().splitlines(keepends=True)
    (last / "metrics.jsonl").write_text("".join(lines[:-1]))
    for _ in range(2):
        assert train(sample, last, *measure) == 2
        assert list(read_condensation(last)) == [0, 2]
    assert len((last / "metrics.jsonl").read_text().splitlines()) == len(lines)

    # A stop where a measurement is due leaves it to the next start.
    stopped = folder / "stopped"
    often = (*measure, "--training.steps", "3", "--condensation.interval", "2")
    assert train(sample, stopped, *often, faults="asked_to_stop:2@0") == 2
    assert list(read_condensation(stopped)) == [0]
    assert train(sample, stopped, *often) == 3
    assert list(read_condensation(stopped)) == [0, 2, 3]

    # A held-out text that is too short refuses the run: another start would find it no
    # longer.
    lacking = (
        "--validation.enable",
        "--validation.dataset_path",
        sample,
        "--stream.validation_sequences",
        "80000",
    )
    for name, more in (
        ("v", lacking),
        ("c", ("--condensation.interval", "9", "--condensation.sequences", "80000")),
    ):
        with pytest.raises(
            RefusedError, match="holds .* sequences of 32 tokens.*, expected 80000"
        ):
            train(sample, folder / name, *steps, *more)
        assert events(folder / name) == [("refused", 0)]

    # A checkpoint of step 0 begins a run.
    seed = folder / "seed"
    assert train(sample, seed, *steps, seed=True) == 0
    assert train(sample, seed, *steps) == 2
    with pytest.raises(
        RefusedError,
        match="seed_checkpoint is true, but the run has a checkpoint of step 2",
    ):
        train(sample, seed, *steps, seed=True)
    with pytest.raises(RefusedError, match="expected 80000"):
        train(sample, seed, *steps, *lacking)
    assert events(seed) == [
        ("start", 0),
        ("stop", 0),
        ("start", 0),
        ("complete", 2),
        ("refused", 2),
        ("refused", 2),
    ]

    # stop_at_tokens ends early, also while steps are skipped, and changes neither steps
    # nor schedule.
    budget = (*ONE_RANK, "--training.steps", "-1", "--budget.tokens", str(256 * 5 - 7))
    stop = ("--budget.stop_at_tokens", str(256 * 3))
    skipping = folder / "skipping"
    assert train(sample, skipping, *budget, *stop, faults="nan_loss:2-3@0") == 3
    assert train(sample, skipping, *budget, *stop) == 3  # nothing is left to train
    assert events(skipping) == [
        ("start", 0),
        ("skip", 2),
        ("skip", 3),
        ("stop", 3),
        ("resume", 3),
        ("stop", 3),
    ]
    for end in (event for event in read_events(skipping) if event["event"] == "stop"):
        assert (end["kind"], end["reason"]) == ("budget", "budget.stop_at_tokens")
    assert checkpoints(skipping / "checkpoint") == [3]

    # A user's stop file from before the start holds until the user removes it. Where
    # the run stands is said, not where it began.
    (skipping / "stop").touch()
    for _ in range(2):
        assert train(sample, skipping, *budget) == 0
    assert events(skipping)[6:] == [("stop", 3), ("stop", 3)]
    assert read_events(skipping)[-1]["kind"] == "file"
    (skipping / "stop").unlink()
    assert train(sample, skipping, *budget) == 5
    assert read_config(skipping)["training"]["steps"] == 5
    guard = torch.zeros(3, dtype=torch.int64)
    safe_dcp.load(
        {"optimizer.guard": guard}, skipping / "checkpoint" / "step-5", no_dist=True
    )
    assert guard.tolist() == [5, 2, 0]  # the guard's counts went on after the resume


@pytest.mark.slow
def test_ends(sample, tmp_path):
    spawn(1, all_ends, str(sample), str(tmp_path))


def let_slow_steps_be_late(file):
    """Let "slow" of FAULTS make rank 0 ``LATE`` seconds late, on both ranks' clock.

    It is late once rank 1 waits for it, and waits itself until then: not in the first
    step, where rank 1 gets its first batch only when rank 0 asks for one.
    """
    from tests import faulty_train
    from titan_disp.run import liveness

    # The ranks share the file's memory: seconds by which the clock is ahead, the steps
    # in which rank 1 has waited for rank 0, and those that rank 0 has begun.
    shared = torch.from_file(str(file), shared=True, size=3, dtype=torch.float64)
    ahead, waits, steps = shared
    steps.fill_(1)
    arrived = liveness.Stragglers.arrived

    def note_arrival(stragglers):
        arrived(stragglers)
        waits.add_(dist.get_rank())

    def be_late(seconds):
        while waits <= steps:
            time.sleep(0.01)
        steps.add_(1)
        ahead.add_(LATE)

    liveness.Stragglers.arrived = note_arrival
    liveness.time = SimpleNamespace(
        time=time.time,
        monotonic=time.monotonic,
        perf_counter=lambda: time.perf_counter() + ahead.item(),
    )
    faulty_train.time = SimpleNamespace(sleep=be_late)


def two_ranks_end(sample, folder):
    """All ranks end at the same step, whichever of them was asked to stop or met a full
    disk.
    """
    run = Path(folder) / "stopped"
    if dist.get_rank() == 0:
        run.mkdir()
        (run / "stop").write_text("123.0")  # one left by an earlier job stops nothing
    dist.barrier()
    let_slow_steps_be_late(Path(folder) / "clock")
    batch = ("--training.local_batch_size", "4")  # one microbatch
    options = (*batch, "--training.steps", "8", "--checkpoint.interval", "100")
    assert train(sample, run, *options, faults="slow:2-4@0,asked_to_stop:5@1") == 5
    assert checkpoints(run / "checkpoint") == [5]
    end = read_events(run)[-1]
    assert (end["kind"], end["reason"]) == ("signal", "another rank was asked to stop")
    slow = [
        row["straggler"] for step, row in read_metrics(run).items() if 2 <= step <= 4
    ]
    assert [late["rank"] for late in slow] == [0, 0, 0]
    # Rank 1's time, which is the median, does not include its waiting.
    assert all(0 < late["median"] < LATE / 10 for late in slow)
    assert [late["seconds"] for late in slow] == pytest.approx([LATE] * 3, rel=0.1)

    # An asynchronous save fails on one rank: all end within a step or two, not only at
    # the next save.
    saving = (
        *batch,
        "--checkpoint.interval",
        "4",
        "--checkpoint.async_mode",
        "async",
        "--training.steps",
    )
    run = Path(folder) / "full"
    with pytest.raises(
        CheckpointError,
        match="the checkpoint of step 8 could not be saved.*last good checkpoint is step 4",
    ):
        train(sample, run, *saving, "30", faults="nospace:8-30@1,await_save:9-30@1")
    assert max(read_metrics(run)) < 12
    assert checkpoints(run / "checkpoint") == [4]
    assert events(run) == [("start", 0), ("save_failed", 8)]
    FileSystem.create_stream = CREATE_STREAM
    assert train(sample, run, *saving, "9") == 9
    assert events(run)[2:] == [("resume", 4), ("complete", 9)]
    assert checkpoints(run / "checkpoint") == [4, 8, 9]


def test_two_ranks_end(sample, tmp_path):
    spawn(2, two_ranks_end, str(sample), str(tmp_path))


def stall(go):
    """Let the threads that read to the positions wait, after two reads, until the file
    ``go`` is there.
    """
    reads = []
    readinto = storage.RetryingFile.readinto

    def read(file, buffer):
        if threading.current_thread().name.startswith("tokenize"):
            reads.append(file)
            while len(reads) > 2 and not go.exists():
                time.sleep(0.01)
        return readinto(file, buffer)

    storage.RetryingFile.readinto = read


def read_to_the_positions(sample, folder):
    """A resume announces how far all ranks are with reading to their positions, if they
    read on; a rank that is there waits for the others.
    """
    run = Path(folder) / "run"
    go = Path(folder) / "go"
    # within a window, the position is that of its beginning
    data = ("--stream.shuffle_window", "0", "--training.seq_len", "1024")
    options = (*data, "--training.local_batch_size", "4", "--training.steps")
    assert train(sample, run, *options, "2") == 2
    passes.PROGRESS_SECONDS = 0.05
    announced = []

    def watch():
        """Let rank 1 read on when its heartbeat has stood still for 40 reports."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            beat = read_heartbeat(run)
            if beat and beat["doing"].startswith("reading") and beat not in announced:
                announced.append(beat)
                still = time.monotonic() + 40 * passes.PROGRESS_SECONDS
            elif announced and time.monotonic() > still:
                break
            time.sleep(0.01)
        go.touch()

    if dist.get_rank() == 1:
        stall(go)
    watcher = threading.Thread(target=watch)
    if dist.get_rank() == 0:
        watcher.start()
    assert train(sample, run, *options, "3") == 3
    if dist.get_rank() == 0:
        watcher.join()
        assert len(announced) < 10
        assert all(
            re.fullmatch(
                r"reading to the position, 0\.00 of 0\.00 GB, about \d+ s",
                beat["doing"],
            )
            and beat["step"] == 3
            for beat in announced
        )
        assert announced[0]["allowed_seconds"] > 600


def test_a_resume_announces_that_it_reads_to_its_positions(sample, tmp_path):
    spawn(2, read_to_the_positions, str(sample), str(tmp_path))
