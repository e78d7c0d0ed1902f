"""The document streams: every document once per epoch; the same batches on any ranks, after any stops, with bad data.

Terms (slot, epoch, pass, position) are those of ``titan_disp.data``. ``*_by_hand`` functions compute the expected
result in the plainest way.
"""

import dataclasses
import errno
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from titan_disp.config.load import load_config
from titan_disp.data.assignment import VERSION, Assignment
from titan_disp.data.cursor import Faults
from titan_disp.data.documents import Documents
from titan_disp.data.files import DataFile, list_files
from titan_disp.data.fingerprint import check_fingerprint, differences, read_data_state
from titan_disp.data.formats import BadDocument, text_of
from titan_disp.data.loader import StreamLoader, open_stream, together
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Field, Position
from titan_disp.data.stream import RankStreams, Sequences
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import _ValidationSet, first_sequences, held_out_sequences
from titan_disp.errors import ConfigError, DataError
from titan_disp.job_config import all_keys, fixed
from titan_disp.lab.digest import digest

EOS = 0
READ = StreamOptions(max_document_bytes=1 << 20)
VALIDATION_FILE = "en/c4-validation.00000-of-00001.json.gz"  # in the sample corpus


def encode(text):
    """Make tokens that say which document they come from: one per word, the document's number; then EOS."""
    return [int(word) for word in text.split()] + [EOS]


