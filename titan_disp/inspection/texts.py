"""Text to measure on: a random sample, the same for every model with the same tokenizer."""

import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from titan_disp.data.documents import Documents
from titan_disp.data.files import DataFile, list_files
from titan_disp.data.formats import JSON_LINES, PARQUET
from titan_disp.data.hub_dataset import is_hub_name
from titan_disp.data.records import BadDocument, DamagedFile, text_of
from titan_disp.errors import ConfigError

MOST = 64 << 20  # characters that are read, so that the time does not grow with the file
_DOCUMENTS = (*JSON_LINES, *PARQUET)
MARGIN = 8  # characters for a token, of which English text needs about four
PIECE = 8192  # characters of a plain text that stay together: about four sequences of 512 tokens


def read_texts(text: Path | None, dataset: str | None, seed: int, in_order: bool = False) -> list[str]:
    """Documents in random order, or in that of the text.

    Args:
        text: file of documents (named as training data is), or else a plain UTF-8 text, which is cut at line ends into
            pieces of 8192 characters or a little more.
        dataset: folder, whose validation split is taken, or file or glob of documents, or a data set of the hub (hf:…).
        seed: of the order of files and documents. Of more than 64 M characters the first are taken, in the files' order.
        in_order: the documents of a file follow each other as there, each ends in a blank line, and a plain text is cut into
            lines: joined without anything between them, they are the text.

    Raises:
        ConfigError: not exactly one of the two, missing, unreadable or empty.
    """
    if (text is None) == (dataset is None):
        raise ConfigError("expected one of --text FILE and --dataset PATH: what to measure on")
    shuffle = random.Random(seed).shuffle
    source = f"--text {str(text)!r}" if text is not None else f"--dataset {dataset!r}"
    if text is not None and not text.is_file():
        raise ConfigError(
            f"{source} is not a file; expected plain text, or documents in {', '.join('*' + s for s in _DOCUMENTS)}"
        )
    if text is not None and not text.name.endswith(_DOCUMENTS):
        documents = _pieces(text, 1 if in_order else PIECE)
    else:
        try:
            if dataset is not None and is_hub_name(dataset):
                files = list_files(dataset, None, "validation")
            else:
                files = list_files("c4_validation", str(text or dataset))
        except ConfigError as error:  # speaks of a key that is not used here
            message = re.sub(r"(training.dataset_path|validation.dataset) is", "--dataset is", str(error))
            raise ConfigError(message) from error
        shuffle(files)
        documents = (f"{document}\n\n" for document in _documents(files)) if in_order else _documents(files)
    taken = _first(documents)
    if not taken:
        raise ConfigError(f"{source} holds no text")
    if not in_order:
        shuffle(taken)
    return taken


def _first(documents: Iterable[str]) -> list[str]:
    taken: list[str] = []
    characters = 0
    for document in documents:
        taken.append(document)
        characters += len(document)
        if characters >= MOST:
            break
    return taken


def _pieces(path: Path, size: int) -> Iterator[str]:
    lines: list[str] = []
    characters = 0
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                lines.append(line)
                characters += len(line)
                if characters >= size:
                    yield "".join(lines)
                    lines, characters = [], 0
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {str(path)!r} is not UTF-8 text: {error}") from error
    if lines:
        yield "".join(lines)


def _documents(files: Iterable[DataFile]) -> Iterator[str]:
    """Bad documents and the rest of damaged files are passed over, and said on stderr."""
    for file in files:
        reader, bad = Documents(file, max_bytes=MOST), 0
        try:
            while (record := reader.read()) is not None:
                try:
                    yield text_of(record)
                except BadDocument:
                    bad += 1
        except DamagedFile as error:
            print(f"{file.url} is damaged and ends early: {error}", file=sys.stderr)
        finally:
            reader.close()
        if bad:
            print(f"{file.url}: {bad} bad documents were passed over", file=sys.stderr)


def cut_sequences(texts: Iterable[str], encode: Callable[[str], list[int]], count: int, length: int) -> Tensor:
    """Token ids of the texts, joined by blank lines, in sequences of equal length.

    Args:
        encode: text → token ids, without special tokens.
        count, length: wanted; a short text gives fewer sequences, and where it does not fill one, a single shorter one.

    Returns:
        [count, length] int64.

    Raises:
        ConfigError: fewer than two tokens.
    """
    ids: list[int] = []
    for text in texts:
        ids += encode(f"\n\n{text}" if ids else text)
        if len(ids) >= count * length:
            break
    if len(ids) < 2:
        raise ConfigError(f"the text has {len(ids)} tokens, expected at least 2: a cosine needs a pair of tokens")
    length = min(length, len(ids))
    count = min(count, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def contiguous_sequences(
    texts: Sequence[str], encode: Callable[[str], list[int]], count: int, length: int, seed: int
) -> Tensor:
    """The text from random places on, as the paper measures: a document or line begins each sequence, and the next ones fill it.

    Args:
        texts: as ``read_texts`` gives them ``in_order``.
        encode: text → token ids, without special tokens.
        count, length: of the sequences, which may overlap. One that would run beyond the end begins earlier.
        seed: of the places.

    Returns:
        [count, length] int64.

    Raises:
        ConfigError: the whole text has fewer than ``length`` tokens.
    """
    generator = random.Random(seed)
    return torch.tensor([_from(texts, generator.randrange(len(texts)), encode, length) for _ in range(count)])


def _from(texts: Sequence[str], start: int, encode: Callable[[str], list[int]], length: int) -> list[int]:
    characters = MARGIN * length
    while True:
        end, taken = start, 0
        while end < len(texts) and taken < characters:
            taken += len(texts[end])
            end += 1
        ids = encode("".join(texts[start:end]))
        if len(ids) >= length:
            return ids[:length]
        if end < len(texts):
            characters *= 2
        elif start:
            start //= 2
        else:
            raise ConfigError(f"the text has {len(ids)} tokens, expected at least {length} for a contiguous sequence")


def surround(tokens: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """[count, length] token ids with these before and after each sequence."""
    count = len(tokens)
    ends = [torch.tensor(ids, dtype=torch.int64).expand(count, len(ids)) for ids in (before, after)]
    return torch.cat([ends[0], tokens, ends[1]], dim=1)
