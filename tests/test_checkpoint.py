"""What is saved, kept, resumed from and refused: the real checkpoint manager with a model of one weight, on one rank.

The weight always is the step at which it was saved. (tests/test_ranks_agree.py uses two ranks, and tests/test_faults.py
whole runs.)
"""

import json
import os
import pickle
import shutil
import threading
from concurrent.futures import wait
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import Checkpoint

from titan_disp.errors import CheckpointError, ConfigError
from titan_disp.models.hf import INDEX
from titan_disp.models.qwen3 import Qwen3HfAdapter, flavors
from titan_disp.run.checkpoint import DispCheckpointManager, check_initial_load
from titan_disp.run.integrity import checkpoints, problem


class State:
    """Stands for the data loader, the schedulers and the trainer, which have nothing but a state here."""

    def __init__(self, value=0):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def hooks(event=lambda name, step, **details: None):
    """A trainer that refuses nothing, and owns no folder."""
    return SimpleNamespace(
        check_resume=lambda step: None,
        healthy=lambda: True,
        owns_folder=lambda: False,
        event=event,
        busy=lambda doing, step: nullcontext(),
    )


class Run:
    def __init__(self, folder, **config):
        self.model = nn.Linear(1, 1, bias=False)
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 0.1})
        self.trainer = State()
        self.folder = folder / "checkpoint"
        self.events = []
        self.reasons = {}
        self.hooks = hooks(event=self.note)
        self.manager = DispCheckpointManager(
            hooks=self.hooks,
            dataloader=State(),
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=State(),
            states={"train_state": self.trainer},
            checkpoint_config=Checkpoint(**{"enable": True, "interval": 1, "keep_latest_k": 0, **config}),
            sd_adapter=SimpleNamespace(hf_assets_path=None, model_args=None),
            base_folder=str(folder),
        )

    def note(self, name, step, reason=None, **details):
        self.events.append((name, step))
        self.reasons[step] = reason

    def save(self, *steps, last_step=False):
        for step in steps:
            self.trainer.value = step
            with torch.no_grad():
                self.model.weight.fill_(step)
            self.manager.save(step, last_step)

    @property
    def loaded(self):
        """The loaded weight and the trainer's step."""
        return self.model.weight.item(), self.trainer.value

    @property
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def start(one_rank, tmp_path):
    """start(name="run", **checkpoint) starts this run again. Its model has neither a step's weight nor a state."""
    runs = []

    def start(name="run", **config):
        runs.append(Run(tmp_path / name, **config))
        with torch.no_grad():
            runs[-1].model.weight.fill_(-1)
        return runs[-1]

    yield start
    for run in runs:
        run.manager.close()


def truncate(folder):
    file = next(folder.glob("*.distcp"))
    os.truncate(file, file.stat().st_size // 2)


def garble(folder):
    """Spoil a checkpoint that was saved without hashes.

    Its files keep their length: only loading notices.
    """
    (folder / "hashes.json").unlink()
    file = next(folder.glob("*.distcp"))
    file.write_bytes(b"\xff" * file.stat().st_size)


def unfinished(folder):
    folder.mkdir(parents=True)
    (folder / "__7_0.distcp").write_bytes(b"half")


def fails(number, reason):
    """A function of the operating system that does."""

    def fail(*args, **kwargs):
        raise OSError(number, reason)

    return fail


def full_disk(self, path, mode):
    raise OSError(28, "No space left on device", str(path))


# ---- what counts as a checkpoint


def test_problem_names_what_is_wrong(tmp_path):
    assert problem(tmp_path).startswith("it is incomplete")
    (tmp_path / ".metadata").write_bytes(b"no pickle")
    assert problem(tmp_path).startswith(".metadata cannot be read: UnpicklingError")
    parts = {"b": (10, 90), "a": (0, 10)}  # (offset, length)
    storage = {MetadataIndex(name): _StorageInfo("__0_0.distcp", *part) for name, part in parts.items()}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data=storage)))
    assert problem(tmp_path) == "__0_0.distcp: No such file or directory"
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 99)
    assert problem(tmp_path) == "__0_0.distcp has 99 bytes, expected 100"
    (tmp_path / "__0_0.distcp").write_bytes(b"x" * 100)
    assert problem(tmp_path) is None


