"""Files that are odd but readable, or changed: what is before the damage is used, and what changed is noticed."""

import gzip
import json

import numpy as np
import pyarrow
import pytest

from tests.streams import config, json_lines, records_of
from titan_disp.data.fingerprint import differences
from titan_disp.data.loader import build_dataloader
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import RefusedError


def compressed(content, suffix):
    return gzip.compress(content) if suffix == "gz" else pyarrow.compress(content, "zstd", asbytes=True)


TEXTS = [f"{i} " + np.random.default_rng(i).bytes(100).hex() for i in range(3010)]
SPOILED = [
    lambda frame: frame + b"junk" * 100,  # after a complete frame
    lambda frame: frame + b"\x00" * 5000 + b"junk",
    lambda frame: frame + frame[: len(frame) // 2] + b"junk",
]


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("spoil", SPOILED, ids=["junk", "zeros and junk", "second frame"])
def test_documents_before_the_damage_are_used(tmp_path, suffix, spoil):
    """In zstd all of them, although pyarrow drops what the failing read has decompressed; in gzip all but the last 8 KiB."""
    content = json_lines(TEXTS)
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(spoil(compressed(content, suffix)))
    *found, end = records_of(path)
    least = 3010 - (8192 // 200 if suffix == "gz" else 0)
    assert len(found) >= least
    assert found[:least] == content.splitlines(keepends=True)[:least]
    assert end.startswith("damaged: ")


def swap_halves(content):
    return content[len(content) // 2 :] + content[: len(content) // 2]


CHANGES = [lambda content: b"".join(reversed(content.splitlines(keepends=True))), swap_halves, lambda content: content]


@pytest.mark.parametrize("change", CHANGES, ids=["reversed", "swapped", "copied"])
def test_a_file_that_changes_between_a_save_and_a_resume(sample, tmp_path, change):
    """Its name and size stay. A copy, with another time of writing, is no change, and neither are files on the hub."""
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_bytes(json_lines(TEXTS[:90]))
    job = config(sample, "--training.dataset", "text", "--training.dataset_path", str(tmp_path))
    tokenizer = load_tokenizer(job.model.hf_assets_path)
    saved = build_dataloader(1, 0, tokenizer, job).state_dict()
    content = (tmp_path / "b.jsonl").read_bytes()
    (tmp_path / "b.jsonl").write_bytes(changed := change(content))
    assert len(changed) == len(content)
    now = build_dataloader(1, 0, tokenizer, job)
    if changed == content:
        now.load_state_dict(saved)
    else:
        with pytest.raises(RefusedError, match="content: 1 file of the same size with other documents, first b.jsonl"):
            now.load_state_dict(saved)
    assert differences(json.loads(saved["fingerprint"]), now.fingerprint | {"contents": {}}) == []
