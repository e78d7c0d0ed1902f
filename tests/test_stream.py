"""The document streams: every document once per epoch; the same batches on any ranks
and after stops, with bad data.
"""

import ast
import contextlib
import dataclasses
import errno
import gzip
import io
import json
import math
import multiprocessing
import os
import select
import shutil
import signal
import struct
import threading
import time
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.command_line import ROOT
from tests.pages import changed
from tests.streams import (
    EOS,
    VALIDATION_FILE,
    batches,
    config,
    encode,
    epochs_of,
    first_sequences_by_hand,
    ids_as,
    loader,
    of_ranks,
    of_sizes,
    parts_by_hand,
    stored,
    streams_of,
    through,
    words_of,
    write_files,
    write_texts,
)
from titan_disp.data.assignment import (
    VERSION,
    Assignment,
    Part,
    one_share,
    prefixed,
    shares,
)
from titan_disp.data.documents import Documents
from titan_disp.data.findings import measured
from titan_disp.data.fingerprint import check_fingerprint, data_changes, read_data_state
from titan_disp.data.index import with_index
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.loader import build_dataloader, together
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.passes import Progress
from titan_disp.data.position import Field
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import (
    _ValidationSet,
    first_sequences,
    held_out_sequences,
)
from titan_disp.errors import ConfigError, DataError, RefusedError, UserError
from titan_disp.job_config import Source
from titan_disp.lab.digest import digest
from titan_disp.metric import Metric


def divisors(slots):
    return st.sampled_from(
        [ranks for ranks in range(1, slots + 1) if slots % ranks == 0]
    )


class TestAssignment:
    @settings(max_examples=100, deadline=None)
    @given(
        sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=40),
        slots=st.integers(1, 60),
        data=st.data(),
    )
    def test_every_document_has_one_owner(self, sizes, slots, data):
        """Shares are equal in bytes.

        A cut that is moved to a file's edge changes one by an eighth, which later runs
        divide.
        """
        assignment = Assignment(of_sizes(sizes), one_share(slots), seed=1)
        epoch = data.draw(st.integers(0, 3))
        owned = {file: [] for file in range(len(sizes))}
        lengths = [max(size, 1) for size in sizes]
        for slot in range(slots):
            run = assignment.run(slot, epoch)
            share = 0
            assert all(
                (s.low, s.high) == (0, 2**64) for s in run.parts.get(Part.BODY, ())
            )
            for segment in run.segments:
                owned[segment.file].append((segment.low, segment.high))
                share += (segment.high - segment.low) / 2**64 * lengths[segment.file]
            reads = {file for file in owned if slot in assignment.owners(file, epoch)}
            assert (
                assignment.files_of(range(slot, slot + 1), epoch)
                == reads
                == {s.file for s in run.segments}
            )
            assert share * slots == pytest.approx(sum(lengths), rel=0.3)
        for file, parts in owned.items():
            assert len(parts) == len(assignment.owners(file, epoch))
            lows, highs = zip(*parts, strict=True)  # in the order of the slots
            assert (lows[0], *highs) == (0, *lows[1:], 2**64)
            assert all(low < high for low, high in parts)
        ranks = data.draw(divisors(slots))
        assert (
            sum(
                len(assignment.files_of(part, epoch)) for part in of_ranks(slots, ranks)
            )
            < len(sizes) + ranks
        )

    def test_on_python_3_10(self):
        """Before Python 3.11, from_bytes has no default for the byte order."""
        calls = [
            node
            for file in (ROOT / "titan_disp").rglob("*.py")
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
            and getattr(node.func, "attr", "") == "from_bytes"
        ]
        assert calls
        assert all(len(call.args) == 2 for call in calls)

    def test_files_about_equal_are_not_cut_into_slivers(self):
        for files, slots, ranks in (
            (64, 8, 8),
            (64, 64, 64),
            (64, 128, 64),
            (1023, 640, 640),
            (1024, 1200, 600),
        ):
            sizes = np.random.default_rng(0).uniform(0.99, 1.01, files) * 1e6
            assignment = Assignment(
                of_sizes(sizes.astype(int).tolist()), one_share(slots), seed=0
            )
            read = [assignment.files_of(part, 0) for part in of_ranks(slots, ranks)]
            assert (
                sum(sizes[list(part)].sum() for part in read) / sizes.sum()
                < 1 + ranks / files
            )
            assert files != 64 or sum(map(len, read)) == 64


KINDS = (
    "jsonl",
    "json.gz",
    "json.zst",
    "parquet",
    "txt",
    "txt.gz",
    "bin",
    "npy",
    "megatron",
)
NAMES = ("web", "web2", "we")
FORMAT = Format(text_split="blank_lines", eos_id=EOS, vocab_size=5000)


