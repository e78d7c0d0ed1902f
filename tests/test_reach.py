"""Which test files run a line, as ``make mutants`` needs it."""

import os

import pytest

from tests.reach import measure, that_call, that_run
from tests.semantic import Edit, edited_lines, noticed_elsewhere

pytest.importorskip("coverage")  # make mutants installs it

CODE = '''\
CONSTANT = 1

def double(x):
    """Return 2x."""
    return x * 2

def in_a_process():
    return 3

def nowhere():
    return 4
'''
# Its process is forked, and its child starts a new one.
PROCESSES = """\
import os, subprocess, sys
def test_processes():
    if not (pid := os.fork()):
        import titan_disp.code
        titan_disp.code.double(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    code = "import titan_disp.code; titan_disp.code.in_a_process()"
    subprocess.run([sys.executable, "-c", code], check=True)
"""
CALL = (
    "from titan_disp.code import double\ndef test_call():\n    assert double(1) == 2\n"
)


def test_lines_and_their_tests(tmp_path):
    table = tmp_path / "build" / "table"
    for folder in ("titan_disp", "tests"):
        (tmp_path / folder).mkdir()
    code = tmp_path / "titan_disp" / "code.py"
    code.write_text(CODE)
    (tmp_path / "tests" / "test_processes.py").write_text(PROCESSES)
    (tmp_path / "tests" / "test_call.py").write_text(CALL)
    measure(tmp_path, table, ["test_call.py", "test_processes.py"])

    def of_line(text):
        number = CODE.splitlines().index(text) + 1
        return that_run(table, "titan_disp/code.py", [number])

    assert of_line("    return x * 2") == ["test_call.py", "test_processes.py"]
    assert of_line("    return 3") == ["test_processes.py"]
    assert of_line("    return 4") == []
    assert that_call(tmp_path, table, [code]) == [
        "test_call.py",
        "test_processes.py",
    ]
    edit = Edit(
        file="titan_disp/code.py",
        old="x * 2",
        new="x * 3",
        why="It triples.",
        tests=["test_processes.py"],
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert noticed_elsewhere(tmp_path, edit, table, environment) == "test_call.py"
    same = edit._replace(new="x + x")
    assert noticed_elsewhere(tmp_path, same, table, environment) == ""
    assert code.read_text() == CODE


EDIT = Edit(file="code.py", old="", new="", why="", tests=[])


def test_the_lines_of_an_edit():
    text = "a = 1\nb = f(\n    1,\n    2,\n)\nc = 3\n"
    for old, lines in {
        "a = 1\n": [1],
        "b = f(1, 2)": [2, 3, 4, 5],
        "    2,\n)\nc = 3": [4, 5, 6],
    }.items():
        assert [*edited_lines(text, EDIT._replace(old=old))] == lines
