"""What the real checkpoint manager saves, keeps, loads and refuses.

Weights are the step at which they were saved.
"""

import os
import threading
from concurrent.futures import wait
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import Checkpoint as TitanCheckpoint

import titan_disp.plugin  # noqa: F401
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import (
    CheckpointError,
    ConfigError,
    EndedError,
    RefusedError,
    UserError,
)
from titan_disp.job_config import Checkpoint as DispCheckpoint
from titan_disp.models.hf import INDEX
from titan_disp.models.qwen3 import Qwen3HfAdapter, flavors
from titan_disp.run.checkpoint import DispCheckpointManager, check_initial_load
from titan_disp.run.identity import RUN, to_state
from titan_disp.run.integrity import checkpoints


@dataclass
class Checkpoint(DispCheckpoint, TitanCheckpoint):
    """The section with the keys of both, as a config has it."""


class State:
    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Run:
    """A start of a run.

    Its weights are no step's until it loads; its trainer refuses nothing, and owns no
    folder.
    """

    def __init__(self, folder, **config):
        self.model = nn.Linear(3, 2, bias=False)
        self.fill(-1)
        self.optimizers = OptimizersContainer(
            [self.model], torch.optim.AdamW, {"lr": 0.1}
        )
        self.trainer = State()
        self.folder = folder / "checkpoint"
        self.events = []
        self.reasons = {}
        self.hooks = SimpleNamespace(
            healthy=lambda: True, owns_folder=lambda: False, taken_by=lambda: None
        )
        self.hooks.check_resume = lambda step: None
        self.hooks.event = self.note
        self.hooks.tokenizer = self.tokenizer
        self.hooks.busy = lambda doing, step: nullcontext()
        self.manager = DispCheckpointManager(
            hooks=self.hooks,
            dataloader=State(),
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=State(),
            states={"train_state": self.trainer},
            checkpoint_config=Checkpoint(
                **{"enable": True, "interval": 1, "keep_latest_k": 0, **config}
            ),
            sd_adapter=SimpleNamespace(hf_assets_path=None, model_args=None),
            base_folder=str(folder),
            save_seconds=60.0,
        )

    def note(self, name, step, reason=None, **details):
        self.events.append((name, step))
        self.reasons[step] = reason

    def tokenizer(self):
        return load_tokenizer(self.manager.sd_adapter.hf_assets_path)

    def fill(self, value):
        with torch.no_grad():
            self.model.weight.fill_(value)

    def save(self, *steps, last_step=False):
        for step in steps:
            self.trainer.value = step
            self.fill(step)
            self.manager.save(step, last_step)

    @property
    def loaded(self):
        return self.model.weight[0, 0].item(), self.trainer.value

    @property
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


