"""What titan_disp imports from TorchTitan, and what docs/port.md and docs/compatibility.md say of it."""

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path

import tomli

from benchmarks.torchtitan_port import Imported, compare, imported_by, modules_of
from tests.command_line import ROOT


def test_every_import_from_the_installed_torchtitan_is_found():
    """The script's answer by reading, against Python's own by importing."""
    imports = imported_by(ROOT / "titan_disp")
    assert Imported("torchtitan.train", "Trainer") in imports
    assert Imported("torchtitan.protocols.train_spec", "register_train_spec") in imports  # as titan.register_train_spec
    installed = modules_of(Path(importlib.util.find_spec("torchtitan").origin).parent.parent)
    for wanted, how in compare(imports, installed):
        assert how == "there", wanted
        assert hasattr(importlib.import_module(wanted.module), wanted.name), wanted


def test_the_page_counts_all_imports():
    """Its list for TorchTitan 0.3 is made by hand: another import must be looked up in it again."""
    text = (ROOT / "docs" / "port.md").read_text()
    counts = re.search(r"(\d+) names are in their place, (\d+) moved, and (\d+) are gone", text).groups()
    there, elsewhere, gone = map(int, counts)
    assert there + elsewhere + gone == len(imported_by(ROOT / "titan_disp"))
    assert len(re.findall(r"^\| `torchtitan\.", text, flags=re.M)) == elsewhere + gone


def test_the_page_names_what_pyproject_asks_for():
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = {re.match(r"[\w-]+", line)[0]: line for line in project["dependencies"]}
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for wanted in (asked["torch"], asked["torchtitan"], asked["transformers"], f"python{project['requires-python']}"):
        assert f"`{wanted}`" in page
    assert importlib.metadata.version("torchtitan") == asked["torchtitan"].partition("==")[2]
