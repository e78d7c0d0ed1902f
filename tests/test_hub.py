"""The hub, by a local stand-in: which files a data set has there and in a mirror, and
reading the same from both.
"""

from dataclasses import replace
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.command_line import typed
from tests.fake_hub import COMMIT, OLDER, serving
from tests.streams import VALIDATION_FILE, config, write_texts
from titan_disp.cluster.node_health import input_problems
from titan_disp.config.command_options import FetchOptions
from titan_disp.data import findings
from titan_disp.data.documents import Documents
from titan_disp.data.formats import text_of
from titan_disp.data.listing import held_out, list_files, split_of
from titan_disp.data.options import StreamOptions
from titan_disp.data.sources import DataSet, list_and_check, list_for_run
from titan_disp.data.stores import RECORDS, HubName, check_hub, parse_name
from titan_disp.errors import ConfigError
from titan_disp.lab.digest import digest
from titan_disp.lab.fetch import fetch
from titan_disp.lab.inspection.texts import read_texts

# As FineWeb-Edu's: the default configuration is everything, samples lie elsewhere; and
# a configuration with three splits.
CARD = """---
configs:
- {config_name: default, data_files: [{split: train, path: data/*/*}]}
- {config_name: sample-2, data_files: [{split: train, path: sample/2/*}]}
- config_name: split
  data_files:
  - {split: train, path: split/a*}
  - {split: validation, path: [split/b.jsonl, split/c.jsonl]}
  - {split: tiny, path: split/a1.jsonl.gz}
- {config_name: table, data_files: table/*.xml}
- {config_name: mixed, data_files: [mixed/*]}
---
Prose.
"""
PARQUET = (
    "data/x/1.parquet",
    "data/y/1.parquet",
    "sample/2/1.parquet",
    "sample/2/2.parquet",
)
LINES = (
    "split/a1.jsonl",
    "split/a2.jsonl",
    "split/b.jsonl",
    "split/c.jsonl",
    "mixed/1.jsonl",
)
OTHER = ("table/1.xml", "mixed/2.xml")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "some"
    for index, name in enumerate((*PARQUET, *LINES, *OTHER)):
        write_texts(
            folder / name, [f"{index} {word} " * 30 for word in ("a", "b", "c", "d")]
        )
    # by its name only; nobody reads it here
    (folder / "split" / "a1.jsonl").rename(folder / "split" / "a1.jsonl.gz")
    (folder / "README.md").write_text(CARD)
    with serving(
        tmp_path / "some", "some/prose", monkeypatch, tmp_path / "cache"
    ) as hub:
        yield hub


@pytest.fixture
def c4(sample, tmp_path, monkeypatch):
    with serving(sample, "allenai/c4", monkeypatch, tmp_path / "cache") as hub:
        yield hub


def add(hub, tmp_path, name, *files, card=None):
    for file in files:
        write_texts(tmp_path / name / file, ["1 2 3"])
    if card:
        (tmp_path / name / "README.md").write_text(f"---\nconfigs:\n{card}---\n")
    hub.datasets[f"some/{name}"] = tmp_path / name


FILES = {
    "hf:some/prose": ["data/x/1.parquet", "data/y/1.parquet"],
    "hf:some/prose@main:default:train": ["data/x/1.parquet", "data/y/1.parquet"],
    "hf:some/prose::train": ["data/x/1.parquet", "data/y/1.parquet"],
    "hf:some/prose:sample-2": ["sample/2/1.parquet", "sample/2/2.parquet"],
    "hf:some/prose:split": ["split/a1.jsonl.gz", "split/a2.jsonl"],
    "hf:some/prose:split:validation": ["split/b.jsonl", "split/c.jsonl"],
    "hf:some/prose:split:tiny": ["split/a1.jsonl.gz"],
}