def write_source(folder, kind, counts, first):
    """Write files of documents from number ``first`` on, with bad ones among them.

    Return the number after the last.
    """
    folder.mkdir()
    for f, count in enumerate(counts):
        path = folder / f"{f}.{kind}"
        texts = [words_of(number) for number in range(first, first + count)]
        first = first + count
        bad = range(count // 2, -1, -6)
        if kind == "megatron":
            documents = [encode(text)[:-1] for text in texts]
            sizes = np.array([len(ids) for ids in documents], "<i4")
            parts = sizes, 2 * (sizes.cumsum() - sizes), np.arange(count + 1)
            header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, count, count + 1)
            path.with_suffix(".bin").write_bytes(ids_as(np.concatenate(documents)))
            path.with_suffix(".idx").write_bytes(
                header + b"".join(part.tobytes() for part in parts)
            )
        elif kind in ("bin", "npy", "parquet"):
            for at in bad if kind == "parquet" else ():
                texts[at:at] = [None, " "]
            write_texts(path, texts, rows=7)
        else:
            blocks = kind.startswith("txt")
            found = [
                (text if blocks else json.dumps({"text": text})).encode()
                for text in texts
            ]
            for at in bad:
                found[at:at] = (
                    [b"\xff"]
                    if blocks
                    else [b"{bad", b"", b'{"text": " "}', b'{"text": "\\ud800"}']
                )
            # two gzip members, the first with a byte-order mark
            end = b"\r\n \n" if blocks else b"\r\n"
            parts = (b"\xef\xbb\xbf" + found[0] + end, end.join(found[1:]))
            path.write_bytes(
                b"".join(stored(part, path.name) for part in parts if part)
            )
    return first


COUNTS = st.lists(st.integers(1, 25), min_size=1, max_size=5)


# Shrinking would take minutes
@settings(max_examples=20, deadline=None, phases=(Phase.reuse, Phase.generate))
@given(
    corpus=st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from(KINDS), COUNTS),
        min_size=1,
        max_size=3,
    ),
    seq_len=st.integers(1, 40),
    window=st.sampled_from([0, 2, 7, 100]),
    block=st.sampled_from([None, 1, 60]),
    data=st.data(),
)
def test_any_run_against_the_list_of_documents(
    tmp_path_factory, corpus, seq_len, window, block, data
):
    """Each document once per epoch of its source; through any stops, on any ranks and
    threads, the same batches.
    """
    folder = tmp_path_factory.mktemp("corpus")
    first = 1
    numbers = {}
    for i, (_, kind, counts) in enumerate(corpus):
        begin = first
        first = write_source(folder / NAMES[i], kind, counts, first)
        numbers[NAMES[i]] = list(range(begin, first))
    weights = {NAMES[i]: weight for i, (weight, _, _) in enumerate(corpus)}
    slots = data.draw(
        st.sampled_from(
            [n for n in (1, 2, 3, 4, 6, 8, 12) if n >= sum(weights.values())]
        )
    )
    files = [
        file
        for name in weights
        for file in prefixed(name, list_files("text", str(folder / name)))
    ]
    if block is not None:
        # blocks of few bytes, of which few are dealt out
        with mock.patch("titan_disp.data.index._LEAST", block):
            files = with_index(files, StreamOptions(index="memory", format=FORMAT))
    found = shares(weights, slots)
    assert [share.slots / slots for share in found] == pytest.approx(
        [s.asked for s in found], abs=1 / slots
    )

    with mock.patch("titan_disp.data.assignment._MIN_BLOCKS", 1):
        mixture = Assignment(files, found, seed=0)

    def streams(ranks, positions=None):
        how = {
            "shuffle_window": window,
            "tokenizer_threads": data.draw(st.sampled_from([1, 3])),
            "format": FORMAT,
        }
        return streams_of(
            files,
            slots,
            ranks,
            seq_len,
            positions,
            mixture,
            max_skipped_fraction=1.0,
            **how,
        )

    every = [
        slot
        for rank in streams(data.draw(divisors(slots)))
        for slot in rank.slots.values()
    ]
    for share in found:
        assert (
            epochs_of(every[share.first : share.first + share.slots])
            == [numbers[share.name]] * 2
        )
    steps = data.draw(st.integers(2, 12))
    expected, end = batches(streams(1), steps)
    stops = sorted(data.draw(st.sets(st.integers(1, steps - 1), max_size=3)))
    phases = [
        (data.draw(divisors(slots)), n) for n in np.diff([0, *stops, steps]).tolist()
    ]
    got, positions = through(streams, phases)
    assert np.array_equal(got, expected)
    assert np.array_equal(positions, end)


def test_position_by_hand(tmp_path):
    """Positions as checkpoints store them.

    With 5 equal files for 2 slots, each has two whole files and half of the third. A
    slot takes four documents, of 2 bytes in UTF-8, of its whole files for one of the
    shared file; if both are equally far behind, first the part that comes first in the
    line. Seven sequences of 3 tokens are ten documents of 2 tokens, two of them from
    the shared file, and one token of the next.
    """
    for name in "abcde":
        write_texts(tmp_path / f"{name}.json", ["٣"] * 8)
    files = list_files("c4", str(tmp_path))
    _, (_, shared) = parts_by_hand(files, [8] * 5, 2, 0, 0)
    ((_, others), _) = parts_by_hand(files, [8] * 5, 2, 1, 0)
    _, positions = batches(streams_of(files, 2, 1, seq_len=2), 7)
    counted = {
        Field.DOCUMENTS: 10,
        Field.BYTES: 20,
        Field.BODY_BYTES: 16,
        Field.FILE_BYTES: 16,
    }
    after = dict.fromkeys(Field, 0) | counted | {Field.OFFSET: 1, Field.OFFSET_BYTES: 1}
    first = after | {
        Field.BODY_FILE: 1,
        Field.FILE_BYTES: 0,
        Field.TAIL: shared[1][1] + 1,
        Field.TAIL_BYTES: 4,
    }
    second = after | {
        Field.BODY_DOCUMENT: 8,
        Field.HEAD: others[1][1] + 1,
        Field.HEAD_BYTES: 4,
    }
    assert positions.tolist() == [[*first.values()], [*second.values()]]
    assert [int(field) for field in after] == list(range(19))


