"""A dry run (comm.mode = "fake_backend") writes nothing, not even where a run is."""

import pytest

from tests.command_line import DEMO, train
from titan_disp.config.load import load_config
from titan_disp.errors import EXIT_CODE, ConfigError
from titan_disp.run import dry

SHORT = (
    *("--training.seq_len=32", "--lr_scheduler.warmup_steps=1"),
    *(
        "--condensation.interval=0",
        "--metrics.log_freq=1",
        "--metrics.enable_tensorboard",
    ),
)
DRY = ("--comm.mode=fake_backend", "--training.steps=3")


def content(folder):
    return {
        file.relative_to(folder): (file.read_bytes(), file.stat().st_mtime_ns)
        for file in folder.rglob("*")
        if file.is_file()
    }


def test_a_dry_run_leaves_a_finished_run_as_it_is(sample, tmp_path, monkeypatch):
    run = tmp_path / "run"
    train(DEMO, sample, run, *SHORT, "--training.steps=2", "--checkpoint.interval=2")
    before = content(tmp_path)
    assert len(before) > 5
    monkeypatch.setenv("NGPU", "4")
    done = train(DEMO, sample, run, *SHORT, *DRY, "--job.save_config_file=c.json")
    assert "step 3/3  loss" in done.stdout + done.stderr
    assert done.stderr.endswith("the dry run has ended, and has written nothing\n")
    assert content(tmp_path) == before
    monkeypatch.delenv("NGPU")
    done = train(DEMO, sample, tmp_path / "new", *SHORT, *DRY, check=False)
    assert done.returncode == EXIT_CODE
    assert done.stderr.splitlines()[-1].startswith(
        "titan-disp: error: NGPU is '', expected the number of ranks"
    )
    assert content(tmp_path) == before


def test_what_a_dry_run_switches_off():
    """The trainer checks the config again after this."""
    config = load_config(["--job.config_file", str(DEMO)])
    config.checkpoint.create_seed_checkpoint = True
    config.checkpoint.initial_load_path = "weights"
    assert not dry.is_dry(config)
    config.comm.mode = "fake_backend"
    assert dry.is_dry(config)
    dry.write_nothing(config)
    assert not config.checkpoint.enable
    assert not config.checkpoint.create_seed_checkpoint
    assert config.checkpoint.initial_load_path is None
    assert not config.metrics.enable_tensorboard


@pytest.mark.parametrize("number", ["", "0", "-2", "four"])
def test_the_number_of_ranks_to_simulate(number, monkeypatch):
    monkeypatch.setenv("NGPU", number)
    with pytest.raises(ConfigError, match=f"^NGPU is '{number}', expected the number"):
        dry.simulated_ranks()
