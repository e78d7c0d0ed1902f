"""Blocks are the places in a file where reading can begin.

``titan-disp data index`` finds the blocks (``index``).

If blocks are dealt out to the slots, a pass visits a file's blocks in an order that
changes with the epoch, so that sorted files are mixed. The pass leaves out blocks that
none of its slots owns. In a file with blocks, documents are numbered in the order of
the visits.
"""

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

# 2⁶⁴ / golden ratio, odd. No other number's multiples are spread more evenly.
STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True, eq=False)
class Blocks:
    """The B blocks of a file.

    Places are counted in bytes, in row groups of a Parquet file, or in documents of a
    file of Megatron-LM, whose .idx says where each document is.
    """

    # [B + 1] int64, the number of documents before each block; the last entry is the
    # number of documents in the file
    first: np.ndarray
    # [B + 1] int64, the place where each block begins; the last entry is the place
    # where the last block ends
    places: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1


def permutation(key: int, count: int) -> list[int]:
    """Return 0 … count − 1 in a pseudorandom order that ``key`` (64 bits) decides.

    The sort keys are the first ``count`` numbers of SplitMix64 with this key (Steele,
    Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014). This
    generator gives no number twice. It is written out here because the order must not
    change with the version of Python or numpy.
    """
    increment = np.uint64(STEP)  # also SplitMix64's increment
    # The sum is modulo 2⁶⁴.
    z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * increment
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ z >> np.uint64(31), kind="stable").tolist()


class Visits:
    """The order in which a pass visits the blocks of a file.

    Attributes:
        dealt: whether slots own whole blocks, instead of single documents.
        first: the number of documents before each visit; the last entry is the number
            of documents in the file.
        spans: for each visit, the places where its block begins and ends.
    """

    def __init__(self, blocks: Blocks, key: int | None) -> None:
        """``key`` decides the order. If it is None, the blocks are visited in stored
        order, and are not dealt out.
        """
        self.dealt = key is not None
        order = (
            np.arange(len(blocks))
            if key is None
            else np.array(permutation(key, len(blocks)), dtype=np.int64)
        )
        self.first = [0, *np.cumsum(np.diff(blocks.first)[order]).tolist()]
        self.spans = np.stack(
            [blocks.places[order], blocks.places[order + 1]], axis=1
        ).tolist()

    def of(self, index: int) -> int:
        """Return the number of the visit in which a document is read, or the number of
        all visits if there is no such document.
        """
        return bisect_right(self.first, index) - 1
