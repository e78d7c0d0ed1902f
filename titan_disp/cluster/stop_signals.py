"""This module handles the signals by which a user or a terminal asks a command that starts trainings to stop."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

TWICE = 1.0  # seconds: timeout(1) signals a process and then its group, so that a request may arrive twice


@contextlib.contextmanager
def stop_signals(heard: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``heard`` at SIGINT, SIGTERM and SIGHUP, but not again within a second of the first.

    Signals that are ignored stay ignored, as SIGHUP under nohup.
    """
    first = None

    def once(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if first is None:
            first = now
        elif now - first < TWICE:
            return
        heard(number, frame)

    previous = {}
    try:
        with contextlib.suppress(ValueError):  # outside of the main thread, Python forbids signal handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, once)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
