"""What a run shows on the console, and what only the files of its ranks have."""

import logging
import re
import warnings
from contextlib import suppress
from types import SimpleNamespace

import pytest
from torchtitan.tools.logging import init_logger, logger
from torchtitan.tools.utils import GarbageCollection

from tests.command_line import DEMO
from tests.mesh import dims
from titan_disp.cluster.plan import meta_model
from titan_disp.config.load import load_config
from titan_disp.data.assignment import one_share, shares
from titan_disp.data.listing import DataFile
from titan_disp.run import console

TIME = r"\d\d:\d\d:\d\d  "


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder in which torchrun keeps what this rank prints."""
    (tmp_path / "stdout.log").touch()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setenv("RANK", "0")
    return tmp_path


@pytest.fixture
def started(monkeypatch, capsys):
    """Set up the log as a rank does, and return what it then shows of all kinds of
    messages.
    """
    monkeypatch.setattr(logging, "raiseExceptions", True)
    handlers = logger.handlers[:]

    def started():
        init_logger()
        console.split_log()
        logger.info("two\nlines")
        logging.getLogger("titan_disp.data.loader").info("a detail")
        GarbageCollection(10)
        logger.warning("a warning")
        logger.warning("model.safetensors.index.json not found at hf_assets_path: a")
        warnings.warn(
            "DTensor manual_seed() may not have complete support on cpu", stacklevel=1
        )
        warnings.warn("of a library", stacklevel=1)
        return capsys.readouterr()

    yield started
    for handler in logger.handlers:
        with suppress(OSError):  # of the full disk
            handler.close()
    logging.captureWarnings(False)
    logger.handlers[:] = handlers


@pytest.mark.filterwarnings("always")
def test_the_console_has_what_a_user_needs_and_the_file_everything(folder, started):
    shown, errors = started()
    assert re.fullmatch(
        f"{TIME}two\n          lines\n"
        f"{TIME}WARNING a warning\n"
        f"{TIME}WARNING .*test_console.py:\\d+: UserWarning: of a library\n"
        "            warnings.warn.*\n",
        shown,
    )
    assert not errors
    lines = (folder / console.LOG).read_text()
    assert re.match(r"\[titan\] \d{4}-\d\d-\d\d .* - root - INFO - two\nlines\n", lines)
    for text in (
        "titan_disp.data.loader - INFO - a detail",
        "INFO - [GC] Initial GC collection",
        "root - WARNING - a warning",
        "WARNING - model.safetensors.index.json not found",
        "DTensor manual_seed()",
        "UserWarning: of a library",
    ):
        assert text in lines


def test_other_ranks_print_warnings_only(folder, started, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert re.match(f"{TIME}WARNING a warning\n", started().out)
    assert "two\nlines" in (folder / console.LOG).read_text()


def test_without_a_folder_the_console_has_everything(folder, started):
    (folder / "stdout.log").unlink()  # torchrun without --tee or --redirects
    shown = started().out
    assert "[titan] " in shown
    assert "[GC] Initial GC collection" in shown
    assert not (folder / console.LOG).exists()


def test_a_full_disk_ends_nothing_and_shows_nothing(folder, started):
    (folder / console.LOG).symlink_to("/dev/full")
    shown, errors = started()
    assert "WARNING a warning" in shown
    assert not errors


def test_a_file_that_cannot_be_written(folder, started):
    (folder / console.LOG).mkdir()
    shown = started().out
    assert "full.log cannot be written, so everything is shown" in shown
    assert "[GC] Initial GC collection" in shown


def trainer_of(*options, step=0, **degrees):
    """What ``overview`` reads of a trainer."""
    job = load_config(["--job.config_file", str(DEMO), *options])
    model = meta_model(job)
    mesh = dims(
        degrees.get("dp_replicate", 1)
        * degrees.setdefault("dp_shard", 2)
        * degrees.get("tp", 1),
        **degrees,
    )
    return SimpleNamespace(
        job_config=job,
        model_args=model.model_args,
        model_parts=[model],
        parallel_dims=mesh,
        gradient_accumulation_steps=2,
        step=step,
        last_step=job.training.steps,
        monitor=object(),
        dataloader=SimpleNamespace(
            groups=one_share(16), files=[DataFile("a", "a", 600_000)] * 2
        ),
        metrics_processor=SimpleNamespace(
            device_memory_monitor=SimpleNamespace(device_name="CPU"),
            tensorboard_folder="outputs/demo_cpu/tb",
        ),
    )


def rows_of(trainer):
    """The texts of an overview by their names."""
    lines = console.overview(trainer).splitlines()
    assert max(map(len, lines)) <= 135
    rows = {}
    for line in lines:
        if line[:14].strip():
            name = line[:14].strip()
            rows[name] = line[14:]
        else:  # the row goes on
            rows[name] += "\n" + line[14:]
    return rows


def test_an_overview_of_the_demo(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "titan-disp-7")
    assert rows_of(trainer_of()) == {
        "model": "qwen3_disp nano: 427,008 parameters, 6 blocks, width 64, vocabulary "
        "2,048",
        "data": "data/sample: 2 files, 1.2 MB",
        "tokenizer": "data/sample/tokenizer",
        "mesh": "2 ranks on CPU: dp_shard 2",
        "batch": "16 sequences × 256 tokens = 4,096 tokens per step (4 × 2 "
        "data-parallel ranks × 2 accumulation steps)",
        "length": "300 steps, 1,228,800 tokens; from step 0",
        "dispersion": "λ 0.1, τ 1.0, layers all, κ 0.25, norm_eps 0.01, variant "
        "angular, estimator exact",
        "condensation": "measured every 10 steps on 8 held-out sequences",
        "checkpoints": "every 100 steps, the last 3 are kept",
        "writes to": "outputs/demo_cpu",
        "curves": "tensorboard --logdir outputs/demo_cpu/tb",
        "to stop": "Ctrl-C saves and ends; the same command resumes",
    }


OFF = ("--metrics.no-enable-tensorboard", "--checkpoint.no-enable")


@pytest.mark.parametrize(
    ("row", "options", "text"),
    [
        ("dispersion", ["--dispersion.no-enabled"], "off"),
        (
            "dispersion",
            ["--dispersion.decay", "linear", "--dispersion.warmup_steps", "9"],
            "λ 0.1, τ 1.0, layers all, κ 0.25, norm_eps 0.01, variant angular, "
            "estimator exact, warmup_steps 9, decay linear",
        ),
        (
            "dispersion",
            [
                "--dispersion.variant",
                "vicreg",
                "--dispersion.options",
                "gamma=2",
                "--dispersion.losses",
                '[{"variant": "cosine", "weight": 0.5}]',
            ],
            "λ 0.1, layers all, variant vicreg, estimator exact, gamma=2\n"
            "and variant=cosine,weight=0.5",
        ),
        (
            "condensation",
            ["--condensation.interval", "0"],
            "not measured (condensation.interval = 0)",
        ),
        ("validation", [], None),
        (
            "model",
            ["--model.overrides", "n_layers=2", "--baseline.method", "noisy_embedding"],
            "qwen3_disp nano: 229,760 parameters, 2 blocks, width 64, vocabulary "
            "2,048\nchanged: n_layers=2\ntrained with noisy_embedding",
        ),
        (
            "validation",
            ["--validation.enable", "--validation.dataset_path", "d"],
            "every 10 steps on d",
        ),
        ("checkpoints", OFF, "off: nothing is saved"),
        ("checkpoints", ["--checkpoint.load_only"], "only loaded: nothing is saved"),
        ("curves", OFF, None),
        (
            "to stop",
            OFF,
            "touch outputs/demo_cpu/stop ends the run; once the file is removed, the "
            "same command begins anew",
        ),
        (
            "length",
            ["--checkpoint.initial_load_path", "w"],
            "300 steps, 1,228,800 tokens; from step 0, with the weights of w",
        ),
        (
            "length",
            ["--checkpoint.initial_load_in_hf"],
            "300 steps, 1,228,800 tokens; from step 0, with the weights of "
            "data/sample/tokenizer",
        ),
    ],
)
def test_what_is_off_or_on(row, options, text, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert rows_of(trainer_of(*options)).get(row) == text


def test_a_resume_that_ends_early():
    trainer = trainer_of(step=200)
    trainer.last_step = 250
    assert rows_of(trainer)["length"].endswith(
        "; resumes after step 200\nends after step 250 (budget.stop_at_tokens)"
    )


def test_a_mesh_of_replicas():
    trainer = trainer_of(dp_replicate=80, dp_shard=4, tp=2)
    trainer.job_config.training.global_batch_size = 640
    rows = rows_of(trainer)
    assert rows["mesh"] == "640 ranks on CPU: dp_replicate 80 × dp_shard 4 × tp 2"
    assert "(4 × 320 data-parallel ranks × 2 accum" in rows["batch"]


def test_a_mesh_of_one_rank():
    assert rows_of(trainer_of(dp_shard=1))["mesh"] == "1 rank on CPU"


def test_sources_have_their_shares_and_many_are_counted():
    trainer = trainer_of()
    weights = {f"s{i}": 1.0 for i in range(10)}
    trainer.dataloader.groups = shares(weights, 20)
    trainer.dataloader.files = [
        DataFile(f"{name}/a", f"{name}/a", 600) for name in weights
    ]
    data = rows_of(trainer)["data"]
    assert data.startswith("s0, 10.0% of the tokens: 1 file, 600 bytes\ns1, 10.0%")
    assert data.endswith(
        "s7, 10.0% of the tokens: 1 file, 600 bytes\nand 2 more sources"
    )


@pytest.mark.parametrize(
    ("timeout", "options", "text"),
    [
        (None, (), "saves and ends, too, if the save takes less than 30 s"),
        ("900", (), "saves and ends, too, if the save takes less than 900 s"),
        ("900", OFF, "ends the run, too, if the step takes less than 900 s"),
    ],
)
def test_torchrun_by_hand_names_its_timeout(timeout, options, text, monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    if timeout is not None:
        monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", timeout)
    file, torchrun = rows_of(trainer_of(*options))["to stop"].splitlines()
    assert file.startswith("touch outputs/demo_cpu/stop ")
    assert torchrun == (f"SIGTERM to torchrun {text} (TORCH_ELASTIC_SHUTDOWN_TIMEOUT)")


def test_a_job_of_slurm_names_no_ctrl_c(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7.0.123456")
    assert rows_of(trainer_of())["to stop"] == (
        "touch outputs/demo_cpu/stop saves and ends; once the file is removed, the "
        "same command resumes. scancel does not save"
    )
