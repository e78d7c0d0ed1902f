"""Files and folders that appear under their names when they are whole, and numbers and
tables for people.
"""

import os
import subprocess
import sys

import pytest

from tests.command_line import DEMO
from titan_disp.files import atomic_folder, atomic_write, cores
from titan_disp.lab.plots import size
from titan_disp.text import (
    byte_size,
    duration,
    estimated_duration,
    markdown_table,
    number,
    short,
)


def test_a_folder_appears_when_it_is_whole(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "parent/new"):
        with atomic_folder(tmp_path / name) as partial:
            (partial / "a").write_text("1")
            assert not (tmp_path / name / "a").exists()
        assert [p.name for p in (tmp_path / name).iterdir()] == ["a"]
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755
    with (
        pytest.raises(OSError, match="not empty"),
        atomic_folder(tmp_path / "empty") as partial,
    ):
        (partial / "a").write_text("2")
    assert (tmp_path / "empty" / "a").read_text() == "1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "parent"]
    assert [p.name for p in (tmp_path / "parent").iterdir()] == ["new"]


def test_nothing_is_left_of_what_failed(tmp_path):
    with pytest.raises(IsADirectoryError), atomic_folder(tmp_path / "out") as partial:
        partial.write_text("a folder is no file")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").write_text("before")
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "out") as partial:
        partial.write_text(str(1 / 0))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_two_processes_write_the_same_file(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with atomic_write(out, by_many=True) as first:
        first.write_text("first")
        monkeypatch.setattr("os.getpid", lambda: 1)
        with atomic_write(out, by_many=True) as second:
            second.write_text("second")
        assert out.read_text() == "second"
    assert (out.read_text(), list(tmp_path.iterdir())) == ("first", [out])


def test_a_containers_quota_is_fewer_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    for quota, expected in (
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("9900000 100000", 16),
        ("max 100000", 16),
    ):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert cores(tmp_path / "cpu.max") == expected
    assert cores(tmp_path / "none") == 16


UNITS = [
    (
        duration,
        [(0.2, "0 s"), (59.6, "1 min 0 s"), (7260, "2 h 1 min"), (200000, "2 d 7 h")],
    ),
    (
        estimated_duration,
        [
            (0, "0.0 ms"),
            (0.1564, "156.4 ms"),
            (1, "1.0 s"),
            (119, "119.0 s"),
            (120, "2.0 minutes"),
        ],
    ),
    (
        estimated_duration,
        [
            (7199, "120.0 minutes"),
            (7200, "2.0 hours"),
            (172799, "48.0 hours"),
            (172800, "2.0 days"),
        ],
    ),
    (
        byte_size,
        [
            (0, 4, "0 bytes"),
            (1, 4, "1 byte"),
            (999, 4, "999 bytes"),
            (1000, 4, "1 kB"),
            (999_999, 4, "1 MB"),
        ],
    ),
    (
        byte_size,
        [
            (327_123_456_789, 4, "327.1 GB"),
            (26_900_000, 3, "26.9 MB"),
            (2e12, 4, "2 TB"),
        ],
    ),
    (
        short,
        [
            (999_950, 3, "1 M"),
            (999_400, 3, "999 k"),
            (-1.5e9, 6, "-1.5 B"),
            (0.25, 6, "0.25"),
        ],
    ),
    (
        number,
        [
            (11_000.2, 4, "11 k"),
            (11_234.5, 4, "11.23 k"),
            (123_456.7, 5, "123.46 k"),
            (99_999.7, 5, "100 k"),
        ],
    ),
    (
        number,
        [
            (1_234_567.0, 5, "1,234,567"),
            (1234.5, 5, "1,234.5"),
            (0.123456, 5, "0.12346"),
            (0.0, 5, "0"),
        ],
    ),
    (
        number,
        [
            (-2.5e9 - 0.5, 3, "-2.5 B"),
            (None, 5, "–"),
            (float("nan"), 5, "–"),
            (2e-6, 5, "2e-06"),
        ],
    ),
    (
        size,
        [
            (7, "7"),
            (427_456, "427k"),
            (999_499, "999k"),
            (999_950, "1M"),
            (1_720_574_976, "1.72B"),
        ],
    ),
]


def test_units():
    for function, cases in UNITS:
        assert [function(*arguments) for *arguments, _ in cases] == [
            words for *_, words in cases
        ]


def test_tables():
    # `:` alone is not a ruler in Markdown.
    assert (
        markdown_table([["a", "p"], ["b", "1"]], text_columns=1)
        == "| a  |  p |\n| -- | -: |\n| b  |  1 |"
    )


def test_a_locale_without_utf_8():
    """torch cannot even be imported there, which the message says."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-m", "titan_disp.cli", "plan", str(DEMO)]
    run = subprocess.run(
        command, env={**os.environ, **ascii_only}, capture_output=True, text=True
    )
    assert (
        "reads and writes files as ANSI_X3.4-1968 here, expected UTF-8: set PYTHONUTF8=1, or"
        in run.stderr
    )
    assert len(run.stderr.splitlines()) == 1
