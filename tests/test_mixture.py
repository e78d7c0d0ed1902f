"""Several sources with weights: exact fractions of the tokens, each source as in a run of its own, bad configs."""

import contextlib
import copy
import gzip
import itertools
import json
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from sentencepiece import SentencePieceProcessor

from tests.command_line import DEMO, ROOT
from tests.test_stream import EOS, batches, config, loader, of_sizes, streams_of, write_files, write_uneven
from titan_disp.cluster.node_health import input_problems
from titan_disp.config.load import load_config
from titan_disp.data.assignment import Assignment, Mixture, Run, Segment, prefixed, shares
from titan_disp.data.documents import Documents
from titan_disp.data.files import DataFile, list_files
from titan_disp.data.formats import text_of
from titan_disp.data.loader import open_stream, together
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.position import Field, fraction_read
from titan_disp.data.sources import check_sources, source_name, source_shares, training_sets
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import held_out_sequences
from titan_disp.errors import ConfigError
from titan_disp.job_config import Source, Stream
from titan_disp.lab.digest import digest, global_batch
from titan_disp.lab.export.model_card import _data


@pytest.mark.parametrize(
    ("weights", "slots", "expected"),
    [
        ([0.7, 0.2, 0.1], 10, [7, 2, 1]),
        ([3, 1], 8, [6, 2]),
        ([1, 1, 1], 8, [3, 3, 2]),  # ties go to the first sources
        ([0.5, 0.3, 0.2], 7, [4, 2, 1]),  # 3.5, 2.1, 1.4
        ([0.94, 0.03, 0.03], 33, [31, 1, 1]),  # 31.02, 0.99, 0.99
        ([5e-324, 5e-324], 2, [1, 1]),
        ([7], 3, [3]),
    ],
)
def test_slots_follow_the_weights(weights, slots, expected):
    found = shares({f"s{i}": weight for i, weight in enumerate(weights)}, slots)
    assert [share.slots for share in found] == expected
    assert [share.first for share in found] == [sum(expected[:i]) for i in range(len(expected))]
    assert [share.tokens for share in found] == [n / slots for n in expected]
    assert [share.asked for share in found] == pytest.approx([weight / sum(weights) for weight in weights])


def test_too_few_slots_for_a_source():
    with pytest.raises(
        ConfigError, match=r"8 slots are too few for b, whose weight asks for 0.08 of them.* at least 100 slots"
    ):
        shares({"a": 0.99, "b": 0.01}, 8)
    assert [share.slots for share in shares({"a": 0.99, "b": 0.01}, 100)] == [99, 1]
    with pytest.raises(ConfigError, match=r"60 slots are too few for c, "):  # the quotas are 58.8, 0.6 and 0.6
        shares({"a": 0.98, "b": 0.01, "c": 0.01}, 60)


def test_a_source_is_assigned_as_in_a_run_of_its_own():
    """Files of two sources may have the same names. The third source has fewer files than slots."""
    sources = {"a": of_sizes([10, 300, 40, 7] * 5), "b": of_sizes([80, 5, 90]), "c": of_sizes([12])}
    every = [file for name, files in sources.items() for file in prefixed(name, files)]
    assert len({file.name for file in every}) == 24
    found = shares({"a": 5, "b": 3, "c": 4}, 12)
    mixture = Mixture(every, found, seed=3)
    assert mixture.slots == 12
    file = slot = 0
    for share, files in zip(found, sources.values(), strict=True):
        alone = Assignment(files, share.slots, seed=3)
        for epoch in (0, 2):
            for own in range(share.slots):
                here, there = mixture.run(slot + own, epoch), alone.run(own, epoch)
                assert here.weights == there.weights
                assert [(s.file - file, s.low, s.high, s.shift, s.length) for s in here.segments] == [
                    (s.file, s.low, s.high, s.shift, s.length) for s in there.segments
                ]
                reads = {file + segment.file for segment in there.segments}
                assert mixture.files_of(range(slot + own, slot + own + 1), epoch) == reads
            for own in range(len(files)):
                owners = alone.owners(own, epoch)
                assert mixture.owners(file + own, epoch) == range(slot + owners.start, slot + owners.stop)
            assert [file + one for one in alone.order(epoch)] == mixture.order(epoch)[file : file + len(files)]
            part = range(slot, slot + share.slots)
            assert mixture.files_of(part, epoch) == {file + one for one in alone.files_of(range(share.slots), epoch)}
        file, slot = file + len(files), slot + share.slots
    assert mixture.files_of(range(12), 0) == set(range(24))


