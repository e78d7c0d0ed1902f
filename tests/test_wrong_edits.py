"""The wrong edits of ``make mutants ROOM=semantic`` can be made in the present code."""

from tests.command_line import ROOT
from tests.semantic import edit_text, edits


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
