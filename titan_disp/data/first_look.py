"""The first documents of a few local files, before training: is the data what the config says?

What is damaged or bad here and there is for the run to pass over (``stream.on_bad_data``). What is wrong with every document,
as the config names another field or the files are no documents at all, is refused here, with its cause.
"""

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

DOCUMENTS = 20  # of each of three files (the first, one of the middle, the last), until one can be used


def list_and_look(data: Sequence[DataSet], options: StreamOptions) -> list[DataFile]:
    """All files of some data sets; the first documents are looked at. Raises as ``DataSet.files`` and ``look_at``."""
    every = []
    for one in data:
        files = one.files()
        look_at(files, options, one.key)
        every += files
    return every


def look_at(files: Sequence[DataFile], options: StreamOptions, key: str) -> None:
    """Args:
    files: sorted; those on the hub are left alone, as are token ids where no tokenizer is known. key: config section.

    Raises:
        ConfigError: the first cause that no document of a file can be used.
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
    """Why the first documents of a file cannot be used, where none can, and not for reasons of their own.

    Raises:
        ConfigError: from the reader, with the cause: no such column, ids of another tokenizer, a file that cannot be opened.
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
    """What an error leaves open that says only what is wrong with one document."""
    if "expected" in error or "stream." in error:
        return ""
    if file.name.endswith(PLAIN_TEXT):
        return "; expected UTF-8: convert it (iconv), or leave it out"
    return "; expected one document a line, with a text field: convert the file, or leave it out"
