"""Every file of a checkpoint has a hash, so that nothing is loaded that differs from what was saved."""

import json
import os
import pickle
import random
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import xxhash
from safetensors.numpy import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.job_config import Checkpoint

from tests.command_line import DEMO
from tests.distributed import spawn
from tests.test_checkpoint import State, hooks
from titan_disp import cli
from titan_disp.config.load import load_config
from titan_disp.errors import CheckpointError, InUseError
from titan_disp.lab.export.inventory import inventory, verify
from titan_disp.models.hf import INDEX
from titan_disp.run import integrity, safe_dcp
from titan_disp.run.checkpoint import DispCheckpointManager
from titan_disp.run.folder import RunFolder
from titan_disp.run.integrity import (
    HashingWriter,
    checkpoints,
    clean_up,
    damage,
    is_model_only,
    problem,
    rename_step,
)


class Run:
    def __init__(self, folder, **config):
        self.model = nn.Linear(3, 2)
        self.folder = Path(folder) / "checkpoint"
        self.hooks = hooks()
        self.manager = DispCheckpointManager(
            hooks=self.hooks,
            dataloader=State(),
            model_parts=[self.model],
            optimizers=OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 0.1}),
            lr_schedulers=State(),
            states={"train_state": State()},
            checkpoint_config=Checkpoint(**{"enable": True, "interval": 1, "keep_latest_k": 0, **config}),
            sd_adapter=SimpleNamespace(hf_assets_path=None, model_args=None),
            base_folder=str(folder),
        )

    def save(self, *steps):
        for step in steps:
            with torch.no_grad():
                self.model.weight.fill_(step)
            self.manager.save(step)
        self.manager.wait()

    @property
    def weight(self):
        return self.model.weight[0, 0].item()

    @property
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture(scope="module")
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def start(alone, tmp_path):
    """start(name="run", **checkpoint) starts this run again."""
    runs = []

    def start(name="run", **config):
        runs.append(Run(tmp_path / name, **config))
        return runs[-1]

    yield start
    for run in runs:
        run.manager.close()


