"""A slot's documents are shuffled in windows.

A window is the next W documents of the cursor, in an order that (seed, epoch, slot,
window) decides. It is shorter at the beginning and the end of an epoch, and when its
text reaches W · DOCUMENT_BYTES, so that long documents fit into memory too. Other slots
have no influence on it, and therefore ranks have none.

The position of a document is that of its window's beginning, and the number of
documents of the window before it. A resume reads the window again. Bad documents and
ends of files in it are counted once the whole window has been used.
"""

import hashlib

import numpy as np

from titan_disp.data.assignment import KEYS
from titan_disp.data.blocks import STEP, permutation
from titan_disp.data.cursor import Cursor, Document
from titan_disp.data.formats import size_of
from titan_disp.data.passes import DOCUMENT_BYTES
from titan_disp.data.position import Field
from titan_disp.errors import DataError


def _hash(*numbers: int) -> int:
    return int.from_bytes(
        hashlib.sha256("/".join(map(str, numbers)).encode()).digest()[:8], "big"
    )


class Shuffle:
    """Give the documents of a cursor one by one, shuffled in windows of W ≥ 2."""

    def __init__(self, cursor: Cursor, window: int) -> None:
        """The cursor's position is one that this class has stored, or that of the
        beginning.
        """
        self.cursor = cursor
        self.window = window
        # The unused documents of the window, the next one last. As UTF-8: a str may
        # take four bytes per character.
        self._documents: list[bytes | np.ndarray] = []
        p = cursor.position.values
        self._position = p.copy()  # of the next document
        # Go back to the beginning of the window. The bytes of its documents are known
        # once it has been read again.
        self._used = int(p[Field.IN_WINDOW])
        p[Field.DOCUMENTS] -= self._used
        p[Field.IN_WINDOW] = 0

    def next(self) -> Document:
        """Return the next usable document.

        Beside what ``Cursor.next`` raises: DataError if the data has changed.
        """
        if not self._documents:
            self._fill()
        start = self._position
        stored = self._documents.pop()
        if self._documents:
            end = start.copy()
            end[Field.IN_WINDOW] += 1
            end[Field.DOCUMENTS] += 1
            end[Field.BYTES] += size_of(stored)
        else:
            end = self.cursor.position.values.copy()
        self._position = end.copy()
        content = stored.decode() if isinstance(stored, bytes) else stored
        return Document(content, size_of(stored), start, end)

    def _fill(self) -> None:
        begin = self.cursor.position.values.copy()
        while not (documents := self._read()) and not self._used:
            self.cursor.end_epoch()
            begin = self.cursor.position.values.copy()
        position = self.cursor.position
        epoch = int(begin[Field.EPOCH])
        window = int(begin[Field.WINDOW])
        order = permutation(
            _hash(position.assignment.seed, epoch, position.slot, window),
            len(documents),
        )
        used = self._used
        self._used = 0
        if used >= len(documents):
            raise DataError(
                f"slot {position.slot} had used {used} documents of window {window} "
                f"in epoch {epoch} when the checkpoint was written, and now finds "
                f"{len(documents)} in it: a file's content has changed, but not its "
                "name and size. Restore the files as they were, or start a new run in "
                "another --job.dump_folder"
            )
        size = sum(size_of(documents[i]) for i in order[:used])
        self._documents = [documents[i] for i in reversed(order[used:])]
        self.cursor.position.values[Field.BYTES] -= size
        self.cursor.position.values[Field.WINDOW] += 1
        # its BYTES include the documents used, after a resume too
        self._position = begin
        self._position[Field.IN_WINDOW] = used
        self._position[Field.DOCUMENTS] += used

    def _read(self) -> list[bytes | np.ndarray]:
        """Read the documents of the next window, in stored order; none at the end of an
        epoch.
        """
        documents: list[bytes | np.ndarray] = []
        most = self._most()
        size = 0
        while len(documents) < most and size < most * DOCUMENT_BYTES:
            document = self.cursor.next_of_epoch()
            if document is None:
                break
            content = document.content
            # Token ids are copied because they are a view of a larger block.
            documents.append(
                content.encode() if isinstance(content, str) else content.copy()
            )
            size += document.size
        return documents

    def _most(self) -> int:
        """Return the size of the next window in documents, if they are not too long and
        the epoch does not end.

        An epoch's first window is shorter, from 1 to W, spread evenly over the slots.
        Otherwise all slots would refill at the same time, and the windows of two epochs
        would hold the same documents of a file.
        """
        position = self.cursor.position
        if position.values[Field.WINDOW]:
            return self.window
        shift = _hash(position.assignment.seed, position.epoch)
        return 1 + (position.slot * STEP + shift) % KEYS * self.window // KEYS