@pytest.mark.parametrize("window", [0, 8])
def test_a_slot_far_behind_rereads_rather_than_fill_memory(tmp_path, window):
    # Some are far longer
    files = write_files(tmp_path, [300] * 3, words=lambda i: 1 + (i % 3 == 0) * 200)
    expected, _ = batches(
        streams_of(files, 9, 9, seq_len=15, shuffle_window=window), 60
    )
    (rank,) = streams_of(
        files, 9, 1, seq_len=15, queue_bytes=2000, shuffle_window=window
    )
    got, _ = batches([rank], 60)
    assert np.array_equal(got, expected)
    open_passes = set(rank.passes._open.values())
    of_files = {file for _, _, file in rank.passes._open}
    assert window or len(open_passes) > len(of_files)
    # Since the last call
    assert [sum(rank.passes.bytes_read().values()) > 0 for _ in range(2)] == [
        True,
        False,
    ]
    lengths = [
        len(line)
        for f in files
        for line in gzip.decompress(Path(f.url).read_bytes()).splitlines()
    ]
    most = max(reading.queued for reading in open_passes)
    # The part that a pass has read may have a larger mean.
    assert most <= 2000 + 9 * window * 1.1 * np.mean(lengths) + 9 * max(lengths)
    # The first slot reads two epochs, far ahead of the others, then the next one.
    (rank,) = streams_of(
        files, 9, 1, seq_len=15, queue_bytes=2000, shuffle_window=window
    )
    assert epochs_of(rank.slots.values()) == [list(range(1, 901))] * 2


def test_what_the_worker_reads_ahead_is_counted(sample, tmp_path):
    write_texts(tmp_path / "a.jsonl", ["x " * 5000] * 100)  # of many reads
    one = loader(
        list_files("text", str(tmp_path)), sample, prefetch=2, slots=2, seq_len=4096
    )
    for _ in islice(iter(one), 40):
        pass
    one.close()
    assert one.counters()["stored_bytes"] > one.counters()["text_bytes"] > 500_000


def test_the_slot_that_waits_for_a_document_stays_in_its_pass(tmp_path):
    """Memory is bounded by dropping other slots: a slot that asks would read the file
    again for every document.
    """
    files = write_files(tmp_path, [300])
    (rank,) = streams_of(files, 1, 1, queue_bytes=10)
    batches([rank], 100)
    assert sum(rank.passes.bytes_read().values()) <= files[0].size


LINE = b'{"text": "7"}\n'


def fill(folder, files, content, suffix="json"):
    (folder / f"0000.{suffix}").write_bytes(content)
    for i in range(1, files):
        os.link(folder / f"0000.{suffix}", folder / f"{i:04d}.{suffix}")
    return list_files("text", str(folder))


