"""Every file of a checkpoint has a hash, so that nothing is loaded that differs from
what was saved.
"""

import json
import os
import pickle
import random
import re
import shutil
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import xxhash
from safetensors.numpy import save_file
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from tests.command_line import typed
from tests.test_checkpoint import ended_in_hf, fails, flip, unfinished
from titan_disp.errors import CheckpointError, UserError
from titan_disp.lab.export.inventory import inventory, verify
from titan_disp.models.hf import INDEX
from titan_disp.run import integrity
from titan_disp.run.integrity import (
    HashingWriter,
    clean_up,
    damage,
    is_model_only,
    problem,
    rename_step,
)


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_every_file_has_its_hash(start, async_mode):
    run = start(async_mode=async_mode)
    run.save(7)
    run.manager.wait()
    folder = run.folder / "step-7"
    names = {".metadata", "__0_0.distcp"}
    files = {
        name: xxhash.xxh3_128_hexdigest((folder / name).read_bytes()) for name in names
    }
    assert json.loads((folder / "hashes.json").read_text()) == {
        "algorithm": "xxh3_128",
        "files": files,
    }
    assert set(os.listdir(folder)) == names | {"hashes.json"}
    assert verify(folder) is None
    read = []
    assert damage(folder, read=read.append) is None  # by which a progress bar counts
    assert sum(read) == sum((folder / name).stat().st_size for name in names)
    # Stock DCP reads it: .metadata holds nothing of ours.
    assert b"titan_disp" not in (folder / ".metadata").read_bytes()
    found = {"weight": torch.zeros(2, 3)}
    torch_dcp.load(found, checkpoint_id=folder)
    assert torch.equal(found["weight"], torch.full((2, 3), 7.0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_writer_sent_to_another_process(tmp_path):
    """checkpoint.async_mode = "async_with_pinned_mem" pickles the writer."""
    writer = pickle.loads(pickle.dumps(HashingWriter(tmp_path)))
    torch_dcp.save({"a": torch.arange(5)}, storage_writer=writer, no_dist=True)
    assert json.loads((tmp_path / "hashes.json").read_text())["files"].keys() == {
        ".metadata",
        "__0_0.distcp",
    }
    assert verify(tmp_path) is None


def test_every_flipped_bit_is_noticed(start):
    """.metadata is verified before it is unpickled, because a damaged pickle can do
    anything.

    A flip in hashes.json is noticed, or changes nothing but white space. Without
    hashes, as TorchTitan's own trainer saves, a flip in .metadata never raises.
    """
    run = start()
    run.save(1)
    folder = run.folder / "step-1"
    chance = random.Random(0)
    file = folder / "hashes.json"

    def flips(name, number=None):
        every = range(8 * (folder / name).stat().st_size)
        for bit in chance.sample(every, number) if number else every:
            flip(folder / name, bit)
            yield bit
            flip(folder / name, bit)

    for name in (".metadata", "__0_0.distcp"):
        for bit in flips(name, 200):
            assert (
                verify(folder)
                == f"{name} differs from its hash: its content is not what was saved"
            ), bit
    meaning = json.loads(file.read_bytes())
    for _ in flips("hashes.json"):
        assert verify(folder) is not None or json.loads(file.read_bytes()) == meaning
    file.unlink()
    assert (
        sum(
            problem(folder) is not None or is_model_only(folder)
            for _ in flips(".metadata", 200)
        )
        > 50
    )


def flip_a_weight(folder):
    """Make the first weight 4.0 instead of 2.0. Stock DCP does not notice."""
    weights = pickle.loads((folder / ".metadata").read_bytes()).storage_data
    info = next(info for index, info in weights.items() if index.fqn == "weight")
    content = (folder / "__0_0.distcp").read_bytes()[
        info.offset : info.offset + info.length
    ]
    position = content.index(torch.full((6,), 2.0).numpy().tobytes())
    flip(folder / "__0_0.distcp", 8 * (info.offset + position + 2) + 7)
    found = {"weight": torch.zeros(2, 3)}
    torch_dcp.load(found, checkpoint_id=folder)
    assert found["weight"][0, 0] == 4.0


def hashes(change):
    def spoil(folder):
        content = json.loads((folder / "hashes.json").read_text())
        change(content)
        (folder / "hashes.json").write_text(json.dumps(content))

    return spoil


def unhashed(content):
    def spoil(folder):
        (folder / "hashes.json").unlink()
        (folder / ".metadata").write_bytes(
            content if isinstance(content, bytes) else pickle.dumps(content)
        )

    return spoil


def placed(*files):
    return Metadata(
        {},
        storage_data={
            MetadataIndex(str(i)): _StorageInfo(*file) for i, file in enumerate(files)
        },
    )


DISTCP = "__0_0.distcp"


def cut(folder):
    unhashed(placed((DISTCP, 10, 90), (DISTCP, 0, 10)))(folder)
    os.truncate(folder / DISTCP, 99)


def holds(content):
    return lambda folder: (folder / "hashes.json").write_bytes(content)


UNREADABLE = "hashes.json cannot be read: "
DAMAGES = [  # what is done to a checkpoint, and what is said of it
    (flip_a_weight, f"{DISTCP} differs from its hash"),
    (hashes(lambda c: c["files"].pop(DISTCP)), f"{DISTCP} has no hash in hashes.json"),
    (hashes(lambda c: c["files"].pop(".metadata")), ".metadata differs from its hash"),
    (hashes(lambda c: c["files"].update(other="0")), "other: No such file, although"),
    (
        hashes(lambda c: c["files"].update({"../x": "0"})),
        UNREADABLE + 'expected "files"',
    ),
    (hashes(lambda c: c.update(algorithm="md5")), UNREADABLE + "expected"),
    *(
        (holds(b"[]"), UNREADABLE + "expected"),
        (holds(b"{"), UNREADABLE),
        (holds(b"\xff"), UNREADABLE),
    ),
    (lambda folder: (folder / DISTCP).unlink(), f"{DISTCP}: No such file or directory"),
    (
        lambda folder: os.truncate(folder / DISTCP, 10),
        f"{DISTCP} has 10 bytes, expected",
    ),
    (
        unhashed(placed(("/dev/../zero", 0, 1))),
        ".metadata names a file of another folder: '/dev/../zero'",
    ),
    (cut, f"{DISTCP} has 99 bytes, expected 100"),
]
NONSENSE = [
    *(
        b"no pickle",
        Metadata({3: None}, storage_data={}),
        Metadata(None, storage_data={}),
        object.__new__(Metadata),
    ),
    *(
        placed((7, 0, 1), (DISTCP, 0, 1)),
        placed((None, 0, 1)),
        placed((DISTCP, 0, "1")),
        placed((DISTCP, -5, 1)),
    ),
    *(
        placed((DISTCP, 0, 10**9999)),
        placed(("__0\0_0.distcp", 0, 1)),
        placed(("__0\ud800_0.distcp", 0, 1)),
    ),
]
DAMAGES += [(unhashed(content), ".metadata ") for content in NONSENSE]


@pytest.mark.parametrize(("spoil", "reason"), DAMAGES, ids=range(len(DAMAGES)))
def test_damage_is_named_and_not_loaded(start, spoil, reason):
    run = start()
    run.save(1, 2)
    spoil(run.folder / "step-2")
    assert verify(run.folder / "step-2").startswith(reason)
    with pytest.raises(
        UserError, match=r"initial_load_path .* cannot be loaded: " + re.escape(reason)
    ):
        start("other", initial_load_path=str(run.folder / "step-2")).manager.load()
    again = start()
    assert again.manager.load()
    assert (again.loaded, again.names) == ((1, 1), ["damaged-2", "step-1"])
    assert again.reasons[2].startswith(reason)


def test_one_process_that_is_told_of_more_ranks_reads_every_file(start, monkeypatch):
    """With ``comm.mode = "fake_backend"`` there are no other ranks, which would read
    their share or answer.
    """
    run = start()
    run.save(1)
    folder = run.folder / "step-1"
    flip(folder / DISTCP, 1234)  # of two ranks, the second one's
    monkeypatch.setattr(dist, "get_backend", lambda *group: "fake")
    monkeypatch.setattr(dist, "get_world_size", lambda *group: 2)
    monkeypatch.setattr(dist, "all_gather_object", fails(0, "nobody answers"))
    assert damage(folder, 0, 2) is None
    assert run.manager._damage(str(folder)).startswith(
        f"{DISTCP} differs from its hash"
    )


def test_checkpoints_are_listed(start, tmp_path, monkeypatch, capsys):
    def listed(*arguments):
        status = typed(monkeypatch, "checkpoint", *arguments)
        out, err = capsys.readouterr()
        lines = [line.split(maxsplit=5) for line in out.splitlines()]
        return status, {name: state for name, *_, state in lines} or err

    folder = tmp_path / "run"
    assert listed(folder)[0] == 2
    run = start()
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"checkpoint": {"folder": "checkpoint"}})
    )
    assert listed(folder) == (0, "")
    run.save(2, 10, 20)
    (run.folder / "step-2" / "hashes.json").unlink()
    unfinished(run.folder / "step-30")
    (run.folder / "step-40").mkdir()
    save_file({"a": np.zeros(3)}, run.folder / "step-40" / "model.safetensors")
    (run.folder / "step-40" / INDEX).write_text(
        '{"weight_map": {"a": "model.safetensors"}}'
    )
    states = {
        "step-2": "complete, without hashes: not verified",
        **dict.fromkeys(("step-10", "step-20"), "complete, verified"),
        "step-30": "unfinished: its save is under way, or did not end",
        "step-40": "Hugging Face format, without hashes: not verified",
    }
    code, found = listed(folder)
    # sorted by step, not by name
    assert (code, list(found.items())) == (0, list(states.items()))
    flip(run.folder / "step-20" / DISTCP, 1234)
    assert listed(folder)[0] == 1  # although the last one is sound
    os.truncate(run.folder / "step-40" / "model.safetensors", 20)
    code, found = listed(folder)
    assert found.pop("step-40").startswith("damaged: SafetensorError")
    damaged = (
        f"damaged: {DISTCP} differs from its hash: its content is not what was saved"
    )
    assert (code, found) == (
        1,
        {name: states[name] for name in found} | {"step-20": damaged},
    )
    assert listed(folder, "--step", "10") == (0, {"step-10": "complete, verified"})
    code, error = listed(folder, "--step", "11")
    assert (
        code,
        "has no checkpoint of step 11; it has 2, 10, 20, 30, 40" in error,
    ) == (2, True)

    (run.folder / "step-20").rename(run.folder / "damaged-20")
    event = {
        "time": "2026-01-01T00:00:00+00:00",
        "event": "checkpoint_damaged",
        "step": 20,
        "reason": "a flipped bit",
    }
    for events, said in (
        (json.dumps(event) + "\n", " as damaged: a flipped bit"),
        ("", ": the run's log says why"),
    ):
        # None of what a save has moved aside because it does not know it
        (folder / "events.jsonl").write_text(events)
        assert listed(folder, "--step", "20") == (
            0,
            {"damaged-20": f"moved aside{said}"},
        )

    os.utime(run.folder / "step-10" / ".metadata", (1.6e9, 1.6e9))
    (found,) = inventory(folder, 10)
    size = sum(file.stat().st_size for file in (run.folder / "step-10").iterdir())
    assert (found.step, found.size, found.modified) == (10, size, 1.6e9)