def test_only_complete_checkpoints_count(tmp_path):
    assert checkpoints(tmp_path / "nowhere") == []
    complete = (
        "step-10",
        "step-9",
        "damaged-13",
        "step-9.old",
        "old-step-10",
        "step-010",
        "step-08",
        "step-٣",
        "step-+7",
    )
    for name in (*complete, "step-11", "step-12"):
        (tmp_path / name).mkdir()
    (tmp_path / "step-16").write_text("a file")
    for name in complete:  # a user's copy "step-010" must not make the retention count step 10 twice
        (tmp_path / name / ".metadata").touch()
    (tmp_path / "step-11" / INDEX).touch()
    assert checkpoints(tmp_path) == [9, 10]
    assert checkpoints(tmp_path, hugging_face=True) == [9, 10, 11]


# ---- save


def test_everything_is_saved_and_loaded(start):
    run = start()
    run.model.weight.grad = torch.ones(1, 1)
    run.optimizers.step()
    run.save(3)
    moment = run.optimizers.state_dict()["state.weight.exp_avg"].item()
    assert moment == pytest.approx(0.1)  # (1 − β₁) · gradient
    again = start()
    assert again.manager.load()
    assert again.loaded == (3, 3)
    assert again.optimizers.state_dict()["state.weight.exp_avg"].item() == moment
    assert (run.events, again.events) == ([("checkpoint", 3)], [])


def test_the_newest_complete_ones_are_kept(start):
    """Folders of unfinished saves are neither counted nor deleted."""
    run = start(keep_latest_k=2)
    run.save(1, 2)
    for step in (0, 90, 91):
        unfinished(run.folder / f"step-{step}")
    run.save(3, 10)
    run.manager.close()  # waits for the thread that deletes
    assert run.names == ["step-0", "step-10", "step-3", "step-90", "step-91"]


def test_a_purge_that_is_killed_leaves_nothing_that_looks_complete(start, monkeypatch):
    """The folder is renamed first, because deleting its files may take minutes."""
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    run = start(keep_latest_k=2)
    run.save(1, 2, 3)
    run.manager.close()
    assert run.names == ["purging-1", "step-2", "step-3"]
    assert checkpoints(run.folder) == [2, 3]


def test_one_rank_deletes(start, monkeypatch):
    run = start(keep_latest_k=2)
    run.save(1, 2, 3)
    run.manager.keep_latest_k = 1
    with monkeypatch.context() as patch:
        patch.setattr(dist, "get_rank", lambda *group: 1)
        run.manager._purge_stale_checkpoints()
    assert checkpoints(run.folder) == [2, 3]
    run.manager._purge_stale_checkpoints()
    assert checkpoints(run.folder) == [3]


def test_no_rank_saves_before_room_is_made(start, monkeypatch):
    """Rank 0 makes it. With ``comm.mode = "fake_backend"`` there are no other ranks, which would wait."""
    run, waited = start(), []
    monkeypatch.setattr(dist, "barrier", lambda *group: waited.append(1))
    run.manager._make_room(1)
    assert waited == [1]
    monkeypatch.setattr(dist, "get_backend", lambda *group: "fake")
    run.manager._make_room(1)
    assert waited == [1]


def test_keep_latest_0_keeps_all(start):
    run = start(keep_latest_k=0)
    run.save(*range(1, 7))
    assert checkpoints(run.folder) == [1, 2, 3, 4, 5, 6]


def test_a_run_whose_last_checkpoint_is_damaged_has_not_ended(start):
    """It holds the model only. It is not loaded to find out that the run is complete, but it is verified."""
    run = start(last_save_model_only=True)
    run.save(1, 2)
    run.save(3, last_step=True)
    assert start().manager.ended_at() == 3
    file = run.folder / "step-3" / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = start()
    assert again.manager.ended_at() is None
    assert again.manager.load()  # the run trains its last step again
    assert again.loaded == (2, 2)


