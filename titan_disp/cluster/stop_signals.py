"""The signals by which a user or a terminal asks a command that starts trainings to stop."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def stop_signals(heard: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call ``heard`` at SIGINT, SIGTERM and SIGHUP. Signals that are ignored stay ignored, as SIGHUP under nohup."""
    previous = {}
    try:
        with contextlib.suppress(ValueError):  # outside of the main thread, Python forbids signal handlers
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    previous[number] = signal.signal(number, heard)
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