def write_files(folder, counts, words=lambda i: 1 + i % 5):
    """Write files of JSON lines. Documents are numbered from 1; document i is the word i, repeated words(i) times."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for f, count in enumerate(counts):
        with gzip.open(folder / f"c4-train.{f:05d}-of-{len(counts):05d}.json.gz", "wt", compresslevel=1) as file:
            for _ in range(count):
                number += 1
                file.write(json.dumps({"text": " ".join([str(number)] * words(number))}) + "\n")
    return list_files("c4", str(folder))


def streams_of(files, slots, ranks, seq_len=7, positions=None, assignment=None, **options):
    assignment = assignment or Assignment(files, slots, seed=0)
    positions = np.zeros((slots, len(Field)), dtype=np.int64) if positions is None else positions
    own = slots // ranks
    return [
        RankStreams(
            files,
            range(r * own, (r + 1) * own),
            positions[r * own : (r + 1) * own],
            assignment,
            encode,
            StreamOptions(seq_len=seq_len, **options),
        )
        for r in range(ranks)
    ]


def batches(ranks, steps):
    """Return sequences [steps, slots, seq_len + 1], and the positions [slots, k] after them."""
    out = [np.stack([slot.sequence() for rank in ranks for slot in rank.slots.values()]) for _ in range(steps)]
    return np.stack(out), np.stack([slot.position for rank in ranks for slot in rank.slots.values()])


def documents_in(tokens):
    """The numbers of the documents that end in these tokens of one slot, in order."""
    flat = tokens.reshape(-1)
    ends = np.flatnonzero(flat == EOS)
    return [int(flat[i - 1]) for i in ends if i]


def of_sizes(sizes):
    return [DataFile(f"f{i}", f"f{i}", size) for i, size in enumerate(sizes)]


class TestAssignment:
    @settings(max_examples=100, deadline=None)
    @given(
        sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=40), slots=st.integers(1, 60), epoch=st.integers(0, 3)
    )
    def test_every_document_has_one_owner(self, sizes, slots, epoch):
        assignment = Assignment(of_sizes(sizes), slots, seed=1)
        owned = {file: [] for file in range(len(sizes))}
        for slot in range(slots):
            run = assignment.run(slot, epoch)
            assert all((s.low, s.high) == (0, 2**64) for s in run.body)
            for segment in run.segments:
                owned[segment.file].append((segment.low, segment.high))
                assert slot in assignment.owners(segment.file, epoch)
            reads = {file for file in owned if slot in assignment.owners(file, epoch)}
            assert assignment.files_of(range(slot, slot + 1), epoch) == reads
        for file, parts in owned.items():
            assert len(parts) == len(assignment.owners(file, epoch))
            lows, highs = zip(*parts, strict=True)  # in the order of the slots
            assert (lows[0], *highs) == (0, *lows[1:], 2**64)
            assert all(low < high for low, high in parts)

    @settings(max_examples=100, deadline=None)
    @given(sizes=st.lists(st.integers(1, 5000), min_size=1, max_size=40), slots=st.integers(1, 60))
    def test_shares_are_equal_in_bytes(self, sizes, slots):
        """A cut that is moved to the edge of a file changes a share by up to an eighth, which later runs divide."""
        assignment = Assignment(of_sizes(sizes), slots, seed=1)
        for slot in range(slots):
            parts = [(s.high - s.low) / 2**64 * sizes[s.file] for s in assignment.run(slot, 0).segments]
            assert sum(parts) * slots == pytest.approx(sum(sizes), rel=0.3)

    def test_what_a_slot_wants_of_a_shared_file(self):
        """Of two files and three slots, the second has parts of both: each from its position on, until it is read."""
        assignment = Assignment(of_sizes([900, 900]), 3, seed=0)
        run = assignment.run(1, 2)
        position = Position(1, np.zeros(len(Field), dtype=np.int64), assignment)
        position.values[[Field.EPOCH, Field.HEAD, Field.TAIL]] = 2, 40, 50
        assert position.wants(run.head.file, 2) == (run.head, 40)
        assert position.wants(run.tail.file, 2) == (run.tail, 50)
        position.values[Field.DONE] = 1
        assert position.wants(run.head.file, 2) is None
        assert position.wants(run.tail.file, 2) == (run.tail, 50)
        later = assignment.run(1, 3)
        assert position.wants(later.head.file, 3) == (later.head, 0)
        assert position.wants(run.tail.file, 1) is None

    def test_order_differs_by_epoch_and_seed(self):
        files = of_sizes([1] * 50)
        orders = [tuple(Assignment(files, 5, seed).order(epoch)) for seed in (0, 1) for epoch in (0, 1)]
        assert len(set(orders)) == 4
        assert all(sorted(order) == list(range(50)) for order in orders)

    def test_on_python_3_10(self, monkeypatch):
        """Before Python 3.11, from_bytes has no default for the byte order."""

        class Int(int):
            @classmethod
            def from_bytes(cls, data, byteorder, *, signed=False):
                return int.from_bytes(data, byteorder, signed=signed)

        files = of_sizes([10, 20])
        expected = [Assignment(files, 3, seed=0).run(slot, 1) for slot in range(3)]
        monkeypatch.setattr("titan_disp.data.assignment.int", Int, raising=False)
        assert [Assignment(files, 3, seed=0).run(slot, 1) for slot in range(3)] == expected

    @pytest.mark.parametrize(
        ("files", "slots", "ranks"),
        [
            (1024, 640, 640),
            (1023, 640, 640),
            (1000, 640, 640),
            (1024, 1200, 600),
            (1024, 1920, 640),
            (64, 40, 40),
            (7, 12, 4),
            (3, 64, 64),
        ],
    )
    @pytest.mark.parametrize("spread", [0, 0.01, 0.5])
    def test_reads_per_epoch(self, files, slots, ranks, spread):
        sizes = np.random.default_rng(0).uniform(1 - spread, 1 + spread, files) * 1e6
        assignment = Assignment(of_sizes(sizes.astype(int).tolist()), slots, seed=0)
        own = slots // ranks
        read = [assignment.files_of(range(r * own, (r + 1) * own), 0) for r in range(ranks)]
        assert sum(map(len, read)) < files + ranks
        if spread < 0.1:
            assert sum(sizes[list(part)].sum() for part in read) / sizes.sum() < 1 + ranks / files

    @pytest.mark.parametrize("slots", [8, 64, 128])
    def test_files_about_equal_are_not_cut_into_slivers(self, slots):
        """If file sizes differ by some percent, a rank whose share is about a whole number of files reads no others."""
        sizes = np.random.default_rng(0).normal(1e6, 1e4, 64).astype(int).tolist()
        assignment = Assignment(of_sizes(sizes), slots, seed=0)
        own, ranks = slots // min(slots, 64), min(slots, 64)
        read = [assignment.files_of(range(r * own, (r + 1) * own), 0) for r in range(ranks)]
        assert sum(map(len, read)) == 64


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(4, 30), min_size=1, max_size=7),
    slots=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    seq_len=st.integers(1, 40),
    window=st.sampled_from([0, 2, 7, 100]),
    data=st.data(),
)
def test_same_batches_on_any_ranks_through_any_stops(tmp_path_factory, counts, slots, seq_len, window, data):
    files = write_files(tmp_path_factory.mktemp("files"), counts)
    divisors = [r for r in range(1, slots + 1) if slots % r == 0]
    steps = data.draw(st.integers(2, 12))
    expected, end = batches(streams_of(files, slots, 1, seq_len, shuffle_window=window), steps)
    stops = sorted(data.draw(st.sets(st.integers(1, steps - 1), max_size=3)))
    positions, got, begin = None, [], 0
    for stop in [*stops, steps]:
        ranks = streams_of(
            files, slots, data.draw(st.sampled_from(divisors)), seq_len, positions, shuffle_window=window
        )
        part, positions = batches(ranks, stop - begin)
        got.append(part)
        begin = stop
    assert np.array_equal(np.concatenate(got), expected)
    assert np.array_equal(positions, end)


def parts_by_hand(files, counts, slots, slot, epoch):
    """(bytes, [(file, index), …]) of a slot's head, whole files and tail, as assignment.py's docstring says."""
    hashes = [hashlib.sha256(f"0/{epoch}/{file.name}".encode()).digest() for file in files]
    line = sorted(range(len(files)), key=lambda f: hashes[f])
    edges = [Fraction(sum(files[f].size for f in line[:i])) for i in range(len(line) + 1)]
    cuts = [Fraction(0)]
    while len(cuts) < slots:
        share = (edges[-1] - cuts[-1]) / (slots + 1 - len(cuts))
        near = min(edges, key=lambda edge: abs(edge - cuts[-1] - share))
        cuts.append(near if abs(near - cuts[-1] - share) < share / 8 else cuts[-1] + share)
    begin, end = [*cuts, edges[-1]][slot : slot + 2]
    parts, whole_before = [], False
    for i, f in enumerate(line):
        low, high = [(min(max(x, edges[i]), edges[i + 1]) - edges[i]) / files[f].size for x in (begin, end)]
        if low == high:
            continue
        keys = [(k * 0x9E3779B97F4A7C15 + int.from_bytes(hashes[f][-8:])) % 2**64 for k in range(counts[f])]
        part = [(f, k) for k, key in enumerate(keys) if low <= Fraction(key, 2**64) < high]
        size, whole = (high - low) * files[f].size, high - low == 1
        if whole and whole_before:  # all whole files together are one part
            parts[-1] = (parts[-1][0] + size, parts[-1][1] + part)
        else:
            parts.append((size, part))
        whole_before = whole
    return parts


def order_by_hand(files, counts, slots, slot, epoch, size):
    """The documents of one slot in one epoch, as (file, index), in order.

    ``size`` gives the bytes of a document's text.
    """
    parts = parts_by_hand(files, counts, slots, slot, epoch)
    read, taken, order = [0] * len(parts), [0] * len(parts), []
    while left := [i for i, (_, documents) in enumerate(parts) if read[i] < len(documents)]:
        i = min(left, key=lambda i: (taken[i] / parts[i][0], i))
        order.append(parts[i][1][read[i]])
        read[i] += 1
        taken[i] += size(*order[-1])
    return order


@pytest.mark.parametrize(
    ("counts", "slots"),
    [([21, 20, 22, 19, 23], 2), ([40, 33, 51, 20, 47], 3), ([14, 9, 20], 4), ([6, 7, 8, 9], 2), ([90, 4, 4, 70], 7)],
)
def test_order_of_the_documents(tmp_path, counts, slots):
    """The order over two epochs, document by document. If a new version of the code changed it, no run could resume."""
    files = write_files(tmp_path, counts)
    before = np.cumsum([1, *counts])

    def size(file, index):
        number = before[file] + index
        return len(" ".join([str(number)] * (1 + number % 5)))

    (rank,) = streams_of(files, slots, 1)
    tokens, _ = batches([rank], 90)
    for slot in range(slots):
        order = [order_by_hand(files, counts, slots, slot, epoch, size) for epoch in (0, 1)]
        expected = [before[f] + i for f, i in (*order[0], *order[1])]
        found = documents_in(tokens[:, slot])
        assert found[: len(expected)] == expected[: len(found)]
        assert len(found) > len(order[0]) + 3


def test_position_by_hand(tmp_path):
    """Positions as checkpoints store them.

    With 5 equal files for 2 slots, each slot has two whole files and half of the third.

    All documents have 1 byte, so that a slot takes four documents of its whole files for one of the shared file. If
    both are equally far behind, the part that comes first in the line goes first: for slot 0 the whole files, for slot
    1 the shared file.
    """
    for name in "abcde":
        (tmp_path / f"{name}.json").write_text('{"text": "7"}\n' * 8)
    files = list_files("c4", str(tmp_path))
    _, (_, shared) = parts_by_hand(files, [8] * 5, 2, 0, 0)
    ((_, others), _) = parts_by_hand(files, [8] * 5, 2, 1, 0)
    assert {i for _, i in shared} | {i for _, i in others} == set(range(8))
    _, positions = batches(streams_of(files, 2, 1, seq_len=2), 4)
    # Four sequences of 3 tokens are six documents of 2 tokens. b: body, s: shared. Slot 0: b s b b b b; slot 1: s b b b
    # b s.
    after = dict.fromkeys(Field, 0) | {Field.DOCUMENTS: 6, Field.BYTES: 6}
    first = after | {Field.BODY_DOCUMENT: 5, Field.BODY_BYTES: 5, Field.TAIL: shared[0][1] + 1, Field.TAIL_BYTES: 1}
    second = after | {Field.BODY_DOCUMENT: 4, Field.BODY_BYTES: 4, Field.HEAD: others[1][1] + 1, Field.HEAD_BYTES: 2}
    assert positions.tolist() == [[*first.values()], [*second.values()]]
    assert [int(field) for field in after] == list(range(16))
    _, positions = batches(streams_of(files, 2, 1, seq_len=2), 7)
    # 21 tokens are ten documents, two of them from the shared file, and one token of the next; slot 0 is in its second
    # file.
    after = dict.fromkeys(Field, 0) | {Field.DOCUMENTS: 10, Field.BYTES: 10, Field.OFFSET: 1, Field.BODY_BYTES: 8}
    first = after | {Field.BODY_FILE: 1, Field.TAIL: shared[1][1] + 1, Field.TAIL_BYTES: 2}
    second = after | {Field.BODY_DOCUMENT: 8, Field.HEAD: others[1][1] + 1, Field.HEAD_BYTES: 2}
    assert positions.tolist() == [[*first.values()], [*second.values()]]


def write_uneven(folder, counts, suffix="json.gz"):
    """Write files of documents of 10 to 90 words that compress badly.

    The first word is the document's number, from 1 on.
    """
    import pyarrow
    import pyarrow.parquet

    rng, number = np.random.default_rng(0), 0
    for f, count in enumerate(counts):
        texts = []
        for words in rng.integers(9, 90, count):
            number += 1
            texts.append(" ".join(map(str, [number, *rng.integers(10**5, 10**6, words)])))
        path = folder / f"{f:03d}.{suffix}"
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=100)
        else:
            path.write_bytes(gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode(), 1))
    return list_files("text", str(folder))


def number_of_each_word(text):
    words = text.split()
    return [int(words[0])] * len(words) + [EOS]


UNEVEN = (np.random.default_rng(1).lognormal(3.8, 0.9, 97).astype(int) + 1).tolist()


@pytest.mark.parametrize(
    ("counts", "suffix", "slots"),
    [
        (UNEVEN, "json.gz", 60),
        ([1500, 1500, 1500, 150], "parquet", 64),
        ([3000, 600], "json.gz", 48),
        ([400] * 16, "json.gz", 16),
        ([400] * 16, "json.gz", 24),
    ],
)
def test_one_epoch_of_tokens_is_nearly_all_documents_once(tmp_path, counts, suffix, slots):
    """This holds for any corpus, because shares are equal in bytes and slots take equal numbers of tokens."""
    files = write_uneven(tmp_path, counts, suffix)
    (rank,) = streams_of(files, slots, 1, seq_len=63)
    rank.encode = number_of_each_word
    sizes = []
    for file in files:
        documents = Documents(file, READ)
        while (raw := documents.read()) is not None:
            sizes.append(len(number_of_each_word(text_of(raw))))
    assert len(sizes) == sum(counts)
    tokens, _ = batches([rank], round(sum(sizes) / slots / 64))
    seen = np.bincount(tokens[tokens != EOS], minlength=sum(counts) + 1)[1:] / (np.array(sizes) - 1)
    print(f"{len(files)} files, {slots} slots: {(seen == 0).mean():.2%} unseen, {(seen > 1).mean():.2%} seen twice")
    assert (seen == 0).mean() <= 0.08
    assert (seen > 1).mean() <= 0.08


@pytest.mark.parametrize(
    ("counts", "slots"),
    [([64], 64), ([1] * 64, 64), ([3, 1, 60], 64), ([2, 1, 1, 30, 1, 1], 36), ([5], 8)],
)
@pytest.mark.parametrize("window", [0, 3])
def test_few_documents_stop_no_run(tmp_path, counts, slots, window):
    """A slot without documents in one epoch continues with the next, where it owns others.

    One document has nearly all bytes.
    """
    files = write_files(tmp_path, counts, words=lambda i: 1 + (i == 2) * 2000)
    (rank,) = streams_of(files, slots, 1, seq_len=7, shuffle_window=window)
    rank.encode = lambda text: [int(text.split()[0]), EOS]
    tokens, positions = batches([rank], 6)
    assert (positions[:, Field.DOCUMENTS] == 6 * 8 // 2).all()
    assert set(np.unique(tokens)) == set(range(sum(counts) + 1))
    again = streams_of(files, slots, 1, seq_len=7, positions=positions, shuffle_window=window)[0]
    again.encode = rank.encode
    assert np.array_equal(batches([again], 3)[0], batches([rank], 3)[0])


@pytest.mark.parametrize(("files", "slots", "ranks"), [(8, 4, 2), (5, 12, 4), (12, 5, 5), (7, 7, 1), (1, 6, 3)])
def test_every_document_once_an_epoch(tmp_path, files, slots, ranks):
    listed = write_files(tmp_path, [60 + 3 * i for i in range(files)])
    total = sum(60 + 3 * i for i in range(files))
    seen: Counter = Counter()
    for rank in streams_of(listed, slots, ranks, seq_len=1):
        for slot in rank.slots.values():
            # Two whole epochs of this slot; with sequences of two tokens, no sequence holds two ends of documents.
            tokens = []
            while slot.position[Field.EPOCH] < 2:
                tokens.append(slot.sequence())
            seen.update(documents_in(np.concatenate(tokens)))
    # Every document comes twice in two epochs. A few that a slot has begun in the third epoch may come a third time.
    assert set(seen) == set(range(1, total + 1))
    assert min(seen.values()) >= 2
    assert sum(count - 2 for count in seen.values()) <= 2 * slots


def test_one_epoch_is_exact(tmp_path):
    """In the first epoch, all slots together read every document once."""
    counts = [40, 33, 51, 20, 47]
    files = write_files(tmp_path, counts)
    seen = []
    for rank in streams_of(files, 6, 3):
        for slot in rank.slots.values():
            while (document := slot.cursor.next()).end[Field.EPOCH] == 0:
                seen.append(int(document.content.split()[0]))
    assert sorted(seen) == list(range(1, sum(counts) + 1))


def test_slots_of_a_rank_share_one_pass(tmp_path):
    """Read amplification over one epoch, measured in bytes, with files that several slots share."""
    files = write_files(tmp_path, [400] * 16, words=lambda i: 20 + i % 7)
    size = sum(f.size for f in files)
    for slots, ranks in ((12, 3), (12, 12), (16, 4), (10, 5), (24, 2)):
        read = 0
        for rank in streams_of(files, slots, ranks, seq_len=63):
            while any(slot.position[Field.EPOCH] == 0 for slot in rank.slots.values()):
                for slot in rank.slots.values():
                    slot.sequence()
            read += sum(count for (epoch, _), count in rank.passes.bytes_read().items() if epoch == 0)
        assert read / size <= 1 + ranks / len(files), (slots, ranks)


@pytest.mark.parametrize("window", [0, 8])
def test_a_slot_far_behind_rereads_rather_than_fill_memory(tmp_path, monkeypatch, window):
    # Every third document is far longer than the others.
    files = write_files(tmp_path, [300] * 3, words=lambda i: 1 + (i % 3 == 0) * 200)
    expected, _ = batches(streams_of(files, 9, 9, seq_len=15, shuffle_window=window), 60)
    read = 0

    class Counting(io.FileIO):
        def read(self, size=-1):
            nonlocal read
            data = super().read(size)
            read += len(data)
            return data

    monkeypatch.setattr("titan_disp.data.storage.io.FileIO", Counting)
    (rank,) = streams_of(files, 9, 1, seq_len=15, queue_bytes=2000, shuffle_window=window)
    got, _ = batches([rank], 60)
    assert np.array_equal(got, expected)
    # Every read of a file counts, also where several are open at once.
    assert window or max(map(len, rank.passes._open.values())) > 1
    assert sum(rank.passes.bytes_read().values()) == read
    assert sum(rank.passes.bytes_read().values()) == 0  # since the last call
    lengths = [len(line) for f in files for line in gzip.decompress(Path(f.url).read_bytes()).splitlines()]
    mean = 1.1 * sum(lengths) / len(lengths)  # the part that a pass has read may have a larger mean
    for passes in rank.passes._open.values():
        for one in passes:
            assert one.queued <= 2000 + 9 * window * mean + 9 * max(lengths)


def test_the_slot_that_waits_for_a_document_stays_in_its_pass(tmp_path):
    """Memory is bounded by dropping other slots: a slot that asks would read the file again for every document."""
    files = write_files(tmp_path, [300])
    (rank,) = streams_of(files, 1, 1, queue_bytes=10)
    batches([rank], 100)
    assert sum(rank.passes.bytes_read().values()) <= files[0].size


@pytest.mark.parametrize("slots", [1, 4])
def test_after_a_resume_slots_of_a_rank_share_one_pass_again(tmp_path, slots):
    files = write_files(tmp_path, [60] * 2, words=lambda i: 5)
    _, positions = batches(streams_of(files, slots, 1), 3)
    (rank,) = streams_of(files, slots, 1, positions=positions)
    assert [len(passes) for passes in rank.passes._open.values()] == [1, 1][: len(rank.passes._open)]
    batches([rank], 1)
    wanted = [sorted(one.queues) for passes in rank.passes._open.values() for one in passes]
    assert sorted(slot for queues in wanted for slot in queues) == sorted(
        slot for slot in range(slots) for _ in rank.slots[slot].cursor.position.upcoming()
    )


def test_close_waits_for_no_text_that_is_not_begun(tmp_path, monkeypatch):
    """A run that ends need not tokenize first what it has read ahead."""
    (tmp_path / "train.json").write_text((json.dumps({"text": "x" * 10_000}) + "\n") * 10)  # each one is a task
    (rank,) = streams_of(list_files("c4", str(tmp_path)), 1, 1)
    begun, release, shutdown = [], threading.Event(), rank.executor.shutdown
    rank.encode = lambda text: [len(begun), begun.append(release.wait(10))][:1]
    rank.slots[0].read_ahead(50_000)

    def shut_down(**how):
        shutdown(wait=False, **how)
        release.set()
        shutdown()

    monkeypatch.setattr(rank.executor, "shutdown", shut_down)
    rank.close()
    assert begun == [True]


def test_sequences_are_documents_joined_by_eos(tmp_path):
    files = write_files(tmp_path, [30])
    tokens, _ = batches(streams_of(files, 1, 1, seq_len=9), 8)
    expected = [t for i in range(1, 31) for t in encode(" ".join([str(i)] * (1 + i % 5)))]
    assert tokens.reshape(-1).tolist() == expected[: tokens.size]


@pytest.mark.parametrize(
    ("tokens", "sequences"),
    [(8, 16), (8192, 4), (65536, 2)],  # 128 KiB of text at 4 bytes per token, but at least 2 and at most 16 sequences
)
def test_how_far_is_read_ahead(tmp_path, tokens, sequences):
    (tmp_path / "train.json").write_text((json.dumps({"text": "5 " * 1023 + "5"}) + "\n") * 300)  # 2047 bytes each
    (rank,) = streams_of(list_files("c4", str(tmp_path)), 1, 1, seq_len=tokens - 1)
    rank.slots[0].sequence()
    assert 0 <= rank.slots[0].cursor.position.values[Field.BYTES] - 4 * tokens * sequences < 2047


def test_read_ahead_follows_the_text(tmp_path):
    """As 15 bytes are 9 tokens, 16 sequences of 8 tokens come to 213 bytes.

    Reading ahead begins at 512 and goes to 213.
    """
    (tmp_path / "train.json").write_text((json.dumps({"text": "5 5 5 5 5 5 5 5"}) + "\n") * 100)
    (rank,) = streams_of(list_files("c4", str(tmp_path)), 1, 1)
    slot = rank.slots[0]
    for i in range(1200):
        slot.sequence()
        if i >= 600:
            ahead = slot.cursor.position.values[Field.BYTES] - slot.position[Field.BYTES]
            assert 213 - 8 * 15 / 9 - 1 <= ahead <= 213 + 2 * 15


def test_the_next_slots_are_read_ahead(tmp_path):
    """Slots are read ahead in the order in which the rank asks for them; the first one follows the last."""
    files = write_files(tmp_path, [60] * 32, words=lambda i: 5)
    _, rank = streams_of(files, 64, 2)
    rank.read_ahead(59)
    begun = [index for index, slot in rank.slots.items() if slot.cursor.position.values[Field.BYTES]]
    assert begun == [*range(32, 43), *range(59, 64)]


def test_bytes_are_of_utf8(tmp_path):
    (tmp_path / "train.json").write_text((json.dumps({"text": "٣ ٣"}) + "\n") * 20)
    _, positions = batches(streams_of(list_files("c4", str(tmp_path)), 1, 1, seq_len=2), 7)
    assert (positions[0, Field.DOCUMENTS], positions[0, Field.BYTES]) == (7, 7 * 5)


def test_threads_and_read_ahead_decide_nothing(tmp_path, monkeypatch):
    """After a resume, all files here are sought in parallel, which does not change the batches either."""
    files = write_files(tmp_path, [60] * 7, words=lambda i: 1 + i % 23)
    expected, _ = batches(streams_of(files, 6, 1), 90)
    first, positions = batches(streams_of(files, 6, 2, tokenizer_threads=3), 41)
    assert np.array_equal(first, expected[:41])
    monkeypatch.setattr("titan_disp.data.stream.AHEAD_SEQUENCES", 100)
    second, _ = batches(streams_of(files, 6, 3, positions=positions, tokenizer_threads=3), 49)
    assert np.array_equal(second, expected[41:])


def test_seeks_run_together_and_say_how_far_they_are(tmp_path, monkeypatch, caplog):
    files = write_files(tmp_path, [60] * 4)
    _, positions = batches(streams_of(files, 4, 1), 9)
    running, most, lock = 0, 0, threading.Lock()
    seek = Documents.seek

    def slow(self):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.3)
        seek(self)
        with lock:
            running -= 1

    monkeypatch.setattr(Documents, "seek", slow)
    monkeypatch.setattr("titan_disp.data.passes.PROGRESS_SECONDS", 0.05)
    with caplog.at_level("INFO"):
        streams_of(files, 4, 1, positions=positions, tokenizer_threads=4)
    assert most == 4
    assert "finding the place in 4 files: 0 done" in caplog.text


@pytest.mark.parametrize("suffix", ["json", "jsonl", "json.gz", "json.zst", "parquet"])
def test_formats(tmp_path, suffix):
    import pyarrow
    import pyarrow.parquet

    texts = [f"text {i} é\n" * (1 + i % 3) for i in range(700)]
    path = tmp_path / f"train.{suffix}"
    lines = "".join(json.dumps({"text": t}, ensure_ascii=False) + "\n" for t in texts).encode()
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": list(range(700)), "text": texts}), path, row_group_size=100)
    elif suffix == "json.gz":
        path.write_bytes(gzip.compress(lines))
    elif suffix == "json.zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
            out.write(lines)
    else:
        path.write_bytes(lines)
    (file,) = list_files("c4", str(tmp_path))
    for start in (0, 1, 333, 699):
        documents = Documents(file, READ, start)
        got = []
        while (raw := documents.read()) is not None:
            got.append(raw if isinstance(raw, str) else json.loads(raw)["text"])
        assert got == texts[start:]
        assert documents.bytes_read > 0
    assert Documents(file, READ, 700).read() is None


def write_large(folder, suffix):
    """Write 2000 documents that take 2 MB even when compressed, so that no reader holds all of them in its buffers."""
    import pyarrow
    import pyarrow.parquet

    path, rng = folder / f"train.{suffix}", np.random.default_rng(0)
    texts = [rng.bytes(1000).hex() for _ in range(2000)]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    if suffix == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=100)
    elif suffix == "json.zst":
        with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
            out.write(lines)
    else:
        path.write_bytes(gzip.compress(lines, 1) if suffix == "json.gz" else lines)
    assert path.stat().st_size > 2_000_000
    return path


class TestBadData:
    @pytest.fixture
    def files(self, tmp_path):
        """Three files: the first with malformed documents, the second truncated, the third sound."""
        sound = [json.dumps({"text": f"{i} {i}"}).encode() for i in range(1, 91)]
        bad = [
            b"{not json",
            b'{"url": "no text"}',
            b'{"text": 3}',
            b'{"text": "  "}',
            b'{"text": "\xff\xfe"}',
            b"[1]",
            b"null",
        ]
        first = sound[:10] + bad + sound[10:30] + [b'{"text": "' + b"9 " * 40000 + b'"}']
        (tmp_path / "a.json.gz").write_bytes(gzip.compress(b"\n".join(first) + b"\n"))
        whole = gzip.compress(b"\n".join(json.dumps({"text": f"{i} " * 20}).encode() for i in range(31, 400)) + b"\n")
        (tmp_path / "b.json.gz").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "c.json.gz").write_bytes(gzip.compress(b"\n".join(sound[60:90]) + b"\n"))
        return list_files("c4", str(tmp_path))

    OPTIONS = {"seq_len": 3, "max_document_bytes": 1 << 16, "max_skipped_fraction": 1.0}

    def test_skipped_named_counted_and_the_same_on_resume(self, files, caplog):
        with caplog.at_level("WARNING"):
            expected, end = batches(streams_of(files, 3, 1, **self.OPTIONS), 4000)
        assert (end[:, Field.EPOCH] >= 1).all()
        text = caplog.text
        for reason in ("malformed JSON", 'no field "text"', "empty text", "invalid UTF-8", "max_document_mb"):
            assert reason in text
        assert "a.json.gz, document 10: malformed JSON" in text
        assert "b.json.gz is damaged and ends early: EOFError" in text
        epochs = end[:, Field.EPOCH]
        for field, each in ((Field.SKIPPED, 8), (Field.SKIPPED_FILES, 1)):
            assert each * epochs.min() <= end[:, field].sum() <= each * (epochs.max() + 1)
        positions, got = None, []
        for ranks, steps in ((3, 37), (1, 1500), (3, 2463)):
            part, positions = batches(streams_of(files, 3, ranks, positions=positions, **self.OPTIONS), steps)
            got.append(part)
        assert np.array_equal(np.concatenate(got), expected)
        assert np.array_equal(positions, end)

    def test_fail(self, files):
        with pytest.raises(ConfigError, match=r'a\.json\.gz, document 10: malformed JSON.*on_bad_data = "skip"'):
            batches(streams_of(files, 1, 1, on_bad_data="fail", **self.OPTIONS), 500)
        with pytest.raises(ConfigError, match=r"b\.json\.gz is damaged"):
            batches(streams_of(files[1:2], 1, 1, on_bad_data="fail", **self.OPTIONS), 100000)

    def test_a_damaged_file_is_counted_once(self, tmp_path):
        """Two slots read it, on different ranks: there are 3 files for 4 slots."""
        files = write_files(tmp_path, [40] * 3, words=lambda i: 600)
        path = Path(files[1].url)
        path.write_bytes(path.read_bytes()[:-60])
        skipped = 0
        for rank in streams_of(list_files("c4", str(tmp_path)), 4, 4, max_skipped_fraction=1.0):
            for slot in rank.slots.values():
                while slot.position[Field.EPOCH] == 0:
                    slot.sequence()
                skipped += slot.position[Field.SKIPPED_FILES]
        assert skipped == 1

    def test_said_once(self, caplog):
        """Of a thousand documents, and of every file; those that come again in a later epoch are not told again."""
        faults = Faults(of_sizes([1, 1]), StreamOptions(max_skipped_fraction=1.0))
        for _ in range(2):
            for index in range(1001):
                faults.bad(0, index, "empty text")
            for file in (0, 1):
                faults.bad(file, -1, "EOFError")
        expected = [f"skipped: f0, document {index}: empty text" for index in range(1000)]
        expected += [f"skipped: f{file} is damaged and ends early: EOFError" for file in (0, 1)]
        assert [record.message for record in caplog.records] == expected

    @pytest.mark.parametrize(
        ("documents", "fraction", "epochs", "bad"),
        [(20, 1.0, 21, 420), (500, 0.0, 2, 1000)],  # 20 · S epochs without a document, or 1,000 documents, are enough
    )
    def test_all_bad(self, tmp_path, documents, fraction, epochs, bad):
        (tmp_path / "x.json").write_text("broken\n" * documents)
        with pytest.raises(
            ConfigError,
            match=rf"document \(completed epochs: {epochs}, bad documents: {bad}, damaged files: 0\) in these files: 1, ",
        ):
            batches(streams_of(list_files("c4", str(tmp_path)), 1, 1, max_skipped_fraction=fraction), 1)

    @pytest.mark.parametrize(
        ("files", "documents", "slots", "parsed"),
        [(200, 1100, 1, 20_000), (200, 2500, 400, 20_000), (2000, 150, 1, 3000), (1, 30_000, 1, 20_000)],
    )
    def test_a_wholly_wrong_corpus_stops_at_once(self, tmp_path, monkeypatch, files, documents, slots, parsed):
        """A slot does not try all its documents: files are skipped, and 20 of them or 20,000 documents are enough."""
        (tmp_path / "0000.json").write_text('{"content": 1}\n' * documents)
        for i in range(1, files):
            os.link(tmp_path / "0000.json", tmp_path / f"{i:04d}.json")
        tried = []
        monkeypatch.setattr("titan_disp.data.cursor.text_of", lambda *args: tried.append(0) or text_of(*args))
        with pytest.raises(
            DataError, match=r"found no usable document \(completed epochs: \d+, bad documents: \d+.*0000.*log above"
        ):
            batches(streams_of(list_files("text", str(tmp_path)), slots, 1), 1)
        assert len(tried) == parsed

    def test_a_corpus_of_damaged_files_stops_at_once(self, tmp_path, caplog):
        for i in range(200):
            (tmp_path / f"{i}.json.gz").write_text("not gzip")
        with pytest.raises(
            DataError, match=r"completed epochs: 0, bad documents: 0, damaged files: 20\) in these files: 200"
        ):
            batches(streams_of(list_files("text", str(tmp_path)), 4, 1), 1)
        assert caplog.text.count("is damaged and ends early") == 20

    @pytest.mark.parametrize(
        ("files", "good", "wrong", "slots", "steps", "in_a_row"),
        [(1000, 1, 3000, 4, 250, 1000), (150, 20, 2500, 300, 4, 1000), (150, 20, 400, 50, 58, 400)],
    )
    def test_one_wrong_file_among_many_is_passed_over(
        self, tmp_path, files, good, wrong, slots, steps, in_a_row, caplog
    ):
        """It counts as one skipped file, and its documents are not counted.

        In the second corpus, two slots begin with it.
        """
        size = 14 * wrong // good
        line = json.dumps({"text": "x" * (size - 13)}) + "\n"
        (tmp_path / "0000.json").write_text(line * good)
        for i in range(1, files - 1):
            os.link(tmp_path / "0000.json", tmp_path / f"{i:04d}.json")
        (tmp_path / "wrong.json").write_text('{"other": 12}\n' * wrong)
        listed, ends = list_files("text", str(tmp_path)), []
        for ranks in (1, 2):
            streams = streams_of(listed, slots, ranks)
            for rank in streams:
                rank.encode = lambda text: [1] * 7 + [EOS]
            ends.append(batches(streams, steps)[1])
            # It is closed, and none of its documents is kept for anybody.
            assert not any(files - 1 in rank.passes._open for rank in streams)
        assert np.array_equal(*ends)
        total = ends[0].sum(0)
        assert total[Field.DOCUMENTS] == slots * steps >= 1000
        assert (total[Field.SKIPPED], total[Field.SKIPPED_FILES]) == (0, 1)
        assert f"wrong.json is damaged and ends early: {in_a_row} documents in a row cannot be used" in caplog.text

    def test_a_wrong_file_that_is_much_of_the_data_is_not_passed_over(self, tmp_path):
        """Its documents are counted, so that the run stops, or continues if they are few among all."""
        (tmp_path / "a.json").write_text("{}\n" * 2000 + '{"text": "1"}\n')
        (tmp_path / "b.json").write_text('{"text": "1"}\n' * 200)
        (rank,) = streams_of(list_files("text", str(tmp_path)), 1, 1)
        _, positions = batches([rank], 51)  # 204 documents of two tokens: one epoch and three more
        assert positions[0, Field.EPOCH] == 1
        assert positions[0, Field.SKIPPED] in (2000, 4000)
        assert positions[0, Field.SKIPPED_FILES] == 0

    @pytest.mark.parametrize("slots", [1, 4])
    def test_garbage_in_a_row_is_a_damaged_file(self, tmp_path, caplog, slots):
        """This holds for compressed files, where flipped bytes cause it; not for plain ones.

        Empty texts are no garbage.
        """
        good, empty = json.dumps({"text": "5 " * 20}), json.dumps({"text": " "})
        seven = [empty] * 40 + ["{ga"] * 7 + ['{"text": "8"}'] * 60  # which are one too few
        spoiled = [good] * 100 + seven + ["rbage}"] * 300 + ['{"text": "666"}'] * 200
        (tmp_path / "a.json.gz").write_bytes(gzip.compress("\n".join(spoiled).encode()))
        (tmp_path / "b.json").write_text("\n".join([good] * 200 + ["garbage"] * 20 + ['{"text": "7"}'] * 100))
        options = {"max_skipped_fraction": 1.0}
        files = list_files("text", str(tmp_path))
        ranks = streams_of(files, slots, 1, **options)
        tokens, positions = [], None
        while positions is None or positions[:, Field.EPOCH].min() < 1:
            part, positions = batches(ranks, 1)
            tokens.append(part)
        tokens = np.concatenate(tokens)
        assert "a.json.gz is damaged and ends early: 8 documents in a row are not JSON" in caplog.text
        assert "b.json is damaged" not in caplog.text
        assert (8 in tokens, 666 in tokens, 7 in tokens) == (True, False, True)
        assert 1 <= positions[:, Field.SKIPPED_FILES].sum() <= positions[:, Field.EPOCH].max() + 1
        got, at, done = [], None, 0
        for steps in (1, 2, 3, 5, 8, 13, 21, len(tokens)):
            steps = min(steps, len(tokens) - done)
            part, at = batches(streams_of(files, slots, slots, positions=at, **options), steps)
            got.append(part)
            done += steps
        assert np.array_equal(np.concatenate(got), tokens)
        assert np.array_equal(at, positions)

    def test_no_documents_at_all(self, tmp_path):
        files = write_files(tmp_path, [0, 0])
        with pytest.raises(
            ConfigError, match=r"slot \d of 8 found no usable document \(completed epochs: 161, .*add data"
        ):
            batches(streams_of(files, 8, 1), 3)

    @pytest.mark.parametrize("on_bad_data", ["skip", "fail"])
    def test_a_file_that_went_away_is_not_skipped(self, tmp_path, on_bad_data):
        files = write_files(tmp_path, [20, 20])
        Path(files[1].url).unlink()
        with pytest.raises(ConfigError, match=r"cannot read .*c4-train.0000\d-of-00002.json.gz: FileNotFoundError"):
            batches(streams_of(files, 2, 1, on_bad_data=on_bad_data), 50)

    @pytest.mark.parametrize("on_bad_data", ["skip", "fail"])
    def test_a_file_of_another_size_than_listed_is_not_read(self, tmp_path, on_bad_data):
        """The fingerprint in the run's checkpoints has the size that was listed."""
        files = write_files(tmp_path, [20, 20])
        for path in (Path(file.url) for file in files):
            path.write_bytes(path.read_bytes() + gzip.compress(b'{"text": "1"}\n'))
        with pytest.raises(
            DataError, match=rf"has \d+ bytes, but had ({files[0].size}|{files[1].size}) when the files were"
        ):
            batches(streams_of(files, 1, 1, on_bad_data=on_bad_data), 1)

    @pytest.mark.parametrize("suffix", ["json", "json.gz", "json.zst", "parquet"])
    def test_a_file_that_is_cut_off_while_it_is_read_is_not_skipped(self, tmp_path, suffix):
        """The file is sound when it is opened.

        Without the check, plain JSON would just end; others would count as damaged.
        """
        path = write_large(tmp_path, suffix)
        documents = Documents(*list_files("text", str(tmp_path)), READ)
        documents.read()
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(DataError, match=rf"train.{suffix} has \d+ bytes, but had \d+ when the files were listed"):
            deque(iter(documents.read, None), maxlen=0)

    def test_what_is_appended_to_a_file_while_it_is_read_is_not_read(self, tmp_path):
        """Otherwise slots that reach the end later would see other documents than earlier ones."""
        (tmp_path / "train.json").write_text('{"text": "5"}\n' * 10_000)
        documents = Documents(*list_files("text", str(tmp_path)), READ)
        documents.read()
        with open(tmp_path / "train.json", "a") as file:
            file.write('{"text": "6"}\n' * 10_000)
        assert sum(1 for _ in iter(documents.read, None)) == 9_999

    @pytest.mark.parametrize("suffix", ["json", "json.gz", "json.zst", "parquet"])
    def test_a_file_system_that_stays_away_stops_the_run(self, tmp_path, monkeypatch, suffix):
        """This holds for any format, although its library may raise errors of its own: the file is not damaged."""
        write_large(tmp_path, suffix)
        left = 3

        class Failing(io.FileIO):
            def read(self, size=-1):
                nonlocal left
                left -= 1
                if left < 0:
                    raise OSError(errno.EIO, "of the server")
                return super().read(size)

        monkeypatch.setattr("titan_disp.data.storage.io.FileIO", Failing)
        monkeypatch.setattr("titan_disp.data.storage.FIRST_PAUSE", 0.001)
        documents = Documents(*list_files("text", str(tmp_path)), dataclasses.replace(READ, retry_seconds=0.02))
        with pytest.raises(DataError, match=r"cannot read .*: OSError: \[Errno 5\].*of the server"):
            deque(iter(documents.read, None), maxlen=0)

    def test_a_failure_of_the_file_system_is_tried_again(self, tmp_path, monkeypatch, caplog):
        """Reading continues at the same place of the file.

        A failure that lasts stops the run, because the file may be sound.
        """
        (file,) = write_files(tmp_path, [20_000])
        reads = 0

        class Failing(io.FileIO):
            def read(self, size=-1):
                nonlocal reads
                reads += 1
                if reads in failing:
                    raise OSError(errno.ESTALE if reads % 2 else errno.EIO, "of the server")
                return super().read(size)

        monkeypatch.setattr("titan_disp.data.storage.io.FileIO", Failing)
        monkeypatch.setattr("titan_disp.data.storage.FIRST_PAUSE", 0.001)
        failing = {1, 2, 4}
        documents = Documents(file, READ)
        numbers = []
        while (raw := documents.read()) is not None:
            numbers.append(int(text_of(raw).split()[0]))
        assert numbers == list(range(1, 20_001))
        assert reads > 4
        assert [record.message.count("trying again in 0.00") for record in caplog.records] == [1, 1, 1]
        failing, reads = range(2, 100), 0
        documents = Documents(file, dataclasses.replace(READ, retry_seconds=0.05))
        with pytest.raises(DataError, match=r"cannot read .*: OSError: \[Errno \d+\] of the server"):
            deque(iter(documents.read, None), maxlen=0)

    def test_half_a_surrogate_pair_is_a_bad_document(self):
        with pytest.raises(BadDocument, match="invalid Unicode: surrogates not allowed at character 2"):
            text_of(b'{"text": "ab\\ud800"}')
        assert text_of(b'{"text": "\\ud83d\\ude00"}') == "\U0001f600"

    def test_truncated_zstd(self, tmp_path):
        import pyarrow

        path = tmp_path / "train.json.zst"
        lines = [
            json.dumps({"text": str(np.random.default_rng(i).integers(0, 10**9, 50).tolist())}) for i in range(3000)
        ]
        with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
            out.write("\n".join(lines).encode())
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        streams = streams_of(list_files("c4", str(tmp_path)), 1, 1, on_bad_data="fail")
        streams[0].encode = lambda text: [1] * 50
        with pytest.raises(ConfigError, match=r"train\.json\.zst is damaged and ends early|document \d+: malformed"):
            batches(streams, 100000)

    def test_damaged_kinds(self, tmp_path):
        sound = gzip.compress(b'{"text": "1"}\n' * 50)
        for name, content in (("not gzip", b"plain text"), ("flipped", sound[:20] + b"\x00\x00\x00" + sound[23:])):
            (tmp_path / "x.json.gz").write_bytes(content)
            with pytest.raises(ConfigError, match=r"x\.json\.gz is damaged|document"):
                batches(streams_of(list_files("c4", str(tmp_path)), 1, 1, on_bad_data="fail"), 50)
            assert name


