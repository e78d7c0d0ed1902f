import os
import signal

import pytest
import torch.distributed as dist

from tests.distributed import spawn


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("broken on purpose")


def die_at_work():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGABRT)


def die_at_exit():
    dist.destroy_process_group = lambda: os.kill(os.getpid(), signal.SIGABRT)


def test_ranks_that_fail_or_die_fail_the_test():
    """But for a crash after all work, gloo's known abort at exit, and a first one before."""
    with pytest.raises(AssertionError, match="rank 1 failed:(.|\n)*broken on purpose"):
        spawn(2, fail_on_one)
    with pytest.warns(UserWarning, match="tried again"), pytest.raises(AssertionError, match="died at work"):
        spawn(2, die_at_work)
    with pytest.warns(UserWarning, match="at exit"):
        spawn(2, die_at_exit)
