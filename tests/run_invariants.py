"""What docs/run_folder.md promises of every run folder, whatever happened to the run."""

import re
from itertools import pairwise
from math import inf
from pathlib import Path

from titan_disp.run.reader import read_events, read_json_lines

ENDS = {"complete", "stop", "save_failed"}
BEFORE_A_RESUME = {"checkpoint_damaged", "streams_restarted"}
# The page's files, as patterns of their paths below the run folder.
FILES = re.compile(
    r"""config\.json|environment\.json|events\.jsonl|metrics\.jsonl|heartbeat\.json|\.lock|stop|wandb_run_id
    |condensation/step-\d+\.npz
    |tb/.+|logs/.+|comm_traces/rank_\d+|(profile_traces|memory_snapshot|memory_budget_pareto)/.+
    |checkpoint/((damaged|purging)-\d+x*|step-\d+)/(__\d+_\d+\.distcp|\.metadata|hashes\.json|\.saving)
    |checkpoint/step-\d+/(sharded/.+|[\w.-]+\.(safetensors|json|model|txt))
    |supervisor\.jsonl|requeue\.json|bad_nodes\.json|excluded\.json|(nodes|node_check)/.+
    |point\.toml|point\.json|sweep\.log|failed\.json|\.point\.lock""",
    re.VERBOSE,
)


def check_run(run: Path, allowed: str = "") -> None:
    """Assert that the folder of a real run keeps the page's promises. ``allowed`` matches the test's own files."""
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    unknown = [name for name in names if not FILES.fullmatch(name) and not re.fullmatch(allowed, name)]
    assert not unknown, f"docs/run_folder.md names no such file: {unknown}"
    rows = [row for row in read_json_lines(run / "metrics.jsonl") if "loss" in row]
    measured = [row for row in read_json_lines(run / "metrics.jsonl") if "condensation" in row]
    begins = _starts(read_events(run))
    for kind in (rows, measured):
        times = [row["time"] for row in kind]
        assert times == sorted(times), "rows of two writers"
    for (step, since), (_, until) in pairwise([*begins, (0, inf)]):
        of_start = [[row["step"] for row in kind if since <= row["time"] < until] for kind in (rows, measured)]
        for steps in of_start:
            assert steps == sorted(set(steps)), f"a step has two rows, or steps go back, within one start: {steps}"
        assert all(s > step for s in of_start[0]), f"a start from step {step} has rows of steps {of_start[0]}"
        assert all(s >= step for s in of_start[1])
        ratios = {row["tokens"] / row["step"] for row in rows if since <= row["time"] < until}
        assert len(ratios) <= 1, f"tokens do not grow by the same number in every step: {ratios}"
    assert not rows or rows[0]["time"] >= begins[0][1], "a row before the first start"


def _starts(events: list[dict]) -> list[tuple[int, float]]:
    """Check the order of the events, and return the step and the time at which each start began."""
    starts: list[tuple[int, float]] = []
    training, saved = False, 0
    for event in events:
        name, step, time = event["event"], event["step"], event["time"]
        if name in ("start", "resume"):
            assert (name == "start") == (step == 0), event
            assert not starts or time >= starts[-1][1], event
            starts.append((step, time))
            training, saved = True, step
        elif name in ENDS:
            assert training or "allocated" in event, f"an end without a beginning: {event}"
            training = False
        elif name in BEFORE_A_RESUME:
            training = False  # the start before was killed, or this one has not begun to train
        else:
            assert training, f"{name} outside of a start: {event}"
        if name == "checkpoint":
            assert step > saved or step == saved == 0, f"checkpoints go back within one start: {event}"
            saved = step
    return starts
