"""What each rank of a start opens and imports, which hundreds of ranks do at once."""

import resource
import subprocess
import sys

import pytest
import torch.distributed as dist

import titan_disp.plugin  # noqa: F401
from tests.command_line import ROOT, environment
from tests.distributed import spawn
from tests.mesh import build
from titan_disp import files
from titan_disp.cluster.node_health import check_node
from titan_disp.errors import ConfigError

IMPORTED = """
import sys
import titan_disp.train
print(len([m for m in sys.modules.values() if getattr(m, "__file__", None)]))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize(("hard", "ranks"), [(1791, 640), (1022, 256)])
def test_a_hard_limit_that_is_too_low(monkeypatch, hard, ranks):
    """Twice as many sockets as ranks, and 512 other files."""
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, hard))
    needed = f"needs {2 * ranks + 512:,}"
    with pytest.raises(ConfigError, match=needed):
        files.allow_open_files(ranks)
    monkeypatch.setenv("SLURM_NNODES", str(ranks // 8))
    monkeypatch.setenv("TITAN_DISP_NPROC", "8")
    assert any(needed in problem for problem in check_node("/tmp")["problems"])
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 2 * ranks + 512))
    assert files.open_files_problem(ranks) is None
    assert not any(needed in problem for problem in check_node("/tmp")["problems"])


def test_a_soft_limit_is_raised():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        files.allow_open_files(1)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_a_trainer_imports():
    """Each module is a file that every rank opens on a shared file system.

    Of the 3,750, titan-disp has 97. Torch has 1,400, which import 420 of sympy and 285
    of networkx; TorchTitan imports 600 of datasets, pandas and huggingface_hub, and 130
    of tensorboard and protobuf.
    """
    output = subprocess.run(
        [sys.executable, "-c", IMPORTED],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    number, names = output.splitlines()
    assert int(number) < 3850
    assert not {"scipy", "matplotlib", "transformers", "wandb"} & set(names.split())


def groups_of_gloo(sample, folder, async_mode):
    trainer = build(
        sample, folder, "--checkpoint.enable", "--checkpoint.async_mode", async_mode
    )
    descriptions = [group.group_desc for group in dist.distributed_c10d._world.pg_map]
    assert trainer.checkpointer.pg.group_desc == "undefined"  # not a mesh's
    assert descriptions.count("undefined") == 1


@pytest.mark.parametrize("async_mode", ["disabled", "async"])
def test_one_group_of_gloo_for_saves(sample, tmp_path, async_mode):
    spawn(2, groups_of_gloo, str(sample), str(tmp_path), async_mode)


def test_both_batch_scripts_ask_slurm_for_the_same():
    """Both hold the same supervisor: a signal before the end, requeues, one log."""
    asked = [
        {
            line.removeprefix("#SBATCH --")
            for line in (ROOT / "slurm" / name).read_text().splitlines()
            if line.startswith(
                ("#SBATCH --signal", "#SBATCH --requeue", "#SBATCH --open")
            )
        }
        for name in ("pretrain.sbatch", "sweep.sbatch")
    ]
    expected = {"signal=B:USR1@300", "requeue", "open-mode=append"}
    assert asked == [expected, expected]
