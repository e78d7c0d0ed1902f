"""This module finds faulty GPUs of this node, as far as their drivers report faults to users other than root.

nvidia-smi, amd-smi and rocm-smi count uncorrectable errors. nvidia-smi does not show Xids, the errors that NVIDIA's
driver writes to the kernel log. Newer drivers report the action that they require (``gpu_recovery_action``). With older
drivers, the kernel log is read if this user has permission.
"""

import csv
import re
import subprocess
import time
from collections.abc import Iterable, Iterator

LIMIT = 60  # seconds for a tool: if it hangs, so does the driver
DAY = 86400.0
RECOVERY = "gpu_recovery_action"
# nvidia-smi's fields, the value of a healthy GPU, and the message for any other value.
NVIDIA_FIELDS = {
    "ecc.errors.uncorrected.volatile.total": ("0", "{} uncorrectable memory errors since the driver was loaded"),
    "remapped_rows.failure": ("No", "failed memory could not be remapped ({})"),
    "remapped_rows.pending": ("No", "remapping failed memory needs a reset of the GPU ({})"),
    RECOVERY: ("None", "the driver asks for a recovery action ({})"),
}
UNKNOWN = ("N/A", "[N/A]", "[Not Supported]")
# Xids that no application causes: a double-bit error, a failed retirement of memory, a GPU that has fallen off the bus,
# an uncontained error, and a GSP (the GPU's own processor) that has failed or does not answer. Source: nverror.h of
# NVIDIA's open kernel modules.
HARDWARE_XIDS = (48, 64, 79, 95, 119, 120)
XID = re.compile(r"(?m)^(?:\[ *([\d.]+)\] )?NVRM: Xid \((PCI:[^)]*)\): (\d+), (.*)$")


def gpu_problems() -> list[str]:
    """Describe the faults of this node's GPUs. The list is empty if no vendor tool is installed."""
    try:
        nvidia = {field: _nvidia(field) for field in NVIDIA_FIELDS}
        problems = []
        for field, (sound, text) in NVIDIA_FIELDS.items():
            unsound = {gpu: value for gpu, value in nvidia[field].items() if value not in (sound, *UNKNOWN)}
            problems += [f"GPU {gpu}: {text.format(value)}" for gpu, value in unsound.items()]
        problems += [f"GPU {gpu}: {count} uncorrectable errors" for gpu, count in _amd().items() if count]
    except subprocess.TimeoutExpired as error:
        return [f"{error.cmd[0]} does not answer within {LIMIT} s"]
    told = [value for value in nvidia[RECOVERY].values() if value not in UNKNOWN]
    return problems if told else problems + list(dict.fromkeys(_xids()))


def _output(*command: str) -> str:
    """Return what a command prints, or an empty string if it is missing or fails.

    Raises:
        subprocess.TimeoutExpired: The command hangs.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _nvidia(field: str) -> dict[str, str]:
    """Return one field of each GPU. Fields are queried singly: nvidia-smi rejects queries with any unknown field."""
    text = _output("nvidia-smi", f"--query-gpu=index,{field}", "--format=csv,noheader")
    return dict(row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 2)


def _amd() -> dict[str, int]:
    """Return the number of uncorrectable errors of each GPU, from amd-smi or the older rocm-smi."""
    counts = {}
    for gpu, text in _parts(r"(?m)^GPU: (\d+)$", _output("amd-smi", "metric", "--ecc")):
        counts[gpu] = re.findall(r"(?m)^ *TOTAL_UNCORRECTABLE_COUNT: (\d+)$", text)
    if not any(counts.values()):
        for gpu, text in _parts(r"(?m)^GPU\[(\d+)\]: +\tRAS INFO$", _output("rocm-smi", "--showrasinfo")):
            # Each row has a block, its status, and the numbers of correctable and uncorrectable errors.
            counts[gpu] = re.findall(r"(?m)^ *\w+ +\w+ +\d+ +(\d+) *$", text)
    return {gpu: sum(map(int, numbers)) for gpu, numbers in counts.items()}


def _parts(head: str, text: str) -> Iterable[tuple[str, str]]:
    """Split a text at the lines that match ``head``. Yields the GPU of each such line and the text below it."""
    _, *parts = re.split(head, text)
    return zip(parts[::2], parts[1::2], strict=True)


def _xids() -> Iterator[str]:
    """Yield the last day's Xids of hardware, from dmesg, or from the journal if only root may run dmesg."""
    try:
        log = _output("dmesg") or _output(
            "journalctl", "--dmesg", "--since=-24h", "--output=cat", "--no-pager", "--quiet"
        )
    except subprocess.TimeoutExpired:  # a slow disk says nothing about the GPUs
        return
    for seconds, gpu, xid, text in XID.findall(log):
        # dmesg prints seconds since the node was booted.
        if int(xid) in HARDWARE_XIDS and (not seconds or time.monotonic() - float(seconds) < DAY):
            yield f"GPU at {gpu}: Xid {xid} within a day: {text}"
