"""Several sources with weights, each as in a run of its own; and the same documents
under two names.
"""

import json
import os
import re
import shutil
from functools import partial

import numpy as np
import pyarrow
import pytest
import torch

from tests.command_line import DEMO, ROOT
from tests.pages import changed
from tests.streams import (
    EOS,
    batches,
    config,
    loader,
    sequence,
    streams_of,
    words_of,
    write_files,
    write_texts,
)
from titan_disp.checks import check_inputs, listed_inputs
from titan_disp.cluster.node_health import input_problems
from titan_disp.config.load import load_config
from titan_disp.data.assignment import Assignment, prefixed, shares
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.loader import build_dataloader, together
from titan_disp.data.options import StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.sources import (
    DataSet,
    check_overlaps,
    measured,
    source_name,
    source_shares,
)
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError, Problems
from titan_disp.job_config import Source, Stream
from titan_disp.lab.digest import digest, global_batch


def test_slots_follow_the_weights():
    for weights, slots, expected in (
        ([0.7, 0.2, 0.1], 10, [7, 2, 1]),
        ([1, 1, 1], 8, [3, 3, 2]),  # ties go to the first sources
        ([0.5, 0.3, 0.2], 7, [4, 2, 1]),  # 3.5, 2.1, 1.4
        ([0.94, 0.03, 0.03], 33, [31, 1, 1]),  # 31.02, 0.99, 0.99
        ([5e-324, 5e-324], 2, [1, 1]),
    ):
        found = shares({f"s{i}": weight for i, weight in enumerate(weights)}, slots)
        assert [(share.slots, share.tokens) for share in found] == [
            (n, n / slots) for n in expected
        ]
        assert [share.asked for share in found] == pytest.approx(
            [weight / sum(weights) for weight in weights]
        )
    with pytest.raises(
        ConfigError,
        match=r"8 slots are too few for b, whose weight asks for 0.08 .* at least 100 ",
    ):
        shares({"a": 0.99, "b": 0.01}, 8)
    # the quotas are 58.8, 0.6 and 0.6
    with pytest.raises(ConfigError, match=r"60 slots are too few for c, "):
        shares({"a": 0.98, "b": 0.01, "c": 0.01}, 60)


@pytest.fixture(scope="module")
def job(sample, tmp_path_factory):
    root = tmp_path_factory.mktemp("sources")
    for name, first in (("web", 0), ("code", 4)):
        (root / name).mkdir()
        for i in range(3):
            (root / name / f"{i}.json.gz").symlink_to(
                sample / f"en/c4-train.{first + i:05d}-of-00008.json.gz"
            )
    made = config(
        sample, "--training.global_batch_size", "6", "--training.local_batch_size", "1"
    )
    made.training.dataset_path = None
    made.stream.sources = [
        Source(2.0, str(root / "web")),
        Source(1.0, str(root / "code")),
    ]
    return made


def built(job):
    return build_dataloader(1, 0, load_tokenizer(job.model.hf_assets_path), job)


def test_a_config_with_sources_from_listing_to_batches(job, tmp_path):
    """Each source gives what it gives alone.

    (Without shuffling, because the shuffled order depends on the slots' numbers.)
    """
    names = [f"{name}/{i}.json.gz" for name in ("web", "code") for i in range(3)]
    assert [file.name for file in built(job).files] == names

    def first_batches(one, batch):
        iterators = [iter(built(one))]
        return torch.stack(
            [global_batch(iterators, one, batch, batch) for _ in range(5)]
        )

    plain = changed(job, {"stream.shuffle_window": 0})
    found = first_batches(plain, 6)
    for i, own, slots in ((0, slice(4), 4), (1, slice(4, 6), 2)):
        alone = {
            "stream.sources": [job.stream.sources[i]],
            "training.global_batch_size": slots,
        }
        assert torch.equal(found[:, own], first_batches(changed(plain, alone), slots))
    whole = digest(job, 8, [(0, 1)])
    assert digest(job, 8, [(0, 2), (3, 3), (5, 6)]).hashes == whole.hashes
    assert {
        "epoch",
        "epoch/web",
        "epochs_read/web",
        "epoch/code",
        "epochs_read/code",
    } <= whole.counters.keys()
    assert "epochs_read" not in whole.counters
    empty = Source(
        1.0,
        str(
            write_texts(tmp_path / "empty.parquet", pyarrow.array([], pyarrow.string()))
        ),
    )
    # Although the others have some
    with pytest.raises(ConfigError, match=r"empty\.parquet has no rows"):
        built(changed(job, {"stream.sources": [*job.stream.sources, empty]}))


