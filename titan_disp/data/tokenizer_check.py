"""Check whether a tokenizer suits the data: whether the token that ends documents is
that of a text and not of a chat, whether files of token ids have it, and whether texts
survive.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import numpy as np

from titan_disp.data.documents import Documents
from titan_disp.data.formats import (
    TOKEN_IDS,
    BadDocument,
    DamagedFile,
    Record,
    text_of,
)
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
LOOK = 1_000_000  # ids at the beginning of a file among which a separator must be
_SAMPLE = 1 << 16  # characters at the beginning of each of three files
_LOST = 0.001  # of the characters of a sample, which a tokenizer may lose


def tokenizer_warnings(
    tokenizer: AnyTokenizer, files: Sequence[DataFile], options: StreamOptions
) -> list[str]:
    """Return a sentence about everything in which the tokenizer does not suit local
    files.

    ConfigError is raised if documents have no end in files of token ids, and the loss
    or the attention depends on their ends.
    """
    local = [file for file in files if not file.remote]
    ids = [file for file in local if file.name.endswith(TOKEN_IDS)]
    texts = [file for file in local if not file.name.endswith(TOKEN_IDS)]
    lacking = _without_separator(ids, options)
    warnings = [
        _chat_token(tokenizer, options.format.separator),
        _no_separator(tokenizer, lacking, len(ids), options),
        _lost_characters(tokenizer, texts, options),
    ]
    if options.segments and lacking:
        raise ConfigError(
            f"{warnings[1]}. stream.document_mask and dispersion.within_documents "
            "need the ends of documents"
        )
    return [warning for warning in warnings if warning]


def _chat_token(tokenizer: AnyTokenizer, separator: str) -> str:
    if separator:
        return ""
    assert tokenizer.eos_id is not None
    eos = tokenizer.id_to_token(tokenizer.eos_id)
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
        documents = 0  # none in a damaged file
        for ids in _first_ids(file, options):
            if ids[-1] == eos_id:
                return False
            documents += 1
        return documents > 0

    with ThreadPoolExecutor(16) as pool:
        lack = list(pool.map(lacks_separator, files))
    lacking = [file for file, lacks in zip(files, lack, strict=True) if lacks]
    if not all(lack):  # then a short file may be one document
        lacking = [file for file in lacking if file.size > 4 * LONGEST]
    return lacking


def _no_separator(
    tokenizer: AnyTokenizer,
    lacking: Sequence[DataFile],
    files: int,
    options: StreamOptions,
) -> str:
    """Return a sentence about the ``lacking`` of so many ``files`` of token ids."""
    if not lacking:
        return ""
    eos_id = tokenizer.eos_id
    assert eos_id is not None
    file = lacking[0]
    candidates = _ids_at_intervals(tokenizer, [*_first_ids(file, options)])
    return (
        f"{file.url}: no separator of documents, {eos_id} "
        f"{tokenizer.id_to_token(eos_id)!r}, is among the first {LOOK:,} ids (the same "
        f"holds for {counted(len(lacking), 'file')} of {files}). Such a file is read "
        f"as one document, which is cut after every {LONGEST:,} ids. {candidates}Set "
        "stream.separator to the token that ends documents, or to "
        '"none" if each file is one document'
    )


def _ids_at_intervals(tokenizer: AnyTokenizer, beginning: list[np.ndarray]) -> str:
    """Return a sentence about ids that may be separators: those of special tokens, and
    the largest.
    """
    ids = np.concatenate(beginning)
    counts = Counter(dict(enumerate(np.bincount(ids).tolist())))
    candidates = {*map(tokenizer.token_to_id, tokenizer.added_tokens()), max(counts)}
    intervals = [
        f"{token_id} {tokenizer.id_to_token(token_id)!r} ({count:,} times, every "
        f"{len(ids) // count:,} ids)"
        for token_id, count in counts.most_common()
        if token_id in candidates and count > 1
    ]
    return f"At intervals come {', '.join(intervals[:3])}. " if intervals else ""


def _lost_characters(
    tokenizer: AnyTokenizer, files: Sequence[DataFile], options: StreamOptions
) -> str:
    """Return a sentence about the characters that do not survive encoding and decoding
    of a sample.
    """
    lost = Counter[str]()
    characters = 0
    for file in sample_of(files):
        for text in _first_texts(file, options):
            decoded = tokenizer.decode(tokenizer.plain(text))
            lost += Counter(text) - Counter(decoded)
            characters += len(text)
    share = lost.total() / max(characters, 1)
    if share <= _LOST:
        return ""
    most = ", ".join(f"{character!r}" for character, _ in lost.most_common(5))
    return (
        f"the tokenizer loses {share:.1%} of the characters in a sample of the texts, "
        f"most of all {most}: it normalizes text, or has no tokens for them. Use "
        "another tokenizer, unless this is wanted (docs/data.md)"
    )


def _first_texts(file: DataFile, options: StreamOptions) -> Iterator[str]:
    """Yield documents of about ``_SAMPLE`` characters, of which the last is cut."""
    left = _SAMPLE
    for record in _records(file, options):
        with suppress(BadDocument):
            text = text_of(record, options.format.text_field)[:left]
            left -= len(text)
            yield text
        if left <= 0:
            return


def _first_ids(file: DataFile, options: StreamOptions) -> Iterator[np.ndarray]:
    """Yield the ids of the documents among the first ``LOOK`` ids."""
    left = LOOK
    for record in _records(file, options):
        if isinstance(record, np.ndarray):
            left -= len(record)
            yield record
        if left <= 0:
            return


def _records(file: DataFile, options: StreamOptions) -> Iterator[Record]:
    """Yield the documents of a file, unparsed, up to its end or damage."""
    with closing(Documents(file, options)) as documents, suppress(DamagedFile):
        while (record := documents.read()) is not None:
            yield record