def loader(files, sample, rank=0, ranks=1, prefetch=0, slots=8, shares=(), **options):
    folder = f"{sample}/tokenizer"
    return StreamLoader(
        files,
        load_tokenizer(folder),
        folder,
        StreamOptions(prefetch=prefetch, **({"seq_len": 32} | options)),
        slots=slots,
        shares=shares,
        local_batch_size=2,
        dp_rank=rank,
        dp_world_size=ranks,
    )


def test_position_is_of_batches_consumed_not_prefetched(sample):
    files = list_files("c4", str(sample))
    ahead, plain = loader(files, sample, prefetch=4), loader(files, sample)
    a, b = iter(ahead), iter(plain)
    for _ in range(8):
        (x, labels), (y, _) = next(a), next(b)
        assert torch.equal(x["input"], y["input"])
        assert torch.equal(x["input"][:, 1:], labels[:, :-1])
    saved = ahead.state_dict()
    assert torch.equal(saved["positions"], plain.state_dict()["positions"])
    before = saved["positions"].clone()
    expected = next(b)[0]["input"]
    next(a)
    assert torch.equal(saved["positions"], before), "state_dict must return a copy"
    again = loader(files, sample, prefetch=2)
    again.load_state_dict(saved)
    assert torch.equal(next(iter(again))[0]["input"], expected)