def test_parts_of_the_tokens_are_exact(tmp_path):
    """They are exact in every step, on any ranks, after resumes; a source's documents come as in a run of its own."""
    web = write_files(tmp_path / "web", [40, 33, 51], words=lambda i: 1 + i % 5)
    code = write_files(tmp_path / "code", [25, 9], words=lambda i: 2 + i % 3)
    found = shares({"web": 2, "code": 1}, 6)
    files = [*prefixed("web", web), *prefixed("code", code)]
    mixture = Mixture(files, found, seed=0)

    def mixed(ranks, positions=None):
        return streams_of(files, 6, ranks, positions=positions, assignment=mixture)

    tokens, end = batches(mixed(1), 60)
    assert np.array_equal(tokens[:, :4], batches(streams_of(web, 4, 1), 60)[0])
    assert np.array_equal(tokens[:, 4:], batches(streams_of(code, 2, 1), 60)[0])
    assert end[4:, Field.EPOCH].min() > 1  # this source has epochs of its own
    for stops in ([(2, 60)], [(3, 21), (6, 39)], [(6, 10), (1, 7), (2, 43)]):
        got, positions = [], None
        for ranks, steps in stops:
            part, positions = batches(mixed(ranks, positions), steps)
            got.append(part)
        assert np.array_equal(np.concatenate(got), tokens)
        assert np.array_equal(positions, end)
    # One epoch of a source has each of its documents once.
    (rank,) = mixed(1)
    seen = []
    for slot in (4, 5):
        while (document := rank.slots[slot].cursor.next()).end[Field.EPOCH] == 0:
            seen.append(int(document.content.split()[0]))
    assert sorted(seen) == list(range(1, 35))


def training_files(job):
    return [file for one in training_sets(job) for file in one.files()]


@pytest.fixture(scope="module")
def job(sample, tmp_path_factory):
    """Two sources whose files have the same names, with two thirds and one third of the tokens."""
    root = tmp_path_factory.mktemp("sources")
    for name, first in (("web", 0), ("code", 4)):
        (root / name).mkdir()
        for i in range(3):
            name_of = "en/c4-train.{:05d}-of-00008.json.gz".format
            (root / name / f"{i}.json.gz").symlink_to(sample / name_of(first + i))
    made = config(sample, "--training.global_batch_size", "6", "--training.local_batch_size", "1")
    made.training.dataset_path = None
    made.stream.sources = [Source(2.0, str(root / "web")), Source(1.0, str(root / "code"))]
    return made


def changed(job, **options):
    """Copy a job, and change options of its sources, of [training] and of [stream]."""
    made = copy.deepcopy(job)
    for name, value in options.items():
        setattr(made.stream if name in ("sources", "slots", "shuffle_window") else made.training, name, value)
    return made


def test_a_config_with_sources_from_listing_to_batches(job, sample):
    files = training_files(job)
    assert [file.name for file in files] == [f"{name}/{i}.json.gz" for name in ("web", "code") for i in range(3)]
    tokenizer = load_tokenizer(sample / "tokenizer")

    def first_batches(one, batch):
        iterators = [iter(open_stream(one, training_files(one), tokenizer, 1, 0))]
        return torch.stack([global_batch(iterators, one, batch, batch) for _ in range(5)])

    # Without shuffling, because the shuffled order depends on the slots' numbers.
    found = first_batches(changed(job, shuffle_window=0), 6)
    for i, own, slots in ((0, slice(4), 4), (1, slice(4, 6), 2)):
        path = job.stream.sources[i].path
        alone = changed(job, sources=[], dataset="text", dataset_path=path, global_batch_size=slots, shuffle_window=0)
        assert torch.equal(found[:, own], first_batches(alone, slots))
    whole = digest(job, 8, [(0, 1)])
    for phases in ([(0, 6)], [(0, 2), (3, 3), (5, 6)]):
        assert digest(job, 8, phases).hashes == whole.hashes
    assert {"epoch", "epoch/web", "epochs_read/web", "epoch/code", "epochs_read/code"} <= whole.counters.keys()
    assert "epochs_read" not in whole.counters


