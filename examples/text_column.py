"""Write a column of Parquet files as plain text for titan-disp condensation --text, one
line per row, without empty rows.

titan-disp data fetch data/squad --dataset hf:rajpurkar/squad:plain_text:train
python examples/text_column.py data/squad context data/squad.txt
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet


def rows(source: Path, column: str) -> Iterator[str]:
    """Yield the rows of all Parquet files below a folder whose names contain "train", or
    of all Parquet files if there is no such name.
    """
    files = sorted(source.rglob("*.parquet"))
    if not files:
        sys.exit(f"{source} has no *.parquet")
    for file in [file for file in files if "train" in file.name] or files:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(columns=[column]):
            yield from filter(None, batch.column(0).to_pylist())


def main(source: Path, column: str, dest: Path) -> None:
    with open(dest, "w", encoding="utf-8") as text:
        for row in rows(source, column):
            text.write(row.removesuffix("\n") + "\n")
    print(f"{dest}: {dest.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