def test_files_of_a_configuration_and_a_split(hub, tmp_path):
    for dataset, paths in FILES.items():
        names = [
            path.removeprefix("data/") if path.startswith("data/") else Path(path).name
            for path in paths
        ]
        found = [(file.url, file.size, file.name) for file in list_files(dataset, None)]
        assert found == [
            (
                f"hf://datasets/some/prose@{COMMIT}/{path}",
                (tmp_path / "some" / path).stat().st_size,
                name,
            )
            for path, name in zip(paths, names, strict=True)
        ]
        # The same in a copy of the whole repository.
        if "@" not in dataset:
            assert names_of(list_files(dataset, str(tmp_path / "some"))) == names_of(
                list_files(dataset, None)
            )
    with pytest.raises(
        ConfigError,
        match=r"path is '.*some': it has no configuration 'other', only default, sam",
    ):
        list_files("hf:some/prose:other", str(tmp_path / "some"))
    assert not any(
        path.endswith((".parquet", ".jsonl", ".gz")) for path, _ in hub.ranges
    )


@pytest.mark.skipif(
    datasets.__version__ < "4.8", reason="it takes no hf:// URL, and refuses"
)
def test_a_local_folder_of_the_same_name_is_not_read(hub, tmp_path, monkeypatch):
    write_texts(tmp_path / "here/some/prose/train.jsonl", ["no"])
    monkeypatch.chdir(tmp_path / "here")
    urls = [file.url for file in list_files("hf:some/prose", None)]
    assert urls == [
        f"hf://datasets/some/prose@{COMMIT}/{path}" for path in FILES["hf:some/prose"]
    ]


def test_what_only_a_start_finds(hub, tmp_path, monkeypatch):
    """It lists validation data on the hub, too, and looks for Parquet files without
    rows, as it does locally.
    """
    training, held = (
        DataSet("hf:some/prose:split:validation", None, key)
        for key in ("training", "validation")
    )
    with pytest.raises(
        ConfigError, match="training and validation read 2 files in common"
    ):
        list_and_check([training, held], StreamOptions())
    write_texts(
        tmp_path / "some" / "data" / "y" / "1.parquet",
        pyarrow.array([], pyarrow.string()),
    )
    files = list_and_check(
        [DataSet("hf:some/prose", None, "training")], StreamOptions()
    )
    assert [file.density > 0 for file in files] == [True, False]


def test_files_on_the_hub_are_looked_at(hub, tmp_path, monkeypatch, caplog):
    """As on the disk, but by few requests: a Parquet file's footer, and the beginning
    of another file. The next start repeats none of them.
    """
    monkeypatch.setattr(findings, "_looks", {})
    monkeypatch.setattr(findings, "SMALL", 1 << 12)
    table = tmp_path / "some/data/y/1.parquet"
    rows = [f"{i} " * 100 for i in range(9000)]
    write_texts(tmp_path / "some/data/x/1.parquet", rows)
    pyarrow.parquet.write_table(pyarrow.table({"body": rows}), table)
    (tmp_path / "some/split/b.jsonl").write_text('{"body": "a"}\n' * 9000)
    (tmp_path / "some/split/c.jsonl").write_text('{"text": "a text"}\n' * 9000)
    run = tmp_path / "run"
    run.mkdir()
    options = StreamOptions(run_folder=str(run))
    for dataset, path, problem in (
        ("hf:some/prose", table, 'no column "text"'),
        ("hf:some/prose:split:validation", "split/b.jsonl", "text"),
    ):
        data = [DataSet(dataset, None, "training")]
        with pytest.raises(ConfigError, match=f"{Path(path).name}: .*{problem}"):
            list_and_check(data, options)
    lenient = replace(options, max_skipped_fraction=1.0)
    data = [DataSet("hf:some/prose", None, "training")]
    hub.ranges.clear()
    list_for_run(data, lenient)
    assert findings.of_run(str(run)).ledger[1].fate == "skipped"
    monkeypatch.setattr(findings, "_looks", {})
    hub.ranges.clear()
    list_for_run(data, lenient)
    assert hub.ranges == []


