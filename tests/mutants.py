"""Find small wrong edits of the code that its fast tests do not notice: ``make mutants
ROOM=measure``, CONTRIBUTING.md.

mutmut was chosen over cosmic-ray because it imports torch and TorchTitan (6 s) once and
forks for every mutant, and because it runs only the tests that call the edited
function, so that a mutant takes about a second.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import tomli

from tests import reach, semantic

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutants"
EQUIVALENT = ROOT / "tests" / "equivalent_mutants.toml"

# For each room: the files to edit, and the names of the tests, of which only the fast
# ones run.
ROOMS = {
    "dispersion": (
        "titan_disp/dispersion/*.py titan_disp/dispersion/variants/*.py "
        "titan_disp/objective.py",
        "pairwise variants padding objective sharded_loss loss_edges own_losses gpu_path",
    ),
    "guard": ("titan_disp/run/guard.py", "guard ranks_agree"),
    "checkpoint": (
        "titan_disp/run/checkpoint.py titan_disp/run/integrity.py",
        "checkpoint checkpoint_integrity checkpoint_trust ranks_agree",
    ),
    "stream": (
        "titan_disp/data/stream.py titan_disp/data/cursor.py "
        "titan_disp/data/shuffle.py titan_disp/data/position.py "
        "titan_disp/data/assignment.py titan_disp/data/passes.py",
        "stream shuffle mixture local_files tokenizers formats data_errors",
    ),
    "formats": (
        "titan_disp/data/formats.py titan_disp/data/token_ids.py titan_disp/data/sources.py "
        "titan_disp/data/findings.py titan_disp/data/ledger.py",
        "formats data_errors mixture findings left_out other_formats init",
    ),
    "supervise": ("slurm/supervise.py", "supervise"),
    "plan": ("titan_disp/cluster/plan.py", "plan"),
    "measure": ("titan_disp/condensation/measure.py", "condensation"),
    "compare": (
        "titan_disp/lab/evaluate/compare.py titan_disp/lab/statistics.py",
        "compare evaluate sweep_table",
    ),
}
SEMANTIC = "semantic"  # wrong edits made by hand: tests/semantic.py
REACH = "reach"  # measures which test files run a line: tests/reach.py
TABLE = BUILD / reach.TABLE
MESSAGES = (
    r"logger\.|\bsay\(|raise |Error\(|^\s*\(?(\+ \(?)?f?\"[^\"]*\"( if .*)?[,)]*$"
)
# mutmut's exit codes; a mutant that hangs counts as noticed
SURVIVED = {0: "survived", 5: "no test", 33: "no test"}


# Appended to tests/distributed.py. mutmut sees the calls of its own process only; this
# credits what ranks call to the test that starts them.
RANKS = """

import os as _os
import tempfile as _tempfile
from pathlib import Path as _Path
from types import SimpleNamespace as _SimpleNamespace

from mutmut.state import state as _state

import titan_disp.train  # as _run has it preloaded

_run_ranks = _run
_fork = mp.get_context("fork")  # a mutant's process has imported everything, and runs one thread
mp = _SimpleNamespace(get_context=lambda name: _fork)


_begin = _worker


def _worker(*args):
    # A fixture's group of one rank is not the ranks', and its threads were not forked, for which its end would wait.
    dist.distributed_c10d._update_default_pg(None)
    dist.destroy_process_group = lambda: _os._exit(0)
    _begin(*args)


def _noting(folder, function, *args):
    try:
        function(*args)
    finally:
        _Path(folder, str(_os.getpid())).write_text("\\n".join(_state()._stats))


def _run(world_size, function, args):
    with _tempfile.TemporaryDirectory() as folder:
        result = _run_ranks(world_size, _noting, (folder, function, *args))
        for file in _Path(folder).iterdir():
            _state()._stats.update(filter(None, file.read_text().split("\\n")))
    return result
