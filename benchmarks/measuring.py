"""What the benchmarks share: a process for each case, and tables."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pandas


def in_a_fresh_process(function: Callable[..., Any], *args: object) -> Any:
    """Call a function in a process of its own, because peak memory is a process's high-water mark."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as lines of text. Columns have the numbers' names, and bytes are shown in MiB."""
    frame = pandas.DataFrame(rows)
    for name in frame.filter(like="_bytes"):
        frame[name.replace("_bytes", "_MiB")] = frame.pop(name) / 2**20
    frame.columns = [name.replace("_", " ") for name in frame.columns]
    return frame.to_string(index=False, na_rep="", float_format=lambda x: f"{x:,.0f}" if x >= 1000 else f"{x:.4g}")
