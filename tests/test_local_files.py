"""Which local files belong to a split: folders, globs and links, what is left out, and
what is refused.
"""

import hashlib
import os

import pytest

from tests.streams import config
from titan_disp.data import listing
from titan_disp.data.assignment import Assignment, one_share
from titan_disp.data.listing import list_files
from titan_disp.data.sources import DataSet
from titan_disp.errors import ConfigError
from titan_disp.lab.digest import digest
from titan_disp.lab.sample import TRAIN_FILES


def test_the_hubs_files_in_a_folder(sample, tmp_path):
    hub = [(f.name, f.size) for f in list_files("c4", str(sample))]
    assert [name for name, _ in hub] == [
        f"c4-train.{i:05d}-of-{TRAIN_FILES:05d}.json.gz" for i in range(TRAIN_FILES)
    ]
    for path in (
        sample / "en",
        f"{sample}/en/c4-train*",
        f"{sample}/**/c4-train.*.json.gz",
    ):
        assert [(f.name, f.size) for f in list_files("c4", str(path))] == hub
    with pytest.raises(
        ConfigError,
        match=r"validation\.dataset_path .* no validation data, because .* such as en/c4-",
    ):
        DataSet("c4_validation", str(tmp_path), "validation").check()


# Files, and which of them are in each data set.
LAYOUTS = [
    # Names that say no split are training data, and only whole words decide. "test"
    # decides only beside another split.
    ("a.jsonl b.parquet .hidden.jsonl c.txt", "c4 a.jsonl b.parquet"),
    (
        "constraints.jsonl latest.jsonl library_test.jsonl",
        "text constraints.jsonl latest.jsonl library_test.jsonl",
    ),
    ("train.jsonl latest.jsonl x_test.jsonl", "text latest.jsonl train.jsonl"),
    (
        "a.jsonl test.jsonl valid.jsonl",
        "text a.jsonl",
        "text_validation valid.jsonl",
    ),
    ("a.jsonl validation-0.jsonl", "text_validation validation-0.jsonl"),
    # In a clone of the data set, only en is read, as from the hub.
    (
        "en/c4-train.0.json en.noclean/c4-train.1.json realnewslike/c4-train.2.json",
        "c4 c4-train.0.json",
    ),
    # Of the text, nanoGPT's ids are made.
    ("train.bin val.bin input.txt", "text train.bin", "text_validation val.bin"),
    (
        "fineweb_train_000001.bin fineweb_val_000001.bin",
        "text fineweb_train_000001.bin",
    ),
    (
        "part-0-train.npy part-0-valid.npy",
        "text part-0-train.npy",
        "text_validation part-0-valid.npy",
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(tmp_path, layout):
    files, *listed = layout
    write(tmp_path, *files.split())
    for dataset, *names in map(str.split, listed):
        assert names_in(dataset, tmp_path) == names


def test_a_path_that_exists_is_no_glob(tmp_path):
    write(tmp_path, "runs [1]/a.jsonl", "runs 1/b.jsonl", "x[1].jsonl", "x1.jsonl")
    for path, name in (
        ("runs [1]", "a.jsonl"),
        ("x[1].jsonl", "x[1].jsonl"),
        ("x[0-9].jsonl", "x1.jsonl"),
    ):
        assert names_in("text", tmp_path / path) == [name]


def write(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"text": "a"}\n')


def names_in(dataset, path):
    return [file.name for file in list_files(dataset, str(path))]


@pytest.fixture
def told(caplog):
    listing.warn_once.cache_clear()
    listing._say.cache_clear()
    with caplog.at_level("INFO"):
        yield lambda level: [
            r.getMessage() for r in caplog.records if r.levelname == level
        ]


def test_links_are_followed(tmp_path, told):
    write(tmp_path / "elsewhere", "b.jsonl", "deep/c.jsonl")
    write(tmp_path / "data", "a.jsonl")
    links = {
        "linked": "elsewhere",
        "too": "elsewhere/deep",
        "linked/round": "data",
        "d.jsonl": "elsewhere/b.jsonl",
    }
    for name, target in links.items():
        (tmp_path / "data" / name).symlink_to(tmp_path / target)
    assert names_in("text", tmp_path / "data") == [
        "a.jsonl",
        "d.jsonl",
        "linked/b.jsonl",
        "too/c.jsonl",
    ]
    for warning, name in zip(sorted(told("WARNING")), ("deep", "round"), strict=True):
        assert f"{name} is left out, because it" in warning


@pytest.mark.parametrize("name", ["b.jsonl", "folder"])
def test_dangling_links_are_refused(tmp_path, name):
    write(tmp_path, "a.jsonl")
    (tmp_path / name).symlink_to("/nowhere/b")
    for path in (
        tmp_path,
        *((f"{tmp_path}/*.jsonl", tmp_path / name) if name == "b.jsonl" else ()),
    ):
        with pytest.raises(
            ConfigError,
            match=rf"{name}' is a link to '/nowhere/b', which does not exist",
        ):
            list_files("text", str(path))


# A folder that may be listed and not entered seems to have no files, and Python's own
# glob ignores a closed one.
@pytest.mark.parametrize(
    ("below", "function", "ends"),
    [
        ("", "scandir", ("closed",)),
        ("", "stat", ("b.jsonl",)),
        ("/**/*.jsonl", "scandir", ("closed", "closed/")),
        ("/*/*.jsonl", "scandir", ("closed", "closed/")),
        ("/clo*/b.jsonl", "scandir", ("data",)),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, monkeypatch, below, function, ends):
    """Root can read everything, so that it is simulated."""
    write(tmp_path / "data", "a.jsonl", "open/a.jsonl", "closed/b.jsonl")
    path = f"{tmp_path}/data{below}"
    allowed = getattr(os, function)
    assert f"{tmp_path}/data/closed/b.jsonl" in [
        file.url for file in list_files("text", path)
    ]

    def refused(path, **options):
        if str(path).endswith(ends):
            raise PermissionError(13, "Permission denied", str(path))
        return allowed(path, **options)

    monkeypatch.setattr(os, function, refused)
    with pytest.raises(
        ConfigError,
        match=rf"but '.*{ends[0]}/?' cannot be read: Permission denied. Give read",
    ):
        list_files("text", path)


def test_what_a_glob_leaves_out_is_said(tmp_path, told):
    write(tmp_path, "part-0.jsonl", "part-1/a.jsonl", "part-1/b.jsonl")
    assert names_in("text", f"{tmp_path}/part-*") == ["part-0.jsonl"]
    assert (
        f"the glob leaves out 1 folder, such as {tmp_path}/part-1. "
        in told("WARNING")[0]
    )
    with pytest.raises(
        ConfigError, match="which matches no file, but 1 folder; expected files named"
    ):
        list_files("text", f"{tmp_path}/part-1*")
    (tmp_path / "part-1" / "round").symlink_to(tmp_path)
    (tmp_path / "c.jsonl").symlink_to(tmp_path / "part-0.jsonl")
    assert names_in("text", f"{tmp_path}/**") == [
        "c.jsonl",
        "part-0.jsonl",
        "part-1/a.jsonl",
        "part-1/b.jsonl",
    ]
    assert (
        "left out, because links lead to the same folders again: "
        in told("WARNING")[-1]
    )
    assert len(told("WARNING")) == 2


def test_what_is_left_out_is_said(tmp_path, told):
    write(
        tmp_path,
        "a.jsonl",
        "b.jsonl.bz2",
        "c.jsonl.bz2",
        "d.xml",
        "notes.md",
        "README.md",
        "e.json",
        ".hidden.jsonl",
    )
    write(tmp_path, "tokenizer/a.model")  # as in the sample of make demo
    for _ in range(2):  # logged once, although listed twice
        assert names_in("text", tmp_path) == ["a.jsonl", "e.json"]
    left_out, mixed = told("WARNING")
    assert "left out, because files with such suffixes are not read" in left_out
    assert ": 2 *.bz2, 1 *.md, 1 *.xml, such as " in left_out
    assert "glob" not in left_out  # it does not read them, either
    assert mixed.endswith(
        "files of several formats are read together: 1 *.json, 1 *.jsonl"
    )
    assert [
        f"1 *.md, 1 *.model, such as {tmp_path / 'README.md'}" in m
        for m in told("INFO")
    ] == [True]


def test_a_name_with_train_in_it_hides_no_others(tmp_path, told):
    write(
        tmp_path / "text",
        "train_schedules.jsonl",
        "books1.jsonl",
        "books2.jsonl",
        "validation.jsonl",
    )
    assert names_in("text", tmp_path / "text") == [
        "books1.jsonl",
        "books2.jsonl",
        "train_schedules.jsonl",
    ]
    assert (
        "left out, because their names do not say train: 1 *.jsonl, such as "
        in told("WARNING")[0]
    )
    assert names_in("text", f"{tmp_path}/text/*.jsonl") == sorted(
        p.name for p in (tmp_path / "text").iterdir()
    )
    write(tmp_path / "c4", "c4-train.0.json", "c4-validation.0.json", "c4.json")
    assert names_in("c4", tmp_path / "c4") == ["c4-train.0.json"]
    assert (
        "because their names do not say train, or they are not in en: 2 *.json, such as "
        in told("INFO")[-1]
    )


def test_plain_text_is_read_where_nothing_else_is(tmp_path, told):
    write(tmp_path, "a.txt", "b.txt.gz")
    assert names_in("text", tmp_path) == ["a.txt", "b.txt.gz"]
    write(tmp_path, "c.jsonl")
    assert names_in("text", tmp_path) == ["c.jsonl"]
    assert (
        "left out, because there are documents in other formats (a glob reads both): "
        "1 *.txt, 1 *.txt.gz" in told("INFO")[0]
    )
    assert names_in("text", f"{tmp_path}/*.txt*") == ["a.txt", "b.txt.gz"]


def test_plain_texts_are_held_out_where_no_name_says_which(tmp_path, caplog):
    caplog.set_level("INFO")
    for i in range(100):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
    train, held = (names_in(name, tmp_path) for name in ("text", "text_validation"))
    assert len(held) == 5
    # Wherever the folder is
    assert names_in("text_validation", f"{tmp_path}/../{tmp_path.name}") == held
    assert sorted(train + held) == sorted(f"{i}.txt" for i in range(100))
    assert "5 of 100 *.txt are held out" in caplog.text
    assert len(names_in("text", f"{tmp_path}/*.txt")) == 100
    (tmp_path / "99.txt").rename(tmp_path / "validation.txt")
    assert names_in("text_validation", tmp_path) == ["validation.txt"]
    (tmp_path / "validation.txt").unlink()
    with pytest.raises(
        ConfigError,
        match=r"contains the word 'validation': it holds no val.* data, but 99 \*.txt",
    ):
        list_files("text_validation", str(tmp_path), "training")


def test_names_that_are_not_utf_8(sample, tmp_path):
    """The order depends on the bytes of the names."""
    names = [b"caf\xe9.jsonl", "naïve.jsonl".encode()]
    for name in map(os.fsdecode, names):
        (tmp_path / name).write_text('{"text": "a word"}\n' * 60)
    files = list_files("text", str(tmp_path))
    assert [file.name.encode(errors="surrogateescape") for file in files] == names
    hashes = [hashlib.sha256(b"0/0/" + name).digest() for name in names]
    assert Assignment(files, one_share(2), seed=0)._sources[0]._line(0).order == sorted(
        range(2), key=hashes.__getitem__
    )
    job = config(
        sample, "--training.dataset", "text", "--training.dataset_path", str(tmp_path)
    )
    assert len(digest(job, 2, [(0, 1), (1, 2)]).hashes) == 2


def test_names_that_differ_only_in_the_case_of_their_suffix(tmp_path):
    for name in ("a.txt", "a.TXT"):
        (tmp_path / name).write_text("text")
    with pytest.raises(ConfigError, match=r"a.TXT' and '.*a.txt' .*rename one"):
        list_files("text", str(tmp_path))
