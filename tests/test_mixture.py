"""Several sources with weights: exact parts of the tokens, each source as in a run of its own, and every mistake in a config."""

import copy
import json
import re

import numpy as np
import pytest
import torch

from tests.cluster_of_one import DEMO, ROOT
from tests.test_stream import batches, config, of_sizes, streams_of, write_files
from titan_disp.cluster.nodecheck import input_problems
from titan_disp.config import load_config
from titan_disp.data.assignment import Assignment
from titan_disp.data.digest import digest, global_batch
from titan_disp.data.loader import open_stream
from titan_disp.data.mixture import Mixture, prefixed, shares
from titan_disp.data.place import Field
from titan_disp.data.sources import check_sources, source_name, source_shares, training_files, training_sets
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import held_out_sequences
from titan_disp.errors import ConfigError
from titan_disp.job_config import Source, Stream
from titan_disp.results.model_card import _data


@pytest.mark.parametrize(
    ("weights", "slots", "expected"),
    [
        ([0.7, 0.2, 0.1], 10, [7, 2, 1]),
        ([3, 1], 8, [6, 2]),
        ([1, 1, 1], 8, [3, 3, 2]),  # of equal remainders, the first
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
        ConfigError, match=r"8 slots are too few for b, whose weight asks for 0.08 of them.* to 100 or more"
    ):
        shares({"a": 0.99, "b": 0.01}, 8)
    assert [share.slots for share in shares({"a": 0.99, "b": 0.01}, 100)] == [99, 1]
    with pytest.raises(ConfigError, match=r"60 slots are too few for c, "):  # of 58.8, 0.6 and 0.6
        shares({"a": 0.98, "b": 0.01, "c": 0.01}, 60)


def test_a_source_is_assigned_as_in_a_run_of_its_own():
    """Files of two sources may have the same names; the third has fewer files than slots."""
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
            for own in range(len(files)):
                owners = alone.owners(own, epoch)
                assert mixture.owners(file + own, epoch) == range(slot + owners.start, slot + owners.stop)
            assert [file + one for one in alone.order(epoch)] == mixture.order(epoch)[file : file + len(files)]
            part = range(slot, slot + share.slots)
            assert mixture.files_of(part, epoch) == {file + one for one in alone.files_of(range(share.slots), epoch)}
        file, slot = file + len(files), slot + share.slots
    assert mixture.files_of(range(12), 0) == set(range(24))


def test_parts_of_the_tokens_are_exact(tmp_path):
    """In every step, on any ranks and after resumes on others; and a source's documents come as in a run of its own."""
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
    assert end[4:, Field.EPOCH].min() > 1  # its epochs are its own
    for stops in ([(2, 60)], [(3, 21), (6, 39)], [(6, 10), (1, 7), (2, 43)]):
        got, positions = [], None
        for ranks, steps in stops:
            part, positions = batches(mixed(ranks, positions), steps)
            got.append(part)
        assert np.array_equal(np.concatenate(got), tokens)
        assert np.array_equal(positions, end)
    # One epoch of a source holds each of its documents once.
    (rank,) = mixed(1)
    seen = []
    for slot in (4, 5):
        while (document := rank.slots[slot].cursor.next()).end[Field.EPOCH] == 0:
            seen.append(int(document.text.split()[0]))
    assert sorted(seen) == list(range(1, 35))


@pytest.fixture(scope="module")
def job(sample, tmp_path_factory):
    """Two sources, whose files have the same names: two thirds of one, a third of the other."""
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
    """A copy with other sources' options, or others of [training] and [stream]."""
    made = copy.deepcopy(job)
    for name, value in options.items():
        setattr(made.stream if name in ("sources", "slots") else made.training, name, value)
    return made


def test_a_config_with_sources_from_listing_to_batches(job, sample):
    files = training_files(job)
    assert [file.name for file in files] == [f"{name}/{i}.json.gz" for name in ("web", "code") for i in range(3)]
    tokenizer = load_tokenizer(sample / "tokenizer")

    def first_batches(one, batch):
        iterators = [iter(open_stream(one, training_files(one), tokenizer, 1, 0))]
        return torch.stack([global_batch(iterators, one, batch, batch) for _ in range(5)])

    found = first_batches(job, 6)
    for i, own, slots in ((0, slice(4), 4), (1, slice(4, 6), 2)):
        path = job.stream.sources[i].path
        alone = changed(job, sources=[], dataset="text", dataset_path=path, global_batch_size=slots)
        assert torch.equal(found[:, own], first_batches(alone, slots))
    whole = digest(job, 8, [(0, 1)])
    for phases in ([(0, 6)], [(0, 2), (3, 3), (5, 6)]):
        assert digest(job, 8, phases).hashes == whole.hashes


def test_a_resume_with_other_weights_is_refused(job, sample):
    """Where they make other slots. Without sources the fingerprint is what it was before there were any."""
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
    with pytest.raises(ConfigError, match=r"6 files then, 3 now, 9 differ.*: web 4, code 2 then, none now"):
        open_stream(alone, training_files(alone), tokenizer, 1, 0).load_state_dict(saved)
    assert "sources" not in open_stream(alone, training_files(alone), tokenizer, 1, 0).fingerprint
    assert json.loads(saved["fingerprint"])["sources"] == [["web", 4], ["code", 2]]


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
    """web/a of one source and a of another called web would be one name in the fingerprint."""
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
    """The README's example; values from the command line; tables that are none."""
    example = re.search(r"```toml\n([^`]*\[\[stream\.sources\]\][^`]*)```", (ROOT / "README.md").read_text())[1]
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
    assert _data(job.to_dict()) == "`web` (67%), `code` (33%)"