def flip(file, bit):
    """Flip one bit of a file in place."""
    with open(file, "r+b") as content:
        content.seek(bit // 8)
        byte = content.read(1)[0]
        content.seek(bit // 8)
        content.write(bytes([byte ^ 1 << bit % 8]))


def edit_hashes(folder, change):
    file = folder / "hashes.json"
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_every_file_has_its_hash(start, async_mode):
    run = start(async_mode=async_mode)
    run.save(1)
    folder = run.folder / "step-1"
    content = json.loads((folder / "hashes.json").read_text())
    names = {".metadata", "__0_0.distcp"}
    assert content == {
        "algorithm": "xxh3_128",
        "files": {name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes()) for name in names},
    }
    assert set(os.listdir(folder)) == names | {"hashes.json"}
    assert verify(folder) is None
    read = []
    assert damage(folder, read=read.append) is None  # by which a progress bar counts
    assert sum(read) == sum((folder / name).stat().st_size for name in names)


def test_stock_dcp_reads_it(start):
    """Without titan_disp: .metadata holds nothing of ours."""
    run = start()
    run.save(7)
    content = (run.folder / "step-7" / ".metadata").read_bytes()
    assert b"titan_disp" not in content
    keys = pickle.loads(content).state_dict_metadata.keys()
    assert {index.fqn for index in pickle.loads(content).storage_data} == keys
    found = {"weight": torch.zeros(2, 3)}
    torch_dcp.load(found, checkpoint_id=run.folder / "step-7")
    assert torch.equal(found["weight"], torch.full((2, 3), 7.0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_writer_sent_to_another_process(tmp_path):
    """checkpoint.async_mode = "async_with_pinned_mem" pickles the writer."""
    writer = pickle.loads(pickle.dumps(HashingWriter(tmp_path)))
    torch_dcp.save({"a": torch.arange(5)}, storage_writer=writer, no_dist=True)
    assert json.loads((tmp_path / "hashes.json").read_text())["files"].keys() == {".metadata", "__0_0.distcp"}
    assert verify(tmp_path) is None


def test_every_flipped_bit_is_noticed(start):
    """All of 400 flips are found.

    The hash of .metadata is verified before it is unpickled, because a damaged pickle can do anything.
    """
    run = start()
    run.save(1)
    folder, chance = run.folder / "step-1", random.Random(0)
    for name, flips in ((".metadata", 200), ("__0_0.distcp", 200)):
        for bit in chance.sample(range(8 * (folder / name).stat().st_size), flips):
            flip(folder / name, bit)
            assert verify(folder) == f"{name} differs from its hash: its content is not what was saved", bit
            flip(folder / name, bit)
    assert verify(folder) is None


def test_a_flipped_bit_in_the_hashes(start):
    """A flip in hashes.json of a sound checkpoint never raises. It is noticed, or changes nothing but white space."""
    run = start()
    run.save(1)
    folder = run.folder / "step-1"
    content = (folder / "hashes.json").read_bytes()
    meaning = json.loads(content)
    for bit in range(8 * len(content)):
        flip(folder / "hashes.json", bit)
        if verify(folder) is None:  # for example a space that became another white space
            assert json.loads((folder / "hashes.json").read_bytes()) == meaning
        flip(folder / "hashes.json", bit)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda f: edit_hashes(f, lambda c: c["files"].pop("__0_0.distcp")), "__0_0.distcp has no hash in hashes.json"),
        (lambda f: edit_hashes(f, lambda c: c["files"].pop(".metadata")), ".metadata differs from its hash"),
        (lambda f: edit_hashes(f, lambda c: c["files"].update(other="0")), "other: No such file, although"),
        (lambda f: edit_hashes(f, lambda c: c["files"].update({"../x": "0"})), "hashes.json cannot be read: expected"),
        (lambda f: edit_hashes(f, lambda c: c.update(algorithm="md5")), "hashes.json cannot be read: expected"),
        (lambda f: (f / "hashes.json").write_text("[]"), "hashes.json cannot be read: expected"),
        (lambda f: (f / "hashes.json").write_text("{"), "hashes.json cannot be read: Expecting property name"),
        (lambda f: (f / "hashes.json").write_bytes(b"\xff"), "hashes.json cannot be read: 'utf-8' codec"),
        (lambda f: (f / "__0_0.distcp").unlink(), "__0_0.distcp: No such file or directory"),
        (lambda f: os.truncate(f / "__0_0.distcp", 10), "__0_0.distcp has 10 bytes, expected"),
    ],
)
def test_what_is_wrong(start, spoil, reason):
    run = start()
    run.save(1)
    spoil(run.folder / "step-1")
    assert verify(run.folder / "step-1").startswith(reason)


def test_a_flipped_weight_is_not_loaded(start):
    run = start()
    run.save(1, 2)
    folder = run.folder / "step-2"
    weights = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    info = next(info for index, info in weights.items() if index.fqn == "weight")
    content = (folder / "__0_0.distcp").read_bytes()[info.offset : info.offset + info.length]
    position = content.index(torch.full((6,), 2.0).numpy().tobytes())
    flip(folder / "__0_0.distcp", 8 * (info.offset + position + 2) + 7)
    found = {"weight": torch.zeros(2, 3)}
    torch_dcp.load(found, checkpoint_id=folder)
    assert found["weight"][0, 0] == 4.0  # it was 2.0; DCP alone does not notice
    again = start()
    assert again.manager.load()
    assert again.weight == 1
    assert again.names == ["damaged-2", "step-1"]


def test_an_older_checkpoint_loads_with_a_warning(start, caplog):
    run = start()
    run.save(1)
    assert start().manager.load()
    assert "unverified" not in caplog.text
    (run.folder / "step-1" / "hashes.json").unlink()
    again = start()
    assert again.manager.load()
    assert again.weight == 1
    assert "step-1 has no hashes.json, because TorchTitan's own trainer saved it" in caplog.text


def _of(*files):
    """Make a ``.metadata`` that places an entry at each (file, offset, length)."""
    return Metadata({}, storage_data={MetadataIndex(str(i)): _StorageInfo(*file) for i, file in enumerate(files)})


