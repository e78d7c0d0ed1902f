"""The help of the command line as a user sees it: in terminals of several widths."""

import dataclasses
import io
import re
import sys

import docstring_parser
import pytest

from tests.command_line import typed
from titan_disp import cli


def functions(commands, words=()):
    for name, member in commands.items():
        if isinstance(member, dict):
            yield from functions(member, (*words, name))
        else:
            yield (*words, name), member[0]


ALL = dict(functions(cli.COMMANDS))
LISTS = [(), ("data",), ("sweep",)]


@pytest.fixture
def shown(monkeypatch, capsys):
    def print_help(words, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert typed(monkeypatch, *words, "--help") == 0
        return capsys.readouterr().out

    return print_help


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_description_is_broken_only_where_the_terminal_ends(shown, words):
    out = shown(words, 2000)
    assert f"\n\n  {' '.join(cli.description(ALL[words]).split())}\n\n" in out
    documented = docstring_parser.parse(ALL[words].__doc__).params
    assert {one.arg_name for one in documented} == {field.name for field in dataclasses.fields(ALL[words])}
    for one in documented:
        assert " ".join(one.description.split()) in out, one.arg_name


@pytest.mark.parametrize("words", [*LISTS, *ALL], ids=" ".join)
def test_no_line_is_too_long_and_no_argument_is_named_by_its_type(shown, words):
    for columns in (80, 140):
        usage, *lines = shown(words, columns).splitlines()  # tyro does not wrap the usage
        assert max(map(len, lines)) <= columns
        box = "\n".join(lines)
        assert not re.search(r"None|default: \)|--no-|\[\[", usage + box)
        assert not re.search(r"^[│ ]+(STR|PATH)\b", box, flags=re.M)
        assert not re.search(r"\n[│ ]*\n[│ ]+-", box)  # an empty line before an option


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_lists_have_the_first_paragraph_of_each_subcommand(shown, words):
    shown(("checkpoint",), 2000)  # the whole help of another subcommand, in the same process
    out = shown(words, 2000)
    for name, options in ALL.items():
        if name[:-1] == words:
            summary = " ".join(cli.description(options).partition("\n\n")[0].split())
            assert re.search(rf"^\W*{name[-1]} +{re.escape(summary)}\W*$", out, flags=re.M)


def test_the_kinds_of_gpu_are_those_of_the_table(shown):
    from titan_disp.cluster.cost import GPUS

    *others, last = GPUS
    for words in (("plan",), ("submit",), ("sweep", "run")):
        assert f"{', '.join(others)} or {last}" in shown(words, 2000)


@pytest.mark.parametrize("words", [(), ("condensation",)], ids=["list", "condensation"])
def test_a_terminal_without_unicode(monkeypatch, words):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert typed(monkeypatch, *words, "--help") == 0
    sys.stdout.flush()
    assert b"show this help message" in sys.stdout.buffer.getvalue()