def flip(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def unfinished(folder, *others):
    folder.mkdir(parents=True)
    for name in ("__7_0.distcp", *others):
        (folder / name).write_bytes(b"half")


def ended_in_hf(folder):
    folder.mkdir()
    (folder / INDEX).touch()


def fails(number, reason):
    return mock.Mock(side_effect=OSError(number, reason))


full_disk = fails(28, "No space left on device")


def test_only_complete_checkpoints_count(tmp_path):
    """A user's copy "step-010" must not make step 10 count twice."""
    assert checkpoints(tmp_path / "nowhere") == []
    others = (
        "damaged-13",
        "step-9.old",
        "old-step-10",
        "step-010",
        "step-08",
        "step-٣",
        "step-+7",
    )
    for name in ("step-10", "step-9", *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    ended_in_hf(tmp_path / "step-11")
    (tmp_path / "step-12").mkdir()
    (tmp_path / "step-16").write_text("a file")
    assert (checkpoints(tmp_path), checkpoints(tmp_path, hugging_face=True)) == (
        [9, 10],
        [9, 10, 11],
    )


@pytest.mark.parametrize(
    ("keep", "every", "rank", "kept"),
    [
        (0, 0, 0, [1, 2, 3, 10]),
        (2, 0, 0, [3, 10]),
        (2, 0, 1, [1, 2, 3, 10]),
        (2, 2, 0, [2, 3, 10]),
    ],
)
def test_one_rank_keeps_the_newest_complete_ones(
    start, monkeypatch, keep, every, rank, kept
):
    run = start()
    run.save(1, 2, 3, 10)
    for step in (0, 90, 91):
        unfinished(run.folder / f"step-{step}")
    again = start(keep_latest_k=keep, keep_every=every)
    with monkeypatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda *group: rank)
        again.manager._purge_stale_checkpoints()
        again.manager.close()  # waits for the thread that deletes
    assert run.names == sorted(f"step-{step}" for step in (0, 90, 91, *kept))


def test_a_save_is_due_forced_or_put_off(start):
    run = start(interval=2)
    told = []
    run.hooks.busy = lambda doing, step: nullcontext(told.append(step))
    run.save(1, 2, 3)
    assert checkpoints(run.folder) == told == [run.manager.saved_step] == [2]
    run.manager.force()
    run.save(5, 7)
    for healthy, steps, saved in (
        (False, (8,), [2, 5]),
        (True, (9, 11), [2, 5, 9]),  # at once, and only once
        (False, (13,), [2, 5, 9]),  # none is due at step 13
        (True, (15,), [2, 5, 9]),
    ):
        run.hooks.healthy = lambda healthy=healthy: healthy
        run.save(*steps)
        assert checkpoints(run.folder) == saved
    run.save(15, last_step=True)
    assert run.events == [("checkpoint", step) for step in (2, 5, 9, 15)]


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("stop", [None, "forced", "last"])
@pytest.mark.parametrize("step", [2, 3])
def test_a_stop_saves_whatever_was_skipped(start, step, stop, skipped):
    """Every 2 steps. A skipped step puts off a save that is only due."""
    run = start(interval=2)
    run.hooks.healthy = lambda: not skipped
    if stop == "forced":
        run.manager.force()
    run.save(step, last_step=stop == "last")
    is_due = step == 2 and not skipped
    assert checkpoints(run.folder) == [step] * (is_due or stop is not None)


@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_last_save_for_hugging_face(
    start, sample, tmp_path, caplog, with_tokenizer
):
    run = start(last_save_model_only=True, last_save_in_hf=True)
    run.manager.sd_adapter = Qwen3HfAdapter(
        flavors["nano"], str(sample / "tokenizer" if with_tokenizer else tmp_path)
    )
    run.manager.sd_adapter.to_hf = dict  # the adapter is another model's
    run.save(4)
    run.save(5, last_step=True)
    (weights,) = (run.folder / "step-5").glob("*.safetensors")
    assert load_file(weights)["weight"][0, 0] == 5
    described = {"config.json", "tokenizer.json"} <= {
        path.name for path in (run.folder / "step-5").iterdir()
    }
    assert described == with_tokenizer
    assert ("weights without config and tokenizer" in caplog.text) == (not described)
    assert not (run.folder / "step-4" / "config.json").exists()


@pytest.mark.parametrize("config", [{"load_only": True}, {"enable": False}])
def test_nothing_is_saved(start, config):
    run = start(**config)
    run.manager.force()
    run.save(1, last_step=True)
    run.manager.wait()
    assert not run.manager.save_has_failed()
    assert (run.folder.exists(), run.events) == (False, [])


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_an_unfinished_folder_is_emptied_before_its_step_is_saved(
    start, monkeypatch, caplog
):
    """It may hold files of another number of ranks.

    One that may be more than that is kept under another name.
    """
    run = start()
    unfinished(run.folder / "step-1", ".saving")
    unfinished(run.folder / "step-2", ".saving", ".metadata.bak")
    run.save(1, 2)
    assert run.names == ["damaged-2", "step-1", "step-2"]
    assert (run.folder / "damaged-2" / ".metadata.bak").exists()
    assert f"was moved to {run.folder}/damaged-2" in caplog.text
    assert all(len(list((run.folder / f"step-{i}").iterdir())) == 3 for i in (1, 2))
    kept = run.folder / "step-1" / "kept"
    kept.touch()
    run.save(1)
    # a complete one is not deleted, because the new save may still fail
    assert kept.exists()
    unfinished(run.folder / "step-3", ".saving")
    # By NFS, if a file of it is open elsewhere
    monkeypatch.setattr(os, "rmdir", fails(39, "Directory not empty"))
    run.save(3)
    assert checkpoints(run.folder) == [1, 2, 3]


def test_a_failed_save(start, monkeypatch):
    run = start(keep_latest_k=2)
    run.save(2, 3)
    monkeypatch.setattr(FileSystem, "create_stream", full_disk)
    with pytest.raises(
        CheckpointError,
        match=r"step 4 could not be saved.*No space.*last good checkpoint is step 3\.",
    ):
        run.save(4)
    assert run.events == [("checkpoint", 2), ("checkpoint", 3), ("save_failed", 4)]
    for error, reason in (
        (RuntimeError("y" * 600), f"RuntimeError: {'y' * 586}"),
        (MemoryError(), "MemoryError:"),
    ):
        assert f"{run.folder}: {reason}. The" in str(run.manager._save_error(5, error))
    with pytest.raises(CheckpointError) as first:
        start("new").save(1)
    monkeypatch.setattr(os, "listdir", fails(5, "Input/output error"))
    with pytest.raises(
        CheckpointError, match=r"step 6 could not be saved.*No space left"
    ) as last:
        run.save(6)
    assert "last good one" not in str(first.value) + str(last.value)


def test_an_asynchronous_save(start, monkeypatch):
    run = start(async_mode="async", keep_latest_k=2)
    for step in (1, 2):
        run.save(step)
        run.manager.wait()
    gate = threading.Event()
    create = FileSystem.create_stream
    events = [("checkpoint", step) for step in (1, 2, 3, 4)]
    monkeypatch.setattr(
        FileSystem, "create_stream", lambda *args: gate.wait(200) and create(*args)
    )
    run.save(3)
    assert not run.manager.save_has_failed()
    assert (run.events, checkpoints(run.folder)) == (events[:2], [1, 2])
    gate.set()
    wait([run.manager.save_future], 200)
    for _ in range(2):
        assert not run.manager.save_has_failed()
        assert run.events == events[:3]
    run.save(4, last_step=True)  # which is synchronous
    assert (run.events, checkpoints(run.folder)) == (events, [3, 4])


def test_an_asynchronous_save_that_failed(start, monkeypatch):
    run = start(async_mode="async")
    run.save(1)
    run.manager.wait()
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full_disk)
        run.save(2)
        wait([run.manager.save_future], 200)
    assert run.manager.save_has_failed()
    with pytest.raises(
        CheckpointError,
        match=r"step 2 could not be saved.*No space.*last good checkpoint is step 1",
    ):
        run.save(3)
    assert run.events == [("checkpoint", 1), ("save_failed", 2)]
    assert checkpoints(run.folder) == [1]
    assert not run.manager.save_has_failed()  # a failure is reported once
    run.manager.wait()


