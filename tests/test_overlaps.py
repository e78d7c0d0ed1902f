"""The same documents under two names: in two sources, under several links, and in training and validation."""

import os
import shutil

import numpy as np
import pytest

from tests.streams import batches, config, streams_of, words_of, write_texts
from titan_disp.config.checks import check_inputs, missing_inputs
from titan_disp.data.assignment import Mixture, prefixed, shares
from titan_disp.data.files import DataFile, list_files
from titan_disp.data.loader import build_dataloader
from titan_disp.data.options import StreamOptions
from titan_disp.data.sources import DataSet, check_overlaps, data_sets, list_and_check
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.job_config import Source


@pytest.fixture
def job(sample, tmp_path):
    for name in ("web", "code"):
        for i in range(3):
            write_texts(tmp_path / name / f"{name}-{i}.jsonl", [f"{name} {i} {words_of(n)}" for n in range(50)])
    made = config(sample, "--training.dataset", "text")
    made.training.dataset_path = str(tmp_path / "web")
    return made


def refusals(job):
    """What the checks before a job, the plan and the loader say, each as the first line of an error."""
    for ask in (
        lambda: check_inputs(job),
        lambda: missing_inputs(job, strict=True),
        lambda: build_dataloader(1, 0, load_tokenizer(job.model.hf_assets_path), job),
    ):
        with pytest.raises(ConfigError) as error:
            ask()
        yield str(error.value)


@pytest.mark.parametrize("link", [None, os.link, os.symlink, "of a folder"])
@pytest.mark.parametrize("section", ["sources", "validation"])
def test_the_same_file_twice_is_refused(job, tmp_path, section, link):
    """By its inode, so that names, links and relative paths make no difference."""
    other = tmp_path / "web" / "web-1.jsonl"
    if link == "of a folder":
        (tmp_path / "more").symlink_to(tmp_path / "web")
        other = tmp_path / "more" / other.name
    elif link:
        (tmp_path / "more").mkdir()
        link(other, other := tmp_path / "more" / other.name)
    expected = ("web-1.jsonl' and", "expected held-out documents", "leave the file out of one of the two")
    if section == "sources":
        job.training.dataset_path = None
        job.stream.sources = [Source(2.0, str(tmp_path / "web")), Source(1.0, os.path.relpath(other), name="more")]
        expected = ("stream.sources.web and stream.sources.more", "web-1.jsonl'", "raise the weight of the other")
    else:
        job.validation.enable, job.validation.dataset = True, "text_validation"
        job.validation.dataset_path = os.path.relpath(other)
    for message in refusals(job):
        assert all(part in message for part in (*expected, "read 1 file in common")), message


def test_what_is_not_the_same_file_is_not_refused(job, tmp_path, caplog):
    """Copies, and links within one source, which may be meant; the log names those."""
    shutil.copy(tmp_path / "web" / "web-1.jsonl", tmp_path / "code" / "web-1.jsonl")
    for i in range(2):
        os.link(tmp_path / "web" / "web-0.jsonl", tmp_path / "web" / f"again-{i}.jsonl")
    job.training.dataset_path = None
    job.stream.sources = [Source(1.0, str(tmp_path / name)) for name in ("web", "code")]
    write_texts(tmp_path / "val" / "web-val.jsonl", ["a"] * 9)
    section = job.validation
    section.enable, section.dataset, section.dataset_path = True, "text_validation", str(tmp_path / "val")
    check_inputs(job)
    assert len(list_and_check(data_sets(job), StreamOptions())) == 9  # those of training
    found = ["stream.sources.web data: 2 files" in said for said in caplog.messages if "several times" in said]
    assert found == [True, True]


def test_copies_in_two_sources_come_at_different_times(tmp_path):
    """The source's name enters the order. Without it, all rows of one source were those of the other, step by step."""
    for name in ("web", "code"):
        for f in range(12):
            write_texts(tmp_path / name / f"{f}.jsonl", [words_of(n) for n in range(f * 40 + 1, f * 40 + 41)])
    files = [file for name in ("web", "code") for file in prefixed(name, list_files("text", str(tmp_path / name)))]
    mixture = Mixture(files, shares({"web": 1, "code": 1}, 16), seed=0)
    rows, _ = batches(streams_of(files, 16, 1, 31, assignment=mixture), 15)
    web, code = np.split(rows, 2, axis=1)
    assert (web == code).all(-1).mean() < 0.05
    seen = [[int(n) for n in np.unique(one) if n] for one in (web, code)]
    assert len(set(seen[0]) & set(seen[1])) > 200  # the same documents in the end


def test_a_data_set_that_is_only_on_the_hub_is_compared_by_its_address():
    data = [DataSet("c4", None, "stream.sources.a", "a"), DataSet("c4", None, "stream.sources.b", "b")]
    file = DataFile("x.json", "hf://datasets/a/b@c/x.json", 1)
    with pytest.raises(ConfigError, match="stream.sources.a and stream.sources.b read 1 file in common"):
        check_overlaps([(one, [file]) for one in data])
    check_overlaps([(data[0], [file]), (data[1], [DataFile("x.json", "hf://datasets/a/b@c/y.json", 1)])])


def test_a_run_warns_of_shares_that_are_not_its_weights(job, tmp_path, caplog):
    """As the plan does: with 64 slots, the weights 0.01 and 0.02 both become one slot."""
    job.training.dataset_path, job.training.global_batch_size, job.training.local_batch_size = None, 64, 1
    job.stream.sources = [Source(0.99, str(tmp_path / "web")), Source(0.01, str(tmp_path / "code"))]
    tokenizer = load_tokenizer(job.model.hf_assets_path)
    build_dataloader(1, 0, tokenizer, job)
    far = "stream.sources: code: 1.56% of the tokens (1.00% asked for), 1 of 64 slots"
    assert [far in record.message for record in caplog.records if record.levelname == "WARNING"] == [True]
    caplog.clear()
    job.stream.sources = [Source(3, str(tmp_path / "web")), Source(1, str(tmp_path / "code"))]
    build_dataloader(1, 0, tokenizer, job)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