def test_a_resume_with_other_weights_is_refused(job):
    saved = built(job).state_dict()
    web, code = job.stream.sources
    doubled = [Source(4.0, web.path), Source(2.0, code.path)]
    equal = [Source(1.0, web.path), code]
    built(changed(job, {"stream.sources": doubled})).load_state_dict(saved)
    for keys, message in (
        (
            {"stream.sources": equal},
            r"sources, .* code 2 then, web 3, code 3 now\. .*\"restart",
        ),
        ({"stream.sources": [code, web]}, r"web 4, code 2 then, code 2, web 4 now"),
        (
            {"stream.sources": [], "training.dataset_path": web.path},
            r"6 files then, 3 now, .*code 2 then, none now",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            built(changed(job, keys)).load_state_dict(saved)


def test_bad_documents_of_a_small_source_are_judged_as_in_a_run_of_its_own(tmp_path):
    """A thousand bad documents in a row are judged one by one, because their file is
    much of its source.
    """
    (web,) = list_files(
        "text", str(write_texts(tmp_path / "web" / "0.json", ["x" * 200_000]))
    )
    (code,) = list_files(
        "text",
        str(write_texts(tmp_path / "code" / "0.json", [777] * 1000 + ["5"] * 60)),
    )
    files = [*prefixed("web", [web]), *prefixed("code", [code])]
    mixture = Assignment(files, shares({"web": 1, "code": 1}, 2), seed=0)
    (rank,) = streams_of(files, 2, 1, assignment=mixture, max_skipped_fraction=0.1)
    (alone,) = streams_of([code], 1, 1, max_skipped_fraction=0.1)
    for _ in range(10):
        assert (
            sequence(rank.slots[1]).tolist()
            == sequence(alone.slots[0]).tolist()
            == [5, EOS] * 4
        )
    assert rank.slots[1].position[Field.SKIPPED_FILES] == 0


@pytest.mark.parametrize("window", [0, 1000])
def test_epochs_read_is_what_was_handed_out(sample, tmp_path, window):
    """Found by counting text: on any ranks, with any reading ahead, after a resume, and
    within a window as large as an epoch.
    """
    lengths = lambda i: 9 + i * 7919 % 81  # noqa: E731
    files = measured(write_files(tmp_path, [300, 120, 200], lengths), StreamOptions())
    found = []
    for ranks, prefetch, parts in ((1, 0, [201]), (3, 4, [90, 111])):
        states = [{}] * ranks
        for part in parts:
            how = {"slots": 3, "seq_len": 256, "shuffle_window": window}
            loaders = [
                loader(files, sample, rank, ranks, prefetch, **how)
                for rank in range(ranks)
            ]
            for one, state in zip(loaders, states, strict=True):
                one.load_state_dict(state)
                batches = iter(one)
                for _ in range(part // ranks):
                    next(batches)
                one.close()
            states = [one.state_dict() for one in loaders]
        found.append(together([one.counters() for one in loaders]))
    handed_out = found[0]["text_bytes"] / sum(
        len(words_of(i, lengths)) for i in range(1, 621)
    )
    assert handed_out > 1.1
    assert found[0]["stored_bytes"] >= sum(file.size for file in files)
    for counters in found:
        assert (counters["text_bytes"], counters["epoch"]) == (
            found[0]["text_bytes"],
            found[0]["epoch"],
        )
        assert counters["epochs_read"] == pytest.approx(handed_out, abs=0.02)


def test_names_of_sources():
    for source, name in (
        ({"path": "code/*.jsonl"}, "code"),
        ({"path": "/data/[ab]/**/*.json"}, "data"),
        ({"path": "/data/web", "name": "crawl"}, "crawl"),
        ({"dataset": "c4"}, "c4"),
        ({"dataset": "hf:HuggingFaceFW/fineweb-edu:sample-10BT:train"}, "fineweb-edu"),
    ):
        assert source_name(Source(1.0, **source)) == name


def test_tables_that_cannot_be_read():
    for tables, message in (
        (["web"], r"\[0\] is 'web', expected a table"),
        (
            [{"path": "a", "weight": 1}, {"path": "b", "wieght": 1}],
            r"\[1\].wieght is not known \(did you mean weight",
        ),
        ([{"path": "a"}], r"\[0\] has no weight"),
        ([{"path": "a", "weight": "1"}], r"\[0\].weight is '1', expected a number"),
        ([{"path": 3, "weight": 1}], r"\[0\].path is 3, expected a string"),
    ):
        with pytest.raises(ConfigError, match=f"^stream.sources ?{message}"):
            Stream(sources=tables)


def test_sources_that_cannot_work(job):
    for sources, dataset_path, message in (
        ([("/a", 0.0)], None, r"\[0\] \(a\): weight is 0.0, expected a number > 0"),
        ([("/a", 1.0), ("/b", -1.0)], None, r"\[1\] \(b\): weight is -1.0"),
        ([("/a", float("nan"))], None, r"\[0\] .*weight is nan, expected a number > 0"),
        ([(None, 1.0)], None, r"\[0\] \(text\) has no path: set it to"),
        (
            [("/x/a", 1.0), ("/y/a", 1.0)],
            None,
            ": 2 sources are called 'a': give each a different name",
        ),
        ([("/", 1.0)], None, r"\[0\]: name is '', expected one without a slash"),
        # The file web/a of one source and the file a of a source called web would have
        # one name in the fingerprint.
        (
            [("/a", 1.0, "web/a")],
            None,
            r"\[0\].*name is 'web/a', expected one without a slash",
        ),
        (
            [("/a", 1.0)],
            "/b",
            "training.dataset_path is '/b', and there are 1 stream.sources: expected",
        ),
        ([("/a", 99.0), ("/b", 1.0)], None, ": 6 slots are too few for b"),
    ):
        tables = [
            Source(weight, path, name="".join(name)) for path, weight, *name in sources
        ]
        with pytest.raises(ConfigError, match=f"^({message}|stream.sources{message})"):
            source_shares(
                changed(
                    job,
                    {"stream.sources": tables, "training.dataset_path": dataset_path},
                ),
                6,
            )


def test_messages_name_the_source(job):
    assert input_problems(job) == []
    missing = changed(
        job,
        {"stream.sources": [*job.stream.sources, Source(1.0, "/nowhere", name="lost")]},
    )
    with pytest.raises(
        ConfigError,
        match=r"^stream.sources.lost.path is '/nowhere', which does not exist",
    ) as error:
        built(missing)
    assert input_problems(missing) == [str(error.value)]
    with pytest.raises(
        ConfigError, match=r"^stream.sources.a.dataset is 'pile', expected c4"
    ):
        built(changed(job, {"stream.sources": [Source(1.0, "/a", "pile")]}))


def test_toml_and_command_line(tmp_path):
    example = re.search(
        r"```toml\n([^`]*\[\[stream\.sources\]\][^`]*)```",
        (ROOT / "docs" / "data.md").read_text(),
    )[1]
    lines = [
        line for line in DEMO.read_text().splitlines() if not line.startswith("dataset")
    ]
    (tmp_path / "mixture.toml").write_text("\n".join([*lines, example]))
    argv = ["--job.config_file", str(tmp_path / "mixture.toml")]
    job = load_config(argv)
    found = [
        (type(source), source_name(source), source.weight)
        for source in job.stream.sources
    ]
    assert found == [(Source, "web", 0.8), (Source, "code", 0.2)]
    assert [share.slots for share in source_shares(job, 10)] == [8, 2]
    assert (
        json.loads(json.dumps(job.to_dict()))["stream"]["sources"][1]["weight"] == 0.2
    )
    argv += ["--stream.sources.1.path", "/scratch/c", "--stream.sources.1.weight", "3"]
    source = load_config(argv).stream.sources[1]
    assert (source.path, source.weight) == ("/scratch/c", 3.0)


@pytest.fixture
def small(sample, tmp_path):
    for name in ("web", "code"):
        for i in range(3):
            write_texts(
                tmp_path / name / f"{name}-{i}.jsonl",
                [f"{name} {i} {words_of(n)}" for n in range(50)],
            )
    made = config(sample, "--training.dataset", "text")
    made.training.dataset_path = str(tmp_path / "web")
    return made


def test_blocks_of_an_index_are_read_ahead_and_through_links(
    small, tmp_path, monkeypatch
):
    monkeypatch.setattr("titan_disp.data.index._LEAST", 256)
    monkeypatch.setattr("titan_disp.data.assignment._MIN_BLOCKS", 1)
    (tmp_path / "linked").mkdir()
    for path in (tmp_path / "web").iterdir():
        (tmp_path / "linked" / path.name).symlink_to(path)
    found = []
    small.training.dataset_path = None
    small.stream.index = "memory"
    for folder, prefetch, phases in (
        ("web", 0, [(0, 1)]),
        ("linked", 3, [(0, 2), (3, 4)]),
    ):
        sources = [
            Source(3, str(tmp_path / folder), name="web"),
            Source(1, str(tmp_path / "code")),
        ]
        job = changed(small, {"stream.sources": sources, "stream.prefetch": prefetch})
        assert any(built(job).assignment.dealt)
        found.append(digest(job, 6, phases).hashes)
    assert found[0] == found[1]


@pytest.mark.parametrize("link", [None, os.link, os.symlink, "of a folder"])
@pytest.mark.parametrize("section", ["sources", "validation"])
def test_the_same_file_twice_is_refused(small, tmp_path, section, link):
    """By its inode, so that names, links and relative paths make no difference.

    All checks before a run say it.
    """
    other = tmp_path / "web" / "web-1.jsonl"
    if link == "of a folder":
        (tmp_path / "more").symlink_to(tmp_path / "web")
        other = tmp_path / "more" / other.name
    elif link:
        (tmp_path / "more").mkdir()
        link(other, other := tmp_path / "more" / other.name)
    expected = (
        "web-1.jsonl' and",
        "expected held-out documents",
        "leave the file out of one of the two",
    )
    if section == "sources":
        small.training.dataset_path = None
        small.stream.sources = [
            Source(2.0, str(tmp_path / "web")),
            Source(1.0, os.path.relpath(other), name="more"),
        ]
        expected = (
            "stream.sources.web and stream.sources.more",
            "web-1.jsonl'",
            "raise the weight of the other",
        )
    else:
        small.validation.enable = True
        small.validation.dataset = "text_validation"
        small.validation.dataset_path = os.path.relpath(other)
    for check in (
        check_inputs,
        partial(listed_inputs, missing=Problems(), warnings=[]),
        built,
    ):
        with pytest.raises(ConfigError) as error:
            check(small)
        assert all(
            part in str(error.value) for part in (*expected, "read 1 file in common")
        ), error.value


def test_what_is_not_the_same_file_is_not_refused(small, tmp_path, caplog):
    """Copies, and links within one source, which may be meant; the log names those."""
    shutil.copy(tmp_path / "web" / "web-1.jsonl", tmp_path / "code" / "web-1.jsonl")
    for i in range(2):
        os.link(tmp_path / "web" / "web-0.jsonl", tmp_path / "web" / f"again-{i}.jsonl")
    small.training.dataset_path = None
    small.stream.sources = [
        Source(1.0, str(tmp_path / name)) for name in ("web", "code")
    ]
    write_texts(tmp_path / "val" / "web-val.jsonl", ["a"] * 9)
    section = small.validation
    section.enable = True
    section.dataset = "text_validation"
    section.dataset_path = str(tmp_path / "val")
    check_inputs(small)
    assert len(built(small).files) == 9  # those of training
    found = [
        "stream.sources.web data: 2 files" in said
        for said in caplog.messages
        if "several times" in said
    ]
    assert found == [True, True]


def test_copies_in_two_sources_come_at_different_times(tmp_path):
    """The source's name enters the order.

    Without it, all rows of one source were those of the other, step by step.
    """
    files = [
        file
        for name in ("web", "code")
        for file in prefixed(name, write_files(tmp_path / name, [40] * 12))
    ]
    mixture = Assignment(files, shares({"web": 1, "code": 1}, 16), seed=0)
    rows, _ = batches(streams_of(files, 16, 1, 31, assignment=mixture), 15)
    web, code = np.split(rows, 2, axis=1)
    assert (web == code).all(-1).mean() < 0.05
    seen = [[int(n) for n in np.unique(one) if n] for one in (web, code)]
    assert len(set(seen[0]) & set(seen[1])) > 200  # the same documents in the end


def test_a_data_set_that_is_only_on_the_hub_is_compared_by_its_address():
    data = [
        DataSet("c4", None, "stream.sources.a", "a"),
        DataSet("c4", None, "stream.sources.b", "b"),
    ]
    file = DataFile("x.json", "hf://datasets/a/b@c/x.json", 1)
    with pytest.raises(
        ConfigError, match="stream.sources.a and stream.sources.b read 1 file in common"
    ):
        check_overlaps([(one, [file]) for one in data])
    check_overlaps(
        [
            (data[0], [file]),
            (data[1], [DataFile("x.json", "hf://datasets/a/b@c/y.json", 1)]),
        ]
    )


def test_a_run_warns_of_shares_that_are_not_its_weights(job, caplog):
    """As the plan does: with 64 slots, the weights 0.01 and 0.02 both become one
    slot.
    """
    far = "stream.sources: code: 1.56% of the tokens (1.00% asked for), 1 of 64 slots"
    for weights, warnings in (((0.99, 0.01), [True]), ((3, 1), [])):
        caplog.clear()
        sources = [
            Source(weight, one.path)
            for weight, one in zip(weights, job.stream.sources, strict=True)
        ]
        built(
            changed(job, {"stream.sources": sources, "training.global_batch_size": 64})
        )
        assert [
            far in record.message
            for record in caplog.records
            if record.levelname == "WARNING"
        ] == warnings
