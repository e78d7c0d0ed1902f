"""A checkpoint's ``.metadata`` and some of its entries are pickles.

Code that somebody has put into them is never run.
"""

import builtins
import io
import os
import pickle
import re
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan.config.job_config import Checkpoint

import titan_disp.plugin  # noqa: F401
from tests.command_line import typed
from tests.saved_run import random_model, save_run
from titan_disp import safe_dcp
from titan_disp.data.fingerprint import read_data_state
from titan_disp.errors import CheckpointError, ConfigError
from titan_disp.models.qwen3 import Qwen3HfAdapter, flavors
from titan_disp.run import integrity
from titan_disp.run.checkpoint import check_initial_load
from titan_disp.run.integrity import problem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Call:
    """An object that calls ``function(*args)`` when it is unpickled.

    Either may be a Call again, as pickle sees a call.
    """

    def __init__(self, function, *args):
        self.called = function, args

    def __reduce__(self):
        return self.called

    def __call__(self):
        pass


def pickled(*parts):
    """Make a pickle of protocol 4: bytes are opcodes, a pair of texts is a global name,
    a text is itself.
    """

    def opcodes(part):
        if isinstance(part, bytes):
            return part
        if isinstance(part, tuple):
            return opcodes(part[0]) + opcodes(part[1]) + b"\x93"
        return b"\x8c" + bytes([len(part)]) + part.encode()

    return b"\x80\x04" + b"".join(map(opcodes, parts)) + b"."


def crafted(command):
    of_import = Call(Call(getattr, Call(builtins.__import__, "os"), "system"), command)
    calls = [
        Call(os.system, command),
        Call(builtins.exec, f"import os; os.system({command!r})"),
        of_import,
    ]
    yield from map(pickle.dumps, [*calls, {"planner_data": calls[:1]}])
    yield pickle.dumps(calls[0], protocol=0)
    # Protocol 4 resolves dotted names, and this module imports os.
    yield pickled(
        ("torch.distributed.checkpoint.filesystem", "os.system"), command, b"\x85R"
    )


def test_nothing_in_metadata_is_run(tmp_path):
    ran = tmp_path / "ran"
    for content in crafted(f"touch {ran}"):
        pickle.loads(content)
        assert ran.exists()  # plain pickle runs it
        ran.unlink()
        (tmp_path / ".metadata").write_bytes(content)
        assert "which no checkpoint needs: PyTorch did not write this file" in problem(
            tmp_path
        )
        # torch 2.11 does not tell.
        with pytest.raises(
            CheckpointException, match="which no checkpoint needs|metadata is None"
        ):
            safe_dcp.load({"a": torch.zeros(1)}, tmp_path, no_dist=True)
        assert not ran.exists()


def test_metadata_that_python_3_11_2_wrote_can_be_read(tmp_path, monkeypatch):
    """Enum.__reduce_ex__ of Python 3.11.0 to 3.11.3, as on Debian 12, names getattr.

    That of all others names the class.
    """
    enum = torch_dcp.metadata._MEM_FORMAT_ENCODING
    with monkeypatch.context() as patch:
        patch.setattr(
            enum,
            "__reduce_ex__",
            lambda self, protocol: (getattr, (type(self), self._name_)),
        )
        torch_dcp.save({"a": torch.arange(3.0)}, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    found = {"a": torch.zeros(3)}
    safe_dcp.load(found, tmp_path, no_dist=True)
    assert found["a"].tolist() == [0, 1, 2]
    assert problem(tmp_path) is None
    properties = safe_dcp.read_metadata(tmp_path).state_dict_metadata["a"].properties
    assert properties.memory_format is torch.contiguous_format


ENUM = ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING")
PATH = ("pathlib", "PosixPath")
LAYOUT = ("torch.serialization", "_get_layout")
GETATTR = ("builtins", "getattr")
SET = (b"N}", "poisoned", b"K\x01s\x86b")  # BUILD with (None, {name: value})


def test_nothing_in_metadata_reaches_or_changes_more_than_it_needs():
    for *parts, reason in (
        # Only members of the enum may be taken.
        (GETATTR, ENUM, "__class__", b"\x86R", "takes the attribute"),
        (GETATTR, ENUM, "_member_map_", b"\x86R", "takes the attribute"),
        (
            GETATTR,
            ("collections", "OrderedDict"),
            "fromkeys",
            b"\x86R",
            "takes the attribute",
        ),
        (GETATTR, LAYOUT, "__globals__", b"\x86R", "takes the attribute"),
        # with another PosixPath.__str__, an export would write elsewhere
        (PATH, *SET, "sets attributes of a type"),
        (LAYOUT, *SET, "sets attributes of a function"),
        # LONG_BINPUT makes C's unpickler allocate as many objects as it is told: 64 GB
        # at 2³².
        (b"N", b"r" + (2**22).to_bytes(4, "little"), "has the pickle opcode 0x72"),
    ):
        content = pickled(*parts)
        changed = pickle.loads(content)  # plain pickle does it
        if "poisoned" in parts:
            assert changed.poisoned == 1
            del changed.poisoned
        with pytest.raises(
            pickle.UnpicklingError, match=f"{reason}.*, which no checkpoint needs"
        ):
            safe_dcp.parse_metadata(content)
        assert not hasattr(changed, "poisoned")


def test_no_command_runs_it(tmp_path, sample, text, monkeypatch, capsys):
    ran = tmp_path / "ran"
    run = save_run(tmp_path / "run", random_model(), sample / "tokenizer")
    folder = run / "checkpoint" / "step-30"
    (folder / ".metadata").write_bytes(next(crafted(f"touch {ran}")))
    refused = "names posix.system, which no checkpoint needs"
    for status, *command in (
        (2, "export", run, tmp_path / "model"),
        (2, "generate", run, "The function"),
        (
            2,
            "condensation",
            run,
            "--text",
            text,
            "--out",
            tmp_path / "out",
            "--sequences",
            "1",
        ),
        (1, "checkpoint", run),
    ):
        assert typed(monkeypatch, *command) == status
        assert refused in "".join(capsys.readouterr()), command
    # Training, plan and preflight check the weights to begin with. A resume also reads
    # the data's position.
    config = Checkpoint(enable=True, initial_load_path=str(folder))
    with pytest.raises(ConfigError, match=refused):
        check_initial_load(config, None, Qwen3HfAdapter(flavors["nano"], None))
    with pytest.raises(CheckpointError, match=refused):
        read_data_state(str(folder))
    assert not ran.exists()


def test_nothing_else_unpickles():
    """Other commands that open a run, such as report, evaluate and preflight, read
    checkpoints in no other way.
    """
    package = Path(safe_dcp.__file__).parent
    unsafe = r"\b(pickle\.loads?|Unpickler|torch\.load)\(|FileSystemReader|\bdcp\.load\(.*checkpoint_id=|allow_pickle"
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if re.search(unsafe, path.read_text())
    }
    assert found == {"safe_dcp.py"}