def test_many_files_on_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "_looks", {})
    monkeypatch.setattr(findings, "MOST_ON_HUB", 4)
    folder = tmp_path / "many"
    add(hub, tmp_path, "many", *(f"{i:02d}.jsonl" for i in range(10)))
    files = list_files("hf:some/many", None)
    hub.ranges.clear()
    findings.check_content(files, StreamOptions(), "training")
    looked_at = sorted(path for path, _ in hub.ranges)
    assert looked_at == ["00.jsonl", "03.jsonl", "06.jsonl", "09.jsonl"]
    (folder / "x.txt").write_bytes("Une phrase a été. ".encode("cp1252") * 99)
    (file,) = list_files("text", "hf://datasets/some/many/x.txt")
    with pytest.raises(ConfigError, match=r"x\.txt: it is cp1252, .* data fetch"):
        findings.check_content([file], StreamOptions(), "training")


@pytest.mark.parametrize("dataset", ["hf:some/prose", "hf:some/prose:split:validation"])
def test_a_hub_that_fails_while_files_are_looked_at(
    hub, tmp_path, dataset, monkeypatch, caplog
):
    monkeypatch.setattr(findings, "_looks", {})  # other tests have the same files
    monkeypatch.setattr(findings, "SMALL", 0)
    monkeypatch.setattr(findings, "HUB_RETRY_SECONDS", 0.1)
    files = list_files(dataset, None)
    hub.faults["resolve"] = [(503, {})] * 999
    assert findings.check_content(files, StreamOptions(), "training") == files
    assert "2 files of 2 could not be looked at, such as hf://data" in caplog.text
    refused = hub.requests["refused"]
    assert [entry.fate for entry in findings.entries_of(files, StreamOptions())] == [
        "used",
        "used",
    ]
    assert hub.requests["refused"] == refused  # not asked again
    monkeypatch.setattr(findings, "_looks", {})
    monkeypatch.setattr(findings, "HUB_SECONDS", -1.0)
    hub.requests.clear()
    assert findings.check_content(files, StreamOptions(), "training") == files
    assert not hub.requests


def test_files_of_a_url(hub):
    for place, names in {
        "/sample": ["sample/2/1.parquet", "sample/2/2.parquet"],
        f"@{COMMIT}/split/[a-c].jsonl": ["split/b.jsonl", "split/c.jsonl"],
        "@main/split/c.jsonl": ["split/c.jsonl"],
    }.items():
        files = list_files("text", f"hf://datasets/some/prose{place}")
        assert [file.url for file in files] == [
            f"hf://datasets/some/prose@{COMMIT}/{name}" for name in names
        ]
        assert all(
            text_of(Documents(file, StreamOptions()).read()).endswith(" a ")
            for file in files
        )
    refused = {
        "prose/none": "holds no train data",
        "none": "no such data set",
        "prose@v9/": "no revision 'v9'",
    }
    for place, words in refused.items():
        with pytest.raises(
            ConfigError, match=f"dataset_path is 'hf://datasets/some/{place}'.*{words}"
        ):
            list_files("text", f"hf://datasets/some/{place}")


def test_a_revision(hub, tmp_path):
    add(
        hub,
        tmp_path,
        "older",
        "then.jsonl",
        card="- config_name: one\n  data_files: then.jsonl\n",
    )
    hub.tagged["some/prose"] = hub.datasets.pop("some/older")
    (file,) = list_files("hf:some/prose@v1.0", None)
    assert file.url == f"hf://datasets/some/prose@{OLDER}/then.jsonl"
    assert text_of(Documents(file, StreamOptions()).read()) == "1 2 3"