@pytest.mark.parametrize(
    "content",
    [
        Metadata({3: None}, storage_data={}),
        Metadata(None, storage_data={}),
        _of((7, 0, 1), ("__0_0.distcp", 0, 1)),
        _of((None, 0, 1)),
        _of(("__0_0.distcp", 0, "1")),
        _of(("__0_0.distcp", -5, 1)),
        _of(("__0_0.distcp", 0, 10**9999)),
        _of(("__0\0_0.distcp", 0, 1)),
        _of(("__0\ud800_0.distcp", 0, 1)),
        object.__new__(Metadata),
    ],
)
def test_an_older_checkpoint_with_damaged_metadata(start, content):
    """Without hashes, only nonsense can be noticed.

    It counts as damage; it is not an exception that ends the resume.
    """
    run = start()
    run.save(1, 2)
    folder = run.folder / "step-2"
    (folder / "hashes.json").unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(content))
    assert problem(folder).startswith(".metadata ")
    again = start()
    assert again.manager.load()
    assert (again.weight, again.names) == (1, ["damaged-2", "step-1"])


def test_flipped_bits_in_the_metadata_of_an_older_checkpoint(start):
    """No flip raises an exception. (Without hashes, flips in names or in the entries' own hashes cannot be noticed.)"""
    run = start()
    run.save(1)
    folder, chance = run.folder / "step-1", random.Random(0)
    (folder / "hashes.json").unlink()
    noticed = 0
    for bit in chance.sample(range(8 * (folder / ".metadata").stat().st_size), 200):
        flip(folder / ".metadata", bit)
        noticed += problem(folder) is not None or is_model_only(folder)
        flip(folder / ".metadata", bit)
    assert noticed > 50


def test_metadata_is_parsed_once_for_a_resume(start, monkeypatch):
    """Parsing takes seconds if hundreds of ranks have saved. The result is not kept while the run trains."""
    run = start()
    run.save(1, 2)
    parsed, parse = [], safe_dcp._Unpickler.load
    monkeypatch.setattr(safe_dcp._Unpickler, "load", lambda self: parsed.append(self) or parse(self))
    again = start()
    assert again.manager.ended_at() is None
    assert again.manager.load()
    assert again.weight == 2
    assert len(parsed) == 1
    assert safe_dcp.parse_metadata.cache_info().currsize == 0


def test_the_weights_to_begin_with_are_verified(start):
    other = start("other")
    other.save(3)
    flip(other.folder / "step-3" / "__0_0.distcp", 8 * 5000)
    with pytest.raises(
        CheckpointError, match=r"initial_load_path .* cannot be loaded: __0_0.distcp differs from its hash"
    ):
        start(initial_load_path=str(other.folder / "step-3")).manager.load()


def test_a_save_that_is_killed_before_its_end(start, monkeypatch):
    """hashes.json is written before .metadata gets its name, so that no complete checkpoint lacks it."""
    seen = []
    rename = torch_dcp.filesystem.FileSystem.rename

    def look(self, path, new_path):
        seen.append((Path(path).name, sorted(os.listdir(Path(path).parent))))
        rename(self, path, new_path)

    monkeypatch.setattr(torch_dcp.filesystem.FileSystem, "rename", look)
    start().save(1)
    assert seen == [(".metadata.tmp", [".metadata.tmp", ".saving", "__0_0.distcp", "hashes.json"])]


def test_one_process_that_is_told_of_more_ranks_reads_every_file(start, monkeypatch):
    """With ``comm.mode = "fake_backend"`` there are no other ranks, which would read their share or answer."""
    run = start()
    run.save(1)
    folder = run.folder / "step-1"
    flip(folder / "__0_0.distcp", 1234)  # of two ranks, the second one's

    def nobody_answers(*args, **kwargs):
        raise AssertionError

    monkeypatch.setattr(dist, "get_backend", lambda *group: "fake")
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    monkeypatch.setattr(dist, "all_reduce", nobody_answers)
    assert damage(folder, 0, 2) is None
    assert run.manager._damage(str(folder)).startswith("__0_0.distcp differs from its hash")


