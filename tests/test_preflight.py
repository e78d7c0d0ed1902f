"""A preflight runs one step of rank 0 of hundreds, in its own process."""

import os
import subprocess
from unittest import mock

import pytest

from tests.command_line import ROOT
from tests.pages import changed, loaded
from titan_disp import cpu
from titan_disp.checks import check_config
from titan_disp.cluster.preflight import preflight, prepare, reduce, small_flavor
from titan_disp.config.command_options import PreflightOptions
from titan_disp.errors import ConfigError

PAPER = str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")
TP2 = (
    "--parallelism.tensor_parallel_degree",
    "2",
    "--parallelism.data_parallel_replicate_degree",
    "40",
)


@pytest.mark.night
def test_the_papers_run():
    """The mesh is HSDP 80 × 8 with accumulation 3, as on 640 GPUs.

    The model is small without a GPU.
    """
    report = preflight(PreflightOptions(PAPER, ranks=640))
    assert report.mesh == {"batch": 640, "loss": 640, "dp_replicate": 80, "fsdp": 8}
    assert (report.accumulation, report.own_parameters * 8) == (3, report.parameters)
    assert "by 640 ranks on 80 nodes" in report.warnings[0]
    assert report.seconds > 0
    assert report.peak_bytes > 1e7
    lines = report.lines()
    assert (
        lines[-1]
        == "passed      the step ran; its numbers are not checked, because collectives are fake"
    )
    if cpu.active():
        small = {"training.seq_len 2048 → 128", "model.flavor 0.6B → nano"}
        assert small | {"optimizer.implementation fused → foreach"} <= {*report.reduced}
        assert any("high-water mark of the whole process" in line for line in lines)


@pytest.mark.night
def test_tensor_parallel_with_masks():
    masks = ("--stream.document_mask", "--stream.restart_positions")
    report = preflight(PreflightOptions(PAPER, (*TP2, *masks), 640, "debugmodel", 64))
    assert report.mesh.items() >= {"dp_replicate": 40, "fsdp": 8, "tp": 2}.items()
    assert (report.flavor, report.seq_len, report.accumulation) == ("debugmodel", 64, 6)
    # the norms are not sharded by TP
    assert report.own_parameters < report.parameters / 15


