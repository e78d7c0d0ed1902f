"""The wrong edits of ``make mutants ROOM=semantic`` can be made in the present code."""

from tests.command_line import ROOT
from tests.semantic import edits


def test_each_edit_can_be_made():
    found = edits()
    assert len(found) >= 60
    for edit in found:
        text = (ROOT / edit.file).read_text()
        assert text.count(edit.old) == 1, f"{edit.file}: not found exactly once: {edit.old}"
        if edit.file.endswith(".py"):  # a syntax error would be noticed whatever the tests ask
            compile(text.replace(edit.old, edit.new), edit.file, "exec")
        assert edit.new != edit.old
        assert edit.why.endswith(".")
        assert edit.tests
        for name in edit.tests:
            assert (ROOT / "tests" / name).is_file(), name