def on_two_ranks(folder):
    """Each rank writes and hashes its own files, and verifies a share of all files. All agree on what is damaged."""
    run = Run(folder)
    run.save(1, 2, 3)
    newest = run.folder / "step-3"
    names = {path.name for path in newest.glob("*.distcp")}
    assert len(names) == 2, names
    files = json.loads((newest / "hashes.json").read_text())["files"]
    assert files == {n: xxhash.xxh3_128_hexdigest((newest / n).read_bytes()) for n in names | {".metadata"}}
    dist.barrier()
    if dist.get_rank() == 0:
        for step, name in ((3, "__1_0.distcp"), (2, "__0_0.distcp")):
            flip(run.folder / f"step-{step}" / name, 4321)
    dist.barrier()
    # The sorted files are shared by rank: .metadata and __1_0 belong to rank 0, __0_0 to rank 1.
    assert [damage(newest, rank, 2) is None for rank in (0, 1)] == [False, True]
    assert [damage(run.folder / "step-2", rank, 2) is None for rank in (0, 1)] == [True, False]
    again = Run(folder)
    assert again.manager.load()
    assert again.weight == 1
    dist.barrier()
    assert again.names == ["damaged-2", "damaged-3", "step-1"]
    read, hash_file = [], integrity.hash_file
    integrity.hash_file = lambda path, *others: read.append(path.name) or hash_file(path)
    assert again.manager._damage(str(run.folder / "step-1")) is None
    assert read == ([".metadata", "__1_0.distcp"] if dist.get_rank() == 0 else ["__0_0.distcp"])


def test_two_ranks(tmp_path):
    spawn(2, on_two_ranks, tmp_path)


# ---- titan-disp checkpoint


@pytest.fixture
def listed(monkeypatch, capsys):
    """listed(*arguments) runs `titan-disp checkpoint`. Returns its exit status and {folder: state}."""

    def listed(*arguments):
        monkeypatch.setattr("sys.argv", ["titan-disp", "checkpoint", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        lines = [line.split(maxsplit=5) for line in out.splitlines()]
        return ended.value.code, {name: state for name, *_, state in lines} or err

    return listed


def test_checkpoints_are_listed(start, listed, tmp_path):
    folder = tmp_path / "run"
    assert listed(folder)[0] == 2
    run = start()
    (folder / "config.json").parent.mkdir()
    (folder / "config.json").write_text(json.dumps({"checkpoint": {"folder": "checkpoint"}}))
    assert listed(folder) == (0, "")
    run.save(2, 10, 20)
    (run.folder / "step-2" / "hashes.json").unlink()
    (run.folder / "step-30").mkdir()
    (run.folder / "step-30" / "__0_0.distcp").write_bytes(b"half")
    (run.folder / "step-40").mkdir()
    save_file({"a": np.zeros(3)}, run.folder / "step-40" / "model.safetensors")
    (run.folder / "step-40" / INDEX).write_text('{"weight_map": {"a": "model.safetensors"}}')
    states = {
        "step-2": "complete, without hashes: not verified",
        "step-10": "complete, verified",
        "step-20": "complete, verified",
        "step-30": "unfinished: its save is under way, or did not end",
        "step-40": "Hugging Face format, without hashes: not verified",
    }
    assert listed(folder) == (0, states)
    assert list(listed(folder)[1]) == list(states)  # sorted by step, not by name

    flip(run.folder / "step-20" / "__0_0.distcp", 1234)
    states["step-20"] = "damaged: __0_0.distcp differs from its hash: its content is not what was saved"
    assert listed(folder) == (1, states)
    assert listed(folder, "--step", "20") == (1, {"step-20": states["step-20"]})
    assert listed(folder, "--step", "10") == (0, {"step-10": "complete, verified"})
    code, error = listed(folder, "--step", "11")
    assert code == 2
    assert "has no checkpoint of step 11; it has 2, 10, 20, 30, 40" in error

    os.truncate(run.folder / "step-40" / "model.safetensors", 20)
    assert listed(folder, "--step", "40")[0] == 1
    assert listed(folder, "--step", "40")[1]["step-40"].startswith("damaged: SafetensorError")
    (run.folder / "step-20").rename(run.folder / "damaged-20")
    event = {"time": "2026-01-01T00:00:00+00:00", "event": "checkpoint_damaged", "step": 20, "reason": "a flipped bit"}
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert listed(folder, "--step", "20") == (0, {"damaged-20": "moved aside as damaged: a flipped bit"})
    (folder / "events.jsonl").write_text("")  # as after _make_room, which moves aside what it does not know
    assert listed(folder, "--step", "20") == (0, {"damaged-20": "moved aside: the run's log says why"})


def test_size_and_date(start, tmp_path):
    run = start()
    run.save(5)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"checkpoint": {"folder": "checkpoint"}}))
    os.utime(run.folder / "step-5" / ".metadata", (1.6e9, 1.6e9))
    (found,) = inventory(tmp_path / "run")
    du = subprocess.run(["du", "-ab", run.folder / "step-5"], capture_output=True, text=True, check=True).stdout
    files = [int(line.split()[0]) for line in du.splitlines()[:-1]]
    assert (found.step, found.size, found.modified) == (5, sum(files), 1.6e9)


