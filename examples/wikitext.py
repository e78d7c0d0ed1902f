"""wikitext-103 as documents for titan-disp: its rows are single lines, a third of them empty; a document is an article.

titan-disp data fetch data/wikitext --dataset hf:Salesforce/wikitext:wikitext-103-raw-v1
python examples/wikitext.py data/wikitext/wikitext-103-raw-v1 data/wikitext-103
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet

TITLE = re.compile(r" = [^=].* = \n")  # sections have " = = "
FILES = {"train": 64, "validation": 1}  # stream.seed shuffles files, and documents by a few hundred only


def articles(files: list[Path]) -> Iterator[str]:
    """The texts of a split's articles, each from its title to the line before the next."""
    lines: list[str] = []
    for file in files:
        for line in pyarrow.parquet.read_table(file, columns=["text"])["text"].to_pylist():
            if TITLE.fullmatch(line) and any(map(str.strip, lines)):
                yield "".join(lines)
                lines = []
            lines.append(line)
    yield "".join(lines)


def main(source: Path, dest: Path) -> None:
    dest.mkdir(parents=True)
    for split, count in FILES.items():
        parts = sorted(source.glob(f"{split}-*.parquet"))
        if not parts:
            sys.exit(f"{source} has no {split}-*.parquet")
        files = [open(dest / f"{split}-{i:02}.jsonl", "w") for i in range(count)]  # noqa: SIM115
        number = 0
        for number, text in enumerate(articles(parts), start=1):
            files[number % count].write(json.dumps({"text": text}) + "\n")
        for file in files:
            file.close()
        print(f"{split}: {number:,} articles in {count} files")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
