"""GPUs of this node that will fail, as far as their drivers tell without root.

nvidia-smi, amd-smi and rocm-smi count uncorrectable errors. nvidia-smi does not tell of Xids, the errors that NVIDIA's driver
writes into the kernel's log; newer drivers say what follows from them (``gpu_recovery_action``), and for others the log is read
where this user may.
"""

import csv
import re
import subprocess
import time
from collections.abc import Iterable, Iterator

LIMIT = 60  # seconds for a tool: one that hangs stands for a driver that does
DAY = 86400.0
RECOVERY = "gpu_recovery_action"
# nvidia-smi's fields, the value that a sound GPU has, and what is said of another.
NVIDIA_FIELDS = {
    "ecc.errors.uncorrected.volatile.total": ("0", "{} uncorrectable memory errors since the driver was loaded"),
    "remapped_rows.failure": ("No", "memory that failed could not be remapped ({})"),
    "remapped_rows.pending": ("No", "memory errors wait for a reset of the GPU ({})"),
    RECOVERY: ("None", "the driver asks for a recovery action ({})"),
}
UNKNOWN = ("N/A", "[N/A]", "[Not Supported]")
# Xids that no application causes: a double bit error, a failed retirement of memory, a GPU off the bus, an uncontained error, and
# a GSP (the GPU's own processor) that does not answer or failed. (nverror.h of NVIDIA's open kernel modules.)
HARDWARE_XIDS = (48, 64, 79, 95, 119, 120)
XID = re.compile(r"(?m)^(?:\[ *([\d.]+)\] )?NVRM: Xid \((PCI:[^)]*)\): (\d+), (.*)$")


def gpu_problems() -> list[str]:
    """What is wrong, in words; nothing where no tool is installed."""
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
    """What a command prints; nothing where it is not there or fails.

    Raises:
        subprocess.TimeoutExpired: it hangs.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""


def _nvidia(field: str) -> dict[str, str]:
    """GPU -> value. Asked for one by one: nvidia-smi refuses a query whole in which it does not know one field."""
    text = _output("nvidia-smi", f"--query-gpu=index,{field}", "--format=csv,noheader")
    return dict(row for row in csv.reader(text.splitlines(), skipinitialspace=True) if len(row) == 2)


def _amd() -> dict[str, int]:
    """GPU -> uncorrectable errors, by amd-smi or the older rocm-smi."""
    counts = {}
    for gpu, text in _parts(r"(?m)^GPU: (\d+)$", _output("amd-smi", "metric", "--ecc")):
        counts[gpu] = re.findall(r"(?m)^ *TOTAL_UNCORRECTABLE_COUNT: (\d+)$", text)
    if not any(counts.values()):
        for gpu, text in _parts(r"(?m)^GPU\[(\d+)\]: +\tRAS INFO$", _output("rocm-smi", "--showrasinfo")):
            # A row for each block: its status, correctable and uncorrectable errors.
            counts[gpu] = re.findall(r"(?m)^ *\w+ +\w+ +\d+ +(\d+) *$", text)
    return {gpu: sum(map(int, numbers)) for gpu, numbers in counts.items()}


def _parts(head: str, text: str) -> Iterable[tuple[str, str]]:
    """(GPU, what follows) for every line that begins a GPU's part of a text."""
    _, *parts = re.split(head, text)
    return zip(parts[::2], parts[1::2], strict=True)


def _xids() -> Iterator[str]:
    """The last day's Xids of hardware, from dmesg or, where that is root's, the journal."""
    try:
        log = _output("dmesg") or _output(
            "journalctl", "--dmesg", "--since=-24h", "--output=cat", "--no-pager", "--quiet"
        )
    except subprocess.TimeoutExpired:  # the disk's fault
        return
    for seconds, gpu, xid, text in XID.findall(log):
        # dmesg's times are of the clock that has run since the node was booted.
        if int(xid) in HARDWARE_XIDS and (not seconds or time.monotonic() - float(seconds) < DAY):
            yield f"GPU at {gpu}: Xid {xid} within a day: {text}"
