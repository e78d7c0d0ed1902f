"""These tests check the plan and the sbatch command of ``titan-disp submit``."""

import sys

import pytest

from tests.command_line import ROOT
from titan_disp.cli import main
from titan_disp.cluster import launch

CONFIG = str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    for name in launch.OTHER_PYTHON:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(nodes, *options):
        words = ["submit", CONFIG, "--nodes", str(nodes), "--site", "frontier", "--dry-run", "--gpu", "MI250X-GCD"]
        monkeypatch.setattr("sys.argv", ["titan-disp", *words, *options])
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
