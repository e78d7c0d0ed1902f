"""What the benchmarks share: a process for each case, and tables."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import pandas


@dataclass
class Printed:
    """The option that all benchmarks have."""

    json: bool = False
    """Print only one JSON object."""


def in_a_fresh_process(function: Callable[..., Any], *args: object) -> Any:
    """Call a function in a process of its own, because peak memory is a process's
    high-water mark.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def timed(
    function: Callable[..., object],
    *args: object,
    clock: Callable[[], float] = time.process_time,
) -> tuple[float, float]:
    """Return seconds and this process's CPU seconds, which depend less on how busy the
    machine is.
    """
    start = time.perf_counter()
    cpu = clock()
    function(*args)
    return time.perf_counter() - start, clock() - cpu


def show(as_json: bool, **results: Any) -> None:
    """Print results as one JSON object, or as tables.

    Columns have the numbers' names, and bytes are shown in MiB.
    """
    if as_json:
        print(json.dumps(results))
        return
    for name, rows in results.items():
        frame = pandas.DataFrame([rows] if isinstance(rows, dict) else rows).drop(
            columns="all", errors="ignore"
        )
        for column in frame.filter(like="_bytes"):
            frame[column.replace("_bytes", "_MiB")] = frame.pop(column) / 2**20
        frame.columns = [column.replace("_", " ") for column in frame.columns]
        shown = frame.to_string(
            index=False,
            na_rep="",
            float_format=lambda x: f"{x:,.0f}" if x >= 1000 else f"{x:.4g}",
        )
        print(f"{name.replace('_', ' ')}:\n{shown}\n")
