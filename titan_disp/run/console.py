"""What a run shows on the console, and the file with the whole log of each rank.

A run begins with ``title`` and ``overview``, which say what is on. ``split_log`` keeps
everything else that only an expert asks for away from the console.
"""

import logging
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torchtitan
from torchtitan.config import Job
from torchtitan.tools.logging import logger

from titan_disp import cpu
from titan_disp.config.batch import tokens_per_step
from titan_disp.config.types import JobConfig
from titan_disp.data.loader import StreamLoader
from titan_disp.dispersion.variants import find_variant, options_of
from titan_disp.errors import counted
from titan_disp.run.folder import job_id, versions
from titan_disp.run.reader import STOP
from titan_disp.tables import OPTIONS, shown, written_out
from titan_disp.text import byte_size

LOG = "full.log"  # in the rank's folder, beside torchrun's stdout.log and stderr.log
# Warnings that the console does not show: a pattern of the message, and why it means
# nothing. On a CPU, those of cpu.HARMLESS come with them.
HARMLESS = {
    r"model\.safetensors\.index\.json not found": (
        "without this file, weights are exported as one file, which is complete"
    ),
    r"TORCH_NCCL_ASYNC_ERROR_HANDLING\] = 1 will be overridden": (
        "torchrun has set the 1, and TorchTitan sets what it needs"
    ),
    "Set timeout is now only supported for either nccl or gloo": (
        "TorchTitan's groups that never communicate are fake ones without a time-out"
    ),
}
# Keys of [dispersion] that an overview names even if they have their defaults, besides
# the options that the variant uses
TELLING = ("coeff", "layers", "variant", "estimator")
SYMBOLS = {"coeff": "λ", "tau": "τ", "clamp": "κ"}
TABLES = ("enabled", "options", "losses")  # keys that are written in another way
SHOWN_SOURCES = 8  # the other sources of data are counted
NAME_WIDTH = 14
WIDTH = 115  # columns of an overview, unless a path is longer
TIME_WIDTH = len("05:40:05  ")


class ConsoleFormatter(logging.Formatter):
    """Write the time of day and the message, and the level if it is a warning or an
    error.

    Further lines of a message are indented, so that the times stand out.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s", datefmt="%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = ""
        if record.levelno > logging.INFO:
            level = f"{record.levelname} "
        text = f"{record.asctime}  {level}{record.message.rstrip()}"
        return text.replace("\n", "\n" + " " * TIME_WIDTH)


def is_for_console(record: logging.LogRecord) -> bool:
    """Return whether the console shows a record: a warning or error that is not
    harmless, or what the root logger gets from other files than TorchTitan's.

    Details that nobody misses go to a logger of another name.
    """
    if record.levelno > logging.INFO:
        harmless = [*HARMLESS, *(cpu.HARMLESS if cpu.active() else ())]
        return not re.search("|".join(harmless), record.getMessage())
    is_torchtitans = record.pathname.startswith(*torchtitan.__path__)
    return record.name == "root" and not is_torchtitans


def log_file() -> Path | None:
    """Return this rank's ``LOG``, or None if torchrun keeps no files of its output."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and Path(error_file).with_name("stdout.log").exists():
        return Path(error_file).with_name(LOG)
    return None


def split_log() -> None:
    """Write all records to this rank's ``LOG``, and those ``is_for_console`` to the
    console. Ranks other than 0 print warnings and errors only.

    Without such a file, the console keeps everything, as ``init_logger`` has set it up.
    """
    path = log_file()
    if path is None:
        return
    try:
        file = logging.FileHandler(path)
    except OSError as error:
        logger.warning(f"{path} cannot be written, so everything is shown: {error}")
        return
    (console,) = logger.handlers
    file.setFormatter(console.formatter)
    logger.addHandler(file)
    console.setFormatter(ConsoleFormatter())
    console.addFilter(is_for_console)
    if os.environ.get("RANK") != "0":
        console.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # Otherwise a full disk would print a traceback at every record.
    logging.raiseExceptions = False


def title(job: JobConfig) -> str:
    """Return the first line of a run: versions, and what is trained."""
    description = job.job.description
    if description == Job.description:
        description = f"{job.model.name} {job.model.flavor}"
    packages = versions()
    return (
        f"titan-disp {packages.get('titan-disp')} (torch {packages.get('torch')}, "
        f"torchtitan {packages.get('torchtitan')}): {description}"
    )


def overview(trainer: Any) -> str:
    """Return what is on in a start, one subject per line.

    ``trainer`` is a ``titan_disp.train.DispTrainer`` that has loaded its checkpoint.
    """
    job = trainer.job_config
    rows = {
        "model": _model(trainer),
        "data": "\n".join(_data(job, trainer.dataloader)),
        "tokenizer": job.model.hf_assets_path,
        "mesh": _mesh(trainer),
        "batch": _batch(trainer),
        "length": _length(trainer),
        "dispersion": _dispersion(job.dispersion),
        "condensation": _condensation(trainer),
        "validation": _validation(job),
        "checkpoints": _checkpoints(job),
        "writes to": _writes(trainer),
        "whole log": str(log_file() or ""),
        "to stop": _stop(job),
    }
    return "\n".join(_row(name, text) for name, text in rows.items() if text)


def _row(name: str, text: str) -> str:
    """Return a name and its text, whose further lines are below the first."""
    indent = " " * NAME_WIDTH
    lines = [
        textwrap.fill(
            line,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,  # a path can be copied
            break_on_hyphens=False,
        )
        for line in text.splitlines()
    ]
    return name.ljust(NAME_WIDTH) + "\n".join(lines)[NAME_WIDTH:]


