"""The documents of a slot, shuffled in windows.

A window is the next W documents that the cursor gives, in an order that follows from (seed, epoch, slot, window). It ends
earlier at the end of the epoch, and when its text reaches W · DOCUMENT_BYTES, so that long documents fit into memory too. None
of that depends on other slots, hence none on the ranks.

The position of a document is that of its window's beginning, and how many documents of the window came before it. A resume reads
the window again. What the window's reading passed over (bad documents, ends of files) counts when the window has been used up.
"""

import hashlib

import numpy as np

from titan_disp.data.assignment import KEYS, STEP
from titan_disp.data.cursor import Cursor, Document
from titan_disp.data.passes import DOCUMENT_BYTES
from titan_disp.data.place import Field
from titan_disp.data.records import size_of
from titan_disp.errors import DataError


def permutation(key: int, count: int) -> list[int]:
    """0 … count − 1 in an order that ``key`` (64 bits) decides: sorted by the first ``count`` numbers of SplitMix64.

    Written out, since the order must outlive versions of Python and numpy. SplitMix64 (Steele, Lea, Flood: "Fast splittable
    pseudorandom number generators", OOPSLA 2014) gives no number twice, so there are no ties.
    """
    increment = np.uint64(STEP)  # SplitMix64's is the same number
    z = np.uint64(key) + np.arange(1, count + 1, dtype=np.uint64) * increment  # modulo 2⁶⁴
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ z >> np.uint64(31), kind="stable").tolist()


def memory(slots: int, window: int, document_bytes: float) -> float:
    """Bytes of text that a rank with so many slots holds for shuffling, at most, where documents have this mean length.

    Windows are half full on average, as slots do not refill them at the same time. The slot that is refilling reads ahead of the
    others by a window, so that their documents of a shared file wait: half a window too, and at most a whole one (``Passes``).
    """
    return 2 * slots * window * min(document_bytes, DOCUMENT_BYTES)


def _hash(*numbers: int) -> int:
    return int.from_bytes(hashlib.sha256("/".join(map(str, numbers)).encode()).digest()[:8], "big")


class Shuffle:
    """Gives the documents of a cursor in windows, one by one."""

    def __init__(self, cursor: Cursor, window: int) -> None:
        """Args: cursor: at a position that this class or nobody has moved; taken over. window: W, 2 or more."""
        self.cursor, self.window = cursor, window
        # Of the window, those still to be used, the next one last. UTF-8: a str may take four bytes a character.
        self._documents: list[bytes | np.ndarray] = []
        p = cursor.position
        self._position = p.copy()  # of the next document
        # Back to the beginning of the window. The bytes of its documents are known when it has been read again.
        self._used = int(p[Field.IN_WINDOW])
        p[Field.DOCUMENTS] -= self._used
        p[Field.IN_WINDOW] = 0

    def next(self) -> Document:
        """The next document that can be used.

        Raises:
            DataError: as ``Cursor.next``; or the data is not what it was when the position was stored.
        """
        if not self._documents:
            self._fill()
        start, stored = self._position, self._documents.pop()
        if self._documents:
            end = start.copy()
            end[Field.IN_WINDOW] += 1
            end[Field.DOCUMENTS] += 1
            end[Field.BYTES] += size_of(stored)
        else:
            end = self.cursor.position.copy()
        self._position = end.copy()
        content = stored.decode() if isinstance(stored, bytes) else stored
        return Document(content, size_of(stored), start, end)

    def _fill(self) -> None:
        begin = self.cursor.position.copy()
        while not (documents := self._read()) and not self._used:
            self.cursor.end_epoch()
            begin = self.cursor.position.copy()
        place, epoch, window = self.cursor.place, int(begin[Field.EPOCH]), int(begin[Field.WINDOW])
        order = permutation(_hash(place.assignment.seed, epoch, place.index, window), len(documents))
        used, self._used = self._used, 0
        if used >= len(documents):
            raise DataError(
                f"slot {place.index} had used {used} documents of window {window} in epoch {epoch} when the checkpoint was "
                f"written, and now finds {len(documents)} in it: a file's content has changed"
            )
        size = sum(size_of(documents[i]) for i in order[:used])
        self._documents = [documents[i] for i in reversed(order[used:])]
        self.cursor.position[Field.BYTES] -= size
        self.cursor.position[Field.WINDOW] += 1
        self._position = begin  # whose BYTES are those of the documents used, after a resume as well
        self._position[Field.IN_WINDOW] = used
        self._position[Field.DOCUMENTS] += used

    def _read(self) -> list[bytes | np.ndarray]:
        """The documents of the next window, as they come; none at the end of an epoch."""
        documents: list[bytes | np.ndarray] = []
        most, size = self._most(), 0
        while len(documents) < most and size < most * DOCUMENT_BYTES:
            document = self.cursor.next_of_epoch()
            if document is None:
                break
            content = document.content
            # A copy, as token ids are a part of what was read together.
            documents.append(content.encode() if isinstance(content, str) else content.copy())
            size += document.size
        return documents

    def _most(self) -> int:
        """How many documents the next window has, if they are not too long and the epoch goes on.

        An epoch's first window is shorter, from 1 to W, spread evenly over the slots. All slots would refill at the same moment
        otherwise, and windows of two epochs would hold the same documents of a file.
        """
        place = self.cursor.place
        if self.cursor.position[Field.WINDOW]:
            return self.window
        shift = _hash(place.assignment.seed, place.epoch)
        return 1 + (place.index * STEP + shift) % KEYS * self.window // KEYS
