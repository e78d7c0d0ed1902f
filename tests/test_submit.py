"""The plan and the sbatch command of ``titan-disp submit``."""

import json
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed.checkpoint as dcp

from tests.command_line import ROOT, typed
from tests.pages import loaded
from titan_disp.cluster import freeze, launch
from titan_disp.config.load import load_config
from titan_disp.errors import ConfigError
from titan_disp.run.identity import of_keys, to_state

CONFIG = str(ROOT / "train_configs" / "qwen3_0.6b_c4.toml")


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    for name in launch.OTHER_PYTHON:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch
    # Else it tries a thousand
    monkeypatch.setattr("titan_disp.cluster.plan.MAX_NODES", 1)
    # Once per config
    monkeypatch.setattr(launch, "load_config", lambda argv: loaded(*argv[1:]))

    def run(nodes, *options, dry_run=True):
        words = [
            "submit",
            CONFIG,
            "--nodes",
            str(nodes),
            "--site",
            "frontier",
            "--gpu",
            "MI250X-GCD",
        ]
        return typed(
            monkeypatch, *words, *["--dry-run"] * dry_run, *options
        ), *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("nodes", "spares", "nproc"),
    [(80, "", ""), (82, "2", ""), (160, "", "4"), (162, "2", "4")],
)
def test_the_plan_and_the_command(command, monkeypatch, nodes, spares, nproc):
    """With two nodes to spare, or four ranks on a node of eight GPUs, the mesh is that
    of 80 nodes.
    """
    monkeypatch.setenv("TITAN_DISP_SPARES", spares)
    monkeypatch.setenv("TITAN_DISP_NPROC", nproc)
    code, out, _ = command(
        nodes,
        "--sbatch",
        "time=24:00:00",
        "account=abc",
        "--training.dataset_path",
        "/data/c4",
    )
    assert code == 0
    assert "39,673 of 3,932,160 tokens" in out
    assert "MI250X-GCD = 640 GPUs" in out
    assert "replicate 80 × shard 8 × context 1 × tensor 1" in out  # the file has -1
    assert out.splitlines()[-1] == (
        f"sbatch --nodes={nodes} --gpus-per-node=8 --time=24:00:00 --account=abc "
        f"--export=ALL,TITAN_DISP_SITE=frontier,TITAN_DISP_PYTHON={sys.executable} "
        f"{ROOT}/slurm/pretrain.sbatch {CONFIG} --training.dataset_path /data/c4"
    )


@pytest.mark.parametrize("name", launch.OTHER_PYTHON)
def test_a_container_has_a_python_of_its_own(monkeypatch, name):
    monkeypatch.setenv(name, "apptainer exec --nv titan-disp.sif")
    options = launch.SlurmOptions(nodes=80, site="frontier")
    assert "--export=ALL,TITAN_DISP_SITE=frontier" in launch.command(options, [CONFIG])
    without = launch.command(launch.SlurmOptions(nodes=80, gpus_per_node=0), [CONFIG])
    assert not [word for word in without if "gpus" in word]


def test_a_job_runs_what_was_submitted(command, monkeypatch, tmp_path):
    sbatch = mock.Mock(return_value=SimpleNamespace(returncode=0, stderr=""))
    monkeypatch.setattr(launch.subprocess, "run", sbatch)
    options = (
        "--sbatch",
        "time=24:00:00",
        "--job.dump_folder",
        "runs/a",
        "--training.dataset_path",
        "/data/c4",
    )
    assert command(80, *options, dry_run=False)[0] == 0
    [folder] = (tmp_path / "runs" / "a" / "launch").iterdir()
    ((line,), _) = sbatch.call_args
    run = str(tmp_path / "runs" / "a")  # as a path that holds in any folder
    overrides = [
        "--job.dump_folder",
        "runs/a",
        "--training.dataset_path",
        "/data/c4",
        "--job.dump_folder",
        run,
    ]
    assert line[-8:] == [
        f"{folder}/slurm/pretrain.sbatch",
        f"{folder}/config.toml",
        *overrides,
    ]
    assert (folder / "config.toml").read_text() == Path(CONFIG).read_text()
    launched = json.loads((folder / "launch.json").read_text())
    assert (launched["run"], launched["argv"], ["sbatch", *launched["sbatch"]]) == (
        run,
        line[-7:],
        line[:-8],
    )
    assert launched["packages"]["torchtitan"] == "0.2.2"
    assert (
        json.loads((folder / "resolved.json").read_text())["training"]["dataset_path"]
        == "/data/c4"
    )
    for name in ("supervise.py", "common.sh", "node.sh", "pack.sh", "unpack.sh"):
        assert (folder / "slurm" / name).read_bytes() == (
            ROOT / "slurm" / name
        ).read_bytes()
    # Which a site's file may include
    assert (folder / "slurm" / "sites" / "aws_efa.sh").exists()
    assert (folder / "slurm" / "site.sh").read_bytes() == (
        ROOT / "slurm" / "sites" / "frontier.sh"
    ).read_bytes()