def test_a_save_is_due_forced_or_put_off(start):
    run, told = start(interval=2), []
    run.hooks.busy = lambda doing, step: nullcontext(told.append(step))
    run.save(1, 2, 3)
    assert checkpoints(run.folder) == told == [2]
    assert run.manager.saved_step == 2
    run.manager.force()
    run.save(5, 7)
    assert checkpoints(run.folder) == [2, 5]
    run.hooks.healthy = lambda: False
    run.save(8)
    assert checkpoints(run.folder) == [2, 5]
    run.hooks.healthy = lambda: True
    run.save(9, 11)  # saves at once, and only once
    assert checkpoints(run.folder) == [2, 5, 9]
    run.hooks.healthy = lambda: False
    run.save(13)  # none is due at step 13
    run.hooks.healthy = lambda: True
    run.save(15)
    assert checkpoints(run.folder) == [2, 5, 9]
    run.save(15, last_step=True)
    assert run.events == [("checkpoint", step) for step in (2, 5, 9, 15)]


@pytest.mark.parametrize("assets", ["the tokenizer", "no tokenizer"])
def test_the_last_save_for_hugging_face(start, hf_tokenizer, tmp_path, caplog, assets):
    """It also writes config and tokenizer, and keeps the weights if it cannot.

    The run has ended and cannot be resumed.
    """
    run = start(last_save_model_only=True, last_save_in_hf=True)
    folder = hf_tokenizer if assets == "the tokenizer" else tmp_path
    run.manager.sd_adapter = Qwen3HfAdapter(flavors["nano"], str(folder))
    run.manager.sd_adapter.to_hf = dict  # the adapter is another model's
    run.save(4)
    run.save(5, last_step=True)
    (weights,) = (run.folder / "step-5").glob("*.safetensors")
    assert load_file(weights)["weight"].item() == 5
    described = {"config.json", "tokenizer.json"} <= {path.name for path in (run.folder / "step-5").iterdir()}
    assert described == (assets == "the tokenizer")
    assert ("weights without config and tokenizer" in caplog.text) == (not described)
    assert not (run.folder / "step-4" / "config.json").exists()
    assert run.events == [("checkpoint", 4), ("checkpoint", 5)]


@pytest.mark.parametrize("config", [{"load_only": True}, {"enable": False}])
def test_nothing_is_saved(start, config):
    run = start(**config)
    run.manager.force()
    run.save(1, last_step=True)
    run.manager.wait()
    assert not run.manager.save_has_failed()
    assert not run.folder.exists()
    assert run.events == []


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_an_unfinished_folder_is_emptied_before_its_step_is_saved(start, monkeypatch, caplog):
    """It may hold files of another number of ranks.

    A complete one is not deleted, because the new save may still fail.
    """
    run = start()
    unfinished(run.folder / "step-1")
    (run.folder / "step-1" / ".saving").touch()
    unfinished(run.folder / "step-2")  # possibly more than an unfinished save of titan-disp, and therefore moved aside
    run.save(1, 2)
    assert run.names == ["damaged-2", "step-1", "step-2"]
    assert f"step-2 has no .metadata and was moved to {run.folder}/damaged-2" in caplog.text
    files = [".metadata", "__0_0.distcp", "hashes.json"]
    assert all(sorted(path.name for path in (run.folder / f"step-{i}").iterdir()) == files for i in (1, 2))
    kept = run.folder / "step-1" / "kept"
    kept.touch()
    run.save(1)
    assert kept.exists()
    unfinished(run.folder / "step-3")
    (run.folder / "step-3" / ".saving").touch()
    with monkeypatch.context() as patch:  # as NFS does while another node still has one of its files open
        patch.setattr(os, "rmdir", fails(39, "Directory not empty"))
        run.save(3)
    assert checkpoints(run.folder) == [1, 2, 3]


