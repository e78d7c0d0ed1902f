"""The index of the data: equal shares, resumes that seek, sorted files that are mixed,
changes and losses noticed.
"""

import base64
import contextlib
import json
import os
import shutil
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from tests.command_line import DEMO
from tests.pages import changed, loaded
from tests.streams import (
    EOS,
    batches,
    first_epoch,
    ids_as,
    loader,
    records_of,
    streams_of,
    through,
    words_of,
    write_files,
    write_texts,
)
from titan_disp.config.command_options import IndexOptions
from titan_disp.config.load import load_config
from titan_disp.data import index
from titan_disp.data.findings import check_content, entries_of, measured
from titan_disp.data.fingerprint import check_fingerprint
from titan_disp.data.index import FOLDER
from titan_disp.data.listing import list_files
from titan_disp.data.loader import together
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.position import Field
from titan_disp.errors import ConfigError, DataError, RefusedError
from titan_disp.lab.indexing import index_data

FORMAT = Format(text_split="blank_lines", eos_id=EOS, vocab_size=5000)
OPTIONS = StreamOptions(index="memory", format=FORMAT)
EPOCH = vars(replace(OPTIONS, seq_len=15, max_skipped_fraction=1.0))
LEDGER = replace(
    OPTIONS, index="", seq_len=511, max_document_bytes=1 << 20, max_skipped_fraction=1.0
)


def test_shares_are_of_text(tmp_path):
    """By stored bytes, 23 to 25 % of the documents were not seen in an epoch's
    tokens.
    """
    suffixes = ("jsonl.zst", "parquet", "jsonl", "json.gz")
    for i, rows in enumerate(np.random.default_rng(0).integers(1, 5000, (32, 60, 200))):
        texts = [" ".join(map(str, row[: 150 + row[0] % 50])) for row in rows]
        write_texts(tmp_path / f"{i}.{suffixes[i % 4]}", texts)
    files = measured(list_files("text", str(tmp_path)), StreamOptions())
    seen = Counter()
    share = sum(file.size * file.density for file in files) / 32
    for rank in streams_of(files, 32, 8, encode=lambda text: [1] * len(text)):
        for slot in rank.slots.values():
            while slot.source.position.values[Field.BYTES] < share:
                seen[int(slot.source.next().start[Field.EPOCH])] += 1
    assert seen[0] > 0.96 * 32 * 60
    assert seen.total() - seen[0] < 0.04 * 32 * 60


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(index, "_LEAST", 256)


# As megatron-core 0.12.1 writes them: documents 5 6 7 0, of one sequence; 8 9 and 10 0,
# of two; 11; 0; 12 to 17.
IDX = (
    "TU1JRElEWAAAAQAAAAAAAAAIBgAAAAAAAAAGAAAAAAAAAAQAAAACAAAAAgAAAAEAAAABAAAABgAAAAAAAAAAAAAACAAAAAAAAAAMAAAAAAAAABAA"
    "AAAAAAAAEgAAAAAAAAAUAAAAAAAAAAAAAAAAAAAAAQAAAAAAAAADAAAAAAAAAAQAAAAAAAAABQAAAAAAAAAGAAAAAAAAAA=="
)
IDS = [5, 6, 7, 0, 8, 9, 10, 0, 11, 0, 12, 13, 14, 15, 16, 17]


def test_files_of_megatrons_library(tmp_path):
    (tmp_path / "a.bin").write_bytes(ids_as(IDS))
    (tmp_path / "a.idx").write_bytes(base64.b64decode(IDX))
    found = [
        one if isinstance(one, str) else one.tolist()
        for one in records_of(tmp_path / "a.bin", eos_id=EOS)
    ]
    assert found == [
        [5, 6, 7, 0],
        [8, 9, 10, 0],
        [11],
        "no ids but EOS",
        [12, 13, 14, 15, 16, 17],
    ]
    (file,) = measured(list_files("text", str(tmp_path)), StreamOptions(format=FORMAT))
    assert file.blocks.places.tolist() == list(range(6))
    (tmp_path / "a.idx").write_bytes(
        base64.b64decode(IDX).replace(b"\1\0\0\0\0\0\0\0\3", b"\2\0\0\0\0\0\0\0\3")
    )
    assert (
        measured([file], OPTIONS)[0].sample
        != measured([file], StreamOptions())[0].sample
        != file.sample
    )
    (tmp_path / "a.idx").write_bytes(
        base64.b64decode(IDX).replace(b"\3\0\0\0\0\0\0\0\4", b"\5\0\0\0\0\0\0\0\4")
    )
    with pytest.raises(
        ConfigError, match="a.idx: its sequences or documents do not follow one another"
    ):
        measured([file], OPTIONS)
    (tmp_path / "a.idx").write_bytes(base64.b64decode(IDX))
    with pytest.raises(DataError, match="holds the id 7, but the tokenizer has 6 ids"):
        records_of(tmp_path / "a.bin", eos_id=EOS, vocab_size=6)
    (tmp_path / "a.bin").write_bytes(ids_as(IDS[:-1]))
    assert (
        "its 30 bytes are not the 32 that"
        in records_of(tmp_path / "a.bin", eos_id=EOS)[0]
    )
    (tmp_path / "a.idx").write_bytes(base64.b64decode(IDX)[:-1])
    assert (
        "153 bytes; expected version 1, type 8"
        in records_of(tmp_path / "a.bin", eos_id=EOS)[0]
    )


