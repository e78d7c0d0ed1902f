"""How a run spent its time.

Every second of it is listed here, and a clock is moved by the tests.
"""

import functools
import time

import pytest

from titan_disp.run import liveness
from titan_disp.run.history import Goodput, goodputs
from titan_disp.run.liveness import Clock, allocation_began, process_began


def row(step, at, **spent):
    return {
        "step": step,
        "time": at,
        "spent": {"start_up": 0.0, "checkpoints": 0.0, "condensation": 0.0} | spent,
    }


ROWS = [
    # Allocated at 0, trains from 60, first step done at 70. A step takes 10 s, and so
    # does a checkpoint after step 15.
    row(10, 160, start_up=70, steps=90),
    row(20, 270, start_up=70, steps=190, checkpoints=10),
    row(30, 370, start_up=70, steps=290, checkpoints=10),
    # Killed. Allocated again at 500, continues from step 20 at 540, first step done at
    # 560.
    row(30, 650, start_up=60, steps=90),
    row(40, 770, start_up=60, steps=190, checkpoints=10, condensation=10),
]


def begin(step, time, allocated=0):
    return {
        "event": "resume" if step else "start",
        "step": step,
        "time": time,
        "allocated": allocated,
    }


SPENT = {"start_up": 60, "steps": 190, "checkpoints": 15, "condensation": 10}
EVENTS = [
    begin(0, 60),
    begin(20, 540, 500),
    {"event": "complete", "step": 40, "time": 780, "spent": SPENT},
]


def test_the_report_says_it(tmp_path):
    from tests import test_report as report

    rows = [
        {**report.row(r["step"], report.T0 + r["time"]), "spent": r["spent"]}
        for r in ROWS
    ]
    events = [
        report.event(e["event"], e["step"], report.T0 + e["time"])
        | (
            {"spent": e["spent"]}
            if "spent" in e
            else {"allocated": report.T0 + e["allocated"]}
        )
        for e in EVENTS
    ]
    run = report.write_run(tmp_path / "run", rows, events, steps=40)
    page = report.page_of(run, now=report.T0 + 800)
    (cell,) = report.cells(page, "goodput")
    # 380 of 780 s, which are those from the first allocation to the last line.
    lost = "start-up 2 min 10 s, waiting 2 min 10 s, repeated 1 min 40 s, checkpoints 25 s, condensation 10 s"
    assert cell.startswith(f"48.7% of 13 min 0 s; {lost}")
    # 190 of 370 s, and 190 of the 280 s of the second allocation.
    assert [line[8] for line in report.starts(page)] == [
        "51.4%",
        "67.9%",
    ]


FIRST = Goodput(kept=190, repeated=100, start_up=70, checkpoints=10)
SECOND = Goodput(
    kept=190, start_up=60, checkpoints=15, condensation=10, waiting=130, other=5
)
LOADING = [
    {"event": e, "step": 20, "time": 1040}
    for e in ("checkpoint_damaged", "streams_restarted")
]
HELD = {"event": "stop", "step": 20, "time": 86_430, "allocated": 86_400}
COMPLETE = {"event": "complete", "step": 40, "time": 86_430}
LAST = [FIRST, SECOND, Goodput(start_up=30)]
TWO = [
    row(10, 110, start_up=20, steps=90),
    row(20, 210, start_up=20, steps=190),
    row(20, 290, start_up=250, steps=40),
]
CASES = {
    "killed and resumed": (ROWS, EVENTS, [FIRST, SECOND]),
    "nothing is said before the first row": ([], [begin(0, 0.0)], []),
    # The second start-up begins at the first start's end, not at the allocation. It
    # repeats 5 of its steps: halfway between the rows of steps 10 and 20.
    "two starts in one allocation": (
        TWO,
        [begin(0, 10), begin(15, 240)],
        [Goodput(kept=140, repeated=50, start_up=20), Goodput(kept=40, start_up=40)],
    ),
    # The third start finds the second's checkpoint damaged. It repeats steps of both,
    # and what the second repeated.
    "a start that falls back behind the one before": (
        [*ROWS, row(20, 1150, start_up=50, steps=90)],
        [*EVENTS[:2], *LOADING, begin(10, 1050, 1000)],
        [
            Goodput(kept=90, repeated=200, start_up=70, checkpoints=10),
            Goodput(
                repeated=190, start_up=60, checkpoints=10, condensation=10, waiting=130
            ),
            Goodput(kept=90, start_up=50, waiting=1000 - 770, other=10),
        ],
    ),
    # A start that a stop file holds a day later is separate. Its time does not belong
    # to the killed start before.
    "a start that trains nothing": (
        ROWS[:3],
        [EVENTS[0], HELD],
        [FIRST, Goodput(waiting=86_400 - 370, start_up=30)],
    ),
    # Two starts are killed in the first step, 40 and 90 s after their allocations. The
    # third one continues.
    "starts that were killed before a row": (
        [*ROWS[:3], row(30, 1150, start_up=60, steps=90)],
        [EVENTS[0], begin(20, 540, 500), begin(20, 790, 700), begin(20, 1040, 1000)],
        [
            *(
                FIRST,
                Goodput(start_up=40, waiting=500 - 370),
                Goodput(start_up=90, waiting=700 - 540),
            ),
            Goodput(kept=90, start_up=60, waiting=1000 - 790),
        ],
    ),
    # A chain of jobs starts a complete run again after a day. A checkpoint with only
    # the model is not loaded then.
    "complete, and loaded": (
        ROWS,
        [*EVENTS, begin(40, 86_420, 86_400), COMPLETE],
        LAST,
    ),
    "complete": (ROWS, [*EVENTS, {**COMPLETE, "allocated": 86_400}], LAST),
}


@pytest.mark.parametrize("name", CASES)
def test_starts(name):
    rows, events, expected = CASES[name]
    assert goodputs(rows, events) == expected


def test_the_clock(monkeypatch):
    # the machine's clock and the monotonic one
    now = {"time": 1000.0, "monotonic": 50.0}
    for name in now:
        monkeypatch.setattr(liveness.time, name, functools.partial(now.get, name))
    timer = Clock(began=900.0)

    def during(kind, *seconds):
        with timer.during(kind):
            for part in seconds:
                now["monotonic"] += part
                said = timer.spent()
        return said

    during("condensation", 7)  # before the first step
    now["monotonic"] += 3
    assert during("steps", 40)["start_up"] == 100 + 3 + 40  # it compiles
    during("checkpoints", 5)
    now["monotonic"] += 1  # other time
    now["time"] += 3600  # the clock is set, which changes nothing
    expected = {
        "start_up": 143.0,
        "steps": 4.0,
        "checkpoints": 5.0,
        "condensation": 7.0,
        "validation": 0.0,
    }
    assert during("steps", 4) == expected
    during("validation", 6)
    assert timer.rounded() == expected | {"validation": 6.0}
    with timer.during("steps"):  # here, the first step is a step
        now["monotonic"] += 2
        assert timer.step_seconds() == 40 + 4 + 2
    now["monotonic"] += 9
    assert timer.step_seconds() == 46


def test_the_begin_of_an_allocation():
    assert allocation_began({"SLURM_JOB_START_TIME": "1700000000"}) == 1_700_000_000
    assert allocation_began({"SLURM_JOB_START_TIME": "soon"}) == process_began()
    assert 0 <= time.time() - process_began() < 86400  # when pytest began
