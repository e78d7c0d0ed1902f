"""wikitext-103 as documents for titan-disp: its rows are single lines, a third of them empty; a document is an article.

titan-disp data fetch data/wikitext --dataset hf:Salesforce/wikitext:wikitext-103-raw-v1
python examples/wikitext.py data/wikitext/wikitext-103-raw-v1 data/wikitext-103

The first folder may hold the text files of the original archive instead, wiki.train.raw and wiki.valid.raw: the documents are
the same.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

TITLE = re.compile(r" = [^=].* = \n")  # sections have " = = "
FILES = {"train": 64, "validation": 1}  # stream.seed shuffles files, and documents by a few hundred only
TEXT = {"train": "wiki.train.*", "validation": "wiki.valid.*"}


def find(source: Path, split: str) -> list[Path]:
    """A split's files: Parquet where there is any."""
    return sorted(source.glob(f"{split}-*.parquet")) or sorted(source.glob(TEXT[split]))


def rows(file: Path) -> Iterator[str]:
    """Lines with their ends. Parquet has "" where the text has a line of white space, which is left out."""
    if file.suffix == ".parquet":
        import pyarrow.parquet

        yield from pyarrow.parquet.read_table(file, columns=["text"])["text"].to_pylist()
        return
    with open(file, encoding="utf-8", newline="\n") as lines:
        yield from filter(str.strip, lines)


def articles(files: list[Path]) -> Iterator[str]:
    """The texts of a split's articles, each from its title to the line before the next."""
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
