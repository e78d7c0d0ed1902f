"""A slot's documents are shuffled in windows.

A window is the next W documents of the cursor, in an order that (seed, epoch, slot,
window) decides. A window is shorter at the beginning and the end of an epoch. It also
ends when its text reaches W · DOCUMENT_BYTES, so that long documents fit into memory. A
window depends on no other slot, and therefore not on the ranks.

The position of a document consists of the position where its window begins and the
number of the window's documents before it. A resume reads the window again. The bad
documents and ends of files in a window are counted when the whole window has been used.
"""

import hashlib

import numpy as np

from titan_disp.data.assignment import KEYS
from titan_disp.data.blocks import STEP, permutation
from titan_disp.data.cursor import Cursor, Document
from titan_disp.data.formats import size_of
from titan_disp.data.passes import DOCUMENT_BYTES
from titan_disp.data.position import in_window
from titan_disp.errors import DataError


def _hash(*numbers: int) -> int:
    text = "/".join(map(str, numbers))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


class Shuffle:
    """Returns the documents of a cursor one by one, shuffled in windows of W ≥ 2."""

    def __init__(self, cursor: Cursor, window: int) -> None:
        """The cursor must be at a position that this class has stored, or at the
        beginning.
        """
        self.cursor = cursor
        self.window = window
        # The unused documents of the window, the next one last. They are in UTF-8,
        # because a str may take four bytes per character.
        self._documents: list[bytes | np.ndarray] = []
        # the position before the next document
        self._start = cursor.position.values.copy()
        self._used = cursor.position.rewind_window()

    def next(self) -> Document:
        """Return the next usable document.

        Raises DataError as ``Cursor.next`` does, and if the data has changed.
        """
        while not self._documents:
            self._fill()
        start = self._start
        stored = self._documents.pop()
        size = size_of(stored)
        if self._documents:
            end = in_window(start, 1, size)
        else:
            end = self.cursor.position.values.copy()
        self._start = end
        content = stored.decode() if isinstance(stored, bytes) else stored
        return Document(content, size, start, end)

    def _fill(self) -> None:
        """Read the next window that has documents, and drop the documents that were used
        before a resume. If a file of the window has been left out since, this may drop
        all documents.
        """
        position = self.cursor.position
        begin = position.values.copy()
        while not (documents := self._read()) and not self._used:
            self.cursor.end_epoch()
            begin = position.values.copy()
        place = position.epoch, position.slot, position.window
        order = permutation(_hash(position.assignment.seed, *place), len(documents))
        used = self._used
        self._used = 0
        # Leaving out files changes the window. Fewer documents than a window holds are
        # then lost or come twice.
        is_other = any(file.left_out for file in self.cursor.passes.files)
        if used >= len(documents) and not is_other:
            raise DataError(
                f"slot {position.slot} had used {used} documents of window "
                f"{position.window} in epoch {position.epoch} when the checkpoint was "
                f"written, and now finds {len(documents)} in it: a file's content has "
                "changed, but not its name and size. Restore the files as they were, "
                "or start a new run in another --job.dump_folder"
            )
        size = sum(size_of(documents[i]) for i in order[:used])
        self._documents = [documents[i] for i in reversed(order[used:])]
        position.end_window(size)
        # BYTES of ``begin`` already counts the documents used, so their size is 0.
        self._start = in_window(begin, used, 0)

    def _read(self) -> list[bytes | np.ndarray]:
        """Return the documents of the next window in stored order, or an empty list at
        the end of an epoch.
        """
        documents: list[bytes | np.ndarray] = []
        most = self._most()
        size = 0
        while len(documents) < most and size < most * DOCUMENT_BYTES:
            document = self.cursor.next_of_epoch()
            if document is None:
                break
            if isinstance(document.content, str):
                documents.append(document.content.encode())
            else:
                # The content is a view that keeps a larger block in memory.
                documents.append(document.content.copy())
            size += document.size
        return documents

    def _most(self) -> int:
        """Return the number of documents of the next window, which may hold fewer if
        they are long or the epoch ends.

        An epoch's first window has 1 to W documents, a number that is spread evenly
        over the slots. Otherwise all slots would refill at the same time, and the
        windows of two epochs would hold the same documents of a file.
        """
        position = self.cursor.position
        if position.window:
            return self.window
        shift = _hash(position.assignment.seed, position.epoch)
        return 1 + (position.slot * STEP + shift) % KEYS * self.window // KEYS
