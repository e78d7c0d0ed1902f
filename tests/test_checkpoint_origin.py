"""A run resumes only from its own checkpoints, and only from verified ones, unless
checkpoint.allow_unverified is set.
"""

import shutil
from pathlib import Path

import pytest

from tests.distributed import spawn
from tests.test_run_ends import ONE_RANK, events, train
from titan_disp.errors import ConfigError, RefusedError
from titan_disp.run.reader import read_events
from titan_disp.train import DispTrainer

ALLOW = "--checkpoint.allow_unverified"


def options(steps, *more):
    return (*ONE_RANK, "--training.steps", str(steps), *more)


def copied(run, step, to):
    """Copy a checkpoint into another run folder, and return the path there."""
    path = to / "checkpoint" / f"step-{step}"
    shutil.copytree(run / "checkpoint" / f"step-{step}", path)
    return path


def all_origins(sample, folder):
    folder = Path(folder)
    run = folder / "run"
    other = folder / "other"
    assert train(sample, run, *options(2)) == 2
    assert train(sample, other, *options(3, "--debug.seed", "7")) == 3
    ids = [(path / "run_id").read_text() for path in (run, other)]
    assert len({*ids}) == 2

    # Another run's checkpoint.
    copied(other, 3, run)
    for _ in range(2):
        with pytest.raises(
            RefusedError,
            match=rf"step-3 was saved by another run, whose run_id is {ids[1].strip()} "
            rf"and not {ids[0].strip()}.*allow_unverified",
        ):
            train(sample, run, *options(4))
    assert events(run)[-1] == ("refused", 3)
    assert train(sample, run, *options(4, ALLOW)) == 4
    assert train(sample, run, *options(5)) == 5  # step 4 is its own
    assert (run / "run_id").read_text() == ids[0]

    # A moved run, and a copy of it.
    moved = run.rename(folder / "moved")
    assert train(sample, moved, *options(6)) == 6
    copy = folder / "copy"
    shutil.copytree(moved, copy)
    assert train(sample, copy, *options(7)) == 7

    # A checkpoint in a new run folder is a copy of its run.
    new = folder / "new"
    copied(other, 3, new)
    assert train(sample, new, *options(4)) == 4
    assert (new / "run_id").read_text() == ids[1]

    # A warm start, and a run without checkpoints.
    warm = folder / "warm"
    path = str(other / "checkpoint" / "step-3")
    load = ("--checkpoint.initial_load_path", path)
    assert train(sample, warm, *options(1, *load)) == 1
    assert (warm / "run_id").read_text() not in ids
    none = folder / "none"
    assert train(sample, none, *options(1, "--checkpoint.no-enable")) == 1
    assert not (none / "run_id").exists()

    # Without its hashes.
    (other / "checkpoint" / "step-3" / "hashes.json").unlink()
    for name, more in (("other", ()), ("cold", load)):
        with pytest.raises(
            ConfigError, match=r"step-3 has no hashes.json, although .*allow_unverified"
        ):
            train(sample, folder / name, *options(4, *more))
        assert read_events(folder / name)[-1]["event"] == "refused"
    assert train(sample, folder / "cold", *options(1, ALLOW, *load)) == 1
    assert train(sample, other, *options(4, ALLOW)) == 4

    # Checkpoints of earlier versions have no id.
    name_run = DispTrainer._name_run
    DispTrainer._name_run = lambda self: None
    old = folder / "old"
    assert train(sample, old, *options(1)) == 1
    DispTrainer._name_run = name_run
    (old / "checkpoint" / "step-1" / "hashes.json").unlink()
    assert train(sample, old, *options(2)) == 2
    shutil.rmtree(warm / "checkpoint")
    copied(old, 1, warm)
    assert train(sample, warm, *options(2)) == 2


def test_origins(sample, tmp_path):
    spawn(1, all_origins, str(sample), str(tmp_path))
