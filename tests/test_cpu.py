"""What TorchTitan needs on a machine without an accelerator, and tests/distributed.py:
a test whose ranks fail or die fails.
"""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import distributed
from tests.distributed import spawn
from titan_disp import cpu

on_cpus = pytest.mark.skipif(not cpu.active(), reason="this machine has an accelerator")


def on_rank_1(what, number=0):
    if what == "die at exit":
        dist.destroy_process_group = lambda: os.kill(os.getpid(), number)
    elif dist.get_rank() == 0 or what == "hang":
        time.sleep(300 * (what != "die at work"))
    elif what == "fail":
        raise ValueError("broken on purpose")
    else:
        os.kill(os.getpid(), signal.SIGABRT)


@pytest.mark.timeout(120)
def test_ranks_that_fail_or_die_fail_the_test(monkeypatch):
    """All but an abort after all work, which gloo is known for."""
    with pytest.raises(AssertionError, match="-11"):
        spawn(2, on_rank_1, "die at exit", signal.SIGSEGV)
    with pytest.warns(UserWarning, match="after their work"):
        spawn(2, on_rank_1, "die at exit", signal.SIGABRT)
    monkeypatch.setattr(distributed, "GRACE", 0.1)  # rank 0 sleeps
    for what, said in (
        ("fail", "rank 1 failed:(.|\n)*broken on purpose"),
        ("die at work", "died at work"),
    ):
        with pytest.raises(AssertionError, match=said):
            spawn(2, on_rank_1, what)
    wait = distributed.wait

    def run_out_of_time(*args):
        signal.setitimer(signal.ITIMER_REAL, 0.1)  # of pytest-timeout
        return wait(*args)

    monkeypatch.setattr(distributed, "wait", run_out_of_time)
    with pytest.raises(AssertionError, match="2 of 2 ranks hang"):
        spawn(2, on_rank_1, "hang")


def count_threads():
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    groups = [dist.group.WORLD, dist.new_group([0, 1])]
    for group in groups:
        both = torch.ones(1)
        dist.all_reduce(both, group=group)
        assert both == 2
        assert group._get_backend(both.device).options._threads == 1
    # Each has named itself by now: it has done a collective.
    names = [
        file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")
    ]
    assert names.count("pt_gloo_runloop") == len(groups)
    os.environ["GLOO_SOCKET_IFNAME"] = "no_such_interface"
    with pytest.raises(RuntimeError, match="no_such_interface"):
        dist.new_group([0, 1])


@pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc"
)
@on_cpus
def test_a_gloo_group_has_one_thread():
    """Two of them corrupt the heap: titan_disp/cpu.py says how.

    The user still chooses the network's interface.
    """
    spawn(2, count_threads)
