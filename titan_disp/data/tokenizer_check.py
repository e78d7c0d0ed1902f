"""Check whether a tokenizer suits the data: whether the token that ends documents is
made for texts (not for turns of a chat); whether files of token ids contain this token;
and whether texts survive encoding and decoding.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import numpy as np

from titan_disp.data.documents import Documents
from titan_disp.data.formats import BadDocument, DamagedFile, text_of
from titan_disp.data.listing import DataFile, sample_of
from titan_disp.data.options import StreamOptions
from titan_disp.data.token_ids import LONGEST
from titan_disp.data.tokenizer import NO_SEPARATOR, AnyTokenizer
from titan_disp.errors import ConfigError, counted

# Tokens that end a turn of a chat, and tokens that end a text, of published models.
_ENDS_OF_TURN = (
    "<|im_end|>",  # Qwen, SmolLM2-Instruct
    "<end_of_turn>",  # Gemma
    "<|eot_id|>",  # Llama 3
    "<|eom_id|>",
    "<|end|>",  # Phi
    "<|return|>",  # gpt-oss
    "<|END_OF_TURN_TOKEN|>",  # Command R
)
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "<EOS_TOKEN>")
LOOK = 1_000_000  # a separator must be among this many ids at a file's beginning
_SAMPLE = 1 << 16  # characters at the beginning of each of three files
_LOST = 0.001  # fraction of a sample's characters that a tokenizer may lose


def tokenizer_warnings(
    tokenizer: AnyTokenizer, files: Sequence[DataFile], options: StreamOptions
) -> list[str]:
    """Return a sentence about each way in which the tokenizer does not suit the local
    files.

    Raises ConfigError if documents in files of token ids have no end, although the loss
    or the attention depends on the ends of documents.
    """
    local = [file for file in files if not file.remote]
    of_ids = [file for file in local if file.holds_ids]
    of_text = [file for file in local if not file.holds_ids]
    no_separator = ""
    lacking = _without_separator(of_ids, options)
    if lacking:
        no_separator = _no_separator(tokenizer, lacking, len(of_ids), options)
        if options.segments:
            raise ConfigError(
                f"{no_separator}. stream.document_mask and dispersion.within_documents "
                "need the ends of documents"
            )
    warnings = [
        _chat_token(tokenizer, options.format.separator),
        no_separator,
        _lost_characters(tokenizer, of_text, options),
    ]
    return [warning for warning in warnings if warning]


def _chat_token(tokenizer: AnyTokenizer, separator: str) -> str:
    """Return a sentence about an EOS that ends turns of a chat, or an empty text if the
    tokenizer has no such EOS or ``separator`` replaces it.
    """
    assert tokenizer.eos_id is not None
    eos = "" if separator else tokenizer.id_to_token(tokenizer.eos_id)
    ends = [end for end in _ENDS_OF_TEXT if tokenizer.token_to_id(end) is not None]
    if eos not in _ENDS_OF_TURN or not ends:
        return ""
    return (
        f"documents end with the tokenizer's EOS, {eos!r}, which ends a turn of a "
        f"chat. The tokenizer also has {ends[0]!r}, with which models are usually "
        f'pre-trained: set stream.separator = "{ends[0]}", or "{eos}" to keep it'
    )


def _without_separator(
    files: Sequence[DataFile], options: StreamOptions
) -> list[DataFile]:
    """Return the files of token ids that have no separator near their beginnings."""
    eos_id = options.format.eos_id
    if eos_id == NO_SEPARATOR:
        return []

    def lacks_separator(file: DataFile) -> bool:
        last_ids = {int(ids[-1]) for ids in _beginning(file, options, LOOK)}
        # A damaged file may yield no documents.
        return bool(last_ids) and eos_id not in last_ids

    with ThreadPoolExecutor(16) as pool:
        lack = list(pool.map(lacks_separator, files))
    lacking = [file for file, lacks in zip(files, lack, strict=True) if lacks]
    # If other files have the separator, a short file may be one document.
    if not all(lack):
        lacking = [file for file in lacking if file.size > 4 * LONGEST]
    return lacking


def _no_separator(
    tokenizer: AnyTokenizer,
    lacking: Sequence[DataFile],
    files: int,
    options: StreamOptions,
) -> str:
    """Return a sentence about ``lacking``, the files of token ids without a separator.
    ``files`` is the number of all files.
    """
    assert tokenizer.eos_id is not None
    file = lacking[0]
    ids = np.concatenate(list(_beginning(file, options, LOOK)))
    return (
        f"{file.url}: no separator of documents, {tokenizer.eos_id} "
        f"{tokenizer.id_to_token(tokenizer.eos_id)!r}, is among the first {LOOK:,} ids "
        f"(the same holds for {counted(len(lacking), 'file')} of {files}). Such a file "
        f"is read as one document, which is cut after every {LONGEST:,} ids. "
        f"{_ids_at_intervals(tokenizer, ids)}Set stream.separator to the token that "
        'ends documents, or to "none" if each file is one document'
    )


def _ids_at_intervals(tokenizer: AnyTokenizer, ids: np.ndarray) -> str:
    """Return a sentence about ids that may be separators: the ids of special tokens, and
    the largest id.
    """
    counts = Counter(ids.tolist())
    candidates = {*map(tokenizer.token_to_id, tokenizer.added_tokens()), max(counts)}
    intervals = [
        f"{token_id} {tokenizer.id_to_token(token_id)!r} ({count:,} times, every "
        f"{len(ids) // count:,} ids)"
        for token_id, count in counts.most_common()
        if token_id in candidates and count > 1
    ]
    return f"Ids at intervals: {', '.join(intervals[:3])}. " if intervals else ""


def _lost_characters(
    tokenizer: AnyTokenizer, files: Sequence[DataFile], options: StreamOptions
) -> str:
    """Return a sentence about the characters that do not survive encoding and decoding
    of a sample, or an empty text if nearly all do.
    """
    lost = Counter[str]()
    characters = 0
    for file in sample_of(files):
        for text in _beginning(file, options, _SAMPLE):
            decoded = tokenizer.decode(tokenizer.plain(text))
            lost += Counter(text) - Counter(decoded)
            characters += len(text)
    if lost.total() <= _LOST * characters:
        return ""
    most = ", ".join(f"{character!r}" for character, _ in lost.most_common(5))
    return (
        f"the tokenizer loses {lost.total() / characters:.1%} of the characters in a "
        f"sample of the texts, most of all {most}: it normalizes text, or has no "
        "tokens for them. Use another tokenizer, unless this is wanted (docs/data.md)"
    )


def _beginning(file: DataFile, options: StreamOptions, size: int) -> Iterator[Any]:
    """Yield the first documents of a file, texts or arrays of ids, until they have
    ``size`` characters or ids together. The last text is cut there.
    """
    with closing(Documents(file, options)) as documents, suppress(DamagedFile):
        while size > 0 and (record := documents.read()) is not None:
            if isinstance(record, np.ndarray):
                size -= len(record)
                yield record
                continue
            with suppress(BadDocument):
                text = text_of(record, options.format.text_field)[:size]
                size -= len(text)
                yield text