def test_a_failed_save(start, monkeypatch):
    run = start(keep_latest_k=2)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full_disk)
        with pytest.raises(CheckpointError) as first:
            run.save(1)
    assert "the checkpoint of step 1 could not be saved" in str(first.value)
    assert "No space left on device" in str(first.value)
    assert "last good one" not in str(first.value)
    run.save(2, 3)
    monkeypatch.setattr(FileSystem, "create_stream", full_disk)
    with pytest.raises(CheckpointError, match=r"step 4 could not be saved.*The last good one is step 3\."):
        run.save(4)
    assert checkpoints(run.folder) == [2, 3]
    assert run.events == [("save_failed", 1), ("checkpoint", 2), ("checkpoint", 3), ("save_failed", 4)]
    # The end of a long reason, where a chain of errors has its cause; and one that says nothing has a name.
    assert f"{run.folder}: {'y' * 600}. The" in str(run.manager._failed(5, RuntimeError("x" * 9 + "y" * 600)))
    assert f"{run.folder}: MemoryError. The" in str(run.manager._failed(5, MemoryError()))


def test_a_failed_save_on_a_full_disk_that_takes_no_event_either(start, monkeypatch):
    """The message says why the save failed, not why it could not be recorded."""
    run = start()
    run.save(1)

    def fail(*args, **kwargs):
        raise OSError(5, "Input/output error", "events.jsonl")

    run.hooks.event = fail
    monkeypatch.setattr(FileSystem, "create_stream", full_disk)
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", fail)
        with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left on device") as error:
            run.save(2)
    assert "last good one" not in str(error.value)


def test_checkpoints_that_cannot_be_listed_are_no_failed_save(start, monkeypatch, caplog):
    """The retention deletes old checkpoints at the next save."""
    run = start(keep_latest_k=2)
    run.save(1, 2)

    def fail(*args):
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("titan_disp.run.integrity.checkpoints", fail)
        run.save(3)
    assert "old checkpoints cannot be deleted: [Errno 116] Stale file handle" in caplog.text
    run.save(4)
    run.manager.close()
    assert run.names == ["step-3", "step-4"]


def test_an_asynchronous_save(start, monkeypatch):
    """It counts when it has ended, not when it begins. Asking whether it has failed never waits."""
    run = start(async_mode="async", keep_latest_k=2)
    run.save(1)
    run.manager.wait()
    run.save(2)
    run.manager.wait()
    gate, create = threading.Event(), FileSystem.create_stream
    monkeypatch.setattr(FileSystem, "create_stream", lambda *args: gate.wait(20) and create(*args))
    run.save(3)
    assert not run.manager.save_has_failed()
    assert run.events == [("checkpoint", 1), ("checkpoint", 2)]
    assert checkpoints(run.folder) == [1, 2]
    gate.set()
    wait([run.manager.save_future], 20)
    for _ in range(2):
        assert not run.manager.save_has_failed()
        assert run.events == [("checkpoint", 1), ("checkpoint", 2), ("checkpoint", 3)]
    run.manager.wait()
    assert len(run.events) == 3
    assert checkpoints(run.folder) == [2, 3]
    run.save(4, last_step=True)  # the last save is synchronous
    assert run.events[3:] == [("checkpoint", 4)]


@pytest.mark.parametrize("found_by", ["wait", "the next save"])
def test_an_asynchronous_save_that_failed(start, monkeypatch, found_by):
    run = start(async_mode="async")
    run.save(1)
    run.manager.wait()
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", full_disk)
        run.save(2)
        wait([run.manager.save_future], 20)
    assert run.manager.save_has_failed()
    with pytest.raises(CheckpointError, match=r"step 2 could not be saved.*No space left.*last good one is step 1"):
        run.manager.wait() if found_by == "wait" else run.save(3)
    assert run.events == [("checkpoint", 1), ("save_failed", 2)]
    assert checkpoints(run.folder) == [1]
    assert not run.manager.save_has_failed()  # a failure is reported once
    run.manager.wait()


# ---- load


