"""Tables in Markdown that are also readable as plain text."""

from collections.abc import Sequence


def markdown_table(rows: Sequence[Sequence[str]], left: int = 2) -> str:
    """The lines of a table, without a line break at the end. All cells of a column have the same width.

    Args:
        rows: all of the same length; the first is the header.
        left: how many columns, from the first on, are aligned to the left. The others are aligned to the right, for numbers.
    """
    columns = []
    for i, cells in enumerate(zip(*rows, strict=True)):
        width = max(2, *map(len, cells))  # a ruler needs a dash before its colon
        if i < left:
            columns.append([cells[0].ljust(width), "-" * width, *(cell.ljust(width) for cell in cells[1:])])
        else:
            columns.append([cells[0].rjust(width), "-" * (width - 1) + ":", *(cell.rjust(width) for cell in cells[1:])])
    return "\n".join("| " + " | ".join(row) + " |" for row in zip(*columns, strict=True))