def test_what_travels_with_a_batch_does_not_grow_with_the_files_read(sample, tmp_path):
    """With many small files, every group of batches once carried all files read so far through the worker's pipe."""
    for i in range(150):
        (tmp_path / f"{i:03d}.txt").write_text("some words of a small file")
    files, sizes = list_files("text", str(tmp_path)), []
    one = loader(files, sample, slots=4)
    for _, _, read, _ in Sequences(one._make, 2, 2):
        sizes.append(len(read))
        one.bytes_read.update(read)
        if sum(one.bytes_read.values()) > 3 * sum(file.size for file in files):
            break
    assert {epoch for epoch, _ in one.bytes_read} >= {0, 1}
    assert max(sizes[1:]) < 40  # the first one includes what was read ahead
    first = [count for (epoch, _), count in one.bytes_read.items() if epoch == 0]
    assert sum(first) == sum(file.size for file in files)


def test_batches_before_an_error_come_first(sample, tmp_path):
    """The worker sends microbatches in groups. The complete microbatches before a bad document are not lost."""
    write_files(tmp_path, [60] * 3, words=lambda i: 20)
    broken = sorted(tmp_path.glob("*.gz"))[1]
    lines = gzip.decompress(broken.read_bytes()).splitlines(keepends=True)
    broken.write_bytes(gzip.compress(b"".join([*lines[:50], b"not JSON\n", *lines[51:]])))
    files, found = list_files("c4", str(tmp_path)), []
    for prefetch in (0, 4):
        one = loader(files, sample, prefetch=prefetch, slots=3, on_bad_data="fail")
        tokens = []
        with pytest.raises(DataError, match="document 50: malformed JSON"):
            tokens.extend(x["input"].clone() for x, _ in one)
        one.close()
        found.append((torch.stack(tokens), one.positions))
    (plain, at), (grouped, then) = found
    assert len(plain) % 32  # the error is in the middle of a group
    assert torch.equal(plain, grouped)
    assert torch.equal(at, then)


