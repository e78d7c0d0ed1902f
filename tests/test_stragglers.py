"""Who is waited for: by hand-made times, and by a clock that the test moves. With real ranks: tests/test_run_ends.py."""

import pytest

from titan_disp.run import liveness
from titan_disp.run.liveness import Stragglers, straggler

HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], None),
        ([1.0, 1.1, 1.2, 1.0], None),  # 1.2 × the median of 1.0 is not more than that
        ([1.0, 1.0, 1.3, 1.1], {"rank": 2, "host": "b", "seconds": 1.3, "median": 1.0}),
        ([0.5, 1.0, 1.0, 1.0], None),  # one that is faster keeps nobody waiting
        ([1.0, 2.0], {"rank": 1, "host": "a", "seconds": 2.0, "median": 1.0}),
        ([0.0, 0.0, 0.0, 0.0], None),  # before there is anything to compare
    ],
)
def test_the_slowest_is_named(own, expected):
    assert straggler(own, HOSTS) == expected


def test_waiting_for_others_is_not_a_ranks_own_time(monkeypatch):
    """Steps of 10 s wall time with two microbatches; this rank waits 4 s in the first and 6 s in the second."""
    now = [0.0]
    monkeypatch.setattr(liveness.time, "perf_counter", lambda: now[0])
    timer = Stragglers()

    def step(loading, waiting, computing):
        for seconds in loading:
            now[0] += seconds
            timer.arrived()
        now[0] += waiting
        timer.met()
        now[0] += computing / 2
        timer.met()  # the second microbatch's forward; nobody is waited for before it
        now[0] += computing / 2

    step([100, 100], 50, 100)
    assert timer.own_seconds() == 0.0  # a start, with its compilation, is compared with nothing
    step([1, 1], 4, 4)
    step([0.5, 0.5], 6, 3)
    assert timer.own_seconds() == pytest.approx((6 + 4) / 2)
    step([3, 3], 0, 4)
    assert timer.own_seconds() == pytest.approx(10)