def test_a_read_only_installation_or_run_folder(tmp_path, monkeypatch):
    scripts = tmp_path / "installed"
    shutil.copytree(ROOT / "slurm", scripts)
    for path in (scripts / "node.sh", scripts / "sites", scripts):
        path.chmod(0o555)
    monkeypatch.setattr(freeze, "SCRIPTS", scripts)
    argv = ["--job.config_file", CONFIG, "--job.dump_folder", str(tmp_path / "run")]
    config = load_config(argv)
    folder = freeze.freeze(config, argv, "7.0.abcdef") / "slurm"
    assert all(
        path.stat().st_mode & 0o200
        for path in (folder, folder / "sites", folder / "node.sh")
    )
    shutil.rmtree(tmp_path / "run")
    for step in "07":
        with pytest.raises(
            ConfigError, match=f"^checkpoint.load_step is {step}, expected -1 in a job"
        ):
            freeze.freeze(
                load_config([*argv, "--checkpoint.load_step", step]), argv, "7.0.abcdef"
            )
    anew = "--checkpoint.exclude_from_loading=train_state,lr_scheduler"
    with pytest.raises(ConfigError, match="has 'train_state' in a job: .* requeue"):
        freeze.freeze(load_config([*argv, anew]), argv, "7.0.abcdef")
    (tmp_path / "run").write_text("a file")
    with pytest.raises(ConfigError, match="is not writable: "):
        freeze.freeze(config, argv, "7.0.abcdef")


@pytest.mark.parametrize(
    ("umask", "mode", "warned"),
    [(0o022, None, False), (0o002, 0o2775, False), (0o000, 0o777, True)],
)
def test_who_may_change_what_a_job_runs(tmp_path, capsys, umask, mode, warned):
    """Its owner only, also if a group shares the run folder."""
    run = tmp_path / "run"
    if mode is not None:
        run.mkdir()
        run.chmod(mode)
    argv = ["--job.config_file", CONFIG, "--job.dump_folder", str(run)]
    before = os.umask(umask)
    try:
        folder = freeze.freeze(load_config(argv), argv, "7.0.abcdef")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    warning = f"every user may change the files in {run} (its mode is 777)"
    assert (warning in capsys.readouterr().err) is warned


def test_the_file_of_a_site(tmp_path):
    (tmp_path / "mine").touch()
    assert launch.site_file(str(tmp_path / "mine")) == tmp_path / "mine"
    with pytest.raises(
        ConfigError,
        match="--site is 'mine', expected a file or one of aws_efa, frontier, ",
    ):
        launch.site_file("mine")


@pytest.mark.parametrize(
    ("option", "similar"),
    [
        ("accuont=abc", "account"),
        ("cpus_per_task=4", "cpus-per-task"),
        ("partiton=gpu", "partition"),
        # of sbatch, a beginning of one, and of plugins
        ("gres=gpu:8", None),
        ("part=gpu", None),
        ("container-image=a.sqsh", None),
        ("image=a", None),
    ],
)
def test_an_unknown_option_of_sbatch(command, option, similar):
    code, out, err = command(80, "--sbatch", option)
    if similar is None:
        assert (code, f"--{option}" in out) == (0, True), err
        return
    assert (code, "pretrain.sbatch" in out) == (2, False)
    name, _, _ = option.partition("=")
    assert f"sbatch has no option {name!r} (did you mean {similar}?)" in err


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ([], ""),
        (["--optimizer.lr", "0.1"], ""),
        (["--dispersion.coeff", "0.5"], "another loss: dispersion.coeff is 0.1 in"),
        (["--dispersion.coeff", "0.5", "--checkpoint.allow_other_loss"], ""),
        (["--dispersion.coeff", "0.5", "--checkpoint.no-enable"], ""),
        (["--job.dump_folder", "another", "--dispersion.coeff", "0.5"], ""),
    ],
)
def test_a_job_that_will_refuse_its_checkpoint(command, tmp_path, change, refused):
    """The user learns it before the job waits in the queue."""
    checkpoint = tmp_path / "run" / "checkpoint" / "step-7"
    identity = to_state(of_keys(loaded(CONFIG)))
    dcp.save({"identity": identity}, checkpoint_id=checkpoint, no_dist=True)
    code, out, err = command(80, "--job.dump_folder", "run", *change)
    assert code == 0, err
    warned = "warning: the job will refuse to start: the checkpoint was trained with "
    assert (warned + refused in out) is bool(refused)
    assert ("will refuse" in out) is bool(refused)


