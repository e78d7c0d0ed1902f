"""The wrong edits of ``make mutants ROOM=semantic`` can be made in the present code."""

import ast

import pytest

from tests.command_line import ROOT
from tests.semantic import Edit, edit_text, edits


def test_each_edit_can_be_made():
    found = edits()
    assert len(found) >= 60
    for edit in found:
        edited = edit_text((ROOT / edit.file).read_text(), edit)
        if edit.file.endswith(
            ".py"
        ):  # a syntax error would be noticed whatever the tests ask
            compile(edited, edit.file, "exec")
        assert edit.new != edit.old
        assert edit.why.endswith(".")
        assert edit.tests
        for name in edit.tests:
            assert (ROOT / "tests" / name).is_file(), name


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x = f(a, b)", "x = f(a)"),
        ("return (a and b)", "return a"),
        ("'one ' 'two'", "'one'"),
        ("    if a:\n        x = g(\n            a,\n        )\n", "    x = a\n"),
        ("x.y(a)[0]  # the first", "x.y(b)[0]"),
    ],
)
def test_a_quote_is_found_in_other_formats(old, new):
    code = f"def f():\n    before = 1\n    {old.strip()}\n    after = (2)\n"
    forms = [
        code,
        code.replace("(a and b)", "a and b").replace("(2)", "2"),
        code.replace("f(a, b)", "f(\n        a,  # why\n        b,\n    )"),
        code.replace("x.y", "(x.y").replace("[0]", "\n    )[0]"),
        code.replace(
            "x = g(\n            a,\n        )", "x = (\n            g(a)\n        )"
        ),
        code.replace("'one ' 'two'", "'one two'"),
    ]
    edit = Edit("some.py", old, new, "", [])
    expected = f"def f():\n    before = 1\n    {new.strip()}\n    after = (2)\n"
    for form in forms:
        assert ast.dump(ast.parse(edit_text(form, edit))) == ast.dump(
            ast.parse(expected)
        )


def test_a_quote_that_is_there_twice_is_refused():
    edit = Edit("some.py", "x = f(a)", "x = a", "", [])
    for code in ("x = f(a)\nx = f(a,)\n", "x = f(b)\n"):
        with pytest.raises(ValueError, match="found [02] times"):
            edit_text(code, edit)