def test_names():
    for name, section, split, validation in (
        ("hf:some/prose", "training", "train", "hf:some/prose::validation"),
        (
            "hf:some/prose:split",
            "validation",
            "validation",
            "hf:some/prose:split:validation",
        ),
        (
            "hf:a/b@v1.0:split:tiny",
            "validation",
            "tiny",
            "hf:a/b@v1.0:split:validation",
        ),
    ):
        assert (split_of(name, section), held_out(name)) == (split, validation)
    names = {
        "c4": "c4_validation",
        "text": "text_validation",
        "c4_validation": "c4_validation",
    }
    assert {name: held_out(name) for name in names} == names
    assert parse_name("hf:a/b@refs/pr/1:c.d-e:f", "x") == HubName(
        "a/b", "refs/pr/1", "c.d-e", "f"
    )
    for name in ("hf:a/b", "hf:a/b@c", "hf:a/b:c", "hf:a/b:c:d", "hf:a/b@r::d"):
        assert str(parse_name(name, "x")) == name
    wrong = [
        "hf:",
        "hf:b",
        "hf:a/b/c",
        "hf:a/b:",
        "hf:a/b:c:",
        "hf:a/b:c:d:e",
        "hf:a/b@",
        "hf:a/b@:c",
        "hf:/b",
    ]
    for name in (*wrong, "hf:a b/c"):
        with pytest.raises(
            ConfigError, match=r"training.dataset is '.*', expected hf:OWNER/NAME, "
        ):
            DataSet(name, None, "training").check()


def test_without_a_card_names_decide(hub, tmp_path):
    add(
        hub,
        tmp_path,
        "bare",
        "data/train-00000-of-00002.jsonl",
        "data/train-00001-of-00002.jsonl",
        "data/test.jsonl",
    )
    add(hub, tmp_path, "folders", "en/train/1.json", "en/validation/2.json")
    assert len(list_files("hf:some/bare", None)) == 2
    assert [
        file.url[-20:] for file in list_files("hf:some/folders", None, "validation")
    ] == ["en/validation/2.json"]


BAD = {
    "hf:some/thing": r"no such data set on the hub, or it is private \(its page: huggingface.co/datasets/some/thing",
    "hf:some/gated": r"is gated. Accept its terms or ask for access at huggingface.co/datasets/some/gated",
    "hf:some/prose:smaple": r"no configuration 'smaple', only default, sample-2, .* such as 'hf:some/prose:default'",
    "hf:some/two": r"it has no default configuration, only one, two; name one, such as 'hf:some/two:one'",
    "hf:some/prose:split:test": r"no split 'test', only train, validation, tiny; name one, such as '.*:split:train'",
    "hf:some/prose:table": r"cannot be read \(1 of 1, such as table/1.xml\); expected .*\.parquet",
    "hf:some/prose:mixed": r"cannot be read \(1 of 2, such as mixed/2.xml\); expected names",
    "hf:some/binary": r"datasets finds no data there .*; expected files such as \*.json,",
    "hf:some/script": r"made by a script on the hub, which datasets no longer runs",
    "hf:some/lost": r"datasets finds no data there .*; expected files such as \*.json,",
}


def test_what_cannot_be_had_is_one_message(hub, tmp_path):
    add(hub, tmp_path, "gated", "train.jsonl")
    hub.gated.add("some/gated")
    two = "".join(
        f"- config_name: {name}\n  data_files: {name}.jsonl\n"
        for name in ("one", "two")
    )
    add(hub, tmp_path, "two", "one.jsonl", "two.jsonl", card=two)
    add(hub, tmp_path, "binary", "train.bin", "notes.docx")
    add(hub, tmp_path, "script", "script.py", "train.jsonl")
    add(
        hub,
        tmp_path,
        "lost",
        "a.jsonl",
        card="- config_name: x\n  data_files: gone.jsonl\n",
    )
    for dataset, message in BAD.items():
        with pytest.raises(
            ConfigError, match=f"^training.dataset is '{dataset}.*{message}"
        ):
            list_files(dataset, None)