def test_text_and_token_ids_mixed_and_shuffled(job, sample, tmp_path):
    """On any number of ranks and through resumes, the ids are those of their file, each document once per epoch."""
    processor = SentencePieceProcessor(model_file=str(sample / "tokenizer" / "sample.model"))
    documents = [processor.encode(f"number {i} " * (1 + i % 7)) + [processor.eos_id()] for i in range(60)]
    np.array([i for document in documents for i in document], "<u2").tofile(tmp_path / "ids.bin")
    sources = [job.stream.sources[0], Source(1.0, str(tmp_path / "ids.bin"), name="ids")]
    one = changed(job, sources=sources, shuffle_window=8)
    whole = digest(one, 8, [(0, 1)])
    for phases in ([(0, 6)], [(0, 2), (3, 3), (5, 6)]):
        assert digest(one, 8, phases).hashes == whole.hashes
    loader = open_stream(one, training_files(one), load_tokenizer(sample / "tokenizer"), 1, 0)
    found = [[], []]
    for (inputs, labels), slot in zip(loader, itertools.cycle(range(6)), strict=False):
        if slot >= 4:
            found[slot - 4] += [*inputs["input"][0].tolist(), int(labels[0, -1])]
        if loader.positions[4:, Field.EPOCH].min() > 0:
            break
    loader.close()
    read = [[*part, processor.eos_id()] for tokens in found for part in split_at(tokens, processor.eos_id())]
    assert {tuple(document) for document in documents} <= {tuple(document) for document in read}


def write_all_formats(folder):
    """Write a source of each format. Returns what other readers find in them: the documents of each source."""
    rng, number = np.random.default_rng(0), itertools.count(10)

    def texts(count):
        return [f"{next(number)} " + "é\u2028x " * int(rng.integers(0, 40)) + "." for _ in range(count)]

    for name in ("web", "books", "text", "ids"):
        (folder / name).mkdir()
    for f, count in enumerate((30, 2, 45)):
        bad = [b"", b"{bad", b'{"text": " "}', b'{"text": "\\ud800"}', b'{"text": "\xff"}']
        lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0).encode() for i, text in enumerate(texts(count))]
        lines[1:1] = bad
        members = (b"\xef\xbb\xbf" + lines[0] + b"\r\n", b"\r\n".join(lines[1:]))
        (folder / "web" / f"{f}.json.gz").write_bytes(b"".join(map(gzip.compress, members)))
    for f, count in enumerate((25, 0, 13)):
        schema = pyarrow.schema({"id": pyarrow.int64(), "text": pyarrow.string()})
        rows = pyarrow.table({"id": list(range(count)), "text": texts(count)}, schema)
        with pyarrow.parquet.ParquetWriter(folder / "books" / f"{f}.parquet", schema) as out:
            for part in (rows[:7], rows[:0], pyarrow.table({"id": [0], "text": [None]}, schema), rows[7:]):
                out.write_table(part)
    for f, count in enumerate((20, 8)):
        content = "\r\n \r\n".join(texts(count)).encode("utf-8-sig")
        path = folder / "text" / f"{f}.txt{'.gz' * f}"
        path.write_bytes(gzip.compress(content) if f else content)
    ids = rng.integers(100, 5000, 600)
    ids[::9] = EOS
    ids[:400].astype("<u2").tofile(folder / "ids" / "a.bin")
    np.save(folder / "ids" / "b.npy", ids[400:].astype("<u4"))

    found = {name: Counter() for name in ("web", "books", "text", "ids")}
    for path in (folder / "web").iterdir():
        for line in gzip.decompress(path.read_bytes()).split(b"\r\n"):
            with contextlib.suppress(ValueError):
                text = json.loads(line.decode("utf-8-sig"))["text"]
                found["web"] += Counter([text] * bool(text.encode().strip()))
    for path in (folder / "books").iterdir():
        found["books"].update(text for text in pyarrow.parquet.read_table(path)["text"].to_pylist() if text)
    for path in (folder / "text").iterdir():
        content = path.read_bytes()
        plain = gzip.decompress(content) if path.suffix == ".gz" else content
        found["text"].update(plain.decode("utf-8-sig").split("\r\n \r\n"))
    for part in (ids[:400], ids[400:]):
        runs = [run.tolist() for run in np.split(part, np.flatnonzero(part == EOS) + 1)]
        found["ids"].update(tuple(run) for run in runs if run and run != [EOS])
    return found