def test_the_newest_that_loads_is_resumed_from(start, caplog):
    """Truncated and garbled checkpoints are moved aside, and unfinished saves stay. Nothing is deleted."""
    run = start()
    run.save(2, 4, 6, 8, 10)
    truncate(run.folder / "step-10")
    garble(run.folder / "step-8")
    unfinished(run.folder / "step-9")
    (run.folder / "damaged-8").mkdir()  # from an earlier start
    again = start()
    asked = []

    def check_resume(step):
        asked.append((step, again.loaded))
        if step == 6:
            raise CheckpointError("its data cannot be read")

    again.hooks.check_resume = check_resume
    assert again.manager.load()
    assert again.loaded == (4, 4)
    assert [step for step, _ in asked] == [8, 6, 4]
    assert asked[0][1] == (-1, 0)  # asked before anything was loaded
    assert again.names == ["damaged-10", "damaged-6", "damaged-8", "damaged-8x", "step-2", "step-4", "step-9"]
    assert again.events == [("checkpoint_damaged", step) for step in (10, 8, 6)]
    assert again.reasons[10].startswith("__0_0.distcp has ")
    assert again.reasons[8].startswith("CheckpointException: ")
    assert "\n" not in again.reasons[8]
    assert again.reasons[6] == "its data cannot be read"
    assert f"{run.folder}/step-6 is damaged and was moved to {run.folder}/damaged-6\n" in caplog.text
    assert len(list((run.folder / "damaged-8x").iterdir())) == 2


def test_a_start_that_only_reads_moves_nothing_aside(start, caplog):
    """With checkpoint.load_only, the folder may be that of another run, which is still training."""
    run = start()
    run.save(2, 4)
    truncate(run.folder / "step-4")
    reader = start(load_only=True)
    assert reader.manager.load()
    assert reader.loaded == (2, 2)
    assert reader.names == ["step-2", "step-4"]
    assert reader.events == [("checkpoint_damaged", 4)]
    assert "step-4 cannot be loaded" in caplog.text


def test_the_newest_step(start):
    """It is that of the newest complete checkpoint, even one that no run can resume from."""
    run = start(last_save_model_only=True)
    assert run.manager.newest() == 0
    run.save(2, 4, 30)
    unfinished(run.folder / "step-40")
    assert run.manager.newest() == 30
    assert run.manager.ended_at() is None
    (run.folder / "step-50").mkdir()
    (run.folder / "step-50" / INDEX).touch()
    assert run.manager.newest() == 50
    assert run.manager.ended_at() == 50
    assert start(enable=False).manager.newest() == 0


def test_a_damaged_one_that_cannot_be_moved_is_passed_over(start, monkeypatch):
    run = start()
    run.save(1, 2)
    truncate(run.folder / "step-2")
    monkeypatch.setattr(os, "rename", lambda *args: full_disk(None, args[0], ""))
    again = start()
    assert again.manager.load()
    assert again.loaded == (1, 1)
    assert again.names == ["step-1", "step-2"]


def test_none_that_loads_is_no_fresh_start(start):
    """The config is more likely to be wrong than all of the checkpoints, which therefore stay where they are."""
    run = start()
    run.save(1, 2)
    truncate(run.folder / "step-1")
    garble(run.folder / "step-2")
    again = start()
    message = r"no checkpoint in .* can be loaded \(2 tried\); the newest: CheckpointException.*Nothing was trained"
    with pytest.raises(CheckpointError, match=message):
        again.manager.load()
    assert again.names == ["step-1", "step-2"]
    assert again.events == []


def test_a_refusal_is_no_damage(start):
    run = start()
    run.save(1, 2)

    def check_resume(step):
        raise ConfigError("other data")

    again = start()
    again.hooks.check_resume = check_resume
    with pytest.raises(ConfigError, match="^other data$"):
        again.manager.load()
    assert again.names == ["step-1", "step-2"]


def test_a_step_asked_for(start):
    run = start()
    run.save(2, 4, 6)
    again = start()
    with pytest.raises(CheckpointError, match=r"load_step is 3, but .* holds the steps 2, 4, 6$"):
        again.manager.load(3)
    with pytest.raises(CheckpointError, match=r"load_step is 2, but .* holds newer checkpoints \(4, 6\)"):
        again.manager.load(2)
    assert again.loaded == (-1, 0)
    assert again.manager.load(6)
    assert again.loaded == (6, 6)
    reader = start(load_only=True)  # this start overwrites nothing
    assert reader.manager.load(2)
    assert reader.loaded == (2, 2)
    truncate(run.folder / "step-6")
    with pytest.raises(CheckpointError, match=r"step-6 cannot be loaded: __0_0.distcp has"):
        start().manager.load(6)
    assert run.names == ["step-2", "step-4", "step-6"]
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        start("empty").manager.load(6)


