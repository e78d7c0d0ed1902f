"""Read gzipped JSON lines with the standard library alone."""

import gzip
import json


def records(folder, pattern):
    """Return the records of the files that match, in the order of their names."""
    found = []
    for file in sorted(folder.glob(pattern)):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            found += [json.loads(line) for line in lines]
    return found