@pytest.mark.parametrize("window", [0, 6])
def test_every_format_mixed_against_other_readers(tmp_path, window):
    """Each document comes once per epoch, on one rank and on five; resumes on 1 to 15 ranks give the same tokens."""
    expected = write_all_formats(tmp_path)
    found = shares({"web": 6, "books": 4, "text": 2, "ids": 3}, 15)
    files = [file for name in expected for file in prefixed(name, list_files("text", str(tmp_path / name)))]
    options = {
        "assignment": Mixture(files, found, seed=0),
        "format": Format(text_split="blank_lines", eos_id=EOS, vocab_size=5000),
        "shuffle_window": window,
        "max_skipped_fraction": 1.0,
    }

    def streams(ranks, positions=None):
        made = streams_of(files, 15, ranks, positions=positions, **options)
        for rank in made:
            rank.encode = lambda text: [int(text.split()[0])] * (1 + len(text) // 9) + [EOS]
        return made

    for ranks in (1, 5):
        slots = [slot for rank in streams(ranks) for slot in rank.slots.values()]
        for share in found:
            read = [Counter(), Counter()]
            for slot in slots[share.first : share.first + share.slots]:
                while (document := slot.source.next()).start[Field.EPOCH] < 2:
                    content = document.content
                    key = content if isinstance(content, str) else tuple(content.tolist())
                    read[document.start[Field.EPOCH]][key] += 1
            assert read == [expected[share.name]] * 2
    whole, end = batches(streams(1), 60)
    assert (end[:, Field.EPOCH] >= 1).all()
    got, positions = [], None
    for ranks, steps in ((3, 7), (1, 11), (15, 1), (5, 41)):
        part, positions = batches(streams(ranks, positions), steps)
        got.append(part)
    assert np.array_equal(np.concatenate(got), whole)
    assert np.array_equal(positions, end)


def split_at(tokens, eos):
    ends = [i for i, token in enumerate(tokens) if token == eos]
    return [tokens[begin + 1 : end] for begin, end in zip([-1, *ends], ends, strict=False)]


def test_a_resume_with_other_weights_is_refused(job, sample):
    """It is refused if the weights give other numbers of slots."""
    files, tokenizer = training_files(job), load_tokenizer(sample / "tokenizer")
    one = open_stream(job, files, tokenizer, 1, 0)
    saved = one.state_dict()
    web, code = job.stream.sources
    other = changed(job, sources=[Source(1.0, web.path), Source(1.0, code.path)])
    now = open_stream(other, files, tokenizer, 1, 0)
    with pytest.raises(
        ConfigError, match=r"stream.sources, with .*: web 4, code 2 then, web 3, code 3 now\. .*\"restart\""
    ):
        now.load_state_dict(saved)
    now.restart(1)
    assert now.positions[:, Field.EPOCH].tolist() == [1] * 6
    open_stream(
        changed(job, sources=[Source(4.0, web.path), Source(2.0, code.path)]), files, tokenizer, 1, 0
    ).load_state_dict(saved)
    swapped = changed(job, sources=[code, web])
    with pytest.raises(ConfigError, match=r"web 4, code 2 then, code 2, web 4 now"):
        open_stream(swapped, training_files(swapped), tokenizer, 1, 0).load_state_dict(saved)
    alone = changed(job, sources=[], dataset="text", dataset_path=web.path)
    with pytest.raises(ConfigError, match=r"6 files then, 3 now, with 9 differences.*: web 4, code 2 then, none now"):
        open_stream(alone, training_files(alone), tokenizer, 1, 0).load_state_dict(saved)


def test_files_that_end_early_are_judged_by_the_epochs_of_their_source(sample):
    """A small source is in its tenth epoch and a large one in its first: 9 × 10 + 100 files were begun."""
    files = [DataFile(f"{name}/{i}", "", 1) for name, count in (("small", 9), ("large", 100)) for i in range(count)]
    one = loader(files, sample, slots=4, shares=shares({"small": 1, "large": 3}, 4), max_skipped_fraction=0.1)
    counters = {"documents": 9e9, "skipped_documents": 0, "epoch": 9, "epoch/small": 9, "epoch/large": 0}
    one.check_counters(counters | {"skipped_files": 19})
    with pytest.raises(ConfigError, match="20 of 190 files are damaged"):
        one.check_counters(counters | {"skipped_files": 20})


def test_bad_documents_of_a_small_source_are_judged_as_in_a_run_of_its_own(tmp_path):
    """A thousand bad documents in a row are judged one by one, because their file is much of its source."""
    large = json.dumps({"text": "3", "more": "x" * 2_000_000})
    for name, lines in (("web", [large]), ("code", ['{"text": " "}'] * 1000 + ['{"text": "5"}'] * 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.json").write_text("\n".join(lines))
    web, code = (list_files("text", str(tmp_path / name)) for name in ("web", "code"))
    assert code[0].size < 0.01 * web[0].size
    files, found = [*prefixed("web", web), *prefixed("code", code)], shares({"web": 1, "code": 1}, 2)
    (rank,) = streams_of(files, 2, 1, assignment=Mixture(files, found, seed=0))
    (alone,) = streams_of(code, 1, 1)
    for _ in range(10):
        assert rank.slots[1].sequence().tolist() == alone.slots[0].sequence().tolist() == [5, EOS] * 4
    assert rank.slots[1].position[Field.SKIPPED_FILES] == 0


def test_what_is_said_of_a_slot_without_documents_names_its_source(tmp_path):
    for name, line in (("web", '{"text": "3"}\n'), ("code", "{}\n")):
        (tmp_path / name).mkdir()
        for i in range(2):
            (tmp_path / name / f"{i}.json").write_text(line * 30)
    sources = [prefixed(name, list_files("text", str(tmp_path / name))) for name in ("web", "code")]
    files, found = [*sources[0], *sources[1]], shares({"web": 1, "code": 1}, 2)
    (rank,) = streams_of(files, 2, 1, assignment=Mixture(files, found, seed=0), max_skipped_fraction=1.0)
    with pytest.raises(
        ConfigError, match=r"slot 1 of 2 found no usable .* in these files: 2, from code/0.json to code/1.json. The log"
    ):
        rank.slots[1].sequence()


def test_epochs_read_by_hand(sample):
    """Six slots on two ranks.

    In this epoch, web's file of 300 bytes follows that of 100 bytes, and three slots share it.
    """
    files = [
        DataFile(name, "", size) for name, size in (("web/a", 100), ("web/b", 300), ("code/a", 100), ("code/b", 100))
    ]
    found = shares({"web": 4, "code": 2}, 6)
    ranks = [loader(files, sample, rank, 2, slots=6, shares=found) for rank in range(2)]
    first, second = ranks
    epoch = next(e for e in range(9) if first.assignment.order(e)[:2] == [0, 1])
    runs = [first.assignment.run(slot, epoch) for slot in range(4)]
    assert [sum(run.weights) for run in runs] == [400] * 4  # a hundred bytes each
    assert [[s.file for s in run.segments] for run in runs] == [[0], [1], [1], [1]]
    for one in ranks:
        one.positions[:, Field.EPOCH] = epoch
        one.densities = [2.0, 0.5]  # bytes of text per stored byte
    # Slot 0 has read its file, slot 1 half of its share, slot 2 a tenth; slot 3 has not begun.
    first.positions[0, Field.DONE] = 2
    first.positions[1, Field.HEAD_BYTES] = 100
    first.positions[2, Field.HEAD_BYTES] = 20
    # In the source code, slot 4 has read 20 of 100 bytes; slot 5 is two epochs ahead and has read nothing yet.
    second.positions[1, Field.BODY_BYTES] = 10
    second.positions[2, Field.EPOCH] = epoch + 2
    first.bytes_read[epoch, 1], second.bytes_read[epoch, 1], second.bytes_read[epoch, 3] = 150, 300, 20
    counters = together([one.counters() for one in ranks])
    assert counters["epochs_read/web"] == pytest.approx(epoch + (1 + 0.5 + 0.1 + 0) / 4)
    assert counters["epochs_read/code"] == pytest.approx(epoch + (0.2 + 2) / 2)
    assert (counters["epoch/web"], counters["epoch/code"], counters["epoch"]) == (epoch, epoch + 2, epoch + 2)
    assert counters["stored_bytes"] == 470


def test_fraction_of_a_run_by_hand():
    """A head of 40 bytes, whole files of 10, 30 and 60 bytes, and a tail of 60 bytes. The current file is known."""
    run = Run(
        Segment(0, 1, 2, 0, 40),
        tuple(Segment(i, 0, 2**64, 0, n) for i, n in ((1, 10), (2, 30), (3, 60))),
        Segment(4, 0, 1, 0, 60),
    )

    def read(density=1.0, slots=1, **fields):
        position = np.zeros(len(Field), dtype=np.int64)
        for name, value in fields.items():
            position[Field[name]] = value
        return fraction_read(position, run, slots, density) * 200

    assert read() == 0
    assert read(HEAD_BYTES=20, TAIL_BYTES=6) == pytest.approx(26)
    assert read(HEAD_BYTES=20, TAIL_BYTES=6, density=4.0, slots=2) == pytest.approx(13)
    assert read(HEAD_BYTES=500) == 40
    assert read(HEAD_BYTES=500, DONE=4) == 100
    assert read(BODY_BYTES=25, BODY_FILE=1) == 25
    assert (read(BODY_BYTES=3, BODY_FILE=1), read(BODY_BYTES=99, BODY_FILE=1)) == (10, 40)
    assert read(BODY_BYTES=3, BODY_FILE=3, DONE=7) == 200
    assert read(HEAD_BYTES=20, BODY_FILE=2, density=0.0) == 40  # nothing has been measured yet
    # Of a window that began there, three documents of ten bytes on average have been used.
    used = {"IN_WINDOW": 3, "DOCUMENTS": 20, "BYTES": 200}
    assert (read(HEAD_BYTES=20, **used), read(HEAD_BYTES=20, density=4.0, slots=2, **used)) == (50, 10 + 15)
    assert read(HEAD_BYTES=20, IN_WINDOW=1, DOCUMENTS=1, BYTES=14) == 34
    assert read(DONE=6, **used | {"IN_WINDOW": 20}) == 200
    assert fraction_read(np.zeros(len(Field), dtype=np.int64), Run(None, (), None), 1, 1.0) == 0


def texts_bytes(files):
    """The bytes of all documents' texts."""
    return sum(
        len(text_of(raw).encode()) for file in files for raw in iter(Documents(file, StreamOptions()).read, None)
    )


@pytest.mark.parametrize(("suffix", "documents"), [("json", 1.0), ("json.gz", 2.5), ("parquet", 2.5)])
def test_text_in_a_stored_byte(tmp_path, suffix, documents):
    """At first, the documents per compressed byte are guessed and the text per document is measured; later both are."""
    files = write_uneven(tmp_path, [60, 50], "parquet" if suffix == "parquet" else "json.gz")
    if suffix == "json":
        for file in files:
            (tmp_path / file.name.removesuffix(".gz")).write_bytes(gzip.decompress((tmp_path / file.name).read_bytes()))
            (tmp_path / file.name).unlink()
        files = list_files("text", str(tmp_path))
    (rank,) = streams_of(files, 1, 1, seq_len=1)
    rank.encode = lambda text: [1, EOS]
    assert rank.passes.text_per_stored_byte() == [0.0]
    slot = rank.slots[0]
    slot.sequence()
    read = slot.cursor.position.values
    as_stored = read[Field.BYTES] + (suffix != "parquet") * len('{"text": ""}\n') * read[Field.DOCUMENTS]
    assert rank.passes.text_per_stored_byte() == [pytest.approx(documents * read[Field.BYTES] / as_stored)]
    while slot.position[Field.EPOCH] == 0:
        slot.sequence()
    exact = texts_bytes(files) / sum(file.size for file in files)
    assert rank.passes.text_per_stored_byte() == [pytest.approx(exact, rel=0.005)]


def test_text_in_a_stored_byte_of_a_file_in_the_middle(tmp_path):
    """It is measured after 4 MiB, also after a resume: what was read before the resume does not count."""
    line = json.dumps({"text": "x" * 900, "more": "y" * 1075}) + "\n"
    assert len(line) == 2000
    (tmp_path / "a.json").write_text(line * 8000)
    files, positions = list_files("text", str(tmp_path)), None
    for steps in (750, 800):
        (rank,) = streams_of(files, 1, 1, positions=positions)
        rank.encode = lambda text: [1, EOS]
        _, positions = batches([rank], steps)
        assert rank.passes.text_per_stored_byte() == [pytest.approx(0.45, rel=0.05)]
        (one,) = rank.passes._open[0]
        assert not one.ended
        assert (one.start == 0) == (steps == 750)


@pytest.mark.parametrize("window", [0, 1000])
def test_epochs_read_is_what_was_handed_out(sample, tmp_path, window):
    """The expected number is found by counting text.

    It is the same on any ranks, with any reading ahead, after a resume, and within a window, which may be as large as
    an epoch.
    """
    files = write_uneven(tmp_path, [300, 120, 200], "json.gz")
    total, found = texts_bytes(files), []
    for ranks, prefetch, parts in ((1, 0, [450]), (3, 0, [450]), (1, 4, [201, 249])):
        states = []
        for part in parts:
            options = {"slots": 3, "seq_len": 256, "shuffle_window": window}
            loaders = [loader(files, sample, rank, ranks, prefetch, **options) for rank in range(ranks)]
            for one, state in zip(loaders, states, strict=False):
                one.load_state_dict(state)
            batches = [iter(one) for one in loaders]
            for _ in range(part // ranks):
                for own in batches:
                    next(own)
            for one in loaders:
                one.close()
            states = [one.state_dict() for one in loaders]
        found.append(together([one.counters() for one in loaders]))
    handed_out = found[0]["text_bytes"] / total
    assert handed_out > 1.1
    assert [counters["text_bytes"] / total for counters in found] == [handed_out] * 3
    for counters in found:
        assert counters["epochs_read"] == pytest.approx(handed_out, abs=0.02)


def test_names_of_sources():
    for path, name in (
        ("/data/web", "web"),
        ("/data/web/", "web"),
        ("code/*.jsonl", "code"),
        ("/data/[ab]/**/*.json", "data"),
        ("one.json.gz", "one.json.gz"),
    ):
        assert source_name(Source(1.0, path)) == name
    assert source_name(Source(1.0, "/data/web", name="crawl")) == "crawl"
    assert source_name(Source(1.0, dataset="c4")) == "c4"
    assert source_name(Source(1.0, dataset="hf:HuggingFaceFW/fineweb-edu:sample-10BT:train")) == "fineweb-edu"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (
            {"path": "a", "weight": 1},
            r"^stream.sources is \{'path': 'a', .*expected tables, each written \[\[stream.sources\]\]",
        ),
        ("web", r"^stream.sources is 'web', expected tables"),
        (["web"], r"^stream.sources\[0\] is 'web', expected a table"),
        (
            [{"path": "a", "weight": 1}, {"path": "b", "wieght": 1}],
            r"^stream.sources\[1\].wieght is not known \(did you mean weight\?\)",
        ),
        ([{"path": "a", "wt": 1}], r"^stream.sources\[0\].wt is not known"),
        ([{"path": "a"}], r"^stream.sources\[0\] has no weight"),
        ([{"path": "a", "weight": "1"}], r"^stream.sources\[0\].weight is '1', expected a number"),
        ([{"path": "a", "weight": True}], r"^stream.sources\[0\].weight is True, expected a number"),
        ([{"path": 3, "weight": 1}], r"^stream.sources\[0\].path is 3, expected a string"),
    ],
)
def test_tables_that_cannot_be_read(tables, message):
    with pytest.raises(ConfigError, match=message):
        Stream(sources=tables)


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        ([("/a", 0.0)], {}, r"^stream.sources\[0\] \(a\): weight is 0.0, expected a number > 0"),
        ([("/a", 1.0), ("/b", -1.0)], {}, r"^stream.sources\[1\] \(b\): weight is -1.0"),
        ([("/a", float("nan"))], {}, r"weight is nan, expected a number > 0"),
        ([("/a", float("inf"))], {}, r"weight is inf"),
        ([(None, 1.0)], {}, r"^stream.sources\[0\] \(text\) has no path: set it to"),
        ([("/x/a", 1.0), ("/y/a", 1.0)], {}, r"^stream.sources: 2 of them are called 'a': give each a name of its own"),
        ([("/", 1.0)], {}, r"^stream.sources\[0\]: name is '', expected one without a slash"),
        (
            [("/a", 1.0)],
            {"dataset_path": "/b"},
            r"^training.dataset_path is '/b', and there are 1 stream.sources: expected one of",
        ),
        ([("/a", 99.0), ("/b", 1.0)], {}, r"^stream.sources: 6 slots are too few for b"),
    ],
)
def test_sources_that_cannot_work(job, sources, options, message):
    with pytest.raises(ConfigError, match=message):
        source_shares(changed(job, sources=[Source(weight, path) for path, weight in sources], **options), 6)


