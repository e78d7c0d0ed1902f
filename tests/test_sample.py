"""The sample corpus: in C4's layout, the same on every machine, and read by ``datasets`` as the hub's C4 is."""

import gzip
import json
import re

import pytest

from tests.command_line import typed
from titan_disp.lab import sample as module
from titan_disp.lab.sample import is_complete, write_sample


def records(folder, pattern):
    """The records of the files that match, by the standard library alone."""
    files = sorted(folder.glob(pattern))
    return [json.loads(line) for file in files for line in gzip.open(file, "rt", encoding="utf-8")]


def test_every_document_once_in_an_order_that_hashes_fix(tmp_path, monkeypatch):
    texts, written = [f"Text {i} of some words. " * 20 for i in range(90)], []
    for order in (texts, [*texts[::-1], *texts[:9], "too short"]):
        monkeypatch.setattr(module, "prose", lambda order=order: ((f"url:{text}", text) for text in order))
        folder = tmp_path / str(len(order))
        counts = write_sample(folder, 400)
        assert sorted(r["text"] for r in records(folder / "en", "*.json.gz")) == sorted(texts)
        assert (counts["train"], counts["validation"]) == (87, 3)
        written.append({path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.*")})
    assert written[0] == written[1]


def test_an_existing_folder_is_kept(sample, tmp_path):
    assert is_complete(sample)
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="not a sample corpus"):
        write_sample(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert not is_complete(tmp_path)


def test_sizes_that_a_tokenizer_cannot_have(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "prose", lambda: ((str(i), f"Text {i} of some words. " * 20) for i in range(90)))
    for size, expected in ((5, "at least"), (1, "a few hundred"), (10**6, "at most"), (10**10, "a few hundred")):
        assert typed(monkeypatch, "sample-data", tmp_path / "data", "--vocab-size", size) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"titan-disp: error: --vocab-size is {size}, expected {expected}")
        assert not list(tmp_path.iterdir())
        if number := re.search(rf"{expected} (\d+):", line):
            assert write_sample(tmp_path / number[1], int(number[1]))
            (tmp_path / number[1]).rename(tmp_path.parent / f"{tmp_path.name}-{number[1]}")