def wait_until(condition):
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class Killed(BaseException):
    pass


def killed(run, step, at):
    method = "rename" if at == "rename" else "create_stream"
    stock = getattr(FileSystem, method)

    def die(self, path, *args):
        if at == "rename" or Path(path).name.endswith(at):
            raise Killed
        return stock(self, path, *args)

    with mock.patch.object(FileSystem, method, die), pytest.raises(CheckpointError):
        run.manager.save(step)


def test_unfinished_saves_and_deletions_are_deleted(start, caplog, monkeypatch):
    """A deletion is one rename first, so that nothing looks like a checkpoint if it is
    killed before its end.
    """
    caplog.set_level("INFO")
    run = start(keep_latest_k=2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        run.save(10, 20, 25)
        run.manager.close()
    assert run.names == ["purging-10", "step-20", "step-25"]
    killed(run, 30, ".distcp")
    killed(run, 40, ".metadata.tmp")
    assert sorted(os.listdir(run.folder / "step-40")) == [".saving", DISTCP]
    (run.folder / "step-50").mkdir()
    for owns in (False, True):
        before = run.names
        again = start(load_only=not owns)
        again.hooks.owns_folder = lambda: True
        assert again.manager.load()
        assert owns or run.names == before
    wait_until(lambda: again.names == ["step-20", "step-25"])
    assert (
        "deletions have left: purging-10, purging-30, purging-40, purging-50"
        in caplog.text
    )
    assert verify(run.folder / "step-20") is None


@pytest.mark.parametrize("damaged", [False, True])
def test_a_save_that_lacks_only_the_name_of_its_metadata(start, damaged, caplog):
    """It is finished, and verified, as hashes.json is written before: every start would
    otherwise warn of it, and keep it.
    """
    caplog.set_level("INFO")
    run = start()
    run.save(1)
    run.fill(2)
    run.trainer.value = 2
    killed(run, 2, "rename")
    if damaged:
        flip(run.folder / "step-2" / ".metadata.tmp", 99)
    start(load_only=True).manager.load()
    start().manager.load()  # which does not own the folder
    assert (run.folder / "step-2" / ".metadata.tmp").exists()
    again = start()
    again.hooks.owns_folder = lambda: True
    assert again.manager.load()
    last = 1 if damaged else 2
    assert again.loaded == (last, last)
    wait_until(lambda: again.names == ["step-1", "step-2"][:last])
    assert not any(verify(run.folder / name) for name in again.names)
    assert not list(run.folder.glob("*/.saving"))
    assert ("step-2 was complete except that .metadata" in caplog.text) != damaged


def test_what_may_be_somebodys_checkpoint_stays(start, caplog, tmp_path):
    run = start()
    run.save(10, 11, 12)
    # Hidden from the run, but not deleted
    for step, name in ((10, ".metadata.bak"), (11, "../metadata-11")):
        (run.folder / f"step-{step}" / ".metadata").rename(
            run.folder / f"step-{step}" / name
        )
    # saved without hashes; its .metadata was deleted
    for name in (".metadata", "hashes.json"):
        (run.folder / "step-12" / name).unlink()
    killed(run, 14, "rename")  # only the name of .metadata is missing
    killed(run, 15, ".distcp")
    (run.folder / "step-15" / "notes.txt").write_text("mine")
    # An unfinished save in Hugging Face's format
    (run.folder / "step-16" / "sharded").mkdir(parents=True)
    ended_in_hf(run.folder / "step-17")
    for name in ("damaged-18", "purging"):
        (run.folder / name).mkdir()
    (run.folder / "step-19").symlink_to(tmp_path)
    before = set(run.folder.rglob("*"))
    clean_up(run.folder)
    assert set(run.folder.rglob("*")) == before
    warned = [
        message.split(",")[0]
        for message in caplog.messages
        if "so no run resumes from it" in message
    ]
    assert warned == [
        f"{run.folder}/step-{step} has no .metadata"
        for step in (10, 11, 12, 14, 15, 16)
    ]


def test_a_deletion_holds_up_nothing(tmp_path, monkeypatch):
    (tmp_path / "purging-3").mkdir()
    for expected in ("purging-3x", "purging-3xx"):
        (tmp_path / "step-3").mkdir()
        assert rename_step(tmp_path / "step-3", "purging") == tmp_path / expected
    seen = []
    delete = integrity._delete
    monkeypatch.setattr(
        integrity,
        "_delete",
        lambda paths: seen.append((paths, threading.current_thread().daemon)),
    )
    clean_up(tmp_path)
    wait_until(lambda: seen)
    ((doomed, daemon),) = seen
    assert ([path.name for path in doomed], daemon) == (
        ["purging-3", "purging-3x", "purging-3xx"],
        True,
    )
    # the first is gone: somebody else deleted it
    delete([tmp_path / "purging-2", *doomed])
    assert os.listdir(tmp_path) == []


def test_hashes_that_are_a_folder(tmp_path):
    """No start ends with a traceback because of it."""
    path = tmp_path / "step-4"
    (path / "hashes.json").mkdir(parents=True)
    assert not integrity.can_be_finished(path)
    (path / "hashes.json").rmdir()
    (path / "hashes.json").write_text('{"algorithm": "xxh3_128", "files": {}}')
    (path / ".metadata.tmp").mkdir()
    assert not integrity.can_be_finished(path)
