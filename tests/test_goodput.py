"""How a run spent its time. Every second of it is listed here, and a clock is moved by the tests."""

import time

import pytest

from titan_disp.run import liveness
from titan_disp.run.history import Goodput, goodputs, together
from titan_disp.run.liveness import Clock, allocation_began, process_began


def row(step, at, **spent):
    return {"step": step, "time": at, "spent": {"start_up": 0.0, "checkpoints": 0.0, "condensation": 0.0} | spent}


ROWS = [
    # Allocated at 0, trains from 60, first step done at 70. A step takes 10 s, and so does a checkpoint after step 15.
    row(10, 160, start_up=70, steps=90),
    row(20, 270, start_up=70, steps=190, checkpoints=10),
    row(30, 370, start_up=70, steps=290, checkpoints=10),
    # Killed. Allocated again at 500, continues from step 20 at 540, first step done at 560.
    row(30, 650, start_up=60, steps=90),
    row(40, 770, start_up=60, steps=190, checkpoints=10, condensation=10),
]


def begin(step, time, allocated=0):
    return {"event": "resume" if step else "start", "step": step, "time": time, "allocated": allocated}


EVENTS = [
    begin(0, 60),
    begin(20, 540, 500),
    {
        **{"event": "complete", "step": 40, "time": 780},
        "spent": {"start_up": 60, "steps": 190, "checkpoints": 15, "condensation": 10},
    },
]


def test_a_killed_and_resumed_run_by_hand():
    first, second = goodputs(ROWS, EVENTS)
    assert first == Goodput(kept=190, repeated=100, start_up=70, checkpoints=10)
    assert first.fraction == pytest.approx(190 / 370)
    assert second == Goodput(kept=190, start_up=60, checkpoints=15, condensation=10, waiting=130, other=5)
    assert second.in_its_allocation().fraction == pytest.approx(190 / 280)
    every = together([first, second])
    assert every.total == 780  # from the first allocation to the last line
    assert every.fraction == pytest.approx(380 / 780)
    assert every.lost() == {
        **{"start-up": 130, "waiting": 130, "repeated": 100},
        **{"checkpoints": 25, "condensation": 10, "other": 5},
    }


def test_the_report_says_it(tmp_path):
    from tests import test_report as report
    from titan_disp.lab.report import tables
    from titan_disp.lab.report.gather import gather

    rows = [{**report.row(r["step"], report.T0 + r["time"]), "spent": r["spent"]} for r in ROWS]
    events = [
        report.event(e["event"], e["step"], report.T0 + e["time"])
        | ({"spent": e["spent"]} if "spent" in e else {"allocated": report.T0 + e["allocated"]})
        for e in EVENTS
    ]
    (run,) = gather([report.write_run(tmp_path / "run", rows, events, steps=40)])
    (cell,) = tables.overview([run], now=report.T0 + 800)["goodput"]
    assert cell.startswith("48.7% of 13 min 0 s; ")
    assert "waiting 2 min 10 s, repeated 1 min 40 s, checkpoints 25 s" in cell
    # 190 of 370 s, 190 of 280 s
    assert [line[8] for line in tables.starts(run, now=report.T0 + 800)] == ["51.4%", "67.9%"]


def test_two_starts_in_one_allocation():
    """The second start-up begins at the first start's end, not at the allocation. It repeats 5 of its steps."""
    rows = [row(10, 110, start_up=20, steps=90), row(20, 210, start_up=20, steps=190)]
    rows.append(row(20, 290, start_up=250, steps=40))
    first, second = goodputs(rows, [begin(0, 10), begin(15, 240)])
    assert first == Goodput(kept=140, repeated=50, start_up=20)  # halfway between the rows of steps 10 and 20
    assert second == Goodput(kept=40, start_up=40)


