"""This module decides what a run shows on the console, and writes the whole log of each
rank to a file.

A run begins with ``title`` and ``overview``, which describe the run. ``split_log``
writes all messages to a file, and hides those from the console that users do not need.
"""

import logging
import os
import re
from pathlib import Path
from shlex import quote
from typing import Any

import torch
import torchtitan
from torchtitan.tools.logging import logger

from titan_disp import cpu
from titan_disp.config.batch import tokens_per_step
from titan_disp.config.types import JobConfig
from titan_disp.dispersion.variants import find_variant, options_of
from titan_disp.errors import counted
from titan_disp.run.folder import versions
from titan_disp.run.reader import STOP
from titan_disp.tables import OPTIONS, shown, written_out
from titan_disp.templates import templates
from titan_disp.text import byte_size

LOG = "full.log"  # in the rank's folder, beside torchrun's stdout.log and stderr.log
# Warnings that the console does not show: {pattern of the message: why it is harmless}.
# cpu.HARMLESS has the warnings on a CPU.
HARMLESS = {
    r"Adjusting (warmup|decay) steps to \d": "schedules.schedule_warnings says this",
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
# Keys of [dispersion] that an overview shows even if they have their default values. An
# overview also shows all options of the variant.
TELLING = ("coeff", "layers", "variant", "estimator")
SYMBOLS = {"coeff": "λ", "tau": "τ", "clamp": "κ"}
# keys that ``_dispersion`` does not write as "key value"
OTHERWISE = ("enabled", "options", "losses")
TIME_WIDTH = len("05:40:05  ")


class ConsoleFormatter(logging.Formatter):
    """Write the time of day and the message, and the level if it is a warning or an
    error.

    Further lines of a message are indented, so that the times stand out.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        level = f"{record.levelname} " if record.levelno > logging.INFO else ""
        text = f"{record.asctime}  {level}{record.message.rstrip()}"
        return text.replace("\n", "\n" + " " * TIME_WIDTH)


def is_for_console(record: logging.LogRecord) -> bool:
    """Return whether the console shows a record.

    The console shows warnings and errors that are not harmless, and other records that
    titan-disp's files write to the root logger. Two kinds of records are only in the
    file: those that TorchTitan's own files write to the root logger, and details that
    modules write to loggers of their own names.
    """
    if record.levelno > logging.INFO:
        harmless = "|".join(HARMLESS | cpu.HARMLESS)
        return not re.search(harmless, record.getMessage())
    is_torchtitans = record.pathname.startswith(tuple(torchtitan.__path__))
    return record.name == "root" and not is_torchtitans


def log_file() -> Path | None:
    """Return this rank's ``LOG``, or None if torchrun writes no output to files."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file and Path(error_file).with_name("stdout.log").exists():
        return Path(error_file).with_name(LOG)
    return None


def split_log() -> None:
    """Write all records to this rank's ``LOG``, and to the console only those for which
    ``is_for_console`` is true. Ranks other than 0 print warnings and errors only.

    If torchrun writes no files, the console shows everything, in TorchTitan's format.
    Call this function once.
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
    console.setFormatter(ConsoleFormatter("%(asctime)s", datefmt="%H:%M:%S"))
    console.addFilter(is_for_console)
    if os.environ.get("RANK") != "0":
        console.setLevel(logging.WARNING)
    logging.captureWarnings(True)
    # Otherwise a full disk would print a traceback at every record.
    logging.raiseExceptions = False


def title(job: JobConfig) -> str:
    """Return the first line of a run: versions, and what is trained."""
    return (
        f"titan-disp {versions().get('titan-disp')} (torch {torch.__version__}, torchtitan "
        f"{torchtitan.__version__}): {job.job.description}"
    )


def overview(trainer: Any) -> str:
    """Return the text of overview.txt.j2: what this start trains, on which data and
    devices, and where it writes.

    ``trainer`` is a ``titan_disp.train.DispTrainer`` that has loaded its checkpoint.
    """
    job = trainer.job_config
    dims = trainer.parallel_dims
    loader = trainer.dataloader
    dp_degree = dims.dp_replicate * dims.dp_shard
    text = (
        templates(__file__)
        .get_template("overview.txt.j2")
        .render(
            vars(job),
            args=trainer.model_args,
            byte_size=byte_size,
            counted=counted,
            device=trainer.metrics_processor.device_memory_monitor.device_name,
            dims=dims,
            dispersion_keys=_dispersion(job.dispersion),
            dp_degree=dp_degree,
            environ=os.environ,
            log_file=log_file(),
            parameters=sum(p.numel() for p in trainer.model_parts[0].parameters()),
            quote=quote,
            sources=[
                (share, list(filter(share.owns, loader.files)))
                for share in loader.groups
            ],
            stop_file=os.path.join(job.job.dump_folder, STOP),
            tokens=tokens_per_step(job, dp_degree),
            trainer=trainer,
            written_out=written_out,
        )
    )
    return text.rstrip()


def _dispersion(section: Any) -> str:
    """Return the keys of [dispersion] that define the loss, and those that differ from
    their defaults, as one line; "" if dispersion is off.
    """
    if not section.enabled:
        return ""
    defaults = vars(type(section)())
    telling = {*TELLING, *options_of(find_variant(section.variant))}
    parts = [
        f"{SYMBOLS.get(key, key)} {shown(value)}"
        for key, value in vars(section).items()
        if key in telling or (value != defaults[key] and key not in OTHERWISE)
    ]
    if section.options:
        parts.append(written_out(section.options, OPTIONS))
    return ", ".join(parts)
