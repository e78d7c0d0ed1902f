"""What the benchmarks share: a process for each case, and tables."""

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pandas


def in_a_fresh_process(function: Callable[..., Any], *args: object) -> Any:
    """Call a function in a process of its own, because peak memory is a process's high-water mark."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def show(as_json: bool, **results: Any) -> None:
    """Print results as one JSON object, or as tables. Columns have the numbers' names, and bytes are shown in MiB."""
    if as_json:
        print(json.dumps(results))
        return
    for name, rows in results.items():
        frame = pandas.DataFrame([rows] if isinstance(rows, dict) else rows).drop(columns="all", errors="ignore")
        for column in frame.filter(like="_bytes"):
            frame[column.replace("_bytes", "_MiB")] = frame.pop(column) / 2**20
        frame.columns = [column.replace("_", " ") for column in frame.columns]
        shown = frame.to_string(index=False, na_rep="", float_format=lambda x: f"{x:,.0f}" if x >= 1000 else f"{x:.4g}")
        print(f"{name.replace('_', ' ')}:\n{shown}\n")
