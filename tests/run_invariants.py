"""What docs/run_folder.md promises of every run folder, whatever happened to the
run.
"""

import re
from itertools import pairwise
from math import inf, isclose
from pathlib import Path

from titan_disp.run.reader import read_events, read_json_lines

ENDS = {"complete", "stop", "save_failed", "refused"}
BEFORE_A_RESUME = {"checkpoint_damaged", "streams_restarted"}
EVENTS = {"start", "resume", "checkpoint", "skip", "step_back"} | ENDS | BEFORE_A_RESUME
ADDED_UP = ("tokens", "documents", "text_bytes")  # what the sources have of the whole
CHECKPOINT = r"checkpoint/((damaged|purging)-\d+x*|step-\d+)"
# The name that the page has for files → a pattern of their paths below the run folder.
FILES = {
    **{
        name: re.escape(name)
        for name in ("config.json", "environment.json", "data.json", "events.jsonl")
    },
    **{
        name: re.escape(name)
        for name in ("metrics.jsonl", "heartbeat.json", ".lock", "stop")
    },
    **{
        name: re.escape(name)
        for name in (
            "wandb_run_id",
            "run_id",
            "supervisor.jsonl",
            "outcome.txt",
            "job.json",
            "nodes.json",
        )
    },
    **{
        name: re.escape(name)
        for name in (
            "point.toml",
            "point.json",
            "sweep.log",
            "failed.json",
            ".point.lock",
        )
    },
    **{f"{name}/": rf"{name}/.+" for name in ("tb", "logs")},
    **{
        f"{name}/": rf"{name}/.+"
        for name in ("profile_traces", "memory_snapshot", "memory_budget_pareto")
    },
    "comm_traces/": r"comm_traces/rank_\d+",
    "nodes/START.json": r"nodes/.+",
    "first_run/JOB.RESTARTS/": r"first_run/.+",
    "launch/NAME/": r"launch/.+",
    "condensation/step-N.npz": r"condensation/step-\d+\.npz",
    "__RANK_I.distcp": rf"{CHECKPOINT}/__\d+_\d+\.distcp",
    **{
        name: rf"{CHECKPOINT}/{re.escape(name)}"
        for name in (".metadata", "hashes.json")
    },
    "step-N/.saving": rf"{CHECKPOINT}/\.saving",
    ".metadata.tmp": rf"{CHECKPOINT}/\.(metadata\.tmp|hashes\.json\.partial)",
    "sharded/": r"checkpoint/step-\d+/sharded/.+",
    # With their config and tokenizer
    "*.safetensors": r"checkpoint/step-\d+/[\w.-]+\.(safetensors|json|model|txt)",
}


def pages_names(run: Path) -> dict[str, str | None]:
    """For the path of each file below the run folder, the name that the page has for
    it, or None.
    """
    paths = [
        str(path.relative_to(run)) for path in sorted(run.rglob("*")) if path.is_file()
    ]
    return {
        path: next((name for name in FILES if re.fullmatch(FILES[name], path)), None)
        for path in paths
    }


def check_run(run: Path) -> None:
    unknown = [path for path, name in pages_names(run).items() if name is None]
    assert not unknown, f"docs/run_folder.md names no such file: {unknown}"
    written = read_json_lines(run / "metrics.jsonl")
    kinds = [
        [row for row in written if key in row]
        for key in ("loss", "condensation", "validation")
    ]
    # A kill may come between a save and its event, and a user may copy a checkpoint
    # into a new run.
    held = {
        int(path.name.removeprefix("step-")) for path in run.glob("checkpoint/step-*")
    }
    rows = kinds[0]
    begins = _starts(read_events(run), held)
    for kind in kinds:
        times = [row["time"] for row in kind]
        assert times == sorted(times), "rows of two writers"
    for (step, since), (_, until) in pairwise([*begins, (0, inf)]):
        of_start = [
            [row["step"] for row in kind if since <= row["time"] < until]
            for kind in kinds
        ]
        for steps in of_start:
            assert steps == sorted(set(steps)), (
                f"a step has two rows, or steps go back, within one start: {steps}"
            )
        assert all(s > step for s in of_start[0]), (
            f"a start from step {step} has rows of steps {of_start[0]}"
        )
        assert all(s >= step for s in of_start[1]), (
            f"a start from step {step} measured at steps {of_start[1]}"
        )
        ratios = {
            row["tokens"] / row["step"] for row in rows if since <= row["time"] < until
        }
        assert len(ratios) <= 1, (
            f"tokens do not grow by the same number in every step: {ratios}"
        )
    for row in rows:
        check_sources(row)
    assert not rows or rows[0]["time"] >= begins[0][1], "a row before the first start"


def check_sources(row: dict) -> None:
    own = {
        name: {key: x for key, x in row["data"].items() if key.startswith(f"{name}/")}
        for name in ADDED_UP
    }
    assert {len(numbers) for numbers in own.values()} <= {0, len(own["tokens"])} != {1}
    if not own["tokens"]:
        return
    for name, whole in (row | row["data"]).items():
        assert name not in own or sum(own[name].values()) == whole, (
            f"{name} of the sources: {own[name]}"
        )
    ce = (
        sum(
            row[f"ce/{key.partition('/')[2]}"] * count
            for key, count in own["tokens"].items()
        )
        / row["tokens"]
    )
    assert isclose(ce, row["ce"], rel_tol=1e-6), (
        f"ce of the sources makes {ce}, not {row['ce']}"
    )


def _starts(events: list[dict], held: set[int]) -> list[tuple[int, float]]:
    """Check the order of the events, and that resumed steps were saved or are ``held``.

    A kill may come between a save and its event, and retention may delete that
    checkpoint later: after a killed start, a step above its last event may be resumed.
    Return step and time of each start.
    """
    starts: list[tuple[int, float]] = []
    training = False
    killed = False  # the start before
    saved = 0
    for event in events:
        name = event["event"]
        step = event["step"]
        time = event["time"]
        assert name in EVENTS, f"docs/run_folder.md names no such event: {name}"
        killed |= training and name in BEFORE_A_RESUME | {"start", "resume"}
        if name == "resume":
            assert step in held or (killed and step > saved), (
                f"no checkpoint to resume from: {event}"
            )
        if name in ("start", "resume"):
            assert (name == "start") == (step == 0), event
            assert not starts or time >= starts[-1][1], event
            starts.append((step, time))
            training = True
            killed = False
            saved = step
        elif name in ENDS:
            assert training or "allocated" in event, (
                f"an end without a beginning: {event}"
            )
            training = False
        elif name in BEFORE_A_RESUME:
            # the start before was killed, or this one has not begun to train
            training = False
        else:
            assert training, f"{name} outside of a start: {event}"
        if name == "checkpoint":
            assert step > saved or step == saved == 0, (
                f"checkpoints go back within one start: {event}"
            )
            saved = step
            held = held | {step}
    return starts
