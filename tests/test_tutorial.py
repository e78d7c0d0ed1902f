"""docs/tutorial.md: its own commands and sweep file, from the text that it makes to the
table, in short runs.
"""

import csv
import re
import shlex
import subprocess
import sys

import pytest

from tests.command_line import ROOT, SECONDS, environment
from titan_disp.run.reader import read_rows

# What is longer than it must be: the shortest run of init has 20 steps, and two seeds
# make pairs.
SHORT = {
    "titan-disp init mine": "titan-disp init mine --minutes 0.01",
    "= [1, 2, 3] ": "= [1, 2] ",
}
PYTHON = shlex.quote(sys.executable)
FUNCTIONS = f'python() {{ {PYTHON} "$@"; }}\ntitan-disp() {{ {PYTHON} -m titan_disp.cli "$@"; }}\n'


@pytest.mark.night
@pytest.mark.timeout(6 * SECONDS)
def test_the_commands_of_the_page(tmp_path):
    page = (ROOT / "docs" / "tutorial.md").read_text()
    for words, fewer in SHORT.items():
        assert page.count(words) == 1
        page = page.replace(words, fewer)
    where = {
        "cwd": tmp_path,
        "env": environment() | {"PYTHONPATH": str(ROOT)},
        "check": True,
        "timeout": 3 * SECONDS,
    }
    for language, block in re.findall(
        r"^```(bash|toml)\n(.*?)^```", page, flags=re.M | re.S
    ):
        if language == "toml":
            (tmp_path / "mine" / "sweep.toml").write_text(block)
        else:
            subprocess.run(["bash", "-euc", FUNCTIONS + block], **where)
    on, off = (read_rows(tmp_path / "mine" / name) for name in ("run", "off"))
    assert [row["ce"] for row in on][-1] < on[0]["ce"] - 0.5
    # the same weights and batch
    assert on[0]["ce"] == pytest.approx(off[0]["ce"], rel=1e-5)
    with open(tmp_path / "mine" / "sweep" / "table.csv") as file:
        assert {row["point"]: row["finished"] for row in csv.DictReader(file)} == {
            "off": "2",
            "on": "2",
        }
    assert (tmp_path / "mine" / "report.html").stat().st_size > 1e5
    assert (tmp_path / "mine" / "condensation" / "metrics.csv").is_file()