def test_worker_outlives_signals_but_not_its_rank(sample):
    """SIGTERM and SIGUSR1 from outside do not stop the prefetch worker. When Python exits, the worker ends at once."""
    script = """
import os, signal, subprocess, sys, time
import multiprocessing
from tests.test_stream import list_files, loader
sample = sys.argv[1]
batches = iter(loader(list_files("c4", sample), sample, prefetch=2))
next(batches)
(worker,) = multiprocessing.active_children()
for name in ("TERM", "USR1", "INT"):
    subprocess.run(["sh", "-c", f"kill -{name} {worker.pid}"], check=True)
time.sleep(0.5)
for _ in range(200):  # batches come in groups of 32
    next(batches)
assert worker.is_alive()
print("alive", worker.pid)
"""
    done = subprocess.run([sys.executable, "-c", script, str(sample)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "alive" in done.stdout
    assert not Path(f"/proc/{done.stdout.split()[-1]}").exists()


def test_worker_ends_with_a_killed_rank(sample):
    """The worker ends although its pipe is full and nobody will read from it."""
    script = """
import os, signal, sys
import multiprocessing
from tests.test_stream import list_files, loader
sample = sys.argv[1]
batches = iter(loader(list_files("c4", sample), sample, prefetch=2, seq_len=1024))
next(batches)
(worker,) = multiprocessing.active_children()
print(worker.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with subprocess.Popen([sys.executable, "-c", script, str(sample)], stdout=subprocess.PIPE, text=True) as rank:
        worker = int(rank.stdout.readline())
        rank.wait(60)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{worker}/stat").exists() and time.monotonic() < deadline:
            if Path(f"/proc/{worker}/stat").read_text().split()[2] == "Z":  # a zombie: nobody here reaps it
                break
            time.sleep(0.2)
        else:
            assert not Path(f"/proc/{worker}/stat").exists(), "the prefetch worker outlives its rank"


def test_documents_passed_over_are_not_parsed(tmp_path, monkeypatch):
    (file,) = write_files(tmp_path, [500])
    parsed = []
    monkeypatch.setattr("titan_disp.data.formats.json.loads", lambda raw: parsed.append(raw) or {"text": "1"})
    documents = Documents(file, READ, 499)
    assert text_of(documents.read()) == "1"
    assert documents.read() is None
    assert len(parsed) == 1


def verdict(loader, counters, allowed):
    """Why a run with this limit would stop; None if it would continue."""
    loader.options = dataclasses.replace(loader.options, max_skipped_fraction=allowed)
    try:
        loader.check_counters(counters)
    except DataError as error:
        return str(error)
    return None


def test_bad_documents_are_judged_over_all_ranks(sample, tmp_path):
    """The same data stops any number of ranks after the same step and with the same message, or none of them.

    Each of 12 slots has a file of its own, and in one file every tenth document cannot be used. A document is a
    sequence, and a step takes two sequences of each slot. After step t, a slot has used 2t documents, and the slot of
    the file in question has skipped (2t − 1) // 9. After step 42 these are 9 of 1017, a fraction between 0.008 and
    0.01. Before that, there are fewer than 1000 documents.
    """
    for i in range(12):
        tenth = '{"text": 777}\n' if i == 4 else '{"text": "7"}\n'
        (tmp_path / f"{i:02d}.json").write_text(('{"text": "7"}\n' * 9 + tenth) * 10)
    files = list_files("text", str(tmp_path))
    for ranks in (1, 2, 3, 4, 6, 12):
        loaders = [loader(files, sample, rank, ranks, slots=12) for rank in range(ranks)]
        for one in loaders:
            one.encode = lambda text: [1] * 32 + [EOS]
            # Without threads, which would take longer.
            one.options = dataclasses.replace(one.options, fast_tokenizer=True)
        batches = [iter(one) for one in loaders]
        verdicts = {}
        for step in range(1, 43):
            for own in batches:
                for _ in range(12 // ranks):
                    next(own)
            counters = together([one.counters() for one in loaders])
            verdicts |= {(step, allowed): verdict(loaders[-1], counters, allowed) for allowed in (0.008, 0.01)}
        for one in loaders:
            one.close()
        ((when, why),) = [(when, why) for when, why in verdicts.items() if why is not None]
        assert when == (42, 0.008)
        assert why.startswith(
            "9 of 1017 documents could not be used, more than stream.max_skipped_fraction 0.008 allows"
        )


def test_broken_validation_data_is_refused(sample, tmp_path):
    (tmp_path / "x.json").write_text("".join('{"text": "a word"}\n' if i % 10 else "broken\n" for i in range(2000)))
    job, tokenizer = config(sample), load_tokenizer(sample / "tokenizer")
    first_sequences(list_files("text", str(tmp_path)), tokenizer, job, 8, 50, "")
    with pytest.raises(DataError, match=r"documents could not be used, more than stream.max_skipped_fraction 0.01"):
        first_sequences(list_files("text", str(tmp_path)), tokenizer, job, 8, 400, "")


def test_many_damaged_files_stop_the_run(sample, tmp_path):
    write_files(tmp_path, [30] * 16)
    for path in sorted(tmp_path.glob("*.gz"))[:11]:
        path.write_bytes(path.read_bytes()[:60])
    for allowed in (0.01, 0.9):
        one = loader(list_files("c4", str(tmp_path)), sample, slots=1, max_skipped_fraction=allowed)
        batches = iter(one)
        while one.counters()["skipped_files"] < 10:
            one.check_counters(one.counters())
            next(batches)
        assert one.counters()["epoch"] == 0
        if allowed > 0.5:
            one.check_counters(one.counters())
        else:
            with pytest.raises(
                DataError, match=r"1[01] of 16 files are damaged and end early, more than stream.max_skipped_fr"
            ):
                one.check_counters(one.counters())


def test_a_damaged_file_of_a_few_stops_no_run_in_any_epoch(sample):
    """Nine damaged files of sixteen are 90 of 160 in the tenth epoch.

    Ten are too many in any epoch; of a thousand, eleven are.
    """
    for files, damaged, stops in ((16, 1, False), (16, 9, False), (16, 10, True), (1000, 10, False), (1000, 11, True)):
        one = loader([DataFile(f"{i}.json", "", 1) for i in range(files)], sample)
        for epoch in (0, 9, 99):
            counters = {
                "documents": 1e9,
                "skipped_documents": 0,
                "epoch": epoch,
                "skipped_files": damaged * (epoch + 1),
            }
            if stops:
                with pytest.raises(
                    DataError, match=f"{damaged * (epoch + 1)} of {files * (epoch + 1)} files are damaged"
                ):
                    one.check_counters(counters)
            else:
                one.check_counters(counters)


def test_an_empty_file_is_a_damaged_one(tmp_path):
    """A full disk leaves empty files. gzip alone would take one for a regular end."""
    write_files(tmp_path, [40] * 3)
    sorted(tmp_path.glob("*.gz"))[1].write_bytes(b"")
    ranks = streams_of(list_files("c4", str(tmp_path)), 1, 1)
    _, positions = batches(ranks, 60)
    assert positions[0, Field.SKIPPED_FILES] >= 1
    with pytest.raises(ConfigError, match="is damaged and ends early: the file is empty"):
        batches(streams_of(list_files("c4", str(tmp_path)), 1, 1, on_bad_data="fail"), 60)


def test_mismatch_is_named(sample, tmp_path):
    files = list_files("c4", str(sample))
    saved = loader(files, sample).state_dict()
    with pytest.raises(ConfigError, match=r"seq_len: 32 then, 64 now.*on_mismatch"):
        loader(files, sample, seq_len=64).load_state_dict(saved)
    with pytest.raises(ConfigError, match=r"stream.slots: 8 then, 4 now.*global_batch_size = -1 ties"):
        loader(files, sample, slots=4).load_state_dict(saved)
    loader(files, sample, shuffle_window=1).load_state_dict(saved)  # a window of 1 shuffles nothing either
    changed = [DataFile(files[0].name, files[0].url, files[0].size + 1), *files[1:]]
    with pytest.raises(
        ConfigError, match=r"8 files then, 8 now, with 1 difference; first c4-train.00000-of-00008.json.gz"
    ):
        loader(changed, sample).load_state_dict(saved)
    # Moving from the hub to a mirror is no change, because names are relative to the folder that holds the files.
    mirror = tmp_path / "mirror" / "c4" / "en"
    mirror.parent.mkdir(parents=True)
    mirror.symlink_to(sample / "en")
    assert (
        differences(json.loads(saved["fingerprint"]), loader(list_files("c4", str(mirror)), sample).fingerprint) == []
    )


# For every key that fixes the data: its value in the checkpoint, and another. The sources are test_mixture's.
FIXED = {
    "slots": (16, 8),
    "seed": (0, 3),
    "shuffle_window": (256, 64),
    "max_document_mb": (16.0, 0.5),
    "text_field": ("text", "body"),
    "text_split": ("file", "blank_lines"),
    "token_dtype": ("uint16", "uint32"),
}
# The keys of [stream] that a resume may change: they decide how documents are read, and not which tokens a slot gets.
FREE = {"prefetch", "tokenizer_threads", "fast_tokenizer", "on_bad_data", "max_skipped_fraction", "retry_seconds"}
FREE |= {"validation_sequences", "on_mismatch"}


def test_every_key_that_fixes_the_data(sample):
    """A resume with another value of such a key of the config is refused, both ways, by its name."""
    assert {f"stream.{key}" for key in FIXED} == set(fixed("data")) - {"stream.sources"}
    every = {key.removeprefix("stream.") for key in all_keys() if key.startswith("stream.")}
    assert every == {*FIXED, *FREE, "sources"}, "does a new key of [stream] decide which tokens a slot gets?"
    job, files, tokenizer = config(sample), list_files("c4", str(sample)), load_tokenizer(sample / "tokenizer")
    job.stream.slots = 16
    before = open_stream(job, files, tokenizer, 1, 0)
    for key, (then, now) in FIXED.items():
        assert getattr(job.stream, key) == then
        setattr(job.stream, key, now)
        after = open_stream(job, files, tokenizer, 1, 0)
        setattr(job.stream, key, then)
        for one, other, first, second in ((before, after, then, now), (after, before, now, then)):
            with pytest.raises(
                ConfigError, match=re.escape(f"other data: stream.{key}: {first!r} then, {second!r} now.")
            ):
                other.load_state_dict(one.state_dict())


def test_a_checkpoint_of_another_loader(sample, tmp_path):
    """It is refused, and the message says what to set.

    With this setting, the data begins anew once, not at every resume.
    """
    dcp.save({"model": {"w": torch.ones(2)}}, checkpoint_id=tmp_path, no_dist=True)
    found, epoch = read_data_state(str(tmp_path))
    assert (found, epoch) == ({}, -1)
    now = loader(list_files("c4", str(sample)), sample)
    with pytest.raises(ConfigError, match=r'written by another loader. Set stream.on_mismatch = "restart"'):
        check_fingerprint(found, now.fingerprint)
    now.restart(epoch + 1)
    assert not now.positions.any()


def test_a_checkpoint_of_another_assignment(sample, tmp_path):
    """Its positions have other columns and are never loaded.

    It is refused, or the data begins anew after the last epoch.
    """
    now = loader(list_files("c4", str(sample)), sample)
    old = now.fingerprint | {"assignment": VERSION - 1}
    state = {"fingerprint": json.dumps(old), "positions": torch.tensor([[2] + [7] * 12] * 7 + [[3] + [9] * 12])}
    dcp.save({"dataloader": state}, checkpoint_id=tmp_path, no_dist=True)
    found, epoch = read_data_state(str(tmp_path))
    assert (found, epoch) == (old, 3)
    refused = rf'other data: assignment: {VERSION - 1} then, {VERSION} now.*stream.on_mismatch = "restart"'
    with pytest.raises(ConfigError, match=refused):
        check_fingerprint(found, now.fingerprint)
    with pytest.raises(ConfigError, match=refused):
        now.load_state_dict(state)
    assert not now.positions.any()
    now.restart(epoch + 1)
    assert now.positions[:, Field.EPOCH].tolist() == [4] * 8


def config(sample, *options):
    argv = ["--job.config_file", "train_configs/demo_cpu.toml", "--training.dataset_path", str(sample)]
    argv += ["--model.hf_assets_path", f"{sample}/tokenizer", "--training.seq_len", "32", "--stream.prefetch", "0"]
    return load_config([*argv, *options])


def test_digest_of_no_ranks(sample):
    with pytest.raises(ConfigError, match="--ranks or --resume-ranks is 0, expected at least 1"):
        digest(config(sample), 1, [(0, 0)])


def first_sequences_by_hand(file, sample, count, length):
    """The first [count, length] tokens of a file, computed with gzip, json and sentencepiece only."""
    processor = SentencePieceProcessor(model_file=str(sample / "tokenizer" / "sample.model"))
    tokens = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        while len(tokens) < count * length:
            tokens += [*processor.encode(json.loads(next(lines))["text"]), processor.eos_id()]
    return torch.tensor(tokens[: count * length]).view(count, length)


def test_validation_is_the_same_on_any_ranks(sample):
    options = ("--validation.enable", "--validation.local_batch_size", "2", "--stream.validation_sequences", "16")
    job = config(sample, *options, "--validation.dataset_path", str(sample), "--validation.seq_len", "64")
    tokenizer = load_tokenizer(sample / "tokenizer")
    expected = sorted(first_sequences_by_hand(sample / VALIDATION_FILE, sample, 16, 65).tolist())
    for ranks in (1, 2, 4, 8):
        sets = [_ValidationSet(job, tokenizer, ranks, rank) for rank in range(ranks)]
        batches = [[torch.cat([x["input"], labels[:, -1:]], 1) for x, labels in one] for one in sets]
        assert {len(b) for b in batches} == {16 // ranks // 2}
        assert sorted(row.tolist() for b in batches for x in b for row in x) == expected
        # A second validation gives the same batches.
        inputs, labels = next(iter(sets[-1]))
        assert torch.equal(inputs["input"], batches[-1][0][:, :-1])
        assert torch.equal(labels, batches[-1][0][:, 1:])


def test_held_out_sequences_are_the_first_of_the_validation_split(sample, tmp_path, caplog):
    """The split beside the training data, or that of [validation] if it is enabled; None if there is neither."""
    tokenizer, job = load_tokenizer(sample / "tokenizer"), config(sample)
    expected = first_sequences_by_hand(sample / VALIDATION_FILE, sample, 5, 33)
    found = held_out_sequences(job, tokenizer, 5)
    assert found.dtype == torch.int64
    assert torch.equal(found, expected)

    other = shutil.copy(sample / "en" / "c4-train.00002-of-00008.json.gz", tmp_path / "valid.json.gz")
    section = job.validation
    section.enable, section.dataset, section.dataset_path = True, "text_validation", str(tmp_path)
    section.seq_len = 64  # of validation; held-out sequences have training's
    found = held_out_sequences(job, tokenizer, 5)
    assert torch.equal(found, first_sequences_by_hand(other, sample, 5, 33))
    assert not torch.equal(found, expected)

    section.enable = False
    job.training.dataset_path = other  # a single file, with no validation split beside it
    assert held_out_sequences(job, tokenizer, 5) is None
    job.training.dataset_path = str(tmp_path / "train")
    (tmp_path / "train").mkdir()
    shutil.move(other, tmp_path / "train" / "train.json.gz")
    assert held_out_sequences(job, tokenizer, 5) is None
    assert "no validation split: " in caplog.text


def test_held_out_text_is_of_all_folders(sample, tmp_path):
    """For documents other than C4's, ``en`` is a folder like any other. C4's variants also lie beside each other."""
    for folder in ("de", "en", "en.noclean"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.jsonl").write_text('{"text": "to train on"}\n')
        (tmp_path / folder / "validation.jsonl").write_text(json.dumps({"text": f"In {folder}. " * 20}) + "\n")
    job, tokenizer = config(sample, "--training.dataset", "text"), load_tokenizer(sample / "tokenizer")
    job.training.dataset_path = str(tmp_path)
    found = tokenizer.decode(held_out_sequences(job, tokenizer, 4).reshape(-1).tolist())
    assert [folder in found for folder in ("In de", "In en.", "In en.noclean")] == [True] * 3
    job.training.dataset = "c4"
    found = tokenizer.decode(held_out_sequences(job, tokenizer, 1).reshape(-1).tolist())
    assert [folder in found for folder in ("In de", "In en.", "In en.noclean")] == [False, True, False]


def test_a_document_of_many_megabytes_does_not_fill_memory(tmp_path):
    import tracemalloc

    with open(tmp_path / "train.json", "wb") as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(50):
            file.write(b"x" * (1 << 20))
        file.write(b'"}\n{"text": "last"}\n')
    (file,) = list_files("c4", str(tmp_path))
    documents = Documents(file, READ)
    tracemalloc.start()
    got = [documents.read() for _ in range(4)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (got[0], got[2], got[3]) == (b'{"text": "first"}\n', b'{"text": "last"}\n', None)
    assert "52,428,813 bytes, more than stream.max_document_mb" in str(got[1])
    assert peak < 8 << 20


def test_digest(sample):
    """The real loaders give the same hashes for 1 to 40 ranks, resumed twice, across an epoch, and with prefetch."""
    options = ("--training.global_batch_size", "80", "--training.local_batch_size", "1", "--training.seq_len", "256")
    job = config(sample, *options)
    steps = 60  # 1.2 M tokens: two epochs
    expected = digest(job, steps, [(0, 1)])
    assert expected.counters["epoch"] >= 1
    assert len(set(expected.hashes)) == steps
    for phases in ([(0, 8)], [(0, 2), (20, 40), (45, 4)], [(0, 40), (1, 1), (30, 2)]):
        assert digest(job, steps, phases).hashes == expected.hashes, phases
    prefetched = config(sample, *options, "--stream.prefetch", "3")
    assert digest(prefetched, 20, [(0, 2), (7, 1)]).hashes == expected.hashes[:20]
    # Fewer slots than sequences, and another accumulation: another stream, which does not depend on the ranks either.
    few = config(sample, *options, "--stream.slots", "16", "--training.local_batch_size", "5")
    assert digest(few, 10, [(0, 1)]).hashes == digest(few, 10, [(0, 8), (4, 16)]).hashes != expected.hashes[:10]


def test_fast_tokenizer_gives_the_same_batches(sample, hf_tokenizer):
    options = (
        "--training.global_batch_size",
        "16",
        "--training.seq_len",
        "256",
        "--model.hf_assets_path",
        str(hf_tokenizer),
    )
    hashes = digest(config(sample, *options), 40, [(0, 2)]).hashes
    fast = config(sample, *options, "--stream.fast_tokenizer")
    assert digest(fast, 40, [(0, 1), (15, 4)]).hashes == hashes
    ahead = config(sample, *options, "--stream.fast_tokenizer", "--stream.prefetch", "3")
    assert digest(ahead, 40, [(0, 2), (15, 1)]).hashes == hashes


@pytest.mark.parametrize(
    ("files", "slots", "ranks"), [(1024, 640, 640), (1023, 640, 640), (1000, 640, 640), (1024, 1200, 600)]
)
@pytest.mark.slow
def test_read_amplification_measured(tmp_path, files, slots, ranks):
    """Read amplification over one epoch of tiny files, measured by counting bytes."""
    listed = write_files(tmp_path, [40] * files)
    size = sum(f.size for f in listed)
    read = 0
    for rank in streams_of(listed, slots, ranks, seq_len=15):
        while any(slot.position[Field.EPOCH] == 0 for slot in rank.slots.values()):
            for slot in rank.slots.values():
                if slot.position[Field.EPOCH] == 0:
                    slot.sequence()
        read += sum(count for (epoch, _), count in rank.passes.bytes_read().items() if epoch == 0)
        rank.close()
    assert read / size <= 1 + ranks / files
    print(f"{files} files, {slots} slots, {ranks} ranks: read amplification {read / size:.3f}")