# ---- what killed processes leave behind


def wait_until(condition):
    """Wait for what is deleted in the background."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Killed(BaseException):
    pass


@pytest.fixture
def killed(monkeypatch):
    """killed(run, step, at): kill a save when it renames ``.metadata`` or opens its first or last file."""

    def die(*args):
        raise Killed

    def killed(run, step, at):
        method = "rename" if at == "rename" else "create_stream"
        stock = getattr(FileSystem, method)
        with monkeypatch.context() as patch:
            patch.setattr(
                FileSystem,
                method,
                lambda self, path, *a: die() if Path(path).name.endswith(at) else stock(self, path, *a),
            )
            if at == "rename":
                patch.setattr(FileSystem, "rename", die)
            with pytest.raises(CheckpointError):
                run.manager.save(step)

    return killed


def test_unfinished_saves_and_deletions_are_deleted(start, killed, caplog):
    caplog.set_level("INFO")
    run = start()
    run.save(10, 20)
    killed(run, 30, ".distcp")
    killed(run, 40, ".metadata.tmp")
    (run.folder / "step-50").mkdir()
    (run.folder / "step-20").rename(run.folder / "purging-20")  # a deletion was killed
    assert sorted(os.listdir(run.folder / "step-40")) == [".saving", "__0_0.distcp"]
    again = start()
    again.hooks.owns_folder = lambda: True
    assert again.manager.load()
    wait_until(lambda: again.names == ["step-10"])
    assert (
        "deleting what unfinished saves and deletions have left: purging-20, purging-30, purging-40, purging-50"
        in caplog.text
    )
    assert verify(run.folder / "step-10") is None


def test_what_may_be_somebodys_checkpoint_stays(start, killed, caplog, tmp_path):
    run = start()
    run.save(10, 11, 12, 13)
    for step, name in ((10, ".metadata.bak"), (11, "../metadata-11")):  # hidden from the run, but not deleted
        (run.folder / f"step-{step}" / ".metadata").rename(run.folder / f"step-{step}" / name)
    (run.folder / "step-12" / ".metadata").unlink()  # saved without hashes; its .metadata was deleted
    (run.folder / "step-12" / "hashes.json").unlink()
    killed(run, 14, "rename")  # only the name of .metadata is missing
    killed(run, 15, ".distcp")
    (run.folder / "step-15" / "notes.txt").write_text("mine")
    (run.folder / "step-16" / "sharded").mkdir(parents=True)  # an unfinished save in Hugging Face's format
    (run.folder / "step-17").mkdir()
    (run.folder / "step-17" / INDEX).touch()
    (run.folder / "damaged-18").mkdir()
    (run.folder / "purging").mkdir()
    (run.folder / "step-19").symlink_to(tmp_path)
    before = sorted(str(path) for path in run.folder.rglob("*"))
    clean_up(run.folder)
    assert sorted(str(path) for path in run.folder.rglob("*")) == before
    warned = [record.message for record in caplog.records if "so that no run resumes from it" in record.message]
    expected = [f"{run.folder}/step-{step} has no .metadata" for step in (10, 11, 12, 14, 15, 16)]
    assert [message.split(",")[0] for message in warned] == expected


def test_a_deletion_that_is_still_under_way_keeps_its_name(tmp_path, monkeypatch):
    """As where the step was saved again meanwhile: both are deleted at the next start."""
    (tmp_path / "purging-3").mkdir()
    for expected in ("purging-3x", "purging-3xx"):
        (tmp_path / "step-3").mkdir()
        assert rename_step(tmp_path / "step-3", "purging") == tmp_path / expected
    doomed = []
    monkeypatch.setattr(integrity, "_delete", doomed.extend)
    clean_up(tmp_path)
    wait_until(lambda: [path.name for path in doomed] == ["purging-3", "purging-3x", "purging-3xx"])


def test_a_deletion_holds_up_neither_the_others_nor_the_end_of_the_run(tmp_path, monkeypatch):
    (tmp_path / "purging-3").mkdir()
    integrity._delete([tmp_path / "purging-2", tmp_path / "purging-3"])  # the first is gone: somebody else deleted it
    assert os.listdir(tmp_path) == []
    (tmp_path / "step-4").mkdir()
    daemons = []
    monkeypatch.setattr(integrity, "_delete", lambda paths: daemons.append(threading.current_thread().daemon))
    clean_up(tmp_path)
    wait_until(lambda: daemons == [True])


@pytest.mark.parametrize("who", ["another job holds the folder", "it only reads"])
def test_nothing_is_deleted_where(start, killed, who):
    run = start()
    run.save(1)
    killed(run, 2, ".distcp")
    again = start(load_only=who == "it only reads")
    again.hooks.owns_folder = lambda: who == "it only reads"
    assert again.manager.load()
    assert again.names == ["step-1", "step-2"]


def test_nothing_is_deleted_where_none_loads(start, killed):
    run = start()
    run.save(1)
    killed(run, 2, ".distcp")
    flip(run.folder / "step-1" / "__0_0.distcp", 99)
    again = start()
    again.hooks.owns_folder = lambda: True
    with pytest.raises(CheckpointError, match=r"can be loaded \(1 tried\)"):
        again.manager.load()
    assert again.names == ["step-1", "step-2"]


def test_a_purge_is_one_rename(start, monkeypatch):
    """If it is killed while it deletes files, nothing looks like a checkpoint, and the next start deletes the rest."""
    run = start(keep_latest_k=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        run.save(1, 2, 3)
        run.manager.close()
    assert run.names == ["purging-1", "step-2", "step-3"]
    again = start(keep_latest_k=2)
    again.hooks.owns_folder = lambda: True
    assert again.manager.load()
    wait_until(lambda: again.names == ["step-2", "step-3"])


def test_a_save_moves_aside_what_may_be_a_checkpoint(start, killed):
    """When a step comes again, its unfinished save is deleted; a folder that may be more is kept under another name."""
    run = start()
    run.save(1)
    (run.folder / "step-1" / ".metadata").rename(run.folder / "step-1" / ".metadata.bak")
    killed(run, 2, ".distcp")
    run.save(1, 2)
    assert run.names == ["damaged-1", "step-1", "step-2"]
    assert (run.folder / "damaged-1" / ".metadata.bak").exists()
    assert checkpoints(run.folder) == [1, 2]


def test_the_lock_that_allows_it(tmp_path, monkeypatch):
    """Without locks, as on some network file systems, the folder may be another job's."""
    config = load_config(["--job.config_file", str(DEMO), "--job.dump_folder", str(tmp_path / "run")])
    folder = RunFolder(config, 1)
    assert folder.locked
    with pytest.raises(InUseError):
        RunFolder(config, 1)
    assert folder.locked
    folder.close()
    assert not folder.locked

    def no_locks(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", no_locks)
    without = RunFolder(config, 1)
    assert not without.locked
    without.close()