def _model(trainer: Any) -> str:
    model = trainer.job_config.model
    args = trainer.model_args
    parameters = sum(p.numel() for p in trainer.model_parts[0].parameters())
    text = (
        f"{model.name} {model.flavor}: {parameters:,} parameters, "
        f"{counted(args.n_layers, 'block')}, width {args.dim}, vocabulary "
        f"{args.vocab_size:,}"
    )
    if model.overrides:
        text += f"; changed: {written_out(model.overrides)}"
    method = trainer.job_config.baseline.method
    if method != "none":
        text += f"; trained with {method}"
    return text


def _data(job: JobConfig, loader: StreamLoader) -> Iterator[str]:
    shares = loader.groups
    for share in shares[:SHOWN_SOURCES]:
        files = [file for file in loader.files if share.owns(file)]
        size = byte_size(sum(file.size for file in files), 3)
        source = job.training.dataset_path or f"{job.training.dataset}, from the hub"
        if share.name:
            source = f"{share.name}, {share.tokens:.1%} of the tokens"
        yield f"{source}: {counted(len(files), 'file')}, {size}"
    hidden = len(shares) - SHOWN_SOURCES
    if hidden > 0:
        yield f"and {counted(hidden, 'more source')}"


def _mesh(trainer: Any) -> str:
    dims = trainer.parallel_dims
    degrees = [
        f"{name} {getattr(dims, name)}"
        for name in ("dp_replicate", "dp_shard", "cp", "tp")
        if getattr(dims, name) > 1
    ]
    device = trainer.metrics_processor.device_memory_monitor.device_name
    ranks = f"{counted(dims.world_size, 'rank')} on {device}"
    return ": ".join(filter(None, [ranks, " × ".join(degrees)]))


def _dp_degree(trainer: Any) -> int:
    return trainer.parallel_dims.dp_replicate * trainer.parallel_dims.dp_shard


def _batch(trainer: Any) -> str:
    training = trainer.job_config.training
    dp_degree = _dp_degree(trainer)
    tokens = tokens_per_step(trainer.job_config, dp_degree)
    accumulation = counted(trainer.gradient_accumulation_steps, "accumulation step")
    return (
        f"{tokens // training.seq_len:,} sequences × {training.seq_len:,} tokens = "
        f"{tokens:,} tokens per step ({training.local_batch_size} × "
        f"{counted(dp_degree, 'data-parallel rank')} × {accumulation})"
    )


def _length(trainer: Any) -> str:
    steps = trainer.job_config.training.steps
    tokens = steps * tokens_per_step(trainer.job_config, _dp_degree(trainer))
    parts = [f"{steps:,} steps, {tokens:,} tokens", _beginning(trainer)]
    if trainer.last_step < steps:
        parts.append(f"ends after step {trainer.last_step:,} (budget.stop_at_tokens)")
    return "; ".join(parts)


def _beginning(trainer: Any) -> str:
    if trainer.step:
        return f"resumes after step {trainer.step:,}"
    checkpoint = trainer.job_config.checkpoint
    weights = checkpoint.initial_load_path
    if checkpoint.initial_load_in_hf:
        weights = weights or trainer.job_config.model.hf_assets_path
    if checkpoint.enable and weights:
        return f"from step 0, with the weights of {weights}"
    return "from step 0"


def _dispersion(section: Any) -> str:
    """Return the keys of [dispersion] that say which loss this is, and those that differ
    from their defaults.
    """
    if not section.enabled:
        return "off"
    defaults = vars(type(section)())
    telling = {*TELLING, *options_of(find_variant(section.variant))}
    parts = [
        f"{SYMBOLS.get(key, key)} {shown(value)}"
        for key, value in vars(section).items()
        if key in telling or (value != defaults[key] and key not in TABLES)
    ]
    if section.options:
        parts.append(written_out(section.options, OPTIONS))
    parts += [f"and {written_out(loss)}" for loss in section.losses]
    return ", ".join(parts)


def _condensation(trainer: Any) -> str:
    section = trainer.job_config.condensation
    if not section.interval:
        return "not measured (condensation.interval = 0)"
    if trainer.monitor is None:
        return "not measured, because there is no held-out text"
    sequences = counted(section.sequences, "held-out sequence")
    return f"measured every {counted(section.interval, 'step')} on {sequences}"


def _validation(job: JobConfig) -> str:
    section = job.validation
    if not section.enable:
        return ""
    data = section.dataset_path or section.dataset
    return f"every {counted(section.freq, 'step')} on {data}"


def _checkpoints(job: JobConfig) -> str:
    checkpoint = job.checkpoint
    if not checkpoint.enable:
        return "off: nothing is saved"
    if checkpoint.load_only:
        return "only loaded: nothing is saved"
    kept = "all are kept"
    if checkpoint.keep_latest_k:
        kept = f"the last {checkpoint.keep_latest_k} are kept"
    return f"every {counted(checkpoint.interval, 'step')}, {kept}"


def _writes(trainer: Any) -> str:
    job = trainer.job_config
    if not job.metrics.enable_tensorboard:
        return job.job.dump_folder
    board = trainer.metrics_processor.tensorboard_folder
    return f"{job.job.dump_folder} (to see curves: tensorboard --logdir {board})"


def _stop(job: JobConfig) -> str:
    again = "begins anew"
    ends = "ends the run"
    if job.checkpoint.enable and not job.checkpoint.load_only:
        again = "resumes"
        ends = "saves and ends"
    # cluster.launch starts ranks with such an id, and passes Ctrl-C on to them.
    if os.environ.get("TORCHELASTIC_RUN_ID", "").startswith("titan-disp-"):
        return f"Ctrl-C {ends}; the same command {again}"
    file = os.path.join(job.job.dump_folder, STOP)
    text = f"touch {file} {ends}; once the file is removed, the same command {again}"
    if job_id():
        text += ". scancel does not save"
    return text
