"""Documents shuffled in windows: the right order, also through resumes, in bounded
memory.
"""

import hashlib
from collections import deque
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest

from tests.streams import (
    SEED,
    batches,
    json_lines,
    order_by_hand,
    sequence,
    streams_of,
    words_of,
    write_files,
)
from titan_disp.data.blocks import permutation
from titan_disp.data.listing import list_files
from titan_disp.data.position import Field
from titan_disp.errors import DataError

STEP = 0x9E3779B97F4A7C15


def splitmix(state):
    while True:
        state = z = (state + STEP) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        yield z ^ z >> 31


def test_permutation():
    """It sorts by SplitMix64's numbers; here by those published for the seed
    1234567.
    """
    published = (
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
    )
    assert tuple(islice(splitmix(1234567), 4)) == published
    assert permutation(1234567, 5) == [1, 3, 0, 2, 4]
    assert (permutation(3, 0), permutation(2**64 - 1, 1)) == ([], [0])


def first_64_bits(text):
    return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def shuffled_by_hand(order, size, window, slot, epoch):
    """(document, number of its window, place in it) of ``order``, computed as
    shuffle.py's docstring describes.
    """
    waiting = deque(order)
    out = []
    number = 0
    while waiting:
        spread = Fraction(
            (slot * STEP + first_64_bits(f"{SEED}/{epoch}")) % 2**64, 2**64
        )
        most = window if number else 1 + int(spread * window)
        taken = []
        while (
            waiting
            and len(taken) < most
            and sum(size(*document) for document in taken) < most * 8192
        ):
            taken.append(waiting.popleft())
        numbers = splitmix(first_64_bits(f"{SEED}/{epoch}/{slot}/{number}"))
        order = [document for _, document in sorted(zip(numbers, taken, strict=False))]
        out += [(document, number, place) for place, document in enumerate(order)]
        number += 1
    return out


CASES = [
    *(
        ([6, 7, 8, 9], 2, 0, 1),
        ([21, 20, 22, 19, 23], 2, 8, 1),
        ([40, 33, 51, 20, 47], 3, 5, 1),
    ),
    *(([14, 9, 20], 4, 100, 1), ([90, 4, 4, 70], 7, 2, 1), ([90, 4, 4, 70], 7, 1, 1)),
    # 3 to 15 kB: many windows end before the sixth document
    ([40, 30, 50], 2, 6, 1000),
]


@pytest.mark.parametrize(("counts", "slots", "window", "longer"), CASES)
def test_order_of_the_documents(tmp_path, counts, slots, window, longer):
    """Document by document over two epochs, with their positions.

    If a new version changed it, no run could resume.
    """
    words = lambda i: longer * (1 + i % 5)  # noqa: E731
    files = write_files(tmp_path, counts, words)
    before = np.cumsum([1, *counts])

    def size(file, index):
        return len(words_of(before[file] + index, words))

    (rank,) = streams_of(files, slots, 1, shuffle_window=window)
    columns = [Field.EPOCH, Field.DOCUMENTS, Field.BYTES, Field.OFFSET]
    for slot in range(slots):
        count = 0
        total = 0
        for epoch in (0, 1):
            plain = order_by_hand(files, counts, slots, slot, epoch, size)
            shuffled = shuffled_by_hand(plain, size, max(window, 1), slot, epoch)
            for document, number, place in shuffled:
                found = rank.slots[slot].source.next()
                assert (
                    int(found.content.split()[0]) == before[document[0]] + document[1]
                )
                assert found.start[columns].tolist() == [epoch, count, total, 0]
                if window > 1:
                    assert found.start[[Field.WINDOW, Field.IN_WINDOW]].tolist() == [
                        number,
                        place,
                    ]
                count = count + 1
                total = total + size(*document)
                assert found.end[columns].tolist() == [epoch, count, total, 0]


def test_a_resume_at_every_position(tmp_path):
    for f in range(3):
        lines = json_lines(
            words_of(1 + n, lambda i: 1 + i % 9) for n in range(20 * f, 20 * f + 20)
        ).splitlines()
        for i in (18, 12, 6):
            lines.insert(i + f, b"broken")
        (tmp_path / f"{f}.json").write_bytes(b"\n".join(lines))
    files = list_files("text", str(tmp_path))
    steps = 90
    options = {"seq_len": 4, "shuffle_window": 5, "max_skipped_fraction": 1.0}
    (rank,) = streams_of(files, 2, 1, **options)
    tokens, positions = zip(*(batches([rank], 1) for _ in range(steps)), strict=True)
    tokens = np.concatenate(tokens)
    for t in range(steps - 6):
        got, then = batches(
            streams_of(files, 2, 1 + t % 2, positions=positions[t], **options), 6
        )
        assert np.array_equal(got, tokens[t + 1 : t + 7])
        assert np.array_equal(then, positions[t + 6])
    every = np.concatenate(positions)
    assert every[:, Field.EPOCH].max() >= 2
    assert ((every[:, Field.OFFSET] > 0) & (every[:, Field.IN_WINDOW] > 0)).any()
    # Bad documents are counted once the window has been used.
    new = [
        p
        for p in positions
        if (p[:, Field.EPOCH] == 1).all() and not p[:, Field.WINDOW].any()
    ]
    assert {int(p[:, Field.SKIPPED].sum()) for p in new} == {9}


def test_slots_that_share_a_file_read_it_once_in_bounded_memory(tmp_path):
    """They share one pass although each in turn reads a window ahead.

    The queue for different speeds is tiny here.
    """
    slots = 24
    window = 64
    files = write_files(tmp_path, [4800], words=lambda i: 30 + i % 50)
    (rank,) = streams_of(
        files,
        slots,
        1,
        seq_len=127,
        shuffle_window=window,
        queue_bytes=20_000,
        tokenizer_threads=1,
    )
    held = []
    every = list(rank.slots.values())
    while any(slot.position[Field.EPOCH] == 0 for slot in every):
        for slot in every:
            sequence(slot)
            waiting = sum(
                len(text) for other in every for text in other.source._documents
            )
            held.append(
                waiting
                + sum(reading.queued for reading in set(rank.passes._open.values()))
            )
    assert rank.passes.bytes_read()[0, 0] == files[0].size
    mean = 5 * (30 + 49 / 2)
    assert max(held) <= 2 * slots * window * mean
    # the bound is not far too large
    assert np.mean(held[: len(held) // 2]) >= 0.5 * slots * window * mean


def test_a_window_that_has_shrunk_is_refused(tmp_path):
    """A position in it would mean other documents. Here the first window has 10."""
    # two documents per sequence
    path = tmp_path / "train.json"
    options = {"seq_len": 3, "shuffle_window": 30}
    for used, window, left in ((4, 0, 2), (8, 1, 0)):
        path.write_text('{"text": "7"}\n' * 40)
        _, positions = batches(
            streams_of(list_files("text", str(path)), 1, 1, **options),
            (10 * window + used) // 2,
        )
        path.write_text('{"text": "7"}\n' * 2 + '{"text": "7",\n' * 38)
        with pytest.raises(
            DataError,
            match=f"used {used} documents of window {window} in ep.* now finds {left} in it",
        ):
            batches(
                streams_of(
                    list_files("text", str(path)), 1, 1, positions=positions, **options
                ),
                1,
            )
