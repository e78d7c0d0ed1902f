"""Write wikitext-103 as documents for titan-disp, one per article. (In the data set, a
row is a single line, and a third of the rows are empty.)

titan-disp data fetch data/wikitext --dataset hf:Salesforce/wikitext:wikitext-103-raw-v1
python examples/wikitext.py data/wikitext/wikitext-103-raw-v1 data/wikitext-103

The first folder may instead have the text files of the original archive, wiki.train.raw
and wiki.valid.raw. The documents are the same.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TITLE = re.compile(r" = [^=].* = \n")  # titles of sections have " = = "
# The number of files. A seed shuffles all files, but documents only among a few hundred,
# so many files give a better order.
FILES = {"train": 64, "validation": 1}
TEXT = {"train": "wiki.train.*", "validation": "wiki.valid.*"}


def find(source: Path, split: str) -> list[Path]:
    """Return the files of a split: Parquet files if there are any, otherwise text."""
    return sorted(source.glob(f"{split}-*.parquet")) or sorted(source.glob(TEXT[split]))


def rows(file: Path) -> Iterator[str]:
    """Yield lines with their line ends. Blank lines are omitted in text files, and are ""
    in Parquet files.
    """
    if file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file, columns=["text"])[
            "text"
        ].to_pylist()
        return
    with open(file, encoding="utf-8", newline="\n") as lines:
        yield from filter(str.strip, lines)


def articles(files: list[Path]) -> Iterator[str]:
    """Yield the text of each article in the files of a split, from its title to the line
    before the next title.
    """
    lines: list[str] = []
    for file in files:
        for line in rows(file):
            if TITLE.fullmatch(line) and any(map(str.strip, lines)):
                yield "".join(lines)
                lines = []
            lines.append(line)
    yield "".join(lines)


def main(source: Path, dest: Path) -> None:
    missing = [split for split in FILES if not find(source, split)]
    if missing:
        sys.exit(f"{source} has neither {missing[0]}-*.parquet nor {TEXT[missing[0]]}")
    dest.mkdir(parents=True)
    for split, count in FILES.items():
        files = [open(dest / f"{split}-{i:02}.jsonl", "w") for i in range(count)]  # noqa: SIM115
        number = 0
        for number, text in enumerate(articles(find(source, split)), start=1):
            files[number % count].write(json.dumps({"text": text}) + "\n")
        for file in files:
            file.close()
        print(f"{split}: {number:,} articles in {count} files")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
