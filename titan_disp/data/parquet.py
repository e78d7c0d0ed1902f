"""This module reads Parquet files: each row of one string column is a document."""

import io
from collections.abc import Iterator
from typing import Any

from titan_disp.data.formats import HEAD, mistaken
from titan_disp.data.records import BadDocument, Garbage, OtherContent, too_long
from titan_disp.errors import DataError

_READ = 1 << 20  # bytes of a column that are read at a time
_ROWS = 256  # rows that are decoded at a time, but …
_BATCH = 4 << 20  # … no more bytes than these


def records(stored: io.BufferedReader, name: str, field: str, max_bytes: int) -> Iterator[str | BadDocument]:
    """Yield the texts of one column.

    Args:
        stored: the file, at its beginning.
        name: the file's name, for messages.
        field: the column, see ``Format``.
        max_bytes: longer texts are bad documents.

    Raises:
        DataError: the file has no such column, or the column is not text. The file is sound; the config has to change.
        OtherContent: the file is not Parquet.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # pyarrow's default pre_buffer would keep everything that was read until the file is closed: gigabytes of a
        # large file.
        file = pyarrow.PythonFile(stored, "r")
        table = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=_READ)
    except pyarrow.ArrowInvalid as error:
        stored.seek(0)
        if (found := mistaken(stored.read(HEAD), name)) is not None:
            raise OtherContent(found) from error
        raise
    with table:
        _check_column(table.schema_arrow, name, field)
        for batch in table.iter_batches(batch_size=_rows(table.metadata), columns=[field]):
            for value in _column(batch, field):
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:  # other writers do not validate UTF-8
                    yield Garbage(f"invalid UTF-8: {error.reason} at byte {error.start}")
                    continue
                if not isinstance(text, str):
                    yield BadDocument("text is null")
                elif 4 * len(text) > max_bytes and (size := len(text.encode())) > max_bytes:
                    yield too_long(size)
                else:
                    yield text


def _rows(metadata: Any) -> int:
    """Return how many rows to decode at a time; these are few if rows are long."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return max(1, min(_ROWS, _BATCH * metadata.num_rows // max(1, size)))


def _check_column(schema: Any, name: str, field: str) -> None:
    import pyarrow.types as types

    columns = dict(_leaves(schema))
    if field not in columns:
        found = ", ".join(f"{column} ({kind})" for column, kind in list(columns.items())[:12])
        raise DataError(
            f'{name} has no column "{field}", only {found}: set stream.text_field to the column of the text'
        )
    kind = columns[field]
    value = kind.value_type if types.is_dictionary(kind) else kind
    is_view = getattr(types, "is_string_view", lambda _: False)  # only later versions of pyarrow have it
    if not (types.is_string(value) or types.is_large_string(value) or is_view(value)):
        raise DataError(
            f'{name}: column "{field}" is {kind}, expected string: set stream.text_field to the column of the text, or '
            "write it as a string"
        )


def _leaves(fields: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, type) of all columns; the names of columns in structs have dots."""
    import pyarrow.types as types

    for field in fields:
        if types.is_struct(field.type):
            yield from _leaves([field.type.field(i) for i in range(field.type.num_fields)], f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, field.type


def _column(batch: Any, field: str) -> Any:
    """Select one column. Reading column ``x.y`` may also load the field ``y`` of a struct ``x``."""
    import pyarrow.compute

    names = batch.schema.names
    if field in names:
        return batch.column(names.index(field))
    struct = next(i for i, name in enumerate(names) if field.startswith(f"{name}."))
    path = field.removeprefix(f"{names[struct]}.").split(".")
    return pyarrow.compute.struct_field(batch.column(struct), path)
