"""make setup, with a pip that only writes down what it would install: which torch is used,
and which environment is kept.
"""

import os
import subprocess
import sys
import venv

import pytest

from tests.command_line import ROOT

PIP = """
import sys
if sys.argv[1] != "--version":
    open({log!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
"""
# An interpreter outside of the environment. "-m venv" is written down, and does nothing, as
# the environment is there already.
OUTSIDE = """#!/bin/sh
case "$*" in
  *"import torch"*) exit {status} ;;
  *"-m venv"*) echo "$*" >> {log} ;;
  *"import site"*) ;;
  *) exit 1 ;;
esac
"""


def packages_of(environment):
    name = f"python3.{sys.version_info.minor}"
    return environment / "lib" / name / "site-packages"


@pytest.fixture
def environment(tmp_path):
    """The site-packages of an environment without pip."""
    venv.create(tmp_path / ".venv", symlinks=True)
    return packages_of(tmp_path / ".venv")


@pytest.fixture
def stubs(tmp_path):
    """A folder on Python's path with this pip, and triton."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    (folder / "pip.py").write_text(PIP.format(log=str(tmp_path / "log")))
    (folder / "triton.py").write_text("")
    return folder


def make_setup(folder, python):
    """Run make setup in a checkout whose environment is ``folder/.venv``, and return what
    was written down.
    """
    done = subprocess.run(
        ["make", "setup", f"VENV={folder}/.venv", f"PYTHON={python}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder / "stubs")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (folder / "log").read_text().splitlines()


def test_an_activated_environment_is_kept(environment, stubs, tmp_path):
    (environment / "torch.py").write_text("")
    config = tmp_path / ".venv" / "pyvenv.cfg"
    before = config.read_text()
    assert "include-system-site-packages = false" in before
    python = tmp_path / ".venv" / "bin" / "python"
    assert make_setup(tmp_path, python) == ["install --quiet -e .[all]"]
    assert config.read_text() == before


def test_an_activated_environment_without_pip(environment, stubs, tmp_path):
    """As uv makes them."""
    (environment / "torch.py").write_text("")
    (stubs / "pip.py").rename(tmp_path / "pip.py")
    paths = f"{str(tmp_path / 'pip.py')!r}, {str(stubs / 'pip.py')!r}"
    (stubs / "ensurepip.py").write_text(f"import os\nos.rename({paths})")
    python = tmp_path / ".venv" / "bin" / "python"
    assert make_setup(tmp_path, python) == ["install --quiet -e .[all]"]


def test_an_activated_environment_whose_setup_was_interrupted(
    environment, stubs, tmp_path
):
    python = tmp_path / ".venv" / "bin" / "python"
    torch, project = make_setup(tmp_path, python)
    assert torch.startswith("install --quiet torch==")
    assert project == "install --quiet -e .[all]"


@pytest.mark.parametrize("has_torch", [True, False])
def test_the_torch_of_the_interpreter(environment, stubs, tmp_path, has_torch):
    """It is shown to the environment, and only where it is missing, torch is installed."""
    if has_torch:
        (environment / "torch.py").write_text("")
    python = tmp_path / "python"
    script = OUTSIDE.format(status=int(not has_torch), log=tmp_path / "log")
    python.write_text(script)
    python.chmod(0o755)
    create, *installed = make_setup(tmp_path, python)
    assert ("--system-site-packages" in create) == has_torch
    assert any("torch==" in line for line in installed) == (not has_torch)
    assert installed[-1] == "install --quiet -e .[all]"


def test_the_torch_of_another_environment(stubs, tmp_path):
    """Python shows only the packages of the system to an environment that is made from
    another one.
    """
    other = tmp_path / "other"
    venv.create(other, symlinks=True)
    torch = packages_of(other) / "torch.py"
    torch.write_text("")
    installed = make_setup(tmp_path, other / "bin" / "python")
    assert installed == ["install --quiet -e .[all]"]
    command = "import torch; print(torch.__file__)"
    python = tmp_path / ".venv" / "bin" / "python"
    found = subprocess.run([python, "-c", command], capture_output=True, text=True)
    assert found.stdout.strip() == str(torch)


def test_a_torch_in_the_environment_is_not_replaced(environment, stubs, tmp_path):
    """A user installed another torch into it; the system's interpreter has none."""
    (environment / "torch.py").write_text("")
    python = tmp_path / "python"
    python.write_text(OUTSIDE.format(status=1, log=tmp_path / "log"))
    python.chmod(0o755)
    assert not any("torch==" in line for line in make_setup(tmp_path, python))
