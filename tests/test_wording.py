"""Counts in messages."""

import pytest

from titan_disp.errors import counted


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((1, "file"), "1 file"),
        ((2, "file"), "2 files"),
        ((0, "file"), "0 files"),
        ((1234, "document"), "1,234 documents"),
        ((1, "copy", "copies"), "1 copy"),
        ((2, "copy", "copies"), "2 copies"),
    ],
)
def test_counted(arguments, text):
    assert counted(*arguments) == text
