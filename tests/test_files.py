"""Files and folders that appear under their names when they are whole."""

import os

import pytest

from titan_disp.files import atomic_folder, atomic_write, cores


def write(path, text):
    with atomic_folder(path) as partial:
        (partial / "a").write_text(text)
        assert not (path / "a").exists()


def test_a_folder_appears_when_it_is_whole(tmp_path):
    """An empty folder is replaced, and a full one is kept."""
    (tmp_path / "empty").mkdir()
    for name in ("empty", "parent/new"):
        write(tmp_path / name, "1")
        assert [p.name for p in (tmp_path / name).iterdir()] == ["a"]
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o755
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "empty") as partial:
        (partial / "a").write_text("2")
    assert (tmp_path / "empty" / "a").read_text() == "1"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "parent"]
    assert [p.name for p in (tmp_path / "parent").iterdir()] == ["new"]


def test_nothing_is_left_of_a_folder_that_failed(tmp_path):
    with pytest.raises(IsADirectoryError), atomic_folder(tmp_path / "out") as partial:
        partial.write_text("a folder is no file")
    assert list(tmp_path.iterdir()) == []


def test_two_processes_write_the_same_file(tmp_path, monkeypatch):
    out = tmp_path / "out"
    with atomic_write(out, by_many=True) as first:
        first.write_text("first")
        monkeypatch.setattr("os.getpid", lambda: 1)
        with atomic_write(out, by_many=True) as second:
            second.write_text("second")
        assert out.read_text() == "second"
    assert (out.read_text(), list(tmp_path.iterdir())) == ("first", [out])


def test_nothing_is_left_of_a_file_that_failed(tmp_path):
    (tmp_path / "out").write_text("before")
    with pytest.raises(ZeroDivisionError), atomic_write(tmp_path / "out") as partial:
        partial.write_text(str(1 / 0))
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]


def test_a_containers_quota_is_fewer_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    for quota, expected in (("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 16), ("max 100000", 16)):
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
        assert cores(tmp_path / "cpu.max") == expected
    assert cores(tmp_path / "none") == 16
