"""Read commands and code blocks from the documentation.

This module imports neither torch nor TorchTitan.
"""

import copy
import functools
import itertools
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.command_line import DEMO, ROOT
from titan_disp import cli

PLACEHOLDERS = {
    "CONFIG": str(DEMO.relative_to(ROOT)),
    "mine/config.toml": str(DEMO.relative_to(ROOT)),  # as titan-disp init writes it
    "SWEEP.toml": "train_configs/sweeps/table3.toml",
    # as docs/tutorial.md writes it
    "mine/sweep.toml": "train_configs/sweeps/table3.toml",
    "…": None,  # left out
    "...": None,
}


class Understood(Exception):
    """Raised in place of a subcommand's work, with the subcommand's name and
    options.
    """


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language without their indentation, also inside lists."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", text, flags=re.M | re.S)
    return [re.sub(rf"^{indent}", "", block, flags=re.M) for indent, block in found]


def split(lines: str) -> Iterator[list[str]]:
    """Yield the words of each command in shell lines, with placeholders filled in."""
    # Drops the file that is written
    for line in re.sub(r" > \S+", "", lines.replace("\\\n", " ")).splitlines():
        words = [
            PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)
        ]
        for is_and, command in itertools.groupby(words, lambda word: word == "&&"):
            if not is_and:
                yield [word for word in command if word is not None]


def commands(page: Path) -> list[list[str]]:
    """The commands in a page's shell blocks, or titan-disp commands in the comments of
    a script or config.
    """
    text = page.read_text()
    if page.suffix == ".md":
        return list(split("\n".join(blocks(text, "bash"))))
    joined = text.replace("\\\n#", "\\\n")
    calls = re.findall(r"^#? *(titan-disp (?:.*\\\n)*.*)$", joined, flags=re.M)
    return [words for call in calls if "$" not in call for words in split(call)]


def _tells(members, prefix=""):
    def told(name, command):
        def tell(options):
            raise Understood(name, options)

        return command[0], tell

    return {
        name: _tells(one, f"{name} ")
        if isinstance(one, Mapping)
        else told(prefix + name, one)
        for name, one in members.items()
    }


def understood(words):
    """The subcommand and its options, as the command line reads the words of a valid
    command.
    """
    return _understood(tuple(words))


@functools.cache
def _understood(words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli, "COMMANDS", _tells(cli.COMMANDS))
        patch.setattr("sys.argv", ["titan-disp", *words])
        patch.chdir(ROOT)  # paths of configs are relative to it
        with pytest.raises(Understood) as told:
            cli.main()
    return told.value.args


@functools.cache
def loaded(*words):
    """A config that the caller may not change."""
    # imports torch, which other tests of pages do without
    from titan_disp.config.load import load_config

    return load_config(["--job.config_file", *map(str, words)])


def changed(config, changes):
    """A copy of a config with other values of keys, by their full names."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        section, key = name.split(".")
        assert hasattr(getattr(config, section), key), name
        setattr(getattr(config, section), key, value)
    return config


def can_start(ranks, *words):
    from titan_disp.checks import check_config

    config = changed(loaded(*words), {})
    check_config(config, ranks)
    return config


def both_ways(*words):
    """The config as titan-disp reads it, and as stock TorchTitan does."""
    from torchtitan.config import ConfigManager

    stock = [
        "--job.config_file",
        *map(str, words),
        "--job.custom_config_module",
        "titan_disp.job_config",
    ]
    return changed(loaded(*words), {}), ConfigManager().parse_args(stock)
