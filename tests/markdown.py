"""Read tables of Markdown back."""


def table(text):
    """Return the cells of the first table, without the line below its header."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[:1] + rows[2:]