@pytest.mark.usefixtures("small_blocks")
def test_a_look_at_megatrons_ids_depends_on_both_files(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(ids_as(IDS))
    idx = base64.b64decode(IDX)
    path.with_suffix(".idx").write_bytes(idx[:40])
    how = replace(OPTIONS, max_skipped_fraction=1.0)
    (entry,) = entries_of(list_files("text", str(tmp_path)), how)
    assert "at least" in entry.reason
    path.with_suffix(".idx").write_bytes(idx)
    (entry,) = entries_of(list_files("text", str(tmp_path)), how)
    assert (entry.fate, entry.reason) == ("used", "")


def test_every_epoch_has_an_order_of_its_own(tmp_path):
    words = lambda i: 1 + i % 5 + (i == 1000) * 250_000  # noqa: E731  # one is longer than a block that is read at once
    files = measured(write_files(tmp_path, (2000,), words, "jsonl"), OPTIONS)
    how = {"max_document_bytes": 1 << 21}
    (cursor,) = [
        slot.cursor for slot in streams_of(files, 1, 1, **how)[0].slots.values()
    ]
    orders = [
        [int(cursor.next().content.split()[0]) for _ in range(2000)] for _ in range(3)
    ]
    assert (
        sorted(orders[0])
        == sorted(orders[1])
        == sorted(orders[2])
        == list(range(1, 2001))
    )
    assert abs(np.corrcoef([range(2000), *orders]) - np.eye(4)).max() < 0.5


def test_a_resume_reads_what_it_needs(tmp_path):
    """Without an index, of one file of ids on 64 ranks, a resume at 95 % reads nearly
    all, and an epoch reads it 64 times.
    """
    ids = np.random.default_rng(0).integers(1, 5000, 4_000_000)
    ids[::200] = EOS
    (tmp_path / "a.bin").write_bytes(ids_as(ids))
    files = measured(list_files("text", str(tmp_path)), OPTIONS)
    how = vars(replace(OPTIONS, seq_len=499, shuffle_window=16))
    (one,) = streams_of(files, 64, 1, **how)
    _, at = batches([one], round(0.95 * len(ids) / 500 / 64))
    assert sum(one.passes.bytes_read().values()) < 1.5 * files[0].size
    for rank in streams_of(files, 64, 64, positions=at, **how)[:64:9]:
        batches([rank], 1)
        assert sum(rank.passes.bytes_read().values()) < 0.02 * files[0].size


@pytest.mark.parametrize(("how", "least", "most"), [("", 10, 100), ("memory", 0.3, 3)])
def test_sorted_files_are_mixed(tmp_path, how, least, most):
    """The variance of a domain's share in a batch, as a multiple of the multinomial
    one; files are sorted by domain.
    """
    generator = np.random.default_rng(0)
    domains = 20
    slots = 30
    for f in range(16):
        lengths = generator.integers(60, 140, 1600)
        write_texts(
            tmp_path / f"{f}.jsonl",
            [f"{1 + i * domains // 1600} " * n for i, n in enumerate(lengths)],
        )
    files = measured(list_files("text", str(tmp_path)), replace(OPTIONS, index=how))
    got, _ = batches(streams_of(files, slots, 1, seq_len=511, shuffle_window=256), 100)
    shares = np.stack([(got == 1 + d).mean((1, 2)) for d in range(domains)])
    # of about 101 tokens a document
    multinomial = (1 / domains) * (1 - 1 / domains) / (slots * 512 / 101)
    assert least < ((shares - 1 / domains) ** 2).mean() / multinomial < most


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["zeros", "unknown ids", "row group"])
def test_what_is_bad_is_bad_with_an_index(tmp_path, kind):
    """Zeros at a read's end are no damage, unknown ids are bad documents, and of a
    damaged row group a part is used.
    """
    if kind == "zeros":
        path = write_texts(tmp_path / "a.jsonl", map(words_of, range(1, 4001)))
        lines = path.read_bytes()
        at = lines.index(b"\n", (1 << 16) - 3000)
        path.write_bytes(lines[: at + 1] + bytes(6000) + b"\n" + lines[at + 1 :])
    elif kind == "unknown ids":
        ids = np.array([i for n in range(1, 4001) for i in [n] * (1 + n % 30) + [EOS]])
        ids[-20_000:][ids[-20_000:] == 3900] = 6000
        (tmp_path / "a.bin").write_bytes(ids_as(ids))
    else:
        path = write_texts(
            tmp_path / "a.parquet", [f"{n} " * 20 for n in range(1, 4001)], rows=1000
        )
        content = bytearray(path.read_bytes())
        content[len(content) * 6 // 10 :][:4000] = bytes(4000)
        path.write_bytes(content)
    found = []
    for ranks, how in ((1, ""), (4, ""), (1, "memory"), (4, "memory")):
        files = measured(
            list_files("text", str(tmp_path)),
            replace(OPTIONS, index=how, max_skipped_fraction=1.0),
        )
        epoch, positions = first_epoch(streams_of(files, 4, ranks, **EPOCH))
        found.append((epoch, positions[:, Field.SKIPPED].any()))
    assert found == found[:1] * 4
    assert 1000 < len(found[0][0]) < 4001


@pytest.mark.usefixtures("small_blocks")
def test_a_block_that_is_damaged_later(tmp_path):
    """Only the slot that owns it loses it, whatever the ranks."""
    files = measured(write_files(tmp_path, (4900,), kind="bin"), OPTIONS)
    os.truncate(tmp_path / "0.bin", files[0].size - 700)
    files = [replace(files[0], size=files[0].size - 700, sample="")]
    (epoch, expected), *others = [
        first_epoch(streams_of(files, 4, ranks, **EPOCH)) for ranks in (1, 2, 4)
    ]
    assert all(
        again == epoch and np.array_equal(positions, expected)
        for again, positions in others
    )
    assert 4500 < len(epoch) < 4900


class TestOnDisk:
    @pytest.fixture
    def corpus(self, tmp_path):
        write_files(tmp_path / "data", [50, 60, 70], kind="jsonl")
        write_texts(
            tmp_path / "data" / "validation.jsonl", ["", *map(words_of, (7, 200, 201))]
        )
        return tmp_path / "data"

    def run(self, corpus, **keys):
        data = {"training.dataset": "text", "training.dataset_path": str(corpus)}
        stream = {f"stream.{key}": value for key, value in keys.items()}
        return list(index_data(changed(loaded(DEMO), data | stream), None, 2))

    def files(self, corpus, index=FOLDER, **how):
        listed = list_files("text", str(corpus))
        return measured(
            listed,
            StreamOptions(index=index and str(corpus / index), format=Format(**how)),
        )

    def test_what_it_says(self, corpus, tmp_path):
        (corpus / "1.jsonl").write_bytes(
            (corpus / "0.jsonl").read_bytes() + b'{"text": ""}\n{\n'
        )
        (corpus / "2.jsonl").write_bytes(
            (corpus / "2.jsonl").read_bytes() + bytes(1 << 14)
        )
        found = list(
            index_data(load_config(IndexOptions(str(corpus), ()).argv), None, 2)
        )
        assert found[0].startswith("172 documents, ")
        assert found[1:4] == [
            "2 of them (1.16%) have no text, or cannot be used",
            "50 of them (29.07%) repeat an earlier document exactly",
            "1 of 3 held-out documents are in the training data, too",
        ]
        assert "2.jsonl is damaged: 4,096 bytes of zeros" in found[4]
        assert found[5] == f"stream.index = '{corpus / FOLDER}'"
        # Files of a glob have no held-out documents beside them.
        assert "held-out" not in "".join(
            self.run(corpus / "*.jsonl", index=f"{tmp_path}/index")
        )

    def test_a_converted_text(self, tmp_path):
        folder = tmp_path / "texts"
        folder.mkdir()
        text = "un café et un thé, s'il vous plaît\n\n" * 50
        for name in ("a.txt", "b.txt", "validation.txt"):
            (folder / name).write_bytes(text.encode("cp1252"))
        lines = self.run(folder, text_split="blank_lines")
        assert lines[1].startswith("0 of them")
        assert "50 of 50 held-out documents" in "".join(lines)
        how = StreamOptions(
            index=str(folder / FOLDER), format=Format(text_split="blank_lines")
        )
        for file in measured(
            check_content(list_files("text", str(folder)), how, "training"), how
        ):
            assert file.documents == 50
            assert round(file.density * file.size) == 50 * len(
                text[: text.index("\n")].encode()
            )
            assert file.blocks is None

    def test_it_is_what_memory_holds(self, corpus):
        self.run(corpus)
        every = [
            self.files(corpus),
            measured(list_files("text", str(corpus)), StreamOptions(index="memory")),
        ]
        first, second = (
            [(file, *map(list, vars(file.blocks).values())) for file in files]
            for files in every
        )
        assert first == second
        moved = corpus.rename(corpus.with_name("moved"))
        assert [file.sample for file in self.files(moved)] == [
            file.sample for file, *_ in first
        ]

    def test_only_what_has_changed_is_read_again(self, corpus, monkeypatch):
        self.run(corpus)
        written = {
            path: path.stat().st_mtime_ns for path in (corpus / FOLDER).iterdir()
        }
        (corpus / "0.jsonl").write_bytes(
            (corpus / "0.jsonl").read_bytes().replace(b"1", b"3")
        )
        with pytest.raises(
            ConfigError,
            match="1 file .*0.jsonl', which has changed since .*Run titan-disp",
        ):
            self.files(corpus)
        self.run(corpus)
        assert (
            sum(
                path.stat().st_mtime_ns != written[path]
                for path in (corpus / FOLDER).iterdir()
            )
            == 1
        )
        self.files(corpus)
        with pytest.raises(
            ConfigError,
            match="3 files .* which is not in the index, or was indexed with other options",
        ):
            self.files(corpus, text_field="body")
        self.run(corpus, text_split="blank_lines")  # beside the first
        self.files(corpus)
        monkeypatch.setattr(index, "read_index", None)  # a copy is only hashed
        os.utime(corpus / "0.jsonl", ns=(0, 10**9))
        with pytest.raises(
            ConfigError,
            match="1 file .* which has another time of change than when it was indexed",
        ):
            self.files(corpus)
        self.run(corpus)
        self.files(corpus)

    def test_a_change_that_the_sample_does_not_show(self, corpus, monkeypatch):
        monkeypatch.setattr(index, "_SAMPLED", 8)
        assert "0 of them (0.00%) repeat" in "".join(self.run(corpus))
        content = (corpus / "0.jsonl").read_bytes()
        (corpus / "0.jsonl").write_bytes(
            content.replace(b'"9 9 9 9 9"', b'"4 4 4 4 4"')
        )
        assert "1 of them (0.56%) repeat" in "".join(self.run(corpus))

    @pytest.mark.parametrize("other", [{"eos_id": 1}, {"token_dtype": "uint32"}])
    def test_ids_that_are_read_in_another_way(self, corpus, other):
        (file,) = list_files("text", str(write_texts(corpus / "a.bin", ["1 2", "3 4"])))
        index.index_file(corpus, OPTIONS, file)
        assert index.current(corpus, OPTIONS, file).documents == 2
        unknown = index.current(
            corpus, replace(OPTIONS, format=replace(FORMAT, **other)), file
        )
        assert unknown.startswith("is not in the index, or was indexed with other")

    def test_an_index_that_cannot_be_used(self, corpus, caplog):
        # of another version
        other = {"facts": '{"other": 1}', "hashes": np.zeros(1), "blocks": np.zeros(1)}
        for damage in (
            lambda path: path.write_bytes(b"PK"),
            Path.unlink,
            lambda path: np.savez(path, **other),
        ):
            self.run(corpus)
            for path in (corpus / FOLDER).iterdir():
                damage(path)
            with pytest.raises(
                ConfigError, match="3 files of the data, .* which is not in the index"
            ):
                self.files(corpus)
        # The first and the last damage have a reason; a missing index has none.
        assert "npz cannot be read: ValueError: " in caplog.text
        assert "npz cannot be read: TypeError: " in caplog.text
        assert "FileNotFoundError" not in caplog.text
        shutil.rmtree(corpus / FOLDER)
        with pytest.raises(
            ConfigError, match="which does not exist: it does not cover 3 files"
        ):
            self.files(corpus)

    def test_a_change_while_it_is_indexed(self, corpus, monkeypatch):
        def records(documents):
            yield from found(documents)
            os.utime(documents.file.url, ns=(0, 10**9))

        found = index._records
        monkeypatch.setattr(index, "_records", records)
        self.run(corpus)
        with pytest.raises(
            ConfigError, match="3 files .* which has another time of change"
        ):
            self.files(corpus)

    def test_it_belongs_to_the_run(self, corpus, sample):
        self.run(corpus)
        plain, indexed = (
            loader(self.files(corpus, how), sample).state_dict() for how in ("", FOLDER)
        )
        for saved, now in ((plain, indexed), (indexed, plain)):
            with pytest.raises(
                RefusedError,
                match="stream.index: the data was read with.* an index then, and is",
            ):
                check_fingerprint(
                    *(json.loads(state["fingerprint"]) for state in (saved, now))
                )

    def test_what_cannot_be_indexed(self, corpus, monkeypatch):
        with pytest.raises(
            ConfigError, match="on the hub cannot be indexed: .* titan-disp data fetch"
        ):
            list(
                index_data(
                    changed(loaded(DEMO), {"training.dataset_path": None}), None, 1
                )
            )
        with pytest.raises(ConfigError, match='no field "body"'):
            self.run(corpus, text_field="body")
        self.run(corpus, index="memory")
        assert (corpus / FOLDER).is_dir()
        (corpus / "file").touch()
        with pytest.raises(
            ConfigError, match=r"\(stream.index or --out\) .* is not a writable folder"
        ):
            self.run(corpus, index=f"{corpus}/file")
        monkeypatch.setattr(index, "_SMALL", 10)
        with pytest.raises(
            ConfigError,
            match="expected at most 10: write an index with titan-disp data index",
        ):
            measured(list_files("text", str(corpus)), StreamOptions(index="memory"))


def scattered_then_zeros(content: bytes) -> bytes:
    """Spoil three lines of four in the first half, and all of the second half."""
    half = len(content) // 2
    lines = content[:half].splitlines(keepends=True)
    for i, line in enumerate(lines):
        if i % 4:
            lines[i] = b"x" * (len(line) - 1) + b"\n"
    return b"".join(lines) + bytes(len(content) - half)


# What becomes of a file's content. A node leaves a file with zeros whose last blocks
# were not on disk when it died.
SPOIL = {
    "zeros": lambda content: bytes(len(content)),
    "zeros from the middle": lambda content: (
        content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
    ),
    "scattered, then zeros": scattered_then_zeros,
    "half": lambda content: content[: len(content) // 2],
    "junk": lambda content: b"\xff" * len(content),
    "random": lambda content: np.random.default_rng(1).bytes(len(content)),
}
# The damage, the fraction of the bytes that it costs, the index, and the kinds of
# files.
DAMAGE = [
    ("zeros", 0.1, "", "json.gz parquet txt bin"),
    ("zeros", 0.1, "memory", "jsonl json.zst parquet bin"),
    ("zeros from the middle", 0.05, "", "jsonl txt"),
    ("zeros from the middle", 0.05, "memory", "txt bin json.gz"),
    ("scattered, then zeros", 0.0875, "", "jsonl"),
    # the rest is not stored, so that its loss is not seen in bytes
    ("half", 0.0, "", "jsonl.gz txt.gz"),
    ("junk", 0.1, "", "txt parquet"),
    ("junk", 0.1, "memory", "jsonl"),
    ("random", 0.1, "", "jsonl txt json.gz"),
]
CASES = [
    (kind, damage, lost, index)
    for damage, lost, index, kinds in DAMAGE
    for kind in kinds.split()
]


@pytest.mark.parametrize(("kind", "damage", "lost", "index"), CASES)
def test_what_is_lost_is_counted_in_bytes_and_stops_the_run(
    sample, tmp_path, kind, damage, lost, index
):
    """Of ten files, one is spoiled: stored = used + skipped on any ranks, and the limit
    is met although few documents are bad.
    """
    generator = np.random.default_rng(0)
    how = vars(LEDGER)
    # Zeros among token ids count as damage if they are very many in a row.
    documents = 1200 if kind == "bin" else 150
    for f in range(10):  # of documents of about 900 bytes of text
        numbers = [
            generator.integers(1000, 4999, 150 + i % 60) for i in range(documents)
        ]
        write_texts(
            tmp_path / f"{f}.{kind}", [" ".join(map(str, some)) for some in numbers]
        )
    whole = first_epoch(streams_of(list_files("text", str(tmp_path)), 4, 1, **how))[1][
        :, Field.BYTES
    ].sum()
    path = tmp_path / f"3.{kind}"
    path.write_bytes(SPOIL[damage](path.read_bytes()))
    files = measured(list_files("text", str(tmp_path)), replace(LEDGER, index=index))
    for ranks in (1, 4):
        _, position = first_epoch(streams_of(files, 4, ranks, **how))
        used, skipped = position[:, [Field.BYTES, Field.SKIPPED_BYTES]].sum(0) / whole
        assert used + skipped == pytest.approx(
            sum(file.size * file.density for file in files) / whole, abs=0.02
        )
        assert skipped == pytest.approx(lost, abs=0.02)

    def make(ranks, at):
        return streams_of(files, 4, ranks, positions=at, **how)

    expected = through(make, [(1, 90)])
    resumed = through(make, [(4, 31), (2, 59)])
    assert all(np.array_equal(a, b) for a, b in zip(expected, resumed, strict=True))
    one = loader(files, sample, slots=4)
    one.positions[:] = one.positions.new_tensor(position)
    one.positions[:, Field.EPOCH] = 0
    counters = together([one.counters()])
    assert counters["skipped_bytes"] == position[:, Field.SKIPPED_BYTES].sum()
    for allowed in (0.03, 0.15):
        one.options = replace(one.options, max_skipped_fraction=allowed)
        refused = pytest.raises(
            DataError,
            match="bytes of text could not be used, more than stream.max_skipped_fr",
        )
        with refused if lost > allowed else contextlib.nullcontext():
            one.check_counters(counters | {"skipped_documents": 0, "skipped_files": 0})


# The last has more in a row than bad documents may be.
@pytest.mark.parametrize(
    ("kind", "between"),
    [
        ("jsonl", [" ", ""]),
        ("json.gz", ["\n"]),
        ("parquet", [""]),
        ("jsonl", [""] * 1500),
    ],
)
def test_documents_without_text_are_no_fault(sample, tmp_path, kind, between, caplog):
    """As in raw wikitext, where a third of the rows are empty: they are passed over,
    and neither counted nor named.
    """
    texts = [
        text
        for i in range(1, 601)
        for text in (f"{i}", *(between if i % 300 == 0 or len(between) < 3 else []))
    ]
    for name in "ab":
        write_texts(tmp_path / f"{name}.{kind}", texts)
    files = list_files("text", str(tmp_path))
    (rank,) = streams_of(files, 2, 1, shuffle_window=5, on_bad_data="fail")
    found = [slot.source.next() for slot in rank.slots.values() for _ in range(700)]
    assert sum(document.start[Field.EPOCH] == 0 for document in found) == 1200
    assert (
        max(
            document.start[Field.SKIPPED] + document.start[Field.SKIPPED_BYTES]
            for document in found
        )
        == 0
    )
    assert not caplog.records
    one = loader(files, sample, slots=2)
    one.positions[:] = one.positions.new_tensor(
        np.stack([document.end for document in found[699::700]])
    )
    one.check_counters(one.counters())


def test_epochs_read_is_the_text_trained_on(sample, tmp_path, caplog):
    """128 files, each a document: some are far longer than what a slot has read of
    them, and some slots have none.
    """
    lengths = np.random.default_rng(0).lognormal(9, 1.5, 128).astype(int)
    for i, length in enumerate(lengths):
        (tmp_path / f"{i}.txt").write_text("x" * (length + 1))
    one = loader(
        measured(list_files("text", f"{tmp_path}/*.txt"), StreamOptions()),
        sample,
        slots=128,
        seq_len=2047,
    )
    one.encode = lambda text: [1] * len(text) + [EOS]
    for _ in islice(iter(one), 5 * 128 // 2):
        pass
    assert one.counters()["epochs_read"] == pytest.approx(
        5 * 128 * 2048 / (lengths.sum() + 128), rel=0.02
    )
    assert "has no documents in epoch" in caplog.text
