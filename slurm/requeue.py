#!/usr/bin/env python3
"""Whether a SLURM job comes back. Used by pretrain.sbatch on the batch host; only the standard library, Python >= 3.6.

    requeue.py end --run RUN --start JOB.RESTART --status N --signalled USR1|TERM|no --max-retries K --state STATE --log FILE
    requeue.py nodes --run RUN --start JOB.RESTART --expected "n1 n2" --max-retries K

Exit status: 0: go on (nodes) or the run is over (end); 10: requeue; 1: give up.

What the run says in RUN/events.jsonl decides, not exit statuses, of which torchrun and srun each make their own. A failure is
counted in RUN/requeue.json; a new complete checkpoint sets the count back.
"""

import argparse
import contextlib
import glob
import json
import os
import sys

END, REQUEUE, GIVE_UP = 0, 10, 1


def read_json(path, default):
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return default


def write_json(path, content):
    with open(path + ".partial", "w") as file:
        json.dump(content, file)
    os.replace(path + ".partial", path)


def events(run, start):
    """What this start of this job has written into events.jsonl."""
    found = []
    try:
        with open(os.path.join(run, "events.jsonl")) as file:
            for line in file:
                try:
                    event = json.loads(line)
                except ValueError:  # a line that a killed process left unfinished
                    continue
                if event.get("job") == start:
                    found.append(event)
    except OSError:
        pass
    return found


def newest_checkpoint(run):
    """Step of the newest complete checkpoint, -1 without one."""
    folder = read_json(os.path.join(run, "config.json"), {}).get("checkpoint", {}).get("folder", "checkpoint")
    steps = [-1]
    for path in glob.glob(os.path.join(run, folder, "step-*", ".metadata")):
        name = os.path.basename(os.path.dirname(path))[len("step-") :]
        if name.isdigit():
            steps.append(int(name))
    return max(steps)


def first_error(run, start):
    """The message of the rank that failed first, from the files that torchrun's ranks leave."""
    found = []
    for path in glob.glob(os.path.join(run, "logs", start, "**", "error.json"), recursive=True):
        message = read_json(path, {}).get("message", {})
        if isinstance(message, dict):
            time = int(message.get("extraInfo", {}).get("timestamp", 0))
            lines = str(message.get("message", "")).strip().splitlines()
            found.append((time, lines[0] if lines else "", path))
    if not found:
        return None
    _, text, path = min(found)
    return f"{text} ({path})"


def count_failure(run, reason, max_retries):
    """Requeue, or give up after max_retries failures in a row without a new checkpoint."""
    path = os.path.join(run, "requeue.json")
    before = read_json(path, {"failures": 0, "step": -1})
    step = newest_checkpoint(run)
    failures = 1 if step > before["step"] else before["failures"] + 1
    write_json(path, {"failures": failures, "step": step, "reason": reason})
    where = f"newest checkpoint: step {step}" if step >= 0 else "no checkpoint yet"
    if failures > max_retries:
        return (
            GIVE_UP,
            f"GIVEN UP after {failures} failures in a row without a new checkpoint ({where}). The last one: {reason}",
        )
    return REQUEUE, f"failure {failures} of at most {max_retries} retries without a new checkpoint ({where}): {reason}"


def end(args):
    mine = events(args.run, args.start)
    last = next((e for e in reversed(mine) if e["event"] in ("complete", "stop")), None)
    if last is not None and last["event"] == "complete":
        forget(args.run)
        return END, f"the run is complete: step {last['step']}"
    if args.state in ("CANCELLED", "COMPLETING") and args.signalled == "TERM":
        return END, "the job was cancelled"
    if last is not None:
        forget(args.run)
        reason = last.get("reason", "")
        if args.signalled != "no" or reason.startswith("SIG"):
            return REQUEUE, f"saved at step {last['step']} and stopped: {reason}"
        return END, f"stopped at step {last['step']}: {reason}"
    reason = first_error(args.run, args.start)
    if reason is None:
        reason = f"a rank or a node died without a word (srun's status {args.status}); see {args.run}/logs/{args.start}"
    if args.signalled != "no":
        reason = f"asked to stop ({args.signalled}) but not saved in time; {reason}"
    return count_failure(args.run, reason, args.max_retries)


def forget(run):
    with contextlib.suppress(OSError):
        os.remove(os.path.join(run, "requeue.json"))


def nodes(args):
    """Nodes that failed their check; one that fails twice is written into RUN/exclude."""
    reports = {}
    for path in glob.glob(os.path.join(args.run, "nodes", args.start, "*.json")):
        report = read_json(path, {})
        reports[report.get("node")] = report.get("problems", ["its report cannot be read"])
    bad = {n: reports.get(n, ["it did not answer"]) for n in args.expected.split() if reports.get(n, [""])}
    if not bad:
        return END, ""
    path = os.path.join(args.run, "bad_nodes.json")
    counts = read_json(path, {})
    for node in bad:
        counts[node] = counts.get(node, 0) + 1
    write_json(path, counts)
    with open(os.path.join(args.run, "exclude"), "w") as file:
        file.write(",".join(sorted(node for node, count in counts.items() if count >= 2)))
    reason = "; ".join(f"node {node}: {', '.join(problems)}" for node, problems in sorted(bad.items()))
    return count_failure(args.run, "nodes that cannot train: " + reason, args.max_retries)


def on_top(log, text):
    """Put the reason before everything else in the job's log. SLURM appends to it, so that it is changed in place."""
    try:
        with open(log, "r+") as file:
            content = file.read()
            file.seek(0)
            file.write(text + "\n\n" + content)
    except OSError:
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["end", "nodes"])
    parser.add_argument("--run", required=True)
    parser.add_argument("--start", required=True)
    parser.add_argument("--status", type=int, default=0)
    parser.add_argument("--signalled", default="no")
    parser.add_argument("--state", default="")
    parser.add_argument("--log", default="")
    parser.add_argument("--expected", default="")
    parser.add_argument("--max-retries", type=int, default=3)
    args = parser.parse_args()
    code, text = {"end": end, "nodes": nodes}[args.what](args)
    if text:
        print("titan-disp: " + text, flush=True)
    if code == GIVE_UP and args.log:
        on_top(args.log, "titan-disp: " + text)
    sys.exit(code)


if __name__ == "__main__":
    main()