def test_the_newest_that_loads_is_resumed_from(start, caplog):
    run = start()
    run.save(2, 4, 6, 8, 10)
    os.truncate(run.folder / "step-10" / "__0_0.distcp", 10)
    # only loading notices what is wrong
    (run.folder / "step-8" / "hashes.json").unlink()
    file = run.folder / "step-8" / "__0_0.distcp"
    file.write_bytes(b"\xff" * file.stat().st_size)
    unfinished(run.folder / "step-9")
    (run.folder / "damaged-8").mkdir()  # from an earlier start
    again = start()
    before = run.names
    asked = []
    again.hooks.check_resume = mock.Mock(side_effect=ConfigError("other data"))
    with pytest.raises(ConfigError, match="^other data$"):  # a refusal is no damage
        again.manager.load()
    assert (again.names, again.events) == (before, [])

    def check_resume(step):
        asked.append((step, again.loaded))
        if step == 6:
            raise CheckpointError("its data cannot be read")

    again.hooks.check_resume = check_resume
    assert again.manager.load()
    assert again.loaded == (4, 4)
    assert [step for step, _ in asked] == [8, 6, 4]
    assert asked[0][1] == (-1, 0)  # asked before anything was loaded
    assert again.names == [
        "damaged-10",
        "damaged-6",
        "damaged-8",
        "damaged-8x",
        "step-2",
        "step-4",
        "step-9",
    ]
    assert again.events == [("checkpoint_damaged", step) for step in (10, 8, 6)]
    assert [again.reasons[step].split()[0] for step in (10, 8)] == [
        "__0_0.distcp",
        "rank",
    ]
    assert "\n" not in again.reasons[8]
    assert "step-8 has no hashes.json" in caplog.text
    assert again.reasons[6] == "its data cannot be read"
    assert f"was moved to {run.folder}/damaged-6\n" in caplog.text