def test_entries_that_are_no_tensors_are_plain(tmp_path):
    ran = tmp_path / "ran"
    plain = {
        "a": 1,
        "b": 0.5,
        "c": "text",
        "d": [1, (2.0, None)],
        "e": {"f": True},
        "h": b"bytes",
    }
    torch_dcp.save(
        {**plain, "g": torch.arange(3)}, checkpoint_id=tmp_path / "plain", no_dist=True
    )
    found = {
        "a": 0,
        "b": 0.0,
        "c": "",
        "d": [0, (0.0, 0)],
        "e": {"f": False},
        "h": b"",
        "g": torch.zeros(3).long(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning that users cannot act on
        safe_dcp.load(found, tmp_path / "plain", no_dist=True)
    assert found.pop("g").tolist() == [0, 1, 2]
    assert found == plain
    torch_dcp.save(
        {"a": Call(os.system, f"touch {ran}")},
        checkpoint_id=tmp_path / "crafted",
        no_dist=True,
    )
    with pytest.raises(
        CheckpointException, match="Weights only load failed|weights_only"
    ):
        safe_dcp.load({"a": None}, tmp_path / "crafted", no_dist=True)
    assert not ran.exists()
    torch_dcp.load({"a": None}, checkpoint_id=tmp_path / "crafted", no_dist=True)
    assert ran.exists()  # DCP alone runs it


def test_what_torch_writes_is_read(tmp_path):
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.bool,
        torch.float8_e4m3fn,
    ]
    state = {str(dtype): torch.zeros(2, 3).to(dtype) for dtype in dtypes}
    state["image"] = torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last)
    torch_dcp.save(
        {**state, "n": 3, "nested": {"x": [torch.ones(1), "y"]}},
        checkpoint_id=tmp_path,
        no_dist=True,
    )
    assert safe_dcp.read_metadata(tmp_path) == pickle.loads(
        (tmp_path / ".metadata").read_bytes()
    )


@pytest.fixture
def fast(monkeypatch):
    """Calls of C's unpickler. What was accepted before does not count."""
    safe_dcp.parse_metadata.cache_clear()
    monkeypatch.setattr(safe_dcp, "_accepted", set())
    fast = mock.Mock(wraps=safe_dcp._FastUnpickler)
    monkeypatch.setattr(safe_dcp, "_FastUnpickler", fast)
    yield fast
    safe_dcp.parse_metadata.cache_clear()


def test_what_another_rank_has_parsed_is_parsed_fast(tmp_path, fast):
    state = {"a": torch.arange(3.0), "b": 1, "c": {"d": "text"}}
    torch_dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    slow = safe_dcp.read_metadata(tmp_path)
    fast.assert_not_called()
    safe_dcp.accept(safe_dcp.metadata_digest(tmp_path))
    safe_dcp.parse_metadata.cache_clear()
    assert safe_dcp.read_metadata(tmp_path) == slow
    fast.assert_called_once()
    # any other content is parsed as before, and C's unpickler has the same list
    for content in crafted(f"touch {tmp_path / 'ran'}"):
        with pytest.raises(Exception, match="no checkpoint needs"):
            safe_dcp.parse_metadata(content)
        with pytest.raises(Exception, match="no checkpoint needs"):
            fast(io.BytesIO(content)).load()
    assert not (tmp_path / "ran").exists()


def test_a_resume_parses_fast_after_rank_0(start, fast):
    run = start()
    run.save(3)
    on_rank_0 = []

    def problem_of(folder):
        on_rank_0.append(fast.call_count)
        found = problem(folder)
        safe_dcp.parse_metadata.cache_clear()  # as on another rank
        return found

    with mock.patch.object(integrity, "problem", problem_of):
        assert start().manager.load()
    assert on_rank_0 == [0]
    assert fast.called
