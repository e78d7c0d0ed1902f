"""Files and folders that appear under their names when they are whole."""

import pytest

from titan_disp.files import atomic_folder


def test_a_folder_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "parent" / "out"
    with atomic_folder(path) as partial:
        (partial / "a").write_text("1")
        assert not path.exists()
    assert [p.name for p in path.parent.iterdir()] == ["out"]
    assert [p.name for p in path.iterdir()] == ["a"]
    assert path.stat().st_mode & 0o777 == 0o755


def test_an_empty_folder_is_replaced_and_a_full_one_is_kept(tmp_path):
    for name in ("empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "a").write_text("old")
    with atomic_folder(tmp_path / "empty") as partial:
        (partial / "a").write_text("new")
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "full") as partial:
        (partial / "a").write_text("new")
    assert {p.name: (p / "a").read_text() for p in tmp_path.iterdir()} == {"empty": "new", "full": "old"}


def test_nothing_is_left_of_a_folder_that_failed(tmp_path):
    with pytest.raises(IsADirectoryError), atomic_folder(tmp_path / "out") as partial:
        partial.write_text("a folder is no file")
    assert list(tmp_path.iterdir()) == []
