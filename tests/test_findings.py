"""What is said of a run's data before it is read: how much of it ranks read, how often,
and files that come twice.
"""

import gzip
import json
from fractions import Fraction

import numpy as np
import pytest

from tests.command_line import DEMO, typed
from tests.streams import config, write_texts
from titan_disp.data.assignment import Share, one_share
from titan_disp.data.blocks import Blocks
from titan_disp.data.findings import check_content
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.options import StreamOptions
from titan_disp.data.sources import DataSet, list_and_check, reading, readings
from titan_disp.errors import ConfigError

GB = 10**9


def of_size(count, size, suffix="jsonl.gz", **others):
    names = [f"{i}.{suffix}" for i in range(count)]
    return [DataFile(name, name, size, **others) for name in names]


@pytest.mark.parametrize(
    ("count", "size", "amplification"), [(1, 300 * GB, 640), (10, 30 * GB, 64)]
)
def test_a_few_large_files_on_many_ranks(count, size, amplification):
    cost = reading(of_size(count, size), *one_share(640), ranks=640, tokens=0, seed=0)
    assert cost.amplification == pytest.approx(amplification, rel=0.01)
    assert cost.largest == size
    (warning,) = cost.warnings()
    assert f"read the stored bytes {amplification} times in an epoch" in warning
    assert f"up to {size // GB} GB" in warning
    assert "split the data into at least as many files as ranks" in warning


def test_what_is_read_a_few_times_is_not_worth_a_word():
    c4 = reading(of_size(1024, 300_000_000), *one_share(640), 640, tokens=0, seed=0)
    assert 1 < c4.amplification < 2
    small = reading(of_size(1, 1_000_000), *one_share(640), 640, tokens=0, seed=0)
    assert small.amplification == 640
    places = np.linspace(0, 300 * GB, 2**14 + 1).astype(np.int64)
    blocks = Blocks(np.arange(2**14 + 1), places)
    indexed = of_size(1, 300 * GB, "jsonl", blocks=blocks)
    dealt = reading(indexed, *one_share(640), 640, tokens=0, seed=0)
    assert dealt.amplification == pytest.approx(1, abs=0.01)
    assert not [w for one in (c4, small, dealt) for w in one.warnings()]


def test_a_source_that_is_read_often():
    share = Share("code", first=12, slots=4, total=16, asked=float(Fraction(1, 4)))
    # a quarter of 1 M tokens of about 4 bytes, from 50 kB
    cost = reading(of_size(1, 50_000, "txt"), share, 2, tokens=1_000_000, seed=0)
    assert cost.epochs == pytest.approx(20)
    (warning,) = cost.warnings()
    assert warning.startswith(
        "data: source code: the run reads the text about 20 times"
    )


def test_readings_of_a_config(sample, tmp_path):
    for name in ("web", "code"):
        write_texts(tmp_path / name / "a.jsonl", ["word " * 100] * 10)
    job = config(
        sample,
        *("--training.steps", "10"),
        *("--training.global_batch_size", "16"),
    )
    files = {"": of_size(2, 5120, "txt")}
    (one,) = readings(files, job, 4)
    assert one.ranks == 4
    assert one.epochs == pytest.approx(10 * 16 * 32 * 4 / (2 * 5120))


def test_copies_are_said(tmp_path, caplog):
    write_texts(tmp_path / "web/a.jsonl", ["one text", "another"])
    write_texts(tmp_path / "web/b.jsonl", ["one text", "anothex"])
    content = (tmp_path / "web/a.jsonl").read_bytes()
    (tmp_path / "held").mkdir()
    (tmp_path / "held/validation.jsonl").write_bytes(content)
    (tmp_path / "held/validation.json.gz").write_bytes(gzip.compress(content))
    data = [
        DataSet("text", str(tmp_path / "web"), "training"),
        DataSet("text_validation", str(tmp_path / "held"), "validation"),
    ]
    list_and_check(data, StreamOptions())
    (warning,) = [r.getMessage() for r in caplog.records if "1 copy" in r.getMessage()]
    assert f"{tmp_path}/held/validation.jsonl' (validation)" in warning
    assert f"whose original is '{tmp_path}/web/a.jsonl' (training)" in warning


def test_the_command(sample, tmp_path, monkeypatch, capsys):
    for name, content in (
        ("web/a.txt", "été. Une phrase.\n".encode("cp1252") * 400),
        ("web/b.txt", b"a text, and more of it. " * 400),
        ("web/c.txt", b"%PDF-1.7 "),
        ("web/d.docx", b"PK"),
        ("code/e.jsonl", b'{"text": "a = 1"}\n' * 400),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    (tmp_path / "run.toml").write_text(
        DEMO.read_text().replace("dataset_path = ", "# ")
        + "".join(
            f"\n[[stream.sources]]\nweight = 0.5\npath = '{tmp_path}/{name}'\n"
            for name in ("web", "code")
        )
    )
    words = [
        "data",
        "check",
        tmp_path / "run.toml",
        *("--model.hf_assets_path", f"{sample}/tokenizer"),
        *("--job.dump_folder", tmp_path / "run"),
        *("--ranks", "2"),
    ]
    assert typed(monkeypatch, *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("files      3 *.txt, 1 *.jsonl: ")
    for line in (
        "separator  ",
        "used       16.8 kB of 2 files",
        "converted  6.8 kB of 1 file, such as web/a.txt: from cp1252",
        "skipped    9 bytes of 1 file, such as web/c.txt: it is PDF",
        "left out   2 bytes of 1 file, such as d.docx: files with such suffixes",
    ):
        assert any(found.startswith(line) for found in lines), line
    assert lines[-1] == "verdict    a start accepts the data"
    stored = sum(path.stat().st_size for path in tmp_path.glob("*/*.*"))
    assert typed(monkeypatch, *words, "--json") == 0
    checked = json.loads(capsys.readouterr().out)
    assert sum(entry["size"] for entry in checked["ledger"]) == stored
    assert [one["source"] for one in checked["readings"]] == ["web", "code"]
    # Half of an epoch of each source, on two ranks.
    for source, size in (("web", 16_800), ("code", 400 * 18)):
        resume = checked["resume"][source]
        assert 0.3 * size < resume["total_bytes"] < 1.1 * size, source
        assert any(found.startswith(f"resume {source}") for found in lines)
    assert typed(monkeypatch, *words, "--stream.on_bad_data", "fail") == 1
    assert (
        "a start refuses the data: stream.sources.web data: " in capsys.readouterr().out
    )


def test_a_file_that_was_removed_since_it_was_listed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    files = list_files("text", str(tmp_path))
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"cannot look at '.*a\.jsonl': .*No such"):
        check_content(files, StreamOptions(), "training")
