"""Bytes, not only documents: what a corpus has lost, what a run has read of it, and when a loss stops a run."""

import contextlib
import dataclasses
from itertools import islice

import numpy as np
import pytest

from tests.streams import EOS, first_epoch, loader, streams_of, through, write_texts
from titan_disp.data.files import list_files
from titan_disp.data.loader import together
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.sources import measured
from titan_disp.errors import DataError

FORMAT = Format(text_split="blank_lines", eos_id=EOS, vocab_size=5000)
OPTIONS = StreamOptions(seq_len=511, max_document_bytes=1 << 20, max_skipped_fraction=1.0, format=FORMAT)
DOCUMENTS = 150  # of a file


def corpus(folder, kind):
    """Ten files of documents of about 900 bytes of text. Documents say their number."""
    generator = np.random.default_rng(0)
    for f in range(10):
        numbers = range(f * DOCUMENTS + 1, (f + 1) * DOCUMENTS + 1)
        texts = [f"{i} " + " ".join(map(str, generator.integers(1000, 4999, 150 + i % 60))) for i in numbers]
        write_texts(folder / f"{f}.{kind}", texts)


# What becomes of a file's content. A node leaves a file with zeros whose last blocks were not on disk when it died.
SPOIL = {
    "zeros": lambda content: bytes(len(content)),
    "zeros from the middle": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "half": lambda content: content[: len(content) // 2],
    "junk": lambda content: b"\xff" * len(content),
    "random": lambda content: np.random.default_rng(1).bytes(len(content)),
}
# The damage, the fraction of the bytes that it costs, and the kinds of files; those behind the bar have an index.
DAMAGE = [
    ("zeros", 0.1, "json.gz parquet txt bin | jsonl json.zst parquet bin"),
    ("zeros from the middle", 0.05, "jsonl txt | txt bin json.gz"),
    ("half", 0.0, "jsonl.gz txt.gz |"),  # the rest is not stored, so that its loss is not seen in bytes
    ("junk", 0.1, "txt parquet | jsonl"),
    ("random", 0.1, "jsonl txt json.gz |"),
]
CASES = [
    (kind, damage, lost, index)
    for damage, lost, kinds in DAMAGE
    for part, index in zip(kinds.split("|"), ("", "memory"), strict=True)
    for kind in part.split()
]


@pytest.mark.parametrize(("kind", "damage", "lost", "index"), CASES)
def test_what_is_lost_is_counted_in_bytes_and_stops_the_run(sample, tmp_path, kind, damage, lost, index):
    """Of ten files, one is spoiled: stored = used + skipped on any ranks, and the limit is met although few documents are bad."""
    corpus(tmp_path, kind)
    how = vars(OPTIONS)
    whole = first_epoch(streams_of(list_files("text", str(tmp_path)), 4, 1, **how))[1][:, Field.BYTES].sum()
    path = tmp_path / f"3.{kind}"
    path.write_bytes(SPOIL[damage](path.read_bytes()))
    files = measured(list_files("text", str(tmp_path)), dataclasses.replace(OPTIONS, index=index))
    for ranks in (1, 4):
        _, position = first_epoch(streams_of(files, 4, ranks, **how))
        used, skipped = position[:, [Field.BYTES, Field.SKIPPED_BYTES]].sum(0) / whole
        assert used + skipped == pytest.approx(sum(file.size * file.density for file in files) / whole, abs=0.02)
        assert skipped == pytest.approx(lost, abs=0.02)

    def make(ranks, at):
        return streams_of(files, 4, ranks, positions=at, **how)

    expected, resumed = through(make, [(1, 90)]), through(make, [(4, 31), (2, 59)])
    assert all(np.array_equal(a, b) for a, b in zip(expected, resumed, strict=True))
    one = loader(files, sample, slots=4)
    one.positions[:] = one.positions.new_tensor(position)
    one.positions[:, Field.EPOCH] = 0
    counters = together([one.counters()])
    assert counters["skipped_bytes"] == position[:, Field.SKIPPED_BYTES].sum()
    for allowed in (0.03, 0.15):
        one.options = dataclasses.replace(one.options, max_skipped_fraction=allowed)
        refused = pytest.raises(DataError, match="bytes of text could not be used, more than stream.max_skipped_fr")
        with refused if lost > allowed else contextlib.nullcontext():
            one.check_counters(counters | {"skipped_documents": 0, "skipped_files": 0})


# The last has more in a row than bad documents may be.
@pytest.mark.parametrize(
    ("kind", "between"), [("jsonl", [" ", ""]), ("json.gz", ["\n"]), ("parquet", [""]), ("jsonl", [""] * 1500)]
)
def test_documents_without_text_are_no_fault(sample, tmp_path, kind, between, caplog):
    """As in raw wikitext, where a third of the rows are empty: they are passed over, and neither counted nor named."""
    texts = [text for i in range(1, 601) for text in (f"{i}", *(between if i % 300 == 0 or len(between) < 3 else []))]
    for name in "ab":
        write_texts(tmp_path / f"{name}.{kind}", texts)
    files = list_files("text", str(tmp_path))
    (rank,) = streams_of(files, 2, 1, shuffle_window=5, on_bad_data="fail")
    found = [slot.source.next() for slot in rank.slots.values() for _ in range(700)]
    assert sum(document.start[Field.EPOCH] == 0 for document in found) == 1200
    assert max(document.start[Field.SKIPPED] + document.start[Field.SKIPPED_BYTES] for document in found) == 0
    assert not caplog.records
    one = loader(files, sample, slots=2)
    one.positions[:] = one.positions.new_tensor(np.stack([document.end for document in found[699::700]]))
    one.check_counters(one.counters())


def test_epochs_read_is_the_text_trained_on(sample, tmp_path, caplog):
    """128 files, each a document: some are far longer than what a slot has read of them, and some slots have none."""
    lengths = np.random.default_rng(0).lognormal(9, 1.5, 128).astype(int)
    for i, length in enumerate(lengths):
        (tmp_path / f"{i}.txt").write_text("x" * (length + 1))
    one = loader(measured(list_files("text", f"{tmp_path}/*.txt"), StreamOptions()), sample, slots=128, seq_len=2047)
    one.encode = lambda text: [1] * len(text) + [EOS]
    for _ in islice(iter(one), 5 * 128 // 2):
        pass
    assert one.counters()["epochs_read"] == pytest.approx(5 * 128 * 2048 / (lengths.sum() + 128), rel=0.02)
    assert "has no documents in epoch" in caplog.text
