"""How a run ends, and what is said of it: `complete` and "saved" only after a save that succeeded."""

import math
import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from tests.distributed import spawn
from titan_disp.errors import CheckpointError, ConfigError
from titan_disp.run import safe_dcp
from titan_disp.run.integrity import checkpoints
from titan_disp.run.reader import read_condensation, read_config, read_events, read_metrics

CREATE_STREAM = FileSystem.create_stream


def events(run):
    return [(e["event"], e["step"]) for e in read_events(run) if e["event"] != "checkpoint"]


def train(sample, run, *options, nan_from=None, signal_at=None):
    """A run of one rank in this process. Its cross-entropy is NaN from a step on. SIGTERM comes in a step of 256 tokens."""
    from tests.mesh import build

    trainer = build(
        *(sample, run, "--checkpoint.enable", "--checkpoint.interval", "100", "--stream.prefetch", "0"),
        *("--training.local_batch_size", "8", "--condensation.interval", "0", "--metrics.log_freq", "1", *options),
    )
    cross_entropy = trainer.loss_fn.cross_entropy

    def broken(logits, labels):
        if trainer.step == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        bad = nan_from is not None and trainer.step >= nan_from
        return cross_entropy(logits, labels) * (math.nan if bad else 1.0)

    trainer.loss_fn.cross_entropy = broken
    try:
        trainer.train()
        assert (run / "heartbeat.json").exists()
    finally:
        trainer.close()
    assert not (run / "heartbeat.json").exists()
    return trainer.step


def all_ends(sample, folder):
    folder = Path(folder)
    run = folder / "run"
    steps = ("--training.steps", "2")

    # Step 2 of 2 is skipped: it changed no weights, so that they are saved. Saying "complete" without would lose step 1.
    assert train(sample, run, *steps, nan_from=2) == 2
    assert events(run) == [("start", 0), ("skip", 2), ("complete", 2)]
    assert checkpoints(run / "checkpoint") == [2]

    # Complete, and started again: it says so again, for whoever decides by the events of this start. With other options, nothing
    # is trained with them, so that config.json, which exports read, stays.
    before = (run / "config.json").read_bytes()
    assert train(sample, run, *steps, "--optimizer.lr", "0.5") == 2
    assert events(run)[3:] == [("resume", 2), ("complete", 2)]
    assert (run / "config.json").read_bytes() == before
    assert "config_changes" not in read_events(run)[-2]

    # Other data is refused, and config.json stays; with the switch, the streams begin a new epoch.
    other = ("--training.steps", "3", "--training.seq_len", "16")
    with pytest.raises(ConfigError, match="other data: training.seq_len: 32 then, 16 now"):
        train(sample, run, *other)
    assert (run / "config.json").read_bytes() == before
    assert train(sample, run, *other, "--stream.on_mismatch", "restart") == 3
    assert events(run)[5:] == [("refused", 2), ("streams_restarted", 2), ("resume", 2), ("complete", 3)]
    assert [row["data"]["epoch"] for row in read_metrics(run).values()] == [0, 0, 1]

    # The same where its last checkpoint holds the model only.
    model = folder / "model"
    for _ in range(2):
        train(sample, model, *steps, "--checkpoint.last_save_model_only")
    assert events(model) == [("start", 0), ("complete", 2), ("complete", 2)]

    # A signal in the last step: the run is complete, and has its last measurement, which a start adds if it is missing.
    measure = (*steps, "--condensation.interval", "9", "--condensation.sequences", "2")
    last = folder / "last"
    assert train(sample, last, *measure, signal_at=2) == 2
    assert events(last) == [("start", 0), ("complete", 2)]
    assert list(read_condensation(last)) == [0, 2]
    lines = (last / "metrics.jsonl").read_text().splitlines(keepends=True)
    (last / "metrics.jsonl").write_text("".join(lines[:-1]))
    for _ in range(2):
        assert train(sample, last, *measure) == 2
        assert list(read_condensation(last)) == [0, 2]
    assert len((last / "metrics.jsonl").read_text().splitlines()) == len(lines)

    # stop_at_tokens ends early, also while steps are skipped, and changes neither steps nor schedule.
    budget = ("--training.steps", "-1", "--budget.tokens", str(256 * 5 - 7))
    stop = ("--budget.stop_at_tokens", str(256 * 3))
    skipping = folder / "skipping"
    assert train(sample, skipping, *budget, *stop, nan_from=2) == 3
    assert train(sample, skipping, *budget, *stop) == 3  # nothing is left to train
    assert events(skipping) == [("start", 0), ("skip", 2), ("skip", 3), ("stop", 3), ("resume", 3), ("stop", 3)]
    for end in (event for event in read_events(skipping) if event["event"] == "stop"):
        assert (end["kind"], end["reason"]) == ("budget", "budget.stop_at_tokens")
    assert checkpoints(skipping / "checkpoint") == [3]

    # A user's stop file from before the start holds until the user removes it. Where the run stands is said, not where it began.
    (skipping / "stop").touch()
    for _ in range(2):
        assert train(sample, skipping, *budget) == 0
    assert events(skipping)[6:] == [("stop", 3), ("stop", 3)]
    assert read_events(skipping)[-1]["kind"] == "file"
    (skipping / "stop").unlink()
    assert train(sample, skipping, *budget) == 5
    assert read_config(skipping)["training"]["steps"] == 5
    guard = torch.zeros(3, dtype=torch.int64)
    safe_dcp.load({"optimizer.guard": guard}, skipping / "checkpoint" / "step-5", no_dist=True)
    assert guard.tolist() == [5, 2, 0]  # the guard's counts went on after the resume


