"""Progress bars of long commands, on stderr. Only a terminal shows them: a log, such as that of a SLURM job, has none."""

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm import tqdm


def progress(what: str, unit: str, items: Iterable[Any] | None = None, total: float | None = None) -> tqdm:
    """Return a progress bar that says what a command does, how far it is and how long the rest will take.

    It disappears when it is closed.

    Args:
        what: what the command does, such as "verifying step-300".
        unit: what is counted, such as "file"; bytes ("B") are shown in kB, MB and so on.
        items: iterated over through the bar, which then counts and closes by itself. Without them, call ``update`` and ``close``,
            or use the bar as a context manager.
        total: how many units there are in all; default: the length of ``items`` where it has one.
    """
    return tqdm(items, desc=what, total=total, unit=unit, unit_scale=unit == "B", leave=False, disable=None)


@contextlib.contextmanager
def no_bars_in_logs() -> Iterator[None]:
    """Disable the bars of all libraries within the block, unless stderr is a terminal.

    lm-evaluation-harness enables each of its bars explicitly, which no setting of tqdm overrides.
    """
    if sys.stderr.isatty():
        yield
        return
    enabled = tqdm.__init__

    def disabled(bar: tqdm, *args: Any, **options: Any) -> None:
        enabled(bar, *args, **{**options, "disable": True})

    tqdm.__init__ = disabled
    try:
        yield
    finally:
        tqdm.__init__ = enabled
