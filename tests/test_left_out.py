"""``stream.left_out``: a run goes on without files that were removed or are bad, and
all slots keep their places in the others.
"""

import numpy as np
import pytest

from tests.streams import (
    epochs_of,
    first_epoch,
    loader,
    number_of,
    streams_of,
    write_texts,
)
from titan_disp.data.index import index_file
from titan_disp.data.options import StreamOptions
from titan_disp.data.sources import DataSet, list_for_run
from titan_disp.errors import ConfigError, RefusedError

FILES = 6
EACH = 40  # documents
INDEXED = 2


def write(folder):
    """Documents that are numbered over all files."""
    folder.mkdir()
    for i in range(FILES):
        numbers = range(EACH * i, EACH * (i + 1))
        texts = [" ".join([str(number)] * (1 + number % 5)) for number in numbers]
        # of two formats, whose densities differ
        write_texts(folder / f"{i}.{'parquet' if i % 2 else 'jsonl.gz'}", texts)
    return [DataSet("text", str(folder), "training")]


def numbers_of(*files):
    return {n for i in files for n in range(EACH * i, EACH * (i + 1))}


def after(data, run, left_out=(), index=""):
    options = StreamOptions(
        left_out=tuple(left_out),
        run_folder=str(run),
        index=index,
        max_skipped_fraction=1.0,
    )
    return list_for_run(data, options)


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("indexed", [False, True])
def test_a_run_goes_on_without_a_removed_file(slots, indexed, tmp_path):
    data = write(tmp_path / "corpus")
    index = ""
    if indexed:
        index = str(tmp_path / "index")
        (tmp_path / "index").mkdir()
        for file in after(data, "none"):
            index_file(tmp_path / "index", StreamOptions(index=index), file)
    files = after(data, tmp_path, index=index)
    before = streams_of(files, slots, 1)
    taken = []
    for slot in before[0].slots.values():
        for _ in range(6):
            taken.append(int(slot.source.next().content.split()[0]))
    assert len({*taken}) == len(taken)
    positions = np.stack(
        [slot.source.position.values for slot in before[0].slots.values()]
    )
    (tmp_path / "corpus/2.jsonl.gz").unlink()
    (tmp_path / "corpus/3.parquet").write_bytes(b"PAR1 is no longer sound")
    names = ["2.jsonl.gz", "3.parquet"]
    read = after(data, tmp_path, names, index)
    assert [(f.name, f.size, f.density) for f in read] == [
        (f.name, f.size, f.density) for f in files
    ]
    later, _ = first_epoch(
        streams_of(read, slots, 2 if slots == 8 else 1, positions=positions)
    )
    left = numbers_of(0, 1, 4, 5)
    assert {*taken, *later} >= left
    assert not {*taken} & {*later}
    assert {*later} <= left


@pytest.mark.parametrize(("window", "used"), [(8, 40), (64, 40), (64, 17)])
def test_a_removed_file_within_a_window(window, used, tmp_path):
    """The window that a slot was in is another one without the file. Only its documents
    may come twice, or not at all.
    """
    data = write(tmp_path / "corpus")
    slots = 3
    how = {"slots": slots, "shuffle_window": window}
    (before,) = streams_of(after(data, tmp_path), ranks=1, **how)
    taken = []
    positions = []
    for slot in before.slots.values():
        documents = [slot.source.next() for _ in range(used)]
        taken += [number_of(document.content) for document in documents]
        positions.append(documents[-1].end)
    (tmp_path / "corpus/2.jsonl.gz").unlink()
    read = after(data, tmp_path, ["2.jsonl.gz"])
    (later,) = streams_of(read, ranks=1, positions=np.stack(positions), **how)
    (numbers,) = epochs_of(later.slots.values(), 1)
    rest = numbers_of(0, 1, 3, 4, 5)
    assert {*numbers} <= rest
    assert len({*taken} & {*numbers}) < window
    assert len(rest - {*taken, *numbers}) < window


def test_what_a_resume_accepts(sample, tmp_path):
    data = write(tmp_path / "corpus")
    saved = loader(after(data, tmp_path), sample).state_dict()
    (tmp_path / "corpus/4.jsonl.gz").unlink()
    with pytest.raises(RefusedError, match="5 now.*name them in stream.left_out"):
        loader(after(data, tmp_path), sample).load_state_dict(saved)
    for _ in range(2):  # the refused start has not forgotten the file
        files = after(data, tmp_path, ["4.jsonl.gz"])
        loader(files, sample).load_state_dict(saved)
    with pytest.raises(ConfigError, match="names '4.jsonl', which is neither"):
        after(data, tmp_path, ["4.jsonl"])


def test_a_new_run_does_not_begin_with_what_is_left_out(tmp_path):
    data = write(tmp_path / "corpus")
    for _ in range(2):
        files = after(data, tmp_path, ["0.jsonl.gz"])
        assert [file.name for file in files] == [
            "1.parquet",
            "2.jsonl.gz",
            "3.parquet",
            "4.jsonl.gz",
            "5.parquet",
        ]


def test_a_run_keeps_some_file(tmp_path):
    data = write(tmp_path / "corpus")
    names = [file.name for file in data[0].files()]
    with pytest.raises(ConfigError, match="stream.left_out names all 6 files"):
        after(data, tmp_path, names)
    after(data, tmp_path)
    with pytest.raises(ConfigError, match="stream.left_out names all 6 files"):
        after(data, tmp_path, names)


@pytest.mark.parametrize("content", ["[]", '{"version": 1, "files": [], "looks": []}'])
def test_a_file_about_the_data_that_is_not_ours(content, tmp_path):
    data = write(tmp_path / "corpus")
    (tmp_path / "data.json").write_text(content)
    assert len(after(data, tmp_path)) == FILES
