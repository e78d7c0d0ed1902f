"""The first run on new machines (make gpu, slurm/first_run.sbatch): the commands of the
stages that can run here, and the verdict on each stage.

    python -m benchmarks.first_run --out OUT …                        prints the commands
    python -m benchmarks.first_run --out OUT … --stage NAME --status S    judges a stage

first_run.toml lists the stages. slurm/first_run.sbatch runs them, because Python in a
container cannot call srun. The output of a stage is in OUT/NAME.txt, and its messages are
in OUT/NAME.log. Both commands append to OUT/summary.txt.
"""

import importlib.util
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli
import tyro

from titan_disp.run.reader import read_metrics, read_rows

TABLE = tomli.loads(Path(__file__).with_suffix(".toml").read_text())
TOLERANCE = 1e-4  # relative; float32 sums in another order give about 1e-6
LIMIT = 200  # seconds within which all ranks must end after one was killed
LEAST_SPEED = 0.9  # speed after the save, as a fraction of the speed before it
MOST_LOST = 30  # seconds that a save may cost
SAVED = 30  # the step of the save
WARM = 10  # number of first steps that do not count for the speed

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """A stage in first_run.toml, which explains the fields."""

    name: str
    of: str
    expected: str
    advice: str
    process: str = ""
    ranks: str = ""
    large: str = ""
    small: str = ""
    multiple: int = 1
    nodes: int = 1
    gpu: bool = False
    package: str = ""
    one_node: bool = False
    steps: int = 10
    same_as: str = ""
    run: str = ""
    faults: str = ""
    saves: bool = False


@dataclass
class Options:
    out: Path
    """Folder of the results."""
    gpus: int
    """GPUs per node. With 0, all stages are small."""
    ranks: int
    """Ranks on all nodes."""
    nodes: int = 1
    data: Path = Path("data/sample")
    """The sample corpus (titan-disp sample-data)."""
    config: str = "train_configs/debug.toml"
    """The config for training, and overrides, quoted for a shell."""
    stages: str = ""
    """Names of the stages to run. By default, all stages."""
    stage: str = ""
    """Judge this stage, which has ended."""
    status: int = 0
    """The exit status of the stage."""

    def run(self, stage: Stage) -> Path:
        """Return the run folder of a stage that trains."""
        return self.out / "runs" / (stage.run or stage.name)


@dataclass(frozen=True)
class Finding:
    """The result of a stage."""

    good: bool
    text: str


def obstacle(stage: Stage, options: Options) -> str:
    """Return the reason why a stage cannot run on these nodes, or "" if it can."""
    if stage.one_node and options.nodes > 1:
        return "it says nothing about several nodes: make gpu on one of them runs it"
    if options.nodes < stage.nodes:
        return f"it needs {stage.nodes} nodes"
    if stage.gpu and not options.gpus:
        return "it needs a GPU"
    if options.ranks % stage.multiple:
        return f"it needs a multiple of {stage.multiple} ranks, not {options.ranks}"
    if stage.package and importlib.util.find_spec(stage.package) is None:
        return f"it needs the package {stage.package}"
    return ""


def command(stage: Stage, options: Options) -> list[str]:
    """Return the arguments of slurm/node.sh for a stage: "process" and the arguments of
    Python, or "ranks", a folder for logs, a module and its arguments. Words of the table that
    are for GPUs, or for none, are included.
    """
    more = stage.large
    debug = TABLE["debug"]
    if not options.gpus:
        more = stage.small
        debug = f"{debug} {TABLE['debug_small']}"
    text = f"{stage.process or stage.ranks} {more}"
    argv = shlex.split(filled(text.replace("{debug}", debug), stage, options))
    if stage.process:
        return ["process", *argv]
    return ["ranks", str(options.out), *argv]


def filled(text: str, stage: Stage, options: Options) -> str:
    """Return a text of first_run.toml with its {words} replaced."""
    marks = "" if options.gpus > 1 else "-m 'not slow and not night'"
    return text.format(
        out=options.out,
        run=options.run(stage),
        data=options.data,
        steps=stage.steps,
        ranks=options.ranks,
        last=options.ranks - 1,
        config=options.config,
        marks=marks,
    )


