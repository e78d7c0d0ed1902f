"""This module reads the first documents of a few local files before training, to see whether they fit the config.

Files are refused if no document in them can be used: the config names a field that the documents do not have, or the
files do not hold documents. Single bad documents and damaged files are left to the run (``stream.on_bad_data``).
"""

import re
from collections.abc import Sequence

import numpy as np

from titan_disp.data.documents import Documents
from titan_disp.data.files import DataFile
from titan_disp.data.formats import PLAIN_TEXT, TOKEN_IDS
from titan_disp.data.records import BadDocument, DamagedFile, Garbage, OtherContent, OtherShape, text_of
from titan_disp.data.sources import DataSet
from titan_disp.data.stream import StreamOptions
from titan_disp.data.text_files import TOO_LONG
from titan_disp.errors import ConfigError

DOCUMENTS = 20  # read in each of three files (the first, a middle one, the last) until a usable one is found


def list_and_check(data: Sequence[DataSet], options: StreamOptions) -> list[DataFile]:
    """List the files of some data sets and check their content.

    Raises:
        ConfigError: as ``DataSet.files`` and ``check_content``.
    """
    every = []
    for one in data:
        files = one.files()
        check_content(files, options, one.key)
        every += files
    return every


def check_content(files: Sequence[DataFile], options: StreamOptions, key: str) -> None:
    """Check the first documents of up to three local files.

    Args:
        files: sorted. Files on the hub are not read, nor are token ids if no tokenizer is known.
        options: the format of the files, and the longest document allowed.
        key: the config section, for messages.

    Raises:
        ConfigError: no document of a file can be used, for the first reason found; or a whole .txt file is one document
            that is too long.
    """
    format, max_bytes = options.format, options.max_document_bytes
    local = [file for file in files if not file.url.startswith("hf://")]
    if format.eos_id is None:
        local = [file for file in local if not file.name.endswith(TOKEN_IDS)]
    if format.text_split == "file":
        for file in local:
            if file.name.endswith(PLAIN_TEXT[0]) and file.size > max_bytes:
                raise ConfigError(f"{key} data: {file.url} is one document of {file.size:,} bytes, {TOO_LONG}")
    for i in sorted({0, len(local) // 2, len(local) - 1}) if local else ():
        if (cause := _cause(local[i], options)) is not None:
            raise ConfigError(f"{key} data: {local[i].url}: {cause}")


def _cause(file: DataFile, options: StreamOptions) -> str | None:
    """Return why none of the first documents of a file can be used, or None.

    An empty or overlong document counts as usable here: it says nothing about the others.

    Raises:
        ConfigError: raised by the reader: no such column, ids of another tokenizer, a file that cannot be opened.
    """
    format, cause = options.format, None
    documents = Documents(file, options.max_document_bytes, options.retry_seconds, format=format)
    try:
        for _ in range(DOCUMENTS):
            record = documents.read()
            if record is None or isinstance(record, np.ndarray):
                break
            try:
                text_of(record, format.text_field)
                return None
            except (Garbage, OtherShape) as error:
                cause = cause or f"document {documents.position - 1}: {error}{_expected(str(error), file)}"
            except BadDocument:  # empty, or too long
                return None
    except OtherContent as error:
        return str(error)
    except DamagedFile:
        return None
    finally:
        documents.close()
    return cause


def _expected(error: str, file: DataFile) -> str:
    """Return advice to append if the error says only what is wrong with one document, else an empty text."""
    if re.search(r"\bexpected\b|stream\.", error):  # but not "unexpected end of data", the error of truncated UTF-8
        return ""
    if file.name.endswith(PLAIN_TEXT):
        return "; expected UTF-8: convert it (iconv), or leave it out"
    return "; expected one document per line, with a text field: convert the file, or leave it out"