@pytest.mark.night
def test_a_step_that_fails(tmp_path, monkeypatch):
    """The module can be imported here, but not in the process of the step."""
    module = tmp_path / "plugin_of_few_ranks.py"
    module.write_text(
        "import os\nassert os.environ.get('WORLD_SIZE') != '640', 'few'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    override = ("--experimental.custom_import", "plugin_of_few_ranks")
    with pytest.raises(
        ConfigError,
        match=r"(?s)rank 0 of 640 failed \(exit status 1\).*cannot be imported: few",
    ):
        preflight(PreflightOptions(PAPER, override, 640))


def test_the_step_has_one_thread_unless_told_otherwise(monkeypatch):
    """With two on a busy machine, a step of 22 s did not end within 400 s."""
    run = mock.Mock(side_effect=subprocess.TimeoutExpired("", 1800))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(
        "titan_disp.cluster.preflight.prepare", lambda options: (None, None)
    )
    # Also inside torchrun, the process is rank 0 of the fake ranks
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for threads in ("1", "3"):
        with pytest.raises(ConfigError, match="did not end within 1800 s"):
            preflight(PreflightOptions(PAPER, ranks=64))
        env = run.call_args.kwargs["env"]
        assert "TORCHELASTIC_RUN_ID" not in env
        names = ("NGPU", "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
        assert [env[name] for name in names] == ["64", "0", "0", "64", threads]
        monkeypatch.setenv("OMP_NUM_THREADS", "3")


@pytest.mark.parametrize(
    ("options", "reduction", "message"),
    [
        (TP2, {"seq_len": 63}, "seq_len 63 is not divisible by 2"),
        ((), {"flavor": "0.7B"}, "model.flavor is '0.7B'"),
        ((), {"seq_len": 0}, "training.seq_len is 0"),
        (
            (),
            {"ranks": 7},
            "7; the nearest: 1918, 1925; 6 or 8 ranks would work with this mesh and",
        ),
        # The unreduced config is checked: block 28 does not exist, and block 27 not in
        # the small model.
        (("--dispersion.layers", "28"), {}, "has 28 blocks"),
    ],
)
def test_errors_come_before_the_step(options, reduction, message):
    with pytest.raises(ConfigError, match=message):
        preflight(PreflightOptions(PAPER, options, **{"ranks": 640, **reduction}))


@pytest.mark.parametrize(
    ("options", "flavor"),
    [
        ("--dispersion.layers 27 --dispersion.final_norm", None),  # 6 blocks
        # 36 blocks, where block 27 is not the last
        ("--dispersion.layers 27 --dispersion.final_norm", "8B"),
        ("--dispersion.warmup_steps 100", None),  # longer than the single step
        ("--dispersion.decay linear --dispersion.decay_steps 1000", None),
        ("--model.overrides hidden_dim=1000", None),
    ],
)
def test_what_the_small_model_lacks(monkeypatch, options, flavor):
    monkeypatch.setattr(cpu, "active", lambda: True)
    _, reduced = prepare(PreflightOptions(PAPER, tuple(options.split()), 640, flavor))
    assert reduced.job_config.dispersion.layers == "all"
    assert reduced.job_config.model.overrides == {}
    told = "model.overrides {'hidden_dim': 1000} → {}: they are for the config's own flavor"
    assert (told in reduced.changes) is ("--model.overrides" in options)


def test_what_a_cpu_leaves_out(monkeypatch):
    """Context parallelism becomes sharding over as many ranks; TP 8 needs more heads
    than the smallest flavor has.
    """
    monkeypatch.setattr(cpu, "active", lambda: True)
    mesh = {
        "tensor_parallel": 8,
        "context_parallel": 2,
        "data_parallel_shard": 2,
        "data_parallel_replicate": 2,
    }
    options = [f"--parallelism.{name}_degree={degree}" for name, degree in mesh.items()]
    job, reduced = prepare(
        PreflightOptions(PAPER, (*options, "--training.global_batch_size=8"), 64)
    )
    small = reduced.job_config
    assert job.parallelism.context_parallel_degree == 2
    degrees = (
        small.parallelism.context_parallel_degree,
        small.parallelism.data_parallel_shard_degree,
    )
    assert (*degrees, small.training.global_batch_size, small.model.flavor) == (
        1,
        4,
        16,
        "debugmodel",
    )
    assert small.lr_scheduler.total_steps == job.training.steps > 1
    assert not small.checkpoint.enable
    assert not small.compile.enable


GPT2 = str(ROOT / "train_configs" / "gpt2_124m_c4.toml")
TP = "parallelism.tensor_parallel_degree"
SHARDS = {
    "parallelism.data_parallel_shard_degree": 128,
    "parallelism.data_parallel_replicate_degree": 1,
}


@pytest.mark.parametrize(
    ("config", "changes", "ranks", "small"),
    [
        (PAPER, {"model.flavor": "4B", TP: 2}, 640, "nano"),
        (PAPER, {"model.flavor": "4B", TP: 8}, 640, "debugmodel"),
        (PAPER, {"model.flavor": "8B", TP: 2}, 640, "debugmodel_untied"),
        (PAPER, {"model.flavor": "0.6B_untied"}, 640, "debugmodel_untied"),
        (PAPER, {"model.flavor": "debugmodel_untied"}, 640, "debugmodel_untied"),
        # 128 shards do not divide the 64 columns of nano's table, and 2 ranks cannot
        # share its rows equally.
        (GPT2, {**SHARDS, TP: 2}, 256, "124M"),
        (GPT2, {**SHARDS, TP: 1}, 128, "nano"),
        # nano with 8 heads, which no smaller flavor has.
        (
            GPT2,
            {"model.flavor": "nano", "model.overrides": {"n_heads": 8}, TP: 8},
            8,
            "nano",
        ),
        (GPT2, {"model.overrides": {"enable_weight_tying": False}}, 8, "nano_untied"),
    ],
)
def test_the_small_flavor_fits_the_mesh_and_is_tied_as_the_large_one(
    monkeypatch, config, changes, ranks, small
):
    monkeypatch.setattr(cpu, "active", lambda: True)
    job = changed(
        loaded(config),
        {**changes, "training.global_batch_size": 2048} if config == GPT2 else changes,
    )
    assert small_flavor(job, ranks) == small
    if config == GPT2:
        check_config(job, ranks)
        reduced = reduce(job, ranks)
        check_config(reduced.job_config, ranks)
        assert reduced.job_config.model.flavor == small


def test_an_accelerator_leaves_out_nothing_but_files(monkeypatch):
    monkeypatch.setattr(cpu, "active", lambda: False)
    job, reduced = prepare(
        PreflightOptions(PAPER, ("--validation.enable", "--validation.steps", "1"), 640)
    )
    small = reduced.job_config
    assert reduced.changes == [
        "checkpoint.enable true → false",
        "metrics.enable_tensorboard true → false",
        "validation.enable true → false",
    ]
    for section in (
        "model",
        "optimizer",
        "parallelism",
        "compile",
        "activation_checkpoint",
        "dispersion",
    ):
        assert getattr(small, section) == getattr(job, section)
    assert small.training.seq_len == 2048