def test_a_start_that_falls_back_behind_the_one_before():
    """The third start finds the second's checkpoint damaged. It repeats steps of both, and what the second repeated."""
    rows = [*ROWS, row(20, 1150, start_up=50, steps=90)]
    loading = [{"event": e, "step": 20, "time": 1040} for e in ("checkpoint_damaged", "streams_restarted")]
    first, second, third = goodputs(rows, [*EVENTS[:2], *loading, begin(10, 1050, 1000)])
    assert (first.kept, first.repeated) == (90, 200)
    assert (second.kept, second.repeated) == (0, 190)
    assert third == Goodput(kept=90, start_up=50, waiting=1000 - 770, other=10)


def test_a_start_that_trains_nothing():
    """A start that a stop file holds a day later is separate. Its time does not belong to the killed start before."""
    held = {"event": "stop", "step": 20, "time": 86_430, "allocated": 86_400}
    first, second = goodputs(ROWS[:3], [EVENTS[0], held])
    assert first == Goodput(kept=190, repeated=100, start_up=70, checkpoints=10)
    assert second == Goodput(waiting=86_400 - 370, start_up=30)


def test_starts_that_were_killed_before_a_row():
    """Two starts are killed in the first step, 40 and 90 s after their allocations. The third one continues."""
    begins = [EVENTS[0], begin(20, 540, 500), begin(20, 790, 700), begin(20, 1040, 1000)]
    rows = [*ROWS[:3], row(30, 1150, start_up=60, steps=90)]
    first, *killed, last = goodputs(rows, begins)
    assert (first.kept, first.repeated) == (190, 100)
    assert killed == [Goodput(start_up=40, waiting=500 - 370), Goodput(start_up=90, waiting=700 - 540)]
    assert last == Goodput(kept=90, start_up=60, waiting=1000 - 790)
    assert together([first, *killed, last]).total == 1150


@pytest.mark.parametrize("loaded", [True, False])
def test_a_complete_run_waits_for_nothing(loaded):
    """A chain of jobs starts the run again after a day. A checkpoint with only the model is not loaded then."""
    began = [begin(40, 86_420, 86_400)] if loaded else []
    end = {"event": "complete", "step": 40, "time": 86_430} | ({} if loaded else {"allocated": 86_400})
    *before, last = goodputs(ROWS, [*EVENTS, *began, end])
    assert before == goodputs(ROWS, EVENTS)
    assert last == Goodput(start_up=30)


def test_nothing_is_said_before_the_first_row():
    assert goodputs([], [begin(0, 0.0)]) == []


@pytest.fixture
def times(monkeypatch):
    """The machine's clock and the monotonic one."""
    times = {"wall": 1000.0, "ticks": 50.0}
    monkeypatch.setattr(liveness.time, "time", lambda: times["wall"])
    monkeypatch.setattr(liveness.time, "monotonic", lambda: times["ticks"])
    return times


def test_the_clock(times):
    timer = Clock(began=900.0)

    def during(kind, seconds):
        with timer.during(kind):
            times["ticks"] += seconds

    during("condensation", 7)  # before the first step
    times["ticks"] += 3
    with timer.during("steps"):
        times["ticks"] += 40  # compiles
        assert timer.spent()["start_up"] == 100 + 3 + 40
        times["ticks"] += 2
    during("checkpoints", 5)
    times["ticks"] += 1  # other time
    with timer.during("steps"):
        times["ticks"] += 4
        times["wall"] += 3600  # the clock is set, which changes nothing
        expected = {"start_up": 145.0, "steps": 4.0, "checkpoints": 5.0, "condensation": 7.0, "validation": 0.0}
        assert timer.spent() == expected
    during("validation", 6)
    assert timer.rounded() == expected | {"validation": 6.0}


def test_the_begin_of_an_allocation():
    assert allocation_began({"SLURM_JOB_START_TIME": "1700000000"}) == 1_700_000_000
    assert allocation_began({"SLURM_JOB_START_TIME": "soon"}) == process_began()
    assert 0 <= time.time() - process_began() < 3600  # when pytest began