def test_a_job_with_a_damaged_checkpoint_is_submitted(command, tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint" / "step-7"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").write_bytes(b"damaged")
    code, out, err = command(80, "--job.dump_folder", "run")
    assert (code, "pretrain.sbatch" in out) == (0, True), err
    assert "will refuse" not in out


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("5", 300),
        ("4:30", 270),
        ("00:20:00", 1200),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-0:0:5", 86405),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_the_seconds_of_a_time_limit(time, seconds):
    assert launch.seconds_of(time) == seconds


@pytest.mark.parametrize(
    ("options", "variable", "lead"),
    [
        (["time=5"], "", 300),
        (["time=00:05:00"], "", 300),
        (["time=10", "signal=B:USR1@600"], "B:USR1@60", 600),
        (["time=1"], "B:USR1@60", 60),
        (["time=5:01"], "", None),
        (["time=5", "signal=B:USR1@60"], "", None),
        (["time=2"], "B:USR1@60", None),
        (["time=0"], "", None),  # sbatch: no limit
        (["deadline=now"], "", None),
    ],
)
def test_a_time_limit_at_which_no_job_could_train(
    command, monkeypatch, options, variable, lead
):
    """It is refused before the job waits in the queue."""
    monkeypatch.setenv("SBATCH_SIGNAL", variable)
    code, out, err = command(80, "--sbatch", *options)
    if lead is None:
        assert (code, "pretrain.sbatch" in out) == (0, True), err
        return
    assert (code, "pretrain.sbatch" in out) == (2, False)
    assert f"error: --sbatch {options[0]} is a time limit of " in err
    assert f"SLURM signals the job {lead} s before it" in err


def test_a_dry_run_looks_at_the_run_folder(command, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    words = ("--inputs-on-nodes", "--job.dump_folder")
    for folder in ("/proc/runs", f"{tmp_path}/file/run"):
        found = {"sbatch": "/usr/bin/sbatch"}
        monkeypatch.setattr(launch.shutil, "which", found.get)
        code, out, err = command(80, *words, folder)
        assert code == 2
        assert f"error: job.dump_folder '{folder}' is not writable: " in err
        assert "pretrain.sbatch" not in out
        # on another machine than the cluster, it may not exist
        del found["sbatch"]
        code, out, err = command(80, *words, folder)
        assert (code, "pretrain.sbatch" in out) == (0, True)
        assert f"warning: job.dump_folder '{folder}' is not writable: " in out
    assert command(80, "--job.dump_folder", "a/b")[0] == 0
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("options", [[], ["--inputs-on-nodes"]])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_job_without_its_data_is_not_submitted(
    command, monkeypatch, tmp_path, options, dry_run
):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho Submitted\n")
    (tmp_path / "sbatch").chmod(0o755)
    words = ("--training.dataset_path", "nowhere", *options)
    code, out, err = command(80, *words, dry_run=dry_run)
    if options:
        assert (code, "warning: training.dataset_path is 'nowhere'" in out) == (0, True)
        return
    assert code == 2
    assert "- training.dataset_path is 'nowhere', which does not exist" in err
    assert "- model.hf_assets_path is" in err
    assert "If only the compute nodes have it, add --inputs-on-nodes" in err
    assert "pretrain.sbatch" not in out
    assert [file.name for file in tmp_path.iterdir()] == ["sbatch"]


REFUSED = "sbatch: error: Batch job submission failed: {}"


@pytest.mark.parametrize("before", ["", "run", "run/launch/earlier", "run/notes"])
@pytest.mark.parametrize(
    ("script", "remains"),
    [
        (f"echo {REFUSED.format('Invalid account')} >&2; exit 1", False),
        # The job may be in the queue
        (f"echo {REFUSED.format('Socket timed out')} >&2; exit 1", True),
        ("echo Submitted batch job 7; exit 1", True),  # --wait, and the job has failed
        (None, False),  # no sbatch
    ],
)
def test_a_refused_job_leaves_no_launch_folder(
    command, monkeypatch, tmp_path, before, script, remains
):
    programs = tmp_path / "programs"
    programs.mkdir()
    if script:
        (programs / "sbatch").write_text(f"#!/bin/sh\n{script}\n")
        (programs / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    (tmp_path / before).mkdir(parents=True, exist_ok=True)
    files = {*tmp_path.rglob("*")}
    words = ("--inputs-on-nodes", "--job.dump_folder", "run")
    code, _, err = command(80, *words, dry_run=False)
    assert code == (1 if script else 2)
    assert ("submission failed" in err) == ("submission failed" in str(script))
    assert ({*tmp_path.rglob("*")} == files) is not remains
    assert {*tmp_path.rglob("*")} >= files


@pytest.mark.parametrize(
    ("nodes", "spares", "python", "said"),
    [
        (79, "", "python", "is not a positive multiple of local_batch_size 1 × 632"),
        (2, "2", "python", "SPARES is '2', expected a whole number below --nodes 2"),
        (
            80,
            "",
            "/envs/a,b/bin/python",
            "is '/envs/a,b/bin/python', and sbatch ends the value at the comma",
        ),
    ],
)
def test_what_would_fail_is_not_submitted(
    command, monkeypatch, nodes, spares, python, said
):
    monkeypatch.setenv("TITAN_DISP_SPARES", spares)
    monkeypatch.setattr(sys, "executable", python)
    code, out, err = command(nodes)
    assert code == 2
    assert said in err
    assert "sbatch" not in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--gpus-per-node -1", "--gpus-per-node is -1, expected at least 0"),
        ("--sbatch partition gpu", "--sbatch partition has no value: write --sbatch "),
        ("--sbatch nodes=8", "nodes is set by titan-disp. Write --nodes N"),
        ("--sbatch export=A=1", "export is set by titan-disp. Write export NAME="),
        ("--sbatch exclusive qos", "--sbatch qos has no value: write --sbatch qos="),
        ("--partition=gpu", "is an option of sbatch: write --sbatch partition=gpu"),
        ("--sbatch --qos high", "is an option of sbatch: write --sbatch qos=VALUE"),
        ("--sbatch -p gpu", "--sbatch -p is a short option: write its long name"),
        ("--sbatch qos=high run.toml", "up to the next option, also run.toml: write"),
    ],
)
def test_options_in_the_wrong_form(command, words, said):
    code, out, err = command(80, *words.split())
    assert (code, "pretrain.sbatch" in out) == (2, False)
    assert said in err