def repeats(rows: Sequence[Row], reference: Mapping[int, Row], last: int) -> Finding:
    """Return whether the losses and gradient norms of a run are those of the reference,
    and whether the run has begun once and reached its last step.
    """
    steps = [row["step"] for row in rows]
    if steps.count(1) != 1 or steps[-1] != last:
        return Finding(
            False, f"trained steps {steps}, expected one start and step {last}"
        )
    if not reference:
        return Finding(False, "the stage to compare with has no steps")
    expected = losses([reference[row["step"]] for row in rows])
    largest = np.abs(losses(rows) / expected - 1).max()  # NaN if any is
    text = f"within {largest:.1e} up to step {last}"
    return Finding(bool(largest <= TOLERANCE), text)


def losses(rows: Sequence[Row]) -> np.ndarray:
    """Return the loss and the gradient norm of each step, [steps, 2]."""
    return np.array([(row["loss"], row["grad_norm"]) for row in rows], dtype=float)


def save_cost(rows: Sequence[Row]) -> Finding:
    """Return whether the speed after the save and the time of the save are good."""
    seconds = np.diff([row["time"] for row in rows])
    speeds = [row["tps"] for row in rows]
    usual = np.median(seconds[WARM : SAVED - 1])
    lost = (seconds[SAVED - 1 :] - usual).sum()
    speed = np.median(speeds[WARM:SAVED])
    share = np.median(speeds[SAVED:]) / speed
    text = f"{speed:,.0f} tokens/s of a rank, {share:.0%} of that after the save, {lost:.1f} s lost"
    return Finding(bool(share >= LEAST_SPEED and lost <= MOST_LOST), text)


def judge(stage: Stage, options: Options) -> Finding:
    """Return the result of a stage that has ended."""
    rows = read_rows(options.run(stage))
    status = options.status
    if stage.faults and status and rows:
        seconds = time.time() - rows[-1]["time"]
        text = f"all ended within {seconds:.0f} s of step {rows[-1]['step']}"
        return Finding(seconds <= LIMIT, text)
    if stage.faults or status:
        messages = last_line(options.out / f"{stage.name}.log")
        return Finding(False, f"status {status} after {len(rows)} steps: {messages}")
    if stage.same_as:
        reference = read_metrics(options.out / "runs" / stage.same_as)
        return repeats(rows, reference, stage.steps)
    if stage.saves:
        cost = save_cost(rows)
        # The speed of a few cores says nothing about GPUs.
        return Finding(cost.good or not options.gpus, cost.text)
    if rows:
        return Finding(True, f"loss {rows[-1]['loss']:.3f} at step {rows[-1]['step']}")
    return Finding(True, last_line(options.out / f"{stage.name}.txt"))


def last_line(path: Path) -> str:
    """Return the last line of a file that is not blank, or ""."""
    # torchrun draws lines of "=".
    lines = [line.strip(" =") for line in path.read_text(errors="replace").split("\n")]
    return next((line for line in reversed(lines) if line), "")


def report(stage: Stage, finding: Finding) -> str:
    """Return the lines of summary.txt about a stage."""
    verdict = "ok    " if finding.good else "FAILED"
    lines = [
        f"{verdict} {stage.name}: {stage.of}",
        f"       found: {finding.text}",
        f"       expected: {stage.expected}",
    ]
    if not finding.good:
        lines.append(f"       what to do: {stage.advice}")
    return "\n".join(lines) + "\n"


def main(options: Options) -> int:
    """Print the commands of the stages that these nodes can run, or judge a stage.

    The line of a command is NAME|FAULTS|COMMAND. Return the exit status.
    """
    stages = {row["name"]: Stage(**row) for row in TABLE["stage"]}
    with open(options.out / "summary.txt", "a") as summary:
        if options.stage:
            stage = stages[options.stage]
            finding = judge(stage, options)
            text = report(stage, finding)
            summary.write(text)
            print(text)
            return int(not finding.good)
        names = options.stages.split() or list(stages)
        if unknown := set(names) - stages.keys():
            sys.exit(f"no stage {', '.join(unknown)}; there are {' '.join(stages)}")
        for name in names:
            stage = stages[name]
            if reason := obstacle(stage, options):
                summary.write(f"not run {name}: {stage.of}: {reason}\n")
                continue
            faults = filled(stage.faults, stage, options)
            print(f"{name}|{faults}|{shlex.join(command(stage, options))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
