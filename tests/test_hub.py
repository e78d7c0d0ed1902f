"""Listing, streaming and mirroring from the hub, against a local stand-in that speaks the hub's protocol."""

import json
import sys
from types import SimpleNamespace

import pytest

from tests.command_line import DEMO
from tests.fake_hub import FakeHub
from titan_disp import cli
from titan_disp.data.mirror import parse_shards
from titan_disp.errors import ConfigError


@pytest.fixture
def hub(sample, tmp_path, monkeypatch):
    server = FakeHub(sample)
    server.use(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr("titan_disp.data.storage.FIRST_PAUSE", 0.01)
    yield server
    server.close()


@pytest.fixture
def titan_disp(monkeypatch, capsys):
    """Run the command in this process."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["titan-disp", *arguments])
        returncode = 0
        try:
            cli.main()
        except SystemExit as end:
            returncode = end.code
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=returncode, stdout=out, stderr=err)

    return run


def test_stream_from_the_hub_is_the_mirrors(hub, sample, tmp_path, titan_disp):
    """Without dataset_path, the hub is streamed. Although requests fail, the batches are those of the local copy."""
    config = tmp_path / "hub.toml"
    config.write_text("\n".join(line for line in DEMO.read_text().splitlines() if not line.startswith("dataset_path")))
    options = ("--json", "--steps", "20", "--model.hf_assets_path", f"{sample}/tokenizer", "--stream.prefetch", "0")
    hub.fail_every = 5
    hub.requests.clear()
    streamed = titan_disp("data", "digest", str(config), *options)
    assert streamed.returncode == 0, streamed.stderr[-3000:]
    assert hub.requests["content"] > 8
    # The files were listed once. No rank and no thread has requested anything but content.
    assert (hub.requests["info"], hub.requests["tree"]) == (1, 1)
    ahead = titan_disp("data", "digest", str(config), *options, "--stream.prefetch", "4", "--ranks", "2")
    assert ahead.returncode == 0, ahead.stderr[-3000:]
    assert json.loads(ahead.stdout)["hashes"] == json.loads(streamed.stdout)["hashes"]
    local = titan_disp("data", "digest", str(config), *options, "--training.dataset_path", str(sample))
    assert json.loads(streamed.stdout)["hashes"] == json.loads(local.stdout)["hashes"]
    assert json.loads(streamed.stdout)["counters"]["skipped_files"] == 0


def test_a_hub_that_stays_away_stops_the_run(hub, sample, tmp_path, titan_disp):
    """Its files may be sound and are therefore never skipped, whatever on_bad_data says."""
    config = tmp_path / "hub.toml"
    config.write_text("\n".join(line for line in DEMO.read_text().splitlines() if not line.startswith("dataset_path")))
    hub.fail_every = 1
    options = ("--steps", "2", "--model.hf_assets_path", f"{sample}/tokenizer", "--stream.retry_seconds", "1")
    failed = titan_disp("data", "digest", str(config), *options)
    assert failed.returncode == 2
    assert "titan-disp: error: cannot read hf://datasets/allenai/c4@" in failed.stderr
    assert "within 1 s (stream.retry_seconds)" in failed.stderr


def test_fetch(hub, sample, tmp_path, titan_disp):
    mirror = tmp_path / "mirror"
    done = titan_disp("data", "fetch", str(mirror), "--shards", "0-2,5")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "is complete" in done.stdout
    names = sorted(p.name for p in (mirror / "en").iterdir())
    expected = [f"c4-train.{i:05d}-of-00008.json.gz" for i in (0, 1, 2, 5)] + ["c4-validation.00000-of-00001.json.gz"]
    assert names == expected
    for name in names:
        assert (mirror / "en" / name).read_bytes() == (sample / "en" / name).read_bytes()

    # Fetch again with one truncated file and one of the right size with wrong content: only these two are fetched.
    cut, wrong = mirror / "en" / names[0], mirror / "en" / names[1]
    cut.write_bytes(cut.read_bytes()[:1000])
    wrong.write_bytes(b"x" * wrong.stat().st_size)
    hub.requests.clear()
    assert titan_disp("data", "fetch", str(mirror), "--shards", "0-2,5").returncode == 0
    assert cut.read_bytes() == (sample / "en" / cut.name).read_bytes()
    assert wrong.read_bytes() == (sample / "en" / wrong.name).read_bytes()
    assert hub.requests["content"] <= 6

    # A file that arrives damaged every time is named, and the command fails.
    hub.damaged = {"en/c4-train.00007-of-00008.json.gz"}
    failed = titan_disp("data", "fetch", str(mirror), "--shards", "6-7", "--split", "train")
    assert failed.returncode == 2
    assert "en/c4-train.00007-of-00008.json.gz: its sha256 differs from the hub's" in failed.stderr
    assert "titan-disp: error: 1 file could not be fetched" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_no_hub(hub, tmp_path, titan_disp):
    hub.close()
    failed = titan_disp("data", "fetch", str(tmp_path / "mirror"))
    assert failed.returncode == 2
    assert "titan-disp: error: cannot list allenai/c4 on the Hugging Face hub" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_parse_shards():
    assert parse_shards("0-63, 100") == [range(64), range(100, 101)]
    assert parse_shards(None) is None
    with pytest.raises(ConfigError, match="expected numbers and ranges"):
        parse_shards("0..3")
    with pytest.raises(ConfigError, match="--shards has the range 63-60, expected the smaller number first"):
        parse_shards("0-3,63-60")
