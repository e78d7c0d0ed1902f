"""Functions that the benchmarks share: fresh processes, times and tables."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import pandas
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Printed:
    """The option of all benchmarks that print tables."""

    json: bool = False
    """Print only one JSON object."""


def in_a_fresh_process(function: Callable[..., Any], *args: object) -> Any:
    """Return the result of a function that is called in a new process.

    Peak memory is the high-water mark of a process, so each case needs its own.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def timed(function: Callable[..., object], *args: object) -> tuple[float, float]:
    """Return the seconds and the CPU seconds of a call, until a GPU has done its work. CPU
    seconds depend less on other work on the machine.
    """
    synchronize = torch.get_device_module(DEVICE).synchronize
    synchronize()
    start = time.perf_counter()
    cpu = time.process_time()
    function(*args)
    synchronize()
    return time.perf_counter() - start, time.process_time() - cpu


def show(as_json: bool, **results: Any) -> None:
    """Print the rows of each name as one JSON object, or as tables. Tables have bytes in
    MiB.
    """
    frames = {name: pandas.DataFrame(rows) for name, rows in results.items()}
    if as_json:
        # pandas writes null for a number that a row does not have.
        rows = {
            name: json.loads(frame.to_json(orient="records"))
            for name, frame in frames.items()
        }
        print(json.dumps(rows))
        return
    for name, frame in frames.items():
        bytes_columns = frame.filter(like="_bytes").columns
        frame[bytes_columns] = frame[bytes_columns] / 2**20
        frame = frame.rename(
            columns=lambda name: name.replace("_bytes", " MiB").replace("_", " ")
        )
        table = frame.to_string(index=False, na_rep="", float_format=_digits)
        print(f"{name}:\n{table}\n")


def _digits(x: float) -> str:
    """Return a number with four digits, or with all digits before the point."""
    if x >= 1000:
        return f"{x:,.0f}"
    return f"{x:.4g}"