class TestBadData:
    def test_skipped_named_and_counted_or_refused(self, tmp_path, caplog):
        sound = [json.dumps({"text": f"{i} " * 20}).encode() for i in range(1, 400)]
        bad = [b"{not json", b'{"url": "no text"}', b"null"]
        whole = gzip.compress(b"\n".join(sound[30:]))
        (tmp_path / "a.json").write_bytes(
            b"\n".join([*sound[:10], *bad, *sound[10:30], b'"' + b"9 " * 40000 + b'"'])
        )
        (tmp_path / "b.json.gz").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "c.json").write_bytes(b"\n".join(sound[60:90]))
        files = list_files("c4", str(tmp_path))
        how = {"max_document_bytes": 1 << 16}
        _, end = batches(streams_of(files, 3, 1, max_skipped_fraction=1.0, **how), 3000)
        for said in (
            "document 10: malformed JSON",
            "max_document_mb",
            "b.json.gz is damaged and ends early: EOFError",
        ):
            assert said in caplog.text
        # once, not in every epoch
        assert sum(said.startswith("skipped: ") for said in caplog.messages) == 4 + 1
        epochs = end[:, Field.EPOCH]
        assert epochs.min() >= 1
        for field, each in ((Field.SKIPPED, 4), (Field.SKIPPED_FILES, 1)):
            assert (
                each * epochs.min() <= end[:, field].sum() <= each * (epochs.max() + 1)
            )
        for file, refused in zip(
            files,
            (r'document 10: mal.*on_bad_data = "skip"', "is damaged"),
            strict=False,
        ):
            with pytest.raises(ConfigError, match=refused):
                batches(streams_of([file], 1, 1, on_bad_data="fail", **how), 100000)

    # 20 · S epochs without a document or 1,000 bad documents are enough. A slot does
    # not try all documents of a corpus that is wholly wrong: files are skipped, and 20
    # of them or 20,000 documents are enough.
    @pytest.mark.parametrize(
        ("files", "content", "slots", "fraction", "found"),
        [
            (
                1,
                b"broken\n" * 20,
                1,
                1.0,
                "epochs: 21, bad documents: 420, damaged files: 0",
            ),
            (
                1,
                b"broken\n" * 500,
                1,
                0.0,
                "epochs: 2, bad documents: 1000, damaged files: 0",
            ),
            (
                200,
                b"{}\n" * 2500,
                400,
                0.01,
                r"slot \d+ of 400 found no .*bad documents: 20000",
            ),
            (2000, b"{}\n" * 150, 1, 0.01, "bad documents: 3000, damaged files: 20"),
            (
                200,
                b"not gzip",
                4,
                0.01,
                "epochs: 0, bad documents: 0, damaged files: 20.* in these files: 200",
            ),
            (
                1,
                b'{"text": " "}\n' * 1200,
                1,
                0.01,
                "bad documents: 0, damaged files: 0, .* text: 20000.*add data",
            ),
            (
                2,
                gzip.compress(b"", mtime=0),
                8,
                0.01,
                "epochs: 161, bad documents: 0, damaged files: 0.*add data",
            ),
        ],
    )
    def test_a_slot_that_finds_nothing_gives_up(
        self, tmp_path, files, content, slots, fraction, found
    ):
        listed = fill(
            tmp_path, files, content, "json" if b"\n" in content else "json.gz"
        )
        with pytest.raises(DataError, match=found):
            batches(streams_of(listed, slots, 1, max_skipped_fraction=fraction), 1)

    @pytest.mark.parametrize(
        ("files", "good", "wrong", "slots", "steps", "in_a_row"),
        [
            (1000, 1, 3000, 4, 250, 1000),
            (150, 20, 2500, 300, 4, 1000),
            (150, 20, 400, 50, 58, 400),
        ],
    )
    def test_one_wrong_file_among_many(
        self, tmp_path, files, good, wrong, slots, steps, in_a_row, caplog
    ):
        """It counts as one skipped file, and its documents are not counted.

        In the second corpus, two slots begin with it.
        """
        line = json.dumps({"text": "x" * (14 * wrong // good - 13)}) + "\n"
        fill(tmp_path, files - 1, line.encode() * good)
        (tmp_path / "wrong.json").write_text('{"other": 12}\n' * wrong)
        listed = list_files("text", str(tmp_path))
        ends = []
        for ranks in (1, 2):
            streams = streams_of(
                listed, slots, ranks, encode=lambda text: [1] * 7 + [EOS]
            )
            ends.append(batches(streams, steps)[1])
            # It is closed, and none of its documents is kept for anybody.
            opened = [file for rank in streams for _, _, file in rank.passes._open]
            assert files - 1 not in opened
        assert np.array_equal(*ends)
        total = ends[0].sum(0)
        assert total[Field.DOCUMENTS] == slots * steps >= 1000
        assert (total[Field.SKIPPED], total[Field.SKIPPED_FILES]) == (0, 1)
        assert (
            f"wrong.json is damaged and ends early: {in_a_row} documents in a row cannot be used"
            in caplog.text
        )

    def test_garbage_in_a_row_is_a_damaged_file(self, tmp_path, caplog):
        """This holds for compressed files, where flipped bytes cause it; not for plain
        ones. Empty texts are no garbage.
        """
        good = json.dumps({"text": "5 " * 20})
        empty = json.dumps({"text": " "})
        # which are one too few
        seven = [empty] * 40 + ["{ga"] * 7 + ['{"text": "8"}'] * 60
        spoiled = [good] * 100 + seven + ["rbage}"] * 300 + ['{"text": "666"}'] * 200
        (tmp_path / "a.json.gz").write_bytes(gzip.compress("\n".join(spoiled).encode()))
        (tmp_path / "b.json").write_text(
            "\n".join([good] * 200 + ["garbage"] * 20 + ['{"text": "7"}'] * 100)
        )
        files = list_files("text", str(tmp_path))
        phases = [1, 1, 1, 2, 3, 5, 8, 29, 500]
        streams = partial(streams_of, files, 4, max_skipped_fraction=1.0)
        tokens, positions = batches(streams(1), sum(phases))
        assert positions[:, Field.EPOCH].min() >= 1
        assert (
            "a.json.gz is damaged and ends early: 8 documents in a row cannot be parsed"
            in caplog.text
        )
        assert "b.json is damaged" not in caplog.text
        assert (8 in tokens, 666 in tokens, 7 in tokens) == (True, False, True)
        assert (
            1
            <= positions[:, Field.SKIPPED_FILES].sum()
            <= positions[:, Field.EPOCH].max() + 1
        )
        got, at = through(
            lambda ranks, at: streams(ranks, positions=at),
            [(4, steps) for steps in phases],
        )
        assert np.array_equal(got, tokens)
        assert np.array_equal(at, positions)

    def test_a_file_that_is_gone_is_not_skipped(self, tmp_path):
        files = write_files(tmp_path, [20, 20])
        Path(files[1].url).unlink()
        with pytest.raises(
            ConfigError, match=r"cannot read .*/1.json.gz: FileNotFoundError"
        ):
            batches(streams_of(files, 2, 1), 50)

    @pytest.mark.parametrize("kind", ["json", "json.gz", "json.zst", "parquet"])
    @pytest.mark.parametrize("trouble", ["cut off", "away", "passing"])
    def test_a_file_that_fails_while_it_is_read_is_not_skipped(
        self, tmp_path, kind, trouble, monkeypatch, caplog
    ):
        """This holds for any format, although its library may raise errors of its own:
        the file is not damaged.
        """
        rng = np.random.default_rng(0)
        reads = iter(range(10**6))
        fail = set()
        # 2 MB even when compressed, so that no reader holds all of them in its buffers.
        large = write_texts(
            tmp_path / f"train.{kind}", [rng.bytes(1000).hex() for _ in range(2000)]
        )

        class Failing(io.FileIO):
            def read(self, size=-1):
                if (number := next(reads)) in fail:
                    raise OSError(
                        errno.ESTALE if number % 2 else errno.EIO, "of the server"
                    )
                return super().read(size)

        monkeypatch.setattr("titan_disp.data.storage.io.FileIO", Failing)
        monkeypatch.setattr("titan_disp.retry.FIRST_PAUSE", 0.001)
        how = StreamOptions(
            max_document_bytes=1 << 20,
            retry_seconds=9.0 if trouble == "passing" else 0.02,
        )
        documents = Documents(*list_files("text", str(large)), how)
        documents.read()
        at = next(reads)
        if trouble == "passing":
            fail |= {at + 1, at + 2, at + 4}
            assert len(list(iter(documents.read, None))) == 1999
            assert [
                record.message.count("trying again in 0.00")
                for record in caplog.records
            ] == [1, 1, 1]
            return
        fail |= {*range(at + 1, 1000)} if trouble == "away" else set()
        os.truncate(large, large.stat().st_size // (2 if trouble == "cut off" else 1))
        found = (
            "cannot read .*of the server"
            if fail
            else rf"{large.name} has (at most )?\d+ bytes, but had \d+ when the files"
        )
        with pytest.raises(DataError, match=found):
            deque(iter(documents.read, None), maxlen=0)


def test_position_is_of_batches_consumed_not_prefetched(sample):
    files = list_files("c4", str(sample))
    ahead, plain = (
        loader(files, sample, prefetch=n, seq_len=100, segments=True) for n in (4, 0)
    )
    a = iter(ahead)
    b = iter(plain)
    for _ in range(32):  # the eight slots have four turns
        (x, _) = next(a)
        (y, _) = next(b)
        assert x.keys() == {"input", "segments"}
        assert all(torch.equal(x[key], y[key]) for key in x)
    saved = ahead.state_dict()["positions"]
    assert torch.equal(saved, plain.positions)
    before = saved.clone()
    _ = next(a)
    assert torch.equal(saved, before), "state_dict must return a copy"
    assert (x["segments"].dtype, x["segments"][:, 0].any().item()) == (
        torch.int32,
        False,
    )


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_resume_says_how_far_it_has_read(sample, tmp_path, monkeypatch, prefetch):
    """In the middle of three files, it reads half of each, in stored bytes."""
    monkeypatch.setattr("titan_disp.data.passes.PROGRESS_SECONDS", 0.001)
    generator = np.random.default_rng(0)
    for name in "abc":
        texts = [
            " ".join(map(str, generator.integers(0, 9999, 150))) for _ in range(2000)
        ]
        write_texts(tmp_path / f"{name}.json.gz", texts)
    files = measured(list_files("text", str(tmp_path)), StreamOptions())

    def make():
        """A document is a sequence."""
        one = loader(files, sample, prefetch=prefetch, slots=3, fast_tokenizer=False)
        one.encode = lambda text: [1] * 32 + [EOS]
        reports = []
        one.on_progress = reports.append
        return one, reports

    first, reports = make()
    for _ in islice(iter(first), 1500):
        pass
    first.close()
    assert reports == [Progress(0, 0, math.inf, finished=True)]
    second, reports = make()
    second.load_state_dict(first.state_dict())
    next(iter(second))
    second.close()
    *before, end = reports
    assert before
    stored = sum(file.size for file in files)
    assert (end.finished, end.expected) == (True, end.read)
    half = 0.95 * stored / 2
    assert half < end.read < stored / 2 + 3 * (1 << 19)  # gzip reads half a MiB at once
    assert [report.read for report in before] == sorted(
        report.read for report in before
    )
    for report in before:
        assert not report.finished
        assert max(half, report.read) <= report.expected <= end.read
        assert str(report).startswith("reading to the position, 0.00 of 0.00 GB")


def test_batches_before_an_error_come_first(sample, tmp_path):
    texts = [words_of(i, lambda i: 20) for i in range(180)]
    for name, part in (
        ("a", texts[:60]),
        ("b", [*texts[60:100], 100, *texts[101:120]]),
        ("c", texts[120:]),
    ):
        write_texts(tmp_path / f"{name}.json", part)
    files = list_files("c4", str(tmp_path))
    found = []
    for prefetch in (0, 4):
        one = loader(files, sample, prefetch=prefetch, slots=3, on_bad_data="fail")
        tokens = []
        with pytest.raises(DataError, match="document 40: "):
            tokens.extend(x["input"].clone() for x, _ in one)
        found.append((torch.stack(tokens), one.positions))
    (plain, at), (grouped, then) = found
    assert len(plain) % 32  # the error is in the middle of a group
    assert torch.equal(plain, grouped)
    assert torch.equal(at, then)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_failure_of_the_worker_is_one_traceback(sample, tmp_path, prefetch):
    one = loader(write_files(tmp_path, [90]), sample, prefetch=prefetch)
    one.encode = lambda text: 1 / 0
    with pytest.raises(
        UserError, match=r"(?s)reading the data failed.*Traceback.*ZeroDivisionError"
    ) as error:
        next(iter(one))
    assert str(error.value).count("Traceback") == 1


def rank_with_a_worker(sample, pipe, seq_len):
    batches = rank_with_a_worker.kept = iter(
        loader(list_files("c4", str(sample)), sample, prefetch=2, seq_len=seq_len)
    )
    next(batches)
    (worker,) = multiprocessing.active_children()
    pipe.send(worker.pid)
    for _ in range(pipe.recv()):
        next(batches)
    pipe.send(worker.is_alive())


@pytest.mark.parametrize("killed", [False, True])
def test_worker_outlives_signals_but_not_its_rank(sample, killed):
    """Signals do not stop the worker; the end of its rank does, although its pipe is
    full and nobody reads it.
    """
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    rank = fork.Process(
        target=rank_with_a_worker, args=(sample, there, 1024 if killed else 32)
    )
    rank.start()
    worker = os.pidfd_open(here.recv())
    if killed:
        rank.kill()
    else:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.pidfd_send_signal(worker, number)
        time.sleep(0.5)
        here.send(200)  # batches come in groups of 32
        assert here.recv() is True
    rank.join(200)
    assert rank.exitcode == (-signal.SIGKILL if killed else 0)
    assert select.select([worker], [], [], 200)[0]  # it has ended
    os.close(worker)


def verdict(loader, counters, allowed):
    loader.options = dataclasses.replace(loader.options, max_skipped_fraction=allowed)
    try:
        loader.check_counters(counters)
    except DataError as error:
        return str(error)
    return ""


def test_limits_begin_anew_with_the_streams(sample, tmp_path):
    """After stream.on_mismatch = "restart" with epoch 9, a tenth of the files and of the
    text of that epoch is too much, also after a resume.
    """
    files = write_files(tmp_path, [3] * 200)
    one = loader(files, sample)
    one.restart(9)
    again = loader(files, sample)
    again.load_state_dict(one.state_dict())
    for restarted in (one, again):
        counters = together([restarted.counters()])
        assert not verdict(restarted, counters, 0.01)
        damaged = counters | {Metric("skipped_files"): 18}
        assert "18 of 200 files are damaged" in verdict(restarted, damaged, 0.01)
        lost = counters | {
            Metric("documents"): 2000,
            Metric("skipped_bytes"): 0.09 * restarted.texts[0],
        }
        assert "bytes of text could not be used" in verdict(restarted, lost, 0.01)
        lost[Metric("epoch")] = 19  # 9 % of one epoch are 0.8 % of 11
        assert not verdict(restarted, lost, 0.01)


def test_bad_documents_are_judged_over_all_ranks(sample, tmp_path):
    """Each of 12 slots has a file of its own; in one, every tenth document is bad.

    A document is a sequence, and a step takes two of each slot. After step t, a slot
    has used 2t documents, and that slot has skipped (2t − 1) // 9. After step 42 these
    are 9 of 1017, a fraction between 0.008 and 0.01. Before that, there are fewer than
    1000 documents.
    """
    for i in range(12):
        (tmp_path / f"{i:02d}.json").write_bytes(
            (LINE * 9 + (b'{"text": 777}\n' if i == 4 else LINE)) * 10
        )
    files = list_files("text", str(tmp_path))
    for ranks in (1, 3, 12):
        loaders = [
            loader(files, sample, rank, ranks, slots=12) for rank in range(ranks)
        ]
        for one in loaders:
            one.encode = lambda text: [1] * 32 + [EOS]
            # without threads, which take longer
            one.options = dataclasses.replace(one.options, fast_tokenizer=True)
        batches = [iter(one) for one in loaders]
        said = []
        for step in range(1, 43):
            for own in batches:
                for _ in range(12 // ranks):
                    next(own)
            counters = together([one.counters() for one in loaders])
            said += [
                (step, allowed, verdict(loaders[-1], counters, allowed))
                for allowed in (0.008, 0.01)
            ]
        ((*when, why),) = [one for one in said if one[2]]
        assert when == [42, 0.008]
        assert why.startswith(
            "9 of 1017 documents could not be used, more than "
            "stream.max_skipped_fraction 0.008"
        )


def test_a_run_stops_at_many_damaged_files(sample):
    """Of those of all epochs that the sources have begun; and at 10 of each epoch, so
    that a few files stop none.
    """
    for files, epochs, damaged, allowed, stops in (
        *(
            ([16], [0], 1, 0.01, False),
            ([16], [0], 9, 0.01, False),
            ([16], [0], 10, 0.01, True),
        ),
        *(
            ([16], [9], 90, 0.01, False),
            ([16], [9], 100, 0.01, True),
            ([16], [9], 100, 0.9, False),
        ),
        *(([1000], [9], 100, 0.01, False), ([1000], [9], 110, 0.01, True)),
        *(([9, 100], [9, 0], 19, 0.1, False), ([9, 100], [9, 0], 20, 0.1, True)),
    ):
        listed = [
            DataFile(f"{source}/{i}", "", 1)
            for source, count in enumerate(files)
            for i in range(count)
        ]
        one = loader(
            listed,
            sample,
            shares=shares({str(i): 1 for i in range(len(files))}, 8)
            if len(files) > 1
            else (),
        )
        one.positions[:, Field.DOCUMENTS] = 10**8
        one.positions[0, Field.SKIPPED_FILES] = damaged
        one.positions[[0, -1][: len(files)], Field.EPOCH] = torch.tensor(epochs)
        begun = sum(
            count * (epoch + 1) for count, epoch in zip(files, epochs, strict=True)
        )
        said = verdict(one, one.counters(), allowed)
        assert (f"{damaged} of {begun} files are damaged" in said, bool(said)) == (
            stops,
            stops,
        )


def test_broken_validation_data_is_refused(sample, tmp_path):
    (tmp_path / "x.json").write_text(
        "".join('{"text": "a word"}\n' if i % 10 else "broken\n" for i in range(2000))
    )
    job = config(sample)
    tokenizer = load_tokenizer(sample / "tokenizer")
    first_sequences(list_files("text", str(tmp_path)), tokenizer, job, 8, 50, "")
    with pytest.raises(
        DataError,
        match=r"documents could not be used, more than stream.max_skipped_fraction 0.01",
    ):
        first_sequences(list_files("text", str(tmp_path)), tokenizer, job, 8, 400, "")


def test_what_is_other_data(sample, tmp_path):
    """tests/test_resume_keys.py has the keys."""
    files = list_files("c4", str(sample))
    one = loader(files, sample)
    saved = one.state_dict()
    longer = [DataFile(files[0].name, files[0].url, files[0].size + 1), *files[1:]]
    with pytest.raises(
        ConfigError,
        match="8 now, with 1 difference; first c4-train.00000-of-00008.json.gz",
    ):
        loader(longer, sample).load_state_dict(saved)
    # it has grown
    with pytest.raises(DataError, match="but had .* when the files were listed"):
        Documents(
            dataclasses.replace(files[0], size=files[0].size - 1), StreamOptions()
        ).read()
    # a window of 1 shuffles nothing either
    loader(files, sample, shuffle_window=1).load_state_dict(saved)
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    of_another_loader, epoch = read_data_state(str(tmp_path))
    assert epoch == -1
    without = {
        key: value for key, value in one.fingerprint.items() if key != "tokenizer"
    }
    for then, now in ((without, one.fingerprint), (one.fingerprint, without)):
        assert [text.split(":")[0] for text in data_changes(then, now)] == ["tokenizer"]
    with pytest.raises(
        ConfigError, match=r'written by another loader.*stream.on_mismatch = "restart"'
    ):
        check_fingerprint(of_another_loader, one.fingerprint)
    one.fingerprint["assignment"] = VERSION - 1
    with pytest.raises(
        ConfigError, match=f"assignment: {VERSION - 1} then, {VERSION} now"
    ):
        loader(files, sample).load_state_dict(one.state_dict())


def test_a_file_that_changes_between_a_save_and_a_resume(sample, tmp_path):
    """Its name and size stay.

    A copy, with another time of writing, is no change, and neither are files on the
    hub.
    """
    lines = [f'{{"text": "{i} {words_of(i)}"}}\n' for i in range(90)]
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    job = config(
        sample, "--training.dataset", "text", "--training.dataset_path", str(tmp_path)
    )
    tokenizer = load_tokenizer(sample / "tokenizer")
    saved = build_dataloader(1, 0, tokenizer, job).state_dict()
    same = "content: 1 file of the same size with other documents, first b.jsonl"
    for text in (lines[::-1], lines[45:] + lines[:45], lines):
        (tmp_path / "b.jsonl").write_text("".join(text))
        now = build_dataloader(1, 0, tokenizer, job)
        with (
            contextlib.nullcontext()
            if text == lines
            else pytest.raises(RefusedError, match=same)
        ):
            now.load_state_dict(saved)
        assert (
            data_changes(
                json.loads(saved["fingerprint"]), now.fingerprint | {"contents": {}}
            )
            == []
        )
    # With another size, it is not said to have the same size.
    (tmp_path / "b.jsonl").write_text("".join(lines[45:]))
    now = build_dataloader(1, 0, tokenizer, job)
    (change,) = data_changes(json.loads(saved["fingerprint"]), now.fingerprint)
    assert change.startswith(
        "data: 3 files then, 3 now, with 1 difference; first b.jsonl"
    )
    (tmp_path / "d.jsonl").write_text(lines[0])
    (tmp_path / "b.jsonl").write_text("".join(lines))
    now = build_dataloader(1, 0, tokenizer, job)
    (change,) = data_changes(json.loads(saved["fingerprint"]), now.fingerprint)
    size = len(lines[0])
    assert change.endswith(f"first d.jsonl (absent then, {size} bytes now)")
    (change,) = data_changes(now.fingerprint, json.loads(saved["fingerprint"]))
    assert change.endswith(f"first d.jsonl ({size} bytes then, absent now)")


def test_validation_is_the_same_on_any_ranks(sample):
    options = (
        "--validation.enable",
        "--validation.local_batch_size",
        "2",
        "--stream.validation_sequences",
        "16",
    )
    job = config(
        sample,
        *options,
        "--validation.dataset_path",
        str(sample),
        "--validation.seq_len",
        "64",
    )
    tokenizer = load_tokenizer(sample / "tokenizer")
    expected = sorted(
        first_sequences_by_hand(sample / VALIDATION_FILE, sample, 16, 65).tolist()
    )
    for ranks in (1, 2, 8):
        sets = [_ValidationSet(job, tokenizer, ranks, rank) for rank in range(ranks)]
        batches = [
            [torch.cat([x["input"], labels[:, -1:]], 1) for x, labels in one]
            for one in sets
        ]
        assert {len(b) for b in batches} == {16 // ranks // 2}
        assert sorted(row.tolist() for b in batches for x in b for row in x) == expected
        inputs, labels = next(iter(sets[-1]))  # a second validation
        assert torch.equal(inputs["input"], batches[-1][0][:, :-1])
        assert torch.equal(labels, batches[-1][0][:, 1:])


def test_held_out_sequences_are_the_first_of_the_validation_split(
    sample, tmp_path, caplog
):
    tokenizer = load_tokenizer(sample / "tokenizer")
    job = config(sample)
    expected = first_sequences_by_hand(sample / VALIDATION_FILE, sample, 5, 33)
    (found,) = held_out_sequences(job, tokenizer, 5)
    assert torch.equal(found, expected)

    other = shutil.copy(
        sample / "en" / "c4-train.00002-of-00008.json.gz", tmp_path / "valid.json.gz"
    )
    section = job.validation
    section.enable = True
    section.dataset = "text_validation"
    section.dataset_path = str(tmp_path)
    section.seq_len = 64  # of validation; held-out sequences have training's
    (found,) = held_out_sequences(job, tokenizer, 5)
    assert torch.equal(found, first_sequences_by_hand(other, sample, 5, 33))
    several = {"validation.dataset_path": f"{sample}/en/*.gz"}
    every = [
        held_out_sequences(changed(job, several | {"stream.seed": seed}), tokenizer, 1)[
            0
        ]
        for seed in range(4)
    ]
    assert all(torch.equal(found, every[0]) for found in every)

    section.enable = False
    job.training.dataset_path = None
    beside = (
        Source(1.0, str(other)),
        Source(1.0, str(write_texts(tmp_path / "train" / "train.json", ["a"]).parent)),
    )
    # no validation split is beside a file, or in the folder
    job.stream.sources = [*beside, Source(1.0, str(sample))]
    (found,) = held_out_sequences(job, tokenizer, 5)
    assert torch.equal(found, expected)
    for job.stream.sources in ([beside[0]], [beside[1]]):
        assert held_out_sequences(job, tokenizer, 5) is None
    assert "no validation split: " in caplog.text


def test_digest(sample, tmp_path):
    (tmp_path / "train.json.gz").symlink_to(
        sample / "en" / "c4-train.00000-of-00008.json.gz"
    )
    options = (
        "--training.global_batch_size",
        "80",
        "--training.local_batch_size",
        "1",
        "--training.seq_len",
        "256",
    )
    options += ("--training.dataset", "text", "--training.dataset_path", str(tmp_path))
    # 0.14 M tokens: more than an epoch
    whole = digest(config(sample, *options), 7, [(0, 1)])
    assert whole.counters["epoch"] >= 1
    assert len(set(whole.hashes)) == 7
    few = ("--stream.slots", "16", "--training.local_batch_size", "5")
    other = digest(config(sample, *options, *few), 4, [(0, 1)]).hashes
    for more, hashes, phases in (
        ((), whole.hashes, [(0, 2), (3, 40), (5, 4)]),
        (("--stream.prefetch", "3"), whole.hashes[:5], [(0, 8), (3, 1)]),
        (few, other, [(0, 8), (2, 16)]),
    ):
        assert (
            digest(config(sample, *options, *more), len(hashes), phases).hashes
            == hashes
        ), phases
    assert other != whole.hashes[:4]
    with pytest.raises(
        ConfigError, match="--ranks or --resume-ranks is 0, expected at least 1"
    ):
        digest(config(sample, *options), 1, [(0, 0)])
    with pytest.raises(ConfigError, match="is not a positive multiple of .* × 3 data"):
        digest(config(sample, *options), 1, [(0, 3)])


def test_an_abandoned_loader_can_be_closed_while_a_thread_starts(sample, tmp_path):
    """The garbage collector may do it anywhere: a whole suite hung in threading, which
    holds a lock as it starts a thread.
    """
    batches = iter(loader(write_files(tmp_path, [50]), sample))
    next(batches)
    # of Python up to 3.12
    with getattr(threading, "_shutdown_locks_lock", contextlib.nullcontext()):
        closing = threading.Thread(target=batches.close, daemon=True)
        closing.start()
        closing.join(200)
        assert not closing.is_alive()