def test_a_run_that_kept_its_model_only_has_ended(start):
    run = start(last_save_model_only=True)
    run.save(4)
    run.save(5, last_step=True)
    again = start()
    with pytest.raises(CheckpointError, match="step-5 holds the model only"):
        again.manager.load()
    assert again.loaded == (-1, 0)
    assert again.names == ["step-4", "step-5"]
    (run.folder / "step-6").mkdir()
    (run.folder / "step-6" / INDEX).touch()
    with pytest.raises(CheckpointError, match="step-6 holds the model only, in Hugging Face's format"):
        again.manager.load()


def test_a_seed_checkpoint_begins_a_run(start):
    """The checkpoint of step 0 may hold the model only."""
    run = start(last_save_model_only=True)
    run.save(0, last_step=True)
    again = start()
    again.trainer.value = 7
    assert again.manager.load()
    assert again.loaded == (0, 7)
    again.save(2)
    with pytest.raises(CheckpointError, match=r"load_step is 0, but .* holds newer checkpoints \(2\)"):
        again.manager.load(0)


def test_hugging_faces_weights_to_begin_with(tmp_path):
    """As in TorchTitan, they are those at the path, else those beside the tokenizer. They must be the model's."""
    adapter = Qwen3HfAdapter(flavors["nano"], None)
    there, beside = str(tmp_path / "a"), str(tmp_path / "b")
    for path, assets, where in ((there, beside, there), (None, beside, beside), (None, None, ".")):
        config = Checkpoint(enable=True, initial_load_in_hf=True, initial_load_path=path)
        with pytest.raises(ConfigError, match=f"initial_load_in_hf: '{where}' (is not a folder|holds no)"):
            check_initial_load(config, assets, adapter)
    (tmp_path / "a").mkdir()
    save_file({"w": torch.zeros(1)}, tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "config.json").write_text(json.dumps({**adapter.architecture(), "hidden_size": 7}))
    config.initial_load_path = there
    with pytest.raises(
        ConfigError, match="another network than .* describe: hidden_size is 7 in config.json and 64 in this model"
    ):
        check_initial_load(config, beside, adapter)
    config.initial_load_model_only = False
    with pytest.raises(ConfigError, match="needs checkpoint.initial_load_model_only"):
        check_initial_load(config, str(tmp_path), adapter)


def test_only_hugging_faces_weights_are_loaded_as_torchtitan_does(start, monkeypatch):
    asked = []
    monkeypatch.setattr(CheckpointManager, "dcp_load", lambda self, *args: asked.append(args))
    run = start()
    run.manager.dcp_load({"a": 1}, "/folder", True, False)
    assert asked == [({"a": 1}, "/folder", True, False)]
    run.save(3)
    run.manager.dcp_load({"train_state": {"value": 0}}, str(run.folder / "step-3"), False, False)
    assert len(asked) == 1


def test_a_new_run_begins_with_another_ones_weights(start):
    """Its folder may exist, with the unfinished save of a killed start."""
    other = start("other")
    other.save(3)
    unfinished(start().folder / "step-1")
    assert not start().manager.load()
    run = start(initial_load_path=str(other.folder / "step-3"))
    assert run.manager.load()
    assert run.loaded == (3, 0)
    run.save(1)
    assert checkpoints(run.folder) == [1]
    with pytest.raises(ConfigError, match="initial_load_path .* cannot be loaded: it is not a folder"):
        start("third", initial_load_path=str(other.folder / "step-4")).manager.load()
    with pytest.raises(ConfigError, match="checkpoint.enable is false"):
        start("third", initial_load_path=str(other.folder / "step-3"), enable=False).manager.load()
    assert not start("third", enable=False).manager.load()