def test_a_hub_that_does_not_answer(hub):
    hub.close()
    for ask in (list_files, lambda dataset, _: check_hub(dataset)):
        with pytest.raises(
            ConfigError,
            match=r"cannot list .* fetch DIR --dataset 'hf:some/prose:split'",
        ):
            ask("hf:some/prose:split", None)
    with pytest.raises(
        ConfigError, match=r"cannot list hf:allenai/c4 on the .* fetch DIR makes one"
    ):
        check_hub("c4")


@pytest.mark.parametrize("dataset", ["hf:some/prose", "hf:some/prose:split", "c4"])
def test_a_hub_that_is_busy_is_asked_again(hub, sample, dataset):
    """At every request while files are listed: otherwise one answer of many would end a
    job of many nodes.
    """
    hub.datasets["allenai/c4"] = sample
    quiet = names_of(list_files(dataset, None))
    for place in range(3):
        for busy in (429, 504, 503, 500):
            hub.faults["list"] = [(busy, {})] * (place + 1)
            assert names_of(list_files(dataset, None)) == quiet
    assert hub.requests["refused"] == 6 * 4
    hub.faults["list"] = [(503, {"Retry-After": "61"})]
    with pytest.raises(ConfigError, match=r"cannot list .*503"):
        list_files(dataset, None)
    for refusal in ((401, {}), (404, {"X-Error-Code": "RepoNotFound"})):
        hub.requests.clear()
        hub.faults["list"] = [refusal] * 9
        with pytest.raises(ConfigError):
            list_files(dataset, None)
        assert hub.requests["refused"] == 1


def test_every_node_asks_the_hub_once(hub, sample):
    job = config(sample)
    job.training.dataset = "hf:some/prose:split"
    job.training.dataset_path = None
    assert input_problems(job) == []
    assert hub.requests == {"info": 1}
    hub.gated.add("some/prose")
    (problem,) = input_problems(job)
    assert "the data set is gated" in problem


def names_of(files):
    return [(file.name, file.size) for file in files]


