"""The sample corpus: in C4's layout, the same on every machine, and read by ``datasets`` as the hub's C4 is."""

import gzip
import json

import pytest

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
