"""After too many skipped steps in a row, a run goes back to the weights of the
checkpoint before its newest one, once.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import spawn
from tests.run_invariants import check_run
from tests.test_run_ends import train
from titan_disp import safe_dcp
from titan_disp.errors import NonFiniteError, RefusedError
from titan_disp.run.history import step_back
from titan_disp.run.integrity import checkpoints
from titan_disp.run.reader import read_events, read_metrics

STEPS = 14
OPTIONS = (
    *("--training.local_batch_size", "4", "--training.steps", str(STEPS)),
    *("--guard.max_skipped_steps", "3", "--checkpoint.interval", "2"),
    *("--checkpoint.keep_latest_k", "0", "--optimizer.implementation", "fused"),
)
PER_STEP = 8  # sequences


def names(run):
    return [
        (event["event"], event["step"])
        for event in read_events(run)
        if event["event"] not in ("skip", "checkpoint")
    ]


def state_of(run, step):
    """The embedding, Adam's moment of it, and the guard's counts in a checkpoint."""
    folder = run / "checkpoint" / f"step-{step}"
    stored = safe_dcp.read_metadata(folder).state_dict_metadata
    moment = "optimizer.state.tok_embeddings.weight.exp_avg"
    state = {
        name: torch.empty(stored[name].size)
        for name in ("tok_embeddings.weight", moment)
    }
    state["optimizer.guard"] = torch.zeros(3, dtype=torch.int64)
    safe_dcp.load(state, folder, no_dist=True)
    guard = state.pop("optimizer.guard")
    return [*state.values()], guard.tolist()


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def check_step_back(run, whole):
    """The run has gone back to step 2 at step 7, where three were skipped."""
    assert names(run) == [("start", 0), ("step_back", 7), ("complete", STEPS)]
    (event,) = [e for e in read_events(run) if e["event"] == "step_back"]
    assert (event["checkpoint"], event["sequences"]) == (2, 5 * PER_STEP)
    assert (
        "step 7: cross-entropy and gradient norm not finite, 3 steps" in event["reason"]
    )
    assert checkpoints(run / "checkpoint") == [2, 4, 7, 8, 10, 12, 14]
    before, _ = state_of(run, 2)
    after, counts = state_of(run, 7)
    assert equal(before, after)
    assert counts == [7, 3, 0]
    # Data and schedule have gone on.
    rows = read_metrics(run)
    expected = read_metrics(whole)
    assert rows.keys() == expected.keys()
    for step, row in rows.items():
        assert row["lr"] == expected[step]["lr"]
        assert row["tokens"] == expected[step]["tokens"]
        assert row["data"]["documents"] == expected[step]["data"]["documents"]
    assert rows[8]["ce"] != expected[8]["ce"]
    check_run(run)


def steps_back(sample, folder):
    folder = Path(folder)
    whole = folder / "whole"
    assert train(sample, whole, *OPTIONS) == STEPS
    run = folder / "run"
    assert train(sample, run, *OPTIONS, faults="nan_loss:5-7@1") == STEPS
    if dist.get_rank() == 0:
        check_step_back(run, whole)
    dist.barrier()

    # The same where no step logs and saves are asynchronous: it is noticed in the next
    # step.
    quiet = folder / "quiet"
    late = ("--metrics.log_freq", "100", "--checkpoint.async_mode", "async")
    assert train(sample, quiet, *OPTIONS, *late, faults="nan_loss:5-7@1") == STEPS
    if dist.get_rank() == 0:
        assert names(quiet) == [("start", 0), ("step_back", 8), ("complete", STEPS)]
        assert equal(state_of(quiet, 8)[0], state_of(quiet, 2)[0])
    dist.barrier()

    # A start that is killed after it has gone back resumes there, and so does one that
    # was killed before.
    for crash in (9, 6):
        other = folder / f"crash-{crash}"
        faults = f"nan_loss:5-7@1,crash:{crash}@0,crash:{crash}@1"
        with pytest.raises(RuntimeError, match="crashed on purpose"):
            train(sample, other, *OPTIONS, faults=faults)
        assert train(sample, other, *OPTIONS, faults="nan_loss:5-7@1") == STEPS
        if dist.get_rank() == 0:
            assert equal(state_of(other, STEPS)[0], state_of(run, STEPS)[0])
            assert len([e for e in names(other) if e[0] == "step_back"]) == 1
        dist.barrier()

    # A damaged checkpoint before the newest one is passed over.
    damaged = folder / "damaged"
    with pytest.raises(RuntimeError, match="crashed on purpose"):
        train(sample, damaged, *OPTIONS, faults="crash:7@0,crash:7@1")
    if dist.get_rank() == 0:
        file = damaged / "checkpoint" / "step-4" / "__0_0.distcp"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    assert train(sample, damaged, *OPTIONS, faults="nan_loss:7-9@1") == STEPS
    if dist.get_rank() == 0:
        (event,) = [e for e in read_events(damaged) if e["event"] == "step_back"]
        assert (event["step"], event["checkpoint"]) == (9, 2)
    dist.barrier()

    # The second time, also of a later start, the run is refused.
    again = folder / "again"
    with pytest.raises(RuntimeError, match="crashed on purpose"):
        train(sample, again, *OPTIONS, faults="nan_loss:5-7@1,crash:9@0,crash:9@1")
    for _ in range(2):
        with pytest.raises(
            RefusedError,
            match=r"step 11: .* 3 steps in a row .*went back at step 7.*"
            r"titan-disp checkpoint \S*again.*mv \S*again/checkpoint/step-8 ",
        ):
            train(sample, again, *OPTIONS, faults="nan_loss:9-12@1")
    expected = [("start", 0), ("step_back", 7), ("resume", 8), ("refused", 8)]
    assert names(again) == [*expected, *expected[2:]]

    # Without a checkpoint before the newest, and at the last step, the run ends.
    for name, skipped in (("first", "3-5"), ("last", "12-14")):
        with pytest.raises(NonFiniteError, match="3 steps in a row"):
            train(sample, folder / name, *OPTIONS, faults=f"nan_loss:{skipped}@1")
        assert names(folder / name) == [("start", 0)]


def test_a_run_steps_back_once(sample, tmp_path):
    spawn(2, steps_back, str(sample), str(tmp_path))


def test_a_step_back_counts_once_it_is_saved():
    """A start that is killed before has changed nothing."""
    events = [{"event": "checkpoint", "step": 4}, {"event": "step_back", "step": 7}]
    assert step_back(events) is None
    again = {"event": "step_back", "step": 8}
    assert step_back([*events, again, {"event": "checkpoint", "step": 8}]) == 8
    assert step_back([*events, {**again, "event": "resume"}]) == 7
    # from an earlier checkpoint, where the weights were good after all
    resumed = [{"event": "resume", "step": 4}, {"event": "checkpoint", "step": 8}]
    assert step_back(events + resumed) is None