def test_mirror(hub, tmp_path, monkeypatch, capsys):
    mirror = tmp_path / "mirror"
    split = "hf:some/prose:split"
    assert typed(monkeypatch, "data", "fetch", mirror, "--dataset", split) == 0
    said = capsys.readouterr().out
    assert (
        f"{mirror} is complete: training.dataset = '{split}', training.dataset_path = "
        in said
    )
    found = sorted(p.relative_to(mirror).as_posix() for p in mirror.glob("[!.]*/*"))
    assert found == sorted([*FILES[split], *FILES[f"{split}:validation"]])
    assert fetch(FetchOptions(mirror, "hf:some/prose:sample-2")) == []
    sections = (
        (split, "training"),
        (split, "validation"),
        (f"{split}:validation", "training"),
    )
    for dataset, key in (*sections, ("hf:some/prose:sample-2", "training")):
        hub.requests.clear()
        local = list_files(dataset, str(mirror), key)
        assert all(Path(file.url).is_relative_to(mirror) for file in local)
        assert not hub.requests, "a mirror asks the hub for nothing"
        assert names_of(local) == names_of(list_files(dataset, None, key))
    held = "hf:some/prose:sample-2:train, hf:some/prose:split:train, hf:some/prose:split:validation"
    (mirror / "split" / "b.jsonl").unlink()
    for dataset, path, key, message in (
        (
            "hf:some/prose",
            mirror,
            "training",
            f"holds {held}, but not hf:some/prose::train: titan-disp data fetch",
        ),
        (
            split,
            mirror,
            "validation",
            r"missing or have another size .*\(1 of 2, such as .*b.jsonl\): titan",
        ),
        (
            "hf:some/prose",
            tmp_path / "a.jsonl",
            "training",
            "is not a folder. Expected a mirror, as titan-disp data",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            list_files(dataset, str(path), key)


def test_a_mirror_of_some_files(hub, tmp_path, monkeypatch, capsys):
    mirror = tmp_path / "mirror"
    hub.damaged = {"split/a2.jsonl"}  # every time
    assert (
        typed(
            monkeypatch,
            "data",
            "fetch",
            mirror,
            "--dataset",
            "hf:some/prose:split",
            "--split",
            "train",
        )
        == 2
    )
    said = capsys.readouterr().err
    assert (
        "1 file could not be" in said,
        "split/a2.jsonl: its sha256 differs from the hub's" in said,
    ) == (True, True)
    assert not (mirror / RECORDS).exists()
    hub.damaged = set()
    for number in (1, 0):
        assert (
            fetch(FetchOptions(mirror, "hf:some/prose:split", str(number), "train"))
            == []
        )
        assert len(list_files("hf:some/prose:split", str(mirror))) == 2 - number
    for name, shards, message in (
        (
            "split",
            "2",
            "--shards names no file; expected numbers 0 to 1 .0 is ",
        ),
        ("split", "0..3", "ascending ranges"),
        ("split", "0-3,63-60", "ascending ranges"),
        ("split:tiny", "0", "but --split is 'train': name the split in one of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            fetch(FetchOptions(mirror, f"hf:some/prose:{name}", shards, "train"))
    assert fetch(FetchOptions(mirror, "hf:some/prose:split:tiny")) == []
    assert len(list_files("hf:some/prose:split:tiny", str(mirror))) == 1


def test_stream_from_the_hub_is_the_local_copys(c4, sample):
    job = config(sample)
    ahead = config(sample, "--stream.prefetch", "4")
    c4.faults["resolve"] = [*[(200, {})] * 4, (503, {})] * 99
    job.training.dataset_path = ahead.training.dataset_path = None
    streamed = digest(job, 12, [(0, 1)])
    assert c4.requests["content"] > 8
    # The files were listed once. No rank and no thread has requested anything but
    # content.
    assert (c4.requests["info"], c4.requests["tree"]) == (1, 1)
    assert digest(ahead, 12, [(0, 2)]).hashes == streamed.hashes
    job.training.dataset_path = str(sample)
    assert digest(job, 12, [(0, 1)]).hashes == streamed.hashes


def test_fetch(c4, sample, tmp_path):
    mirror = tmp_path / "mirror"
    assert fetch(FetchOptions(mirror, shards="1-2,5")) == []
    files = {path.name: path for path in sorted((mirror / "en").iterdir())}
    assert [*files] == [f"c4-train.{i:05d}-of-00008.json.gz" for i in (1, 2, 5)] + [
        Path(VALIDATION_FILE).name
    ]
    # Again, with a truncated file and one of the right size with wrong content: only
    # these two are fetched.
    cut, wrong, *_ = files.values()
    cut.write_bytes(cut.read_bytes()[:1000])
    wrong.write_bytes(b"x" * wrong.stat().st_size)
    c4.requests.clear()
    assert fetch(FetchOptions(mirror, shards="1-2,5")) == []
    assert all(
        path.read_bytes() == (sample / "en" / name).read_bytes()
        for name, path in files.items()
    )
    assert c4.requests["content"] <= 6


def test_fetch_says_why_a_file_is_missing(c4, tmp_path):
    c4.faults["resolve"] = [(403, {})] * 99
    (line,) = fetch(FetchOptions(tmp_path, shards="1", split="train"))
    name = "en/c4-train.00001-of-00008.json.gz"
    assert line.startswith(f"{name}: missing (LocalEntryNotFoundError: ")


def test_text_to_measure_on(hub):
    texts = read_texts(None, "hf:some/prose:split", seed=0)
    assert len(texts) == 8
    assert {text.split()[0] for text in texts} == {"6", "7"}
    with pytest.raises(
        ConfigError,
        match=r"--dataset is 'hf:some/prose': it has no split 'validation', only train",
    ):
        read_texts(None, "hf:some/prose", seed=0)