def test_no_nodes(command):
    assert "--nodes is 0, expected at least 1" in command(0)[2]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RETRIES", "lots", "none or minutes such as now,10"),
        ("NPROC", "abc", "gpu or the ranks per node"),
        ("CHECK_SECONDS", "ten", "a number"),
        ("ENDPOINT", ":abc", "HOST, :PORT or HOST:PORT"),
    ],
)
def test_variables_are_checked_before_the_job_waits(
    command, monkeypatch, name, value, expected
):
    monkeypatch.setenv(f"TITAN_DISP_{name}", value)
    code, out, err = command(80)
    assert (code, "pretrain.sbatch" in out) == (2, False)
    assert f"TITAN_DISP_{name} is {value!r}, expected {expected}" in err


def test_an_archive_that_is_not_there(command, monkeypatch, tmp_path):
    archive = tmp_path / "env.tar"
    monkeypatch.setenv("TITAN_DISP_ENV_ARCHIVE", str(archive))
    code, out, err = command(80)
    assert (code, "pretrain.sbatch" in out) == (2, False)
    assert f"TITAN_DISP_ENV_ARCHIVE is '{archive}', which is no file" in err
    archive.touch()
    assert command(80)[0] == 0


@pytest.mark.parametrize(
    ("python", "prefix", "warned"),
    [
        ("/no/python", "", True),
        ("/no/python", "apptainer exec image.sif", False),
        (sys.executable, "", False),
    ],
)
def test_a_python_that_is_not_there(command, monkeypatch, python, prefix, warned):
    monkeypatch.setenv("TITAN_DISP_PYTHON", python)
    monkeypatch.setenv("TITAN_DISP_PREFIX", prefix)
    code, out, _ = command(80)
    assert code == 0
    assert ("warning: TITAN_DISP_PYTHON is '/no/python'" in out) == warned


@pytest.mark.parametrize(
    ("nproc", "site", "warned"),
    [("", "", True), ("1", "", False), ("", "export TITAN_DISP_NPROC=2", False)],
)
def test_a_job_without_gpus_or_a_number_of_ranks(
    command, monkeypatch, tmp_path, nproc, site, warned
):
    monkeypatch.setenv("TITAN_DISP_NPROC", nproc)
    file = tmp_path / "site.sh"
    file.write_text(site)
    monkeypatch.setattr(launch, "site_file", lambda name: file)
    _, out, _ = command(80, "--gpus-per-node", "0")
    assert ("warning: --gpus-per-node is 0" in out) == warned