"""


class Survivor(NamedTuple):
    file: str
    function: str
    before: str
    after: str
    status: str

    def edit(self) -> semantic.Edit:
        """Return the mutant as an edit of the file, which names no tests."""
        return semantic.Edit(
            file=self.file,
            old=self.before,
            new=self.after,
            why=self.function,
            tests=[],
        )

    def can_be_made(self) -> bool:
        """Return whether the line that the mutant changes stands once in its file."""
        try:
            semantic.edit_text((ROOT / self.file).read_text(), self.edit())
        except ValueError:
            return False
        return True

    def __str__(self) -> str:
        return f"{self.file}: {self.function} ({self.status})\n    - {self.before}\n    + {self.after}"


def prepare(room: str) -> Path:
    """Copy the files of the checkout, with mutmut's settings for the room, so that the
    checkout stays unchanged.
    """
    files, tests = ROOMS[room]
    folder = BUILD / room
    semantic.copy(ROOT, folder)
    with open(folder / "tests" / "distributed.py", "a") as file:
        file.write(RANKS)
    settings = {
        "source_paths": ["titan_disp", "slurm"],
        "only_mutate": files.split(),
        "do_not_mutate_patterns": [MESSAGES],
        "also_copy": [
            *(
                "train_configs",
                "benchmarks",
                "docs",
                "README.md",
                "CHANGELOG.md",
                "Makefile",
            ),
            "titan_disp/cluster/slurm",  # a link, which mutmut does not follow
        ],
        "pytest_add_cli_args_test_selection": [
            f"tests/test_{name}.py" for name in tests.split()
        ],
        # Inductor cannot trace mutmut's switches, and one test reads the source. The
        # plugins that look for exceptions in destructors and threads are off because
        # they collect garbage five times, which takes seconds after many imports.
        "pytest_add_cli_args": [
            *(
                "-m",
                "not slow and not night",
                "-k",
                "not compil and not python_3_10",
                "-p",
                "no:cacheprovider",
            ),
            *("-p", "no:unraisableexception", "-p", "no:threadexception"),
        ],
        # torch must not be forked from a process that has run tests
        "process_isolation": "forkserver",
        "timeout_multiplier": 4.0,  # times what the tests take without an edit
        "timeout_constant": 5.0,
        "use_git_change_detection": False,
    }
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())
    with open(folder / "pyproject.toml", "a") as file:
        file.write(f"\n[tool.mutmut]\n{lines}\n")
    return folder


def sample() -> Path:
    """The corpus of the tests, written once: writing it takes seconds, for every
    mutant.
    """
    from titan_disp.lab.sample import is_complete, write_sample

    folder = BUILD / "sample"
    if not is_complete(folder):
        write_sample(folder)
    return folder


def verdicts(folder: Path) -> Iterator[tuple[Path, str, int | None]]:
    """Yield (source file, mutant, mutmut's exit code) of the last run; the code is None
    if a mutant was not tried.
    """
    for meta in sorted((folder / "mutants").rglob("*.meta")):
        for name, code in json.loads(meta.read_text())["exit_code_by_key"].items():
            yield meta.relative_to(folder / "mutants").with_suffix(""), name, code


def drawn(folder: Path, number: int, environment: dict[str, str]) -> list[str]:
    """Make the mutants, and draw some of them at random, the same ones for the same
    code.

    mutmut tries the mutants with the fastest tests first, so that a run that is stopped
    says little about the others.
    """
    # mutmut stops at a name that it does not know after it has made the mutants and
    # noted which tests reach them.
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", "1", "none"]
    made = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True
    )
    names = [name for _, name, _ in verdicts(folder)]
    if "nothing matches" not in made.stdout + made.stderr or not names:
        raise SystemExit(f"mutmut made no mutants:\n{made.stdout}{made.stderr}")
    return random.Random(0).sample(sorted(names), min(number, len(names)))


def results(folder: Path) -> tuple[int, list[Survivor]]:
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    total = 0
    survivors = []
    os.chdir(folder)  # mutmut looks for its files in the current folder
    for source, name, code in verdicts(folder):
        total += code is not None
        if code in SURVIVED:
            _, _, _, *diff = get_diff_for_mutant(name).splitlines()
            before, after = (
                " ".join(line[1:].strip() for line in diff if line[0] == sign)
                for sign in "-+"
            )
            function, _ = orig_function_and_class_names_from_key(name)
            survivors.append(
                Survivor(str(source), function, before, after, SURVIVED[code])
            )
    return total, survivors


def equivalent() -> Callable[[Survivor], bool]:
    """Tell survivors that do the same as the code: those in the list, and edits of
    arguments that have no effect here.
    """
    content = tomli.loads(EQUIVALENT.read_text())
    known = {
        (entry["file"], _plain(edit))
        for entry in content["equivalent"]
        for edit in entry["edits"]
    }
    arguments = re.compile(
        rf"\b({'|'.join(entry['argument'] for entry in content['argument'])})=\w+"
    )

    def same(survivor: Survivor) -> bool:
        before, after = (
            _plain(arguments.sub("", text))
            for text in (survivor.before, survivor.after)
        )
        return before == after or (survivor.file, _plain(survivor.after)) in known

    return same


def _plain(line: str) -> str:
    """A line without the spaces and the comma that a removed argument leaves."""
    return re.sub(r",?\s*\)", ")", " ".join(line.split()))


def measure_reach(folder: Path) -> None:
    """Run all fast tests with coverage.py in a copy of the checkout, and write which
    lines each test file runs.
    """
    semantic.copy(ROOT, folder)
    TABLE.unlink(missing_ok=True)
    names = [path.name for path in sorted((folder / "tests").glob("test_*.py"))]
    os.environ["SAMPLE"] = str(sample())
    reach.measure(folder, TABLE, names)


def try_edits(folder: Path, processes: int, edits: list[semantic.Edit]) -> None:
    """Try edits in copies of the checkout, as many at a time as there are processes."""
    copies = [folder / str(number) for number in range(processes)]
    for copy in copies:
        semantic.copy(ROOT, copy)
    semantic.run(copies, sample(), TABLE, edits)


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants")
    parser.add_argument("room", choices=[*ROOMS, SEMANTIC, REACH])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    again = parser.add_mutually_exclusive_group()
    again.add_argument(
        "--report",
        action="store_true",
        help="only print the results of the room's last run",
    )
    again.add_argument(
        "--again",
        action="store_true",
        help="only those that survived the last run or were not tried",
    )
    again.add_argument(
        "--elsewhere",
        action="store_true",
        help="only those that survived the last run, against the other tests that run "
        f"their lines (after ROOM={REACH})",
    )
    again.add_argument(
        "--draw", type=int, metavar="N", help="only N mutants, drawn at random"
    )
    again.add_argument(
        "--only",
        default="",
        metavar="WORDS",
        help="in semantic: only edits of such files or reasons",
    )
    args = parser.parse_args()
    folder = BUILD / args.room
    of_mutmut = args.report or args.again or args.draw or args.elsewhere
    if of_mutmut if args.room == SEMANTIC else args.only:
        parser.error(
            f"--only is for ROOM={SEMANTIC}, and the other options are for other rooms"
        )
    if args.room == REACH:
        measure_reach(folder)
        return
    if args.room == SEMANTIC:
        shutil.rmtree(folder, ignore_errors=True)
        try_edits(folder, args.processes, semantic.edits_about(args.only))
        return
    if not args.report and not args.elsewhere:
        names = []
        if args.again:
            names = [
                name
                for _, name, code in verdicts(folder)
                if code in SURVIVED or code is None
            ]
        else:
            shutil.rmtree(folder, ignore_errors=True)
        prepare(args.room)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "SAMPLE": str(sample())}
        if args.draw:
            names = drawn(folder, args.draw, environment)
        if names or not args.again:
            command = [
                sys.executable,
                "-m",
                "mutmut",
                "run",
                "--max-children",
                str(args.processes),
                *names,
            ]
            subprocess.run(command, cwd=folder, env=environment, check=True)
    total, survivors = results(folder)
    if untried := sum(code is None for _, _, code in verdicts(folder)):
        print(f"{untried} mutants have not been tried")
    same = list(filter(equivalent(), survivors))
    noticed = total - len(survivors)
    possible = total - len(same)
    print("\n".join(str(s) for s in survivors if s not in same))
    if args.elsewhere:
        others = [s for s in survivors if s not in same and s.can_be_made()]
        if others:
            copies = folder.with_name(f"{args.room}-elsewhere")
            try_edits(copies, args.processes, [survivor.edit() for survivor in others])
        return
    print(
        f"{args.room}: {noticed} of {possible} mutants noticed "
        f"({noticed / possible:.1%}); {len(same)} of {total} are equivalent to the "
        "code as it is"
    )


if __name__ == "__main__":
    main()
