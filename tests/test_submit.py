"""These tests check the plan and the sbatch command of ``titan-disp submit``."""

import json
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT
from titan_disp.cli import main
from titan_disp.cluster import freeze, launch

CONFIG = str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    for name in launch.OTHER_PYTHON:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(nodes, *options, dry_run=True):
        words = ["submit", CONFIG, "--nodes", str(nodes), "--site", "frontier", "--gpu", "MI250X-GCD"]
        monkeypatch.setattr("sys.argv", ["titan-disp", *words, *["--dry-run"] * dry_run, *options])
        code = 0
        try:
            main()
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


def test_the_plan_and_the_command(command):
    code, out, _ = command(80, "--sbatch", "time=24:00:00", "account=abc", "--training.dataset_path", "/data/c4")
    assert code == 0
    assert "39,673 of 3,932,160 tokens" in out
    assert "replicate 80 × shard 8 × context 1 × tensor 1" in out  # the file has -1
    assert out.splitlines()[-1] == (
        "sbatch --nodes=80 --gpus-per-node=8 --time=24:00:00 --account=abc "
        f"--export=ALL,TITAN_DISP_SITE=frontier,TITAN_DISP_PYTHON={sys.executable} "
        f"{ROOT}/slurm/pretrain.sbatch {CONFIG} --training.dataset_path /data/c4"
    )


@pytest.mark.parametrize("name", launch.OTHER_PYTHON)
def test_a_container_has_a_python_of_its_own(monkeypatch, name):
    """A container's nodes do not have the login node's interpreter."""
    monkeypatch.setenv(name, "apptainer exec --nv titan-disp.sif")
    options = launch.SlurmOptions(nodes=80, site="frontier")
    assert "--export=ALL,TITAN_DISP_SITE=frontier" in launch.command(options, [CONFIG])
    without = launch.command(launch.SlurmOptions(nodes=80, gpus_per_node=0), [CONFIG])
    assert not [word for word in without if "gpus" in word]


def test_what_would_fail_is_not_submitted(command):
    code, out, err = command(79)
    assert code == 2
    assert "titan-disp: error" in err
    assert "sbatch" not in out


def test_a_job_runs_what_was_submitted(command, monkeypatch, tmp_path):
    """The command names the scripts and the config of the launch folder, where no later edit reaches them."""
    sent = []
    monkeypatch.setattr(
        launch.subprocess, "run", lambda line, env: sent.append(line) or type("", (), {"returncode": 0})
    )
    options = ("--sbatch", "time=24:00:00", "--job.dump_folder", "runs/a", "--training.dataset_path", "/data/c4")
    assert command(80, *options, dry_run=False)[0] == 0
    [folder] = (tmp_path / "runs" / "a" / "launch").iterdir()
    [line] = sent
    overrides = ["--job.dump_folder", "runs/a", "--training.dataset_path", "/data/c4"]
    assert line[-6:] == [f"{folder}/slurm/pretrain.sbatch", f"{folder}/config.toml", *overrides]
    assert (folder / "config.toml").read_text() == Path(CONFIG).read_text()
    launched = json.loads((folder / "launch.json").read_text())
    assert launched["run"] == str(tmp_path / "runs" / "a")
    assert launched["argv"] == line[-5:]
    assert ["sbatch", *launched["sbatch"]] == line[:-6]
    assert launched["packages"]["torchtitan"] == "0.2.2"
    assert json.loads((folder / "resolved.json").read_text())["training"]["dataset_path"] == "/data/c4"
    for name in ("supervise.py", "common.sh", "node.sh", "unpack.sh", "sites/frontier.sh"):
        assert (folder / "slurm" / name).read_bytes() == (ROOT / "slurm" / name).read_bytes()


def test_a_launch_folder_is_written_once(tmp_path):
    from titan_disp.config.load import load_config

    argv = ["--job.config_file", CONFIG, "--job.dump_folder", str(tmp_path / "run")]
    site = tmp_path / "mine.sh"
    site.write_text("export MINE=1")
    folder = freeze.freeze(load_config(argv), argv, "7", str(site))
    assert (folder / "slurm" / "sites" / "mine.sh").read_text() == "export MINE=1"
    (folder / "config.toml").write_text("kept")
    assert freeze.freeze(load_config(argv), argv, "7", "generic") == folder
    assert (folder / "config.toml").read_text() == "kept"
    (tmp_path / "run" / "launch").rename(tmp_path / "run" / "moved")
    (tmp_path / "run" / "launch").write_text("a file")
    with pytest.raises(freeze.ConfigError, match="run' is not writable: "):
        freeze.freeze(load_config(argv), argv, "8", "generic")


def test_what_sbatch_would_split(command, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/envs/a,b/bin/python")
    code, _, err = command(80)
    assert code == 2
    assert "TITAN_DISP_PYTHON is '/envs/a,b/bin/python', and sbatch ends the value at the comma" in err