@pytest.mark.parametrize(
    ("truncated", "load_only", "step", "found"),
    [
        (
            (),
            False,
            3,
            CheckpointError(r"load_step is 3, but .* holds the steps 2, 4$"),
        ),
        (
            (),
            False,
            2,
            RefusedError(r"load_step is 2, but .* holds newer checkpoints \(4\)"),
        ),
        ((), False, 4, 4),
        ((), True, 2, 2),  # this start overwrites nothing
        ((4,), False, 4, CheckpointError("step-4 cannot be loaded: __0_0.distcp has")),
        # the folder may be that of another run, which is still training
        ((4,), True, -1, 2),
        ((4,), "full disk", -1, 2),  # it cannot be moved
        # The config is more likely to be wrong than all of the checkpoints.
        (
            (2, 4),
            False,
            -1,
            CheckpointError(
                r"can be loaded \(2 tried\); the newest: __0_0.distcp has 10 .*Nothing"
            ),
        ),
    ],
)
def test_which_is_loaded_where_nothing_is_moved(
    start, monkeypatch, caplog, truncated, load_only, step, found
):
    run = start()
    run.save(2, 4)
    for damaged in truncated:
        os.truncate(run.folder / f"step-{damaged}" / "__0_0.distcp", 10)
    again = start(load_only=load_only is True)
    again.hooks.owns_folder = lambda: True
    if load_only == "full disk":
        monkeypatch.setattr(os, "rename", full_disk)
    if isinstance(found, UserError):
        with pytest.raises(type(found), match=str(found)):
            again.manager.load(step)
        assert (again.loaded, again.events) == ((-1, 0), [])
    else:
        assert again.manager.load(step)
        assert again.loaded == (found, found)
        assert again.events == [
            ("checkpoint_damaged", damaged) for damaged in truncated
        ]
        assert load_only == "full disk" or (
            "step-4 cannot be loaded" in caplog.text
        ) == bool(truncated)
    assert again.names == ["step-2", "step-4"]


def test_lost_hashes(start):
    """They are missed where an identity says that titan-disp has saved them. What
    cannot be read either is damaged.
    """
    run = start()
    run.manager.states["identity"] = to_state({RUN: "an id"})
    run.save(1, 2)
    (run.folder / "step-2" / "hashes.json").unlink()
    with pytest.raises(RefusedError, match=r"step-2 has no hashes.json, although"):
        start().manager.load()
    told = start(allow_unverified=True)
    assert told.manager.load()
    assert told.loaded == (2, 2)
    file = run.folder / "step-2" / "__0_0.distcp"
    file.write_bytes(b"\xff" * file.stat().st_size)
    again = start()
    assert again.manager.load()
    assert (again.loaded, again.events) == ((1, 1), [("checkpoint_damaged", 2)])