@pytest.mark.slow
def test_ends(sample, tmp_path):
    spawn(1, all_ends, str(sample), str(tmp_path))


def two_ranks_end(sample, folder):
    """All ranks end at the same step, whichever of them was asked to stop or met a full disk."""
    from tests.faulty_train import FaultyTrainer
    from tests.mesh import job_config

    def train(name, faults, *options):
        os.environ["FAULTS"] = faults
        options = ("--checkpoint.enable", "--condensation.interval", "0", "--metrics.log_freq", "1", *options)
        trainer = FaultyTrainer(job_config(sample, Path(folder) / name, *options))
        try:
            trainer.train()
        finally:
            trainer.close()
            dist.barrier()
        return trainer.step

    run = Path(folder) / "stopped"
    if dist.get_rank() == 0:
        run.mkdir()
        (run / "stop").write_text("123.0")  # one left by an earlier job stops nothing
    dist.barrier()
    faults = "slow:1-4@0,asked_to_stop:5@1"
    assert train("stopped", faults, "--training.steps", "8", "--checkpoint.interval", "100") == 5
    assert checkpoints(run / "checkpoint") == [5]
    end = read_events(run)[-1]
    assert (end["kind"], end["reason"]) == ("signal", "another rank was asked to stop")
    slow = [row["straggler"] for step, row in read_metrics(run).items() if 2 <= step <= 4]
    assert [found["rank"] for found in slow] == [0, 0, 0]
    # Half a second slower a step: SLOW of tests/faulty_train.py.
    assert all(found["seconds"] - found["median"] == pytest.approx(0.5, abs=0.25) for found in slow)

    # An asynchronous save fails on one rank: all end within a step or two, not only at the next save.
    saving = ("--checkpoint.interval", "4", "--checkpoint.async_mode", "async", "--training.steps")
    run = Path(folder) / "full"
    with pytest.raises(CheckpointError, match="the checkpoint of step 8 could not be saved.*last good one is step 4"):
        train("full", "nospace:8-30@1,slow:9-30@0", *saving, "30")
    assert max(read_metrics(run)) < 12
    assert checkpoints(run / "checkpoint") == [4]
    assert events(run) == [("start", 0), ("save_failed", 8)]
    FileSystem.create_stream = CREATE_STREAM
    assert train("full", "", *saving, "9") == 9
    assert events(run)[2:] == [("resume", 4), ("complete", 9)]
    assert checkpoints(run / "checkpoint") == [4, 8, 9]


def test_two_ranks_end(sample, tmp_path):
    spawn(2, two_ranks_end, str(sample), str(tmp_path))
