"""Equal shares of a corpus, with and without an index of it."""

import numpy as np
import pytest

from tests.streams import streams_of, write_texts
from titan_disp.data.files import list_files
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.sources import measured

EVERY = 6400  # documents of a corpus


def texts(count=200, seed=0, least=150):
    words = np.random.default_rng(seed).integers(1, 5000, (count, least + 50))
    return [" ".join(map(str, row[: least + row[0] % 50])) for row in words]


def after_an_epoch_of_tokens(files, slots, **options):
    """Read an epoch's tokens: return the fractions of documents that are not seen and that are read again."""
    streams = streams_of(files, slots, slots // 8, encode=lambda text: [1] * len(text), **options)
    total, first, again = sum(file.size * file.density for file in files), 0, 0
    for rank in streams:
        for slot in rank.slots.values():
            while slot.source.position.values[Field.BYTES] < total / slots:
                document = slot.source.next()
                first, again = (
                    first + (document.start[Field.EPOCH] == 0),
                    again + (document.start[Field.EPOCH] > 0),
                )
        rank.close()
    return 1 - first / EVERY, again / EVERY


@pytest.mark.parametrize("suffixes", [("jsonl.gz",), ("jsonl", "jsonl.gz"), ("jsonl.zst", "parquet", "jsonl", "json.gz")])
def test_shares_are_of_text(tmp_path, suffixes):
    """Issue: half of the files gzip, and 23 to 25 % of the documents were not seen in an epoch's tokens."""
    for i in range(32):
        write_texts(tmp_path / f"{i}.{suffixes[i % len(suffixes)]}", texts(seed=i))
    options = StreamOptions(max_skipped_fraction=1.0)
    unseen, again = after_an_epoch_of_tokens(measured(list_files("text", str(tmp_path)), options), 64)
    assert unseen < 0.04
    assert again < 0.04
