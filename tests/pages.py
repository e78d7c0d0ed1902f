"""These helpers read commands and code blocks from the documentation, for tests that compare it with the software."""

import copy
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command_line import DEMO, ROOT
from titan_disp import cli

# The function that each subcommand calls with its parsed arguments, as module and name. Tests replace it to do nothing.
ROOMS = {
    "train": ("titan_disp.cluster.launch", "launch"),
    "plan": ("titan_disp.cluster.plan", "make_plan"),
    "config": ("titan_disp.config.reference", "reference"),
    "config --markdown": ("titan_disp.config.reference", "markdown"),
    "preflight": ("titan_disp.cluster.preflight", "preflight"),
    "submit": ("titan_disp.cluster.launch", "submit"),
    "condensation": ("titan_disp.lab.inspection.command", "condensation"),
    "report": ("titan_disp.lab.report.page", "write_report"),
    "export": ("titan_disp.lab.export.export", "export"),
    "checkpoint": ("titan_disp.lab.export.inventory", "inventory"),
    "generate": ("titan_disp.lab.export.generate", "generate"),
    "evaluate": ("titan_disp.lab.evaluate.evaluation", "evaluate"),
    "sample-data": ("titan_disp.data.sample", "write_sample"),
    "data fetch": ("titan_disp.data.mirror", "fetch"),
    "data digest": ("titan_disp.lab.digest", "digest"),
    "sweep": ("titan_disp.lab.sweeps.local", "run"),
    "sweep --submit": ("titan_disp.lab.sweeps.folder", "submit"),
    "sweep table": ("titan_disp.lab.sweeps.comparison", "write_table"),
}
PLACEHOLDERS = {
    "CONFIG": str(DEMO.relative_to(ROOT)),
    "SWEEP.toml": "train_configs/sweeps/table3.toml",
    "…": None,  # left out
    "...": None,
}


class Understood(Exception):
    """Raised when a command calls the function that does its work, with these arguments."""


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks of a language without their indentation, also inside lists."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, flags=re.M | re.S)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]


def split(lines: str) -> Iterator[list[str]]:
    """Yield the words of each command in shell lines, with placeholders filled in."""
    for line in re.sub(r" > \S+", "", lines.replace("\\\n", " ")).splitlines():  # drops the file that is written
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words += [] if PLACEHOLDERS.get(word, word) is None else [PLACEHOLDERS.get(word, word)]
            elif words:
                yield words
                words = []


def commands(page: Path) -> list[list[str]]:
    """Return the commands in a page's shell blocks, or titan-disp commands in the comments of a script or config."""
    text = page.read_text()
    if page.suffix == ".md":
        return list(split("\n".join(blocks(text, "bash"))))
    joined = text.replace("\\\n#", "\\\n")
    calls = re.findall(r"^#? *(titan-disp (?:.*\\\n)*.*)$", joined, flags=re.M)
    return [words for call in calls if "$" not in call for words in split(call)]


def subcommand(words: list[str]) -> str:
    for name in ("sweep --submit", "config --markdown"):
        if words[0] == name.split()[0] and name.split()[1] in words:
            return name
    return max((name for name in ROOMS if words[: len(name.split())] == name.split()), key=len)


def understood(monkeypatch, words):
    """Return the arguments of the function that a command calls. The command must be valid and its files present."""

    def room(*args, **kwargs):
        raise Understood(args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(".".join(ROOMS[subcommand(words)]), room)
        patch.setattr("titan_disp.data.sample.is_complete", lambda folder: False)
        patch.setattr("sys.argv", ["titan-disp", *words])
        patch.chdir(ROOT)  # paths of configs are relative to it
        with pytest.raises(Understood) as told:
            cli.main()
    return told.value.args


@functools.cache  # tyro takes half a second to parse
def loaded(*words):
    """Return a config that the caller may not change."""
    from titan_disp.config.load import load_config  # imports torch, which other tests of pages do without

    return load_config(["--job.config_file", *map(str, words)])


def changed(config, changes):
    """Return a copy of a config with other values of keys, by their full names."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key), name
        setattr(getattr(config, section), key, value)
    return config


def can_start(ranks, *words):
    from titan_disp.config.checks import check_config

    config = copy.deepcopy(loaded(*words))
    check_config(config, ranks)
    return config