def test_a_name_with_a_slash(job):
    """The file web/a of one source and the file a of a source called web would have one name in the fingerprint."""
    with pytest.raises(ConfigError, match=r"name is 'web/a', expected one without a slash"):
        check_sources(changed(job, sources=[Source(1.0, "/a", name="web/a")]))


def test_messages_name_the_source(job):
    missing = changed(job, sources=[*job.stream.sources, Source(1.0, "/nowhere", name="lost")])
    with pytest.raises(ConfigError, match=r"^stream.sources.lost.path is '/nowhere', which does not exist"):
        training_files(missing)
    (problem,) = input_problems(missing)
    assert problem.startswith("stream.sources.lost.path is '/nowhere', which does not exist")
    assert input_problems(job) == []
    unknown = changed(job, sources=[Source(1.0, "/a", "pile")])
    with pytest.raises(ConfigError, match=r"^stream.sources.a.dataset is 'pile', expected c4"):
        training_sets(unknown)[0].check_name()


def test_toml_and_command_line(tmp_path):
    """The example of docs/data.md, values from the command line, and values that are not tables."""
    example = re.search(r"```toml\n([^`]*\[\[stream\.sources\]\][^`]*)```", (ROOT / "docs" / "data.md").read_text())[1]
    lines = [line for line in DEMO.read_text().splitlines() if not line.startswith("dataset")]
    file = tmp_path / "mixture.toml"
    file.write_text("\n".join(lines) + "\n" + example)
    job = load_config(["--job.config_file", str(file)])
    assert [(type(source), source_name(source), source.weight) for source in job.stream.sources] == [
        (Source, "web", 0.8),
        (Source, "code", 0.2),
    ]
    assert [share.slots for share in source_shares(job, 10)] == [8, 2]
    assert json.loads(json.dumps(job.to_dict()))["stream"]["sources"][1]["weight"] == 0.2
    job = load_config(
        ["--job.config_file", str(file), "--stream.sources.1.path", "/scratch/c", "--stream.sources.1.weight", "3"]
    )
    assert [(source.path, source.weight) for source in job.stream.sources][1] == ("/scratch/c", 3.0)
    file.write_text("\n".join([*lines, "[stream]", "sources = []"]))
    with pytest.raises(ConfigError, match=r"^stream.sources is empty: name at least one source"):
        load_config(["--job.config_file", str(file)])
    file.write_text("\n".join([*lines, "[[stream.sources]]", 'path = "/a"']))
    with pytest.raises(ConfigError, match=r"^stream.sources\[0\] has no weight"):
        load_config(["--job.config_file", str(file)])


def test_held_out_sequences_are_of_the_first_source_that_has_some(job, sample):
    tokenizer = load_tokenizer(sample / "tokenizer")
    assert held_out_sequences(job, tokenizer, 3) is None
    beside = changed(job, sources=[*job.stream.sources, Source(1.0, str(sample), "c4")])
    plain = changed(job, sources=[], dataset_path=str(sample))
    assert torch.equal(held_out_sequences(beside, tokenizer, 3), held_out_sequences(plain, tokenizer, 3))


def test_the_model_card_names_the_sources(job):
    assert _data(SimpleNamespace(config=job.to_dict(), in_hf_format=True)) == "`web` (67%), `code` (33%)"
