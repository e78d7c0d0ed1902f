"""Samples the text on which condensation is measured.

Models with the same tokenizer get the same sample.
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from glob import escape, glob
from pathlib import Path

import torch
from torch import Tensor

from titan_disp.data.documents import Documents
from titan_disp.data.findings import encoding_of
from titan_disp.data.formats import (
    JSON_LINES,
    PARQUET,
    BadDocument,
    DamagedFile,
    OtherShape,
    text_of,
)
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.stores import FOLDER, is_hub_name
from titan_disp.errors import ConfigError, DataError, counted, of_options, reported

MOST = 64 << 20  # most characters to read, so that large files take no longer
_DOCUMENTS = (*JSON_LINES, *PARQUET)
# If this many documents have no text, the text field probably has another name.
HOPELESS = 1000
MARGIN = 8  # characters to read per token; English text has about four
# Pieces of plain text have this many characters: about four sequences of 512 tokens.
PIECE = 8192


def read_texts(
    text: Path | None,
    dataset: str | None,
    seed: int,
    in_order: bool = False,
    text_field: str = "text",
) -> list[str]:
    """Return documents in random order, or in the order of the text.

    Args:
        text: file of documents (with a suffix of training data), or of plain UTF-8
            text. Plain text is cut at line ends into pieces of about 8192 characters. A
            folder is read as ``dataset``.
        dataset: folder, file or glob of documents, or data set of the hub (hf:…). In a
            folder, only the validation files are read (``c4_validation`` in a copy of
            C4, else ``text_validation``).
        seed: seed for the order of files and documents. Files are read in this order up
            to about 64 M characters.
        in_order: whether the documents of a file keep their order. Then each document
            ends in a blank line, and plain text is cut into lines, so that joining the
            results gives the text.
        text_field: field of the text, as stream.text_field.

    Raises ConfigError if both or neither of text and dataset are given, if the text is
    missing, unreadable or empty, or if the first ``HOPELESS`` documents have no text.
    """
    if (text is None) == (dataset is None):
        raise ConfigError(
            "expected one of --text FILE and --dataset PATH, with the text to measure "
            "on"
        )
    shuffle = random.Random(seed).shuffle
    source = f"--dataset {dataset!r}"
    if text is not None:
        source = f"--text {str(text)!r}"
    if text is not None and text.is_dir():
        dataset = str(text)
        text = None
    if text is not None and not text.is_file():
        raise ConfigError(
            f"{source} is not a file; expected plain text or {', '.join(_DOCUMENTS)}"
        )
    reasons: list[str] = []
    if text is not None and not text.name.endswith(_DOCUMENTS):
        documents = _pieces(text, 1 if in_order else PIECE)
    else:
        try:
            if dataset is not None and is_hub_name(dataset):
                files = list_files(dataset, None, "validation")
            else:
                path = str(text or dataset)
                split = "text_validation"
                if glob(f"{escape(path)}/{FOLDER}/c4-validation.*"):
                    split = "c4_validation"
                files = list_files(split, path, path_key=source.split()[0])
        # The message for a name of the hub names keys of the config, not options.
        except ConfigError as error:
            message = str(error).replace("validation.dataset is", "--dataset is")
            raise ConfigError(
                message.replace("local copy: dataset_path", "local copy: --dataset")
            ) from error
        shuffle(files)
        documents = _documents(files, text_field, reasons)
        if in_order:
            documents = map("{}\n\n".format, documents)
    sample = next(_groups(documents, MOST), [])
    if not sample:
        raise ConfigError(": ".join([f"{source} holds no text", *reasons[:1]]))
    if not in_order:
        shuffle(sample)
    return sample


def _groups(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    """Yield lists of texts with at least ``size`` characters; the last list may have
    fewer.
    """
    group: list[str] = []
    characters = 0
    for text in texts:
        group.append(text)
        characters += len(text)
        if characters >= size:
            yield group
            group = []
            characters = 0
    if group:
        yield group


def _pieces(path: Path, size: int) -> Iterator[str]:
    """Yield pieces of whole lines with at least ``size`` characters."""
    with (
        reported(f"--text {str(path)!r} is not UTF-8 text", UnicodeDecodeError),
        open(path, encoding="utf-8") as file,
    ):
        yield from map("".join, _groups(file, size))


def _documents(
    files: Iterable[DataFile], text_field: str, reasons: list[str]
) -> Iterator[str]:
    """Yield the texts of documents.

    Bad documents and the rest of damaged files are skipped and reported on stderr. The
    reason for the first bad document of a file, and for damage, is appended to
    ``reasons``.

    Raises ConfigError if the first ``HOPELESS`` documents have no text.
    """
    without_field = 0
    usable = False
    for file in files:
        options = StreamOptions(max_document_bytes=MOST, format=Format(text_field))
        encoding = encoding_of(file, options)
        reader = Documents(replace(file, encoding=encoding), options)
        bad = 0
        try:
            while (record := reader.read()) is not None:
                try:
                    text = text_of(record, text_field)
                except BadDocument as error:
                    if not bad:
                        reasons.append(of_options(error))
                    bad += 1
                    # Only documents without the field suggest a wrong field.
                    without_field += isinstance(error, OtherShape)
                    if without_field == HOPELESS and not usable:
                        raise ConfigError(
                            f"{file.url}: the first {HOPELESS:,} documents have no "
                            f"text, the last one for this reason: {of_options(error)}"
                        ) from error
                else:
                    usable = True
                    yield text
        except DamagedFile as error:
            reasons.append(of_options(error))
            print(f"{file.url} is damaged and ends early: {error}", file=sys.stderr)
        except DataError as error:
            raise ConfigError(of_options(error)) from error
        finally:
            reader.close()
        if bad:
            print(
                f"{file.url}: skipped {counted(bad, 'bad document')}, the first one: "
                f"{reasons[-1]}",
                file=sys.stderr,
            )


def cut_sequences(
    texts: Iterable[str], encode: Callable[[str], list[int]], count: int, length: int
) -> Tensor:
    """Return token ids of texts, joined by blank lines and cut into sequences, [count,
    length] int64.

    A short text gives fewer sequences, or a single shorter sequence if the text does
    not fill one sequence. Raises ConfigError if the text has fewer than two tokens.
    """
    ids: list[int] = []
    for text in texts:
        if ids:
            text = f"\n\n{text}"
        ids += encode(text)
        if len(ids) >= count * length:
            break
    if len(ids) < 2:
        raise ConfigError(
            f"the text has {counted(len(ids), 'token')}, expected at least 2: a "
            "cosine needs a pair"
        )
    length = min(length, len(ids))
    count = min(count, len(ids) // length)
    return torch.tensor(ids[: count * length]).view(count, length)


def contiguous_sequences(
    texts: Sequence[str],
    encode: Callable[[str], list[int]],
    count: int,
    length: int,
    seed: int,
) -> Tensor:
    """Return token ids of sequences that begin at random documents or lines, as in the
    paper, [count, length] int64.

    The following documents or lines fill the sequence. Sequences may overlap. A sequence
    that would exceed the end of the text begins earlier. Raises ConfigError if the whole
    text is shorter than a sequence.
    """
    generator = random.Random(seed)
    return torch.tensor(
        [
            _from(texts, generator.randrange(len(texts)), encode, length)
            for _ in range(count)
        ]
    )


def _from(
    texts: Sequence[str], start: int, encode: Callable[[str], list[int]], length: int
) -> list[int]:
    """Return ``length`` token ids of the texts from index ``start`` on, or from an
    earlier index if the texts end too soon.
    """
    characters = MARGIN * length
    while True:
        end = start
        read = 0
        while end < len(texts) and read < characters:
            read += len(texts[end])
            end += 1
        ids = encode("".join(texts[start:end]))
        if len(ids) >= length:
            return ids[:length]
        if end < len(texts):
            characters *= 2
        elif start:
            start //= 2
        else:
            raise ConfigError(
                f"the text has {counted(len(ids), 'token')}, expected at least "
                f"{length:,} for a sequence"
            )


def surround(tokens: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Return [count, length] token ids with tokens added before and after each sequence."""
    count = len(tokens)
    ends = [
        torch.tensor(ids, dtype=torch.int64).expand(count, len(ids))
        for ids in (before, after)
    ]
    return torch.cat([ends[0], tokens, ends[1]], dim=1)
