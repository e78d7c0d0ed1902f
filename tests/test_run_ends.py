"""How a run ends, and what is said of it: `complete` and "saved" only after a save that succeeded."""

import math
from pathlib import Path

import pytest

from tests.distributed import spawn
from titan_disp.errors import ConfigError
from titan_disp.run.integrity import checkpoints
from titan_disp.run.reader import read_json_lines


def events(run):
    return [(e["event"], e["step"]) for e in read_json_lines(run / "events.jsonl") if e["event"] != "checkpoint"]


def train(sample, run, *options, nan_from=None):
    """A run of one rank in this process, whose cross-entropy is NaN from a step on."""
    from tests.mesh import build

    trainer = build(
        *(sample, run, "--checkpoint.enable", "--checkpoint.interval", "100", "--stream.prefetch", "0"),
        *("--training.local_batch_size", "8", "--condensation.interval", "0", *options),
    )
    cross_entropy = trainer.loss_fn.cross_entropy

    def broken(logits, labels):
        bad = nan_from is not None and trainer.step >= nan_from
        return cross_entropy(logits, labels) * (math.nan if bad else 1.0)

    trainer.loss_fn.cross_entropy = broken
    trainer.train()
    beat = (run / "heartbeat.json").exists()
    trainer.close()
    assert beat
    assert not (run / "heartbeat.json").exists()
    return trainer.step


def all_ends(sample, folder):
    run = Path(folder) / "run"
    steps = ("--training.steps", "2")

    # Step 2 of 2 is skipped: it changed no weights, so that they are saved. Saying "complete" without would lose step 1.
    assert train(sample, run, *steps, nan_from=2) == 2
    assert events(run) == [("start", 0), ("skip", 2), ("complete", 2)]
    assert checkpoints(run / "checkpoint") == [2]

    # Complete, and started again: it says so again, for whoever decides by the events of this start. With other options, nothing
    # is trained with them, so that config.json, which exports read, stays.
    before = (run / "config.json").read_bytes()
    assert train(sample, run, *steps, "--optimizer.lr", "0.5") == 2
    assert events(run)[3:] == [("resume", 2), ("complete", 2)]
    assert (run / "config.json").read_bytes() == before
    assert "config_changes" not in read_json_lines(run / "events.jsonl")[-2]

    # The same where its last checkpoint holds the model only.
    model = Path(folder) / "model"
    train(sample, model, *steps, "--checkpoint.last_save_model_only")
    train(sample, model, *steps, "--checkpoint.last_save_model_only")
    assert events(model) == [("start", 0), ("complete", 2), ("complete", 2)]

    # Asked to stop while steps are being skipped.
    skipping = Path(folder) / "skipping"
    options = ("--training.steps", "9", "--budget.stop_at_tokens", str(8 * 32 * 3))
    assert train(sample, skipping, *options, nan_from=2) == 3
    assert events(skipping) == [("start", 0), ("skip", 2), ("skip", 3), ("stop", 3)]
    assert checkpoints(skipping / "checkpoint") == [3]

    # A user's stop file from before the start holds until the user removes it. Where the run stands is said, not where it began.
    (skipping / "stop").touch()
    for _ in range(2):
        assert train(sample, skipping, *options) == 0
    assert events(skipping)[4:] == [("stop", 3), ("stop", 3)]
    assert (skipping / "stop").exists()
    (skipping / "stop").unlink()
    assert train(sample, skipping, "--training.steps", "5") == 5


@pytest.mark.slow
def test_ends(sample, tmp_path):
    spawn(1, all_ends, str(sample), str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"job": {"dump_fol', "Unterminated string"),
        (b"", "Expecting value"),
        (b"\xff\xfe\x00", "codec can't decode"),
        (b"[1, 2]", "it holds a list, expected an object"),
    ],
)
def test_a_garbled_config_of_the_run_folder_is_one_error(sample, tmp_path, content, reason):
    from titan_disp.config.load import load_config
    from titan_disp.run.folder import RunFolder

    config = load_config(["--job.dump_folder", str(tmp_path)])
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as error:
        RunFolder(config, 1)
    assert "To continue, move it away" in str(error.value)
    assert (tmp_path / "config.json").read_bytes() == content
