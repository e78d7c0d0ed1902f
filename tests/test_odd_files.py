"""Files that are odd but readable, or changed: what is before the damage is used, and what changed is noticed."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from tests.command_line import DEMO
from tests.streams import config, json_lines, loader, records_of, stored, write_texts
from titan_disp.data.assignment import Assignment
from titan_disp.data.files import list_files
from titan_disp.data.fingerprint import differences
from titan_disp.data.loader import build_dataloader
from titan_disp.data.options import StreamOptions
from titan_disp.data.sources import DataSet, list_and_check
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError, RefusedError, UserError
from titan_disp.lab.digest import digest

TEXTS = [f"{i} " + np.random.default_rng(i).bytes(100).hex() for i in range(3010)]
SPOILED = {
    "junk": lambda frame: frame + b"junk" * 100,  # after a complete frame
    "zeros and junk": lambda frame: frame + b"\x00" * 5000 + b"junk",
    "second frame": lambda frame: frame + frame[: len(frame) // 2] + b"junk",
}


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("spoil", SPOILED)
def test_documents_before_the_damage_are_used(tmp_path, suffix, spoil):
    """In zstd all of them, although pyarrow drops what the failing read has decompressed; in gzip all but the last 8 KiB."""
    content, path = json_lines(TEXTS), tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(SPOILED[spoil](stored(content, path.name)))
    *found, end = records_of(path)
    least = 3010 - (8192 // 200 if suffix == "gz" else 0)
    assert len(found) >= least
    assert found[:least] == content.splitlines(keepends=True)[:least]
    assert end.startswith("damaged: ")


def test_a_file_that_changes_between_a_save_and_a_resume(sample, tmp_path):
    """Its name and size stay. A copy, with another time of writing, is no change, and neither are files on the hub."""
    for name in "abc":
        write_texts(tmp_path / f"{name}.jsonl", TEXTS[:90])
    job = config(sample, "--training.dataset", "text", "--training.dataset_path", str(tmp_path))
    tokenizer, content = load_tokenizer(job.model.hf_assets_path), json_lines(TEXTS[:90])
    saved, half = build_dataloader(1, 0, tokenizer, job).state_dict(), len(content) // 2
    backwards = b"".join(reversed(content.splitlines(keepends=True)))
    for changed in (backwards, content[half:] + content[:half], content):
        (tmp_path / "b.jsonl").write_bytes(changed)
        now = build_dataloader(1, 0, tokenizer, job)
        same = "content: 1 file of the same size with other documents, first b.jsonl"
        with contextlib.nullcontext() if changed == content else pytest.raises(RefusedError, match=same):
            now.load_state_dict(saved)
        assert differences(json.loads(saved["fingerprint"]), now.fingerprint | {"contents": {}}) == []


def test_names_that_are_not_utf_8(sample, tmp_path):
    """The order depends on the bytes of the names."""
    names = [b"caf\xe9.jsonl", "naïve.jsonl".encode()]
    for name in names:
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(json_lines(TEXTS[:60]))
    files = list_files("text", str(tmp_path))
    assert [file.name.encode(errors="surrogateescape") for file in files] == names
    hashes = [hashlib.sha256(b"0/0/" + name).digest() for name in names]
    assert Assignment(files, 2, seed=0)._line(0).order == sorted(range(2), key=hashes.__getitem__)
    job = config(sample, "--training.dataset", "text", "--training.dataset_path", str(tmp_path))
    assert len(digest(job, 2, [(0, 1), (1, 2)]).hashes) == 2


def test_a_locale_without_utf_8():
    """torch cannot even be imported there, which the message says."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "titan_disp.cli", "plan", str(DEMO)]
    run = subprocess.run(command, env={**os.environ, **ascii_only}, capture_output=True, text=True)
    assert "reads and writes files as ANSI_X3.4-1968 here, expected UTF-8: set PYTHONUTF8=1, or" in run.stderr
    assert len(run.stderr.splitlines()) == 1


def test_parquet_files_without_rows(tmp_path):
    """They take no part of the line: a slot that got one would find nothing in epoch after epoch."""
    for name in "abcd":
        write_texts(tmp_path / f"{name}.parquet", pyarrow.array(TEXTS[:40] if name == "c" else [], pyarrow.string()))
    files = list_and_check([DataSet("text", str(tmp_path), "training")], StreamOptions())
    assert [file.density > 0 for file in files] == [False, False, True, False]
    for epoch in range(5):
        runs = [Assignment(files, 4, seed=0).run(slot, epoch) for slot in range(4)]
        assert all(any(segment.file == 2 for segment in run.segments) for run in runs)
    (tmp_path / "c.parquet").unlink()
    with pytest.raises(ConfigError, match=r"a.parquet has no rows \(nor have the others\): name files with text"):
        list_and_check([DataSet("text", str(tmp_path), "training")], StreamOptions())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failure_of_the_worker_is_one_traceback(sample, tmp_path, prefetch):
    (tmp_path / "a.jsonl").write_bytes(json_lines(TEXTS[:90]))
    one = loader(list_files("text", str(tmp_path)), sample, prefetch=prefetch)
    one.encode = lambda text: 1 / 0
    with pytest.raises(UserError, match=r"(?s)reading the data failed.*Traceback.*ZeroDivisionError") as error:
        next(iter(one))
    assert str(error.value).count("Traceback") == 1
    one.close()
