"""These tests check numbers, sizes and durations at the places where a format changes its unit."""

import pytest

from titan_disp.text import byte_size, csv_text, duration, estimated_duration, short


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "0 s"), (59.6, "1 min 0 s"), (7260, "2 h 1 min"), (200000, "2 d 7 h")]
)
def test_duration(seconds, words):
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0, "0.0 ms"), (0.1564, "156.4 ms"), (1, "1.0 s"), (119, "119.0 s"), (120, "2.0 minutes")),
        *((7199, "120.0 minutes"), (7200, "2.0 hours"), (172799, "48.0 hours"), (172800, "2.0 days")),
    ],
)
def test_estimated_duration(seconds, words):
    assert estimated_duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "digits", "words"),
    [
        *((0, 4, "0 bytes"), (1, 4, "1 byte"), (999, 4, "999 bytes"), (1000, 4, "1 kB"), (999_999, 4, "1 MB")),
        *((327_123_456_789, 4, "327.1 GB"), (26_900_000, 3, "26.9 MB"), (2e12, 4, "2 TB")),
    ],
)
def test_byte_size(count, digits, words):
    assert byte_size(count, digits) == words


@pytest.mark.parametrize(
    ("value", "digits", "text"), [(999_950, 3, "1 M"), (999_400, 3, "999 k"), (-1.5e9, 6, "-1.5 B"), (0.25, 6, "0.25")]
)
def test_short(value, digits, text):
    assert short(value, digits) == text


def test_csv():
    assert csv_text([["a", "b"], [1, None], ["x,y", 0.5]]) == 'a,b\r\n1,\r\n"x,y",0.5\r\n'