def test_a_resume_that_would_count_its_steps_anew_is_refused(start):
    """It would overwrite the checkpoints of the run, as an old load_step would."""
    run = start()
    run.save(1)
    excluded = ["train_state", "lr_scheduler"]
    again = start(exclude_from_loading=excluded)
    with pytest.raises(
        RefusedError,
        match=r"has 'train_state', but .* holds checkpoints \(1\), which training "
        "from step 1 would overwrite: remove 'train_state' from the list, or start a "
        "new run in another",
    ):
        again.manager.load(-1)
    assert (again.loaded, again.names) == ((-1, 0), ["step-1"])
    only_loads = start(exclude_from_loading=excluded, load_only=True)
    assert only_loads.manager.load(-1)
    assert only_loads.loaded == (1, 0)


def test_a_run_that_kept_its_model_only_has_ended(start):
    """Its last checkpoint is not loaded to find that out, but it is verified: a damaged
    one has not ended the run.
    """
    run = start(last_save_model_only=True)
    assert run.manager.newest() == 0
    run.save(2, 4)
    unfinished(run.folder / "step-40")
    assert run.manager.newest() == 4
    assert start().manager.load()
    run.save(5, last_step=True)
    assert run.manager.newest() == 5
    again = start()
    with pytest.raises(EndedError, match="step-5 holds the model only") as ended:
        again.manager.load()
    assert ended.value.step == 5
    assert again.loaded == (-1, 0)
    assert again.names == ["step-2", "step-4", "step-40", "step-5"]
    flip(run.folder / "step-5" / "__0_0.distcp", 8 * 999)
    assert again.manager.load()  # the run trains its last step again
    assert again.loaded == (4, 4)
    ended_in_hf(run.folder / "step-50")
    assert again.manager.newest() == 50
    with pytest.raises(
        EndedError, match="step-50 holds the model only, in Hugging Face's format"
    ) as ended:
        again.manager.load()
    assert ended.value.step == 50
    assert start(enable=False).manager.newest() == 0
    # a seed checkpoint, from which runs begin
    start("seed", last_save_model_only=True).save(0, last_step=True)
    begun = start("seed")
    begun.trainer.value = 7
    assert begun.manager.load()
    assert begun.loaded == (0, 7)


def test_hugging_faces_weights_to_begin_with(tmp_path):
    """As in TorchTitan, they are those at the path, else those beside the tokenizer.
    tests/test_hf_import.py tries folders.
    """
    adapter = Qwen3HfAdapter(flavors["nano"], None)
    there = str(tmp_path / "a")
    beside = str(tmp_path / "b")
    for path, assets, where in (
        (there, beside, there),
        (None, beside, beside),
        (None, None, "."),
    ):
        config = Checkpoint(
            enable=True, initial_load_in_hf=True, initial_load_path=path
        )
        with pytest.raises(
            ConfigError,
            match=f"initial_load_in_hf: '{where}' (is not a folder|holds no)",
        ):
            check_initial_load(config, assets, adapter)
    config.initial_load_model_only = False
    with pytest.raises(ConfigError, match="needs checkpoint.initial_load_model_only"):
        check_initial_load(config, str(tmp_path), adapter)


def test_a_new_run_begins_with_another_ones_weights(start):
    """Its folder may exist, with the unfinished save of a killed start."""
    other = start("other")
    other.save(3)
    unfinished(start().folder / "step-1")
    assert not start().manager.load()
    path = str(other.folder / "step-3")
    run = start(initial_load_path=path)
    assert run.manager.load()
    assert run.loaded == (3, 0)
    run.save(1)
    assert checkpoints(run.folder) == [1]
    for wrong, said in (
        ({"initial_load_path": f"{path}0"}, "it is not a folder"),
        ({"enable": False}, "enable is false"),
    ):
        with pytest.raises(ConfigError, match=said):
            start("third", **{"initial_load_path": path, **wrong}).manager.load()
    assert not start("third", enable=False).manager.load()
