"""This module shows each warning of lm-evaluation-harness once, rather than for each of 57 subjects of each model."""

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from titan_disp.wording import counted


class _FirstOfEach(logging.Filter):
    """Lets the first record of each line of code through, and counts the others."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        place = (record.pathname, record.lineno)
        self.seen[place] += 1
        return self.seen[place] == 1


@contextmanager
def warnings_once(name: str = "lm_eval") -> Iterator[None]:
    """Print the first warning of each line of code on stderr, and at the end the number of others."""
    logger, first = logging.getLogger(name), _FirstOfEach()
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.WARNING)
    handler.addFilter(first)
    before = logger.handlers, logger.propagate
    logger.handlers, logger.propagate = [handler], False
    try:
        yield
    finally:
        logger.handlers, logger.propagate = before
        if more := sum(first.seen.values()) - len(first.seen):
            print(
                f"{name} gave {counted(more, 'more warning')} of the same kinds, for other tasks or models",
                file=sys.stderr,
            )
