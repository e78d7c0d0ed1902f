"""The files of a run's folder survive kills and broken nodes; a second job is refused; changes of the config are named."""

import json
import os

import pytest
from torchtitan.config import JobConfig

from titan_disp.errors import ConfigError
from titan_disp.run.folder import RunFolder, append_json, read_json_lines, read_metrics, write_json


def job_config(folder, **training):
    config = JobConfig()
    config.job.dump_folder = str(folder)
    for key, value in training.items():
        setattr(config.training, key, value)
    return config


def started(config, world_size=1):
    """Open a run's folder as a start does that nothing refuses."""
    folder = RunFolder(config, world_size)
    folder.record_start()
    return folder


def test_a_line_cut_by_a_kill_spoils_itself_only(tmp_path):
    file = tmp_path / "metrics.jsonl"
    append_json(file, {"step": 1, "loss": 3.0})
    append_json(file, {"step": 2, "loss": 2.5})
    with open(file, "ab+") as f:
        f.truncate(f.tell() - 6)
    append_json(file, {"step": 2, "loss": 2.25})
    append_json(file, {"step": 3, "loss": 2.0})
    assert [r["step"] for r in read_json_lines(file)] == [1, 2, 3]
    assert read_metrics(tmp_path)[2]["loss"] == 2.25


def test_what_a_dead_node_left_spoils_itself_only(tmp_path):
    """Pages that never reached the disk are zeros or what was there before, in the middle of a file."""
    file = tmp_path / "metrics.jsonl"
    append_json(file, {"step": 1, "loss": 3.0})
    with open(file, "ab") as f:
        f.write(b"\0" * 40 + b"\xff\xfe\x80 12\n7\n[1]\n")
    append_json(file, {"step": 2, "loss": 2.5})
    assert read_json_lines(file) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.5}]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Else a node that dies may leave an empty config.json, and no start of the run would get past it."""
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(
        os, "replace", lambda old, new: (done.append(str(old)), done.append(str(new)), replace(old, new))
    )
    write_json(tmp_path / "config.json", {"a": 1})
    partial = str(tmp_path / ".config.json.partial")
    assert done == [partial, partial, str(tmp_path / "config.json")]
    assert json.loads((tmp_path / "config.json").read_text()) == {"a": 1}


def test_repeated_steps_the_last_counts(tmp_path):
    for step, loss in ((1, 5.0), (2, 4.0), (3, 3.0), (2, 4.5)):
        append_json(tmp_path / "metrics.jsonl", {"step": step, "loss": loss})
    append_json(tmp_path / "metrics.jsonl", {"step": 2, "condensation": {}})  # no training step
    metrics = read_metrics(tmp_path)
    assert list(metrics) == [1, 2, 3]
    assert metrics[2]["loss"] == 4.5


def test_second_job_is_refused_and_the_first_unharmed(tmp_path):
    first = started(job_config(tmp_path))
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="in use by another job.*pid"):
        RunFolder(job_config(tmp_path, steps=7), world_size=1)
    assert (tmp_path / "config.json").read_bytes() == before
    first.close()
    RunFolder(job_config(tmp_path), world_size=1).close()


def test_a_start_that_is_refused_leaves_the_config_of_the_run(tmp_path):
    """The folder is opened before everything is checked: a refused start closes it without a record of itself."""
    started(job_config(tmp_path, steps=5)).close()
    before = {name: (tmp_path / name).read_bytes() for name in ("config.json", "environment.json")}
    RunFolder(job_config(tmp_path, steps=9), world_size=3).close()
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    started(job_config(tmp_path, steps=9), world_size=3).close()
    assert json.loads((tmp_path / "config.json").read_text())["training"]["steps"] == 9
    assert json.loads((tmp_path / "environment.json").read_text())["world_size"] == 3


def test_config_changes_are_named(tmp_path):
    started(job_config(tmp_path, steps=5)).close()
    again = RunFolder(job_config(tmp_path, steps=9), world_size=1)
    assert again.config_changes == {"training.steps": [5, 9]}
    again.close()


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not writable"):
        RunFolder(job_config(tmp_path / "file" / "run"), world_size=1)


def test_a_disk_that_is_full_when_the_start_is_recorded(tmp_path, monkeypatch):
    folder = RunFolder(job_config(tmp_path), world_size=1)

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("titan_disp.run.folder.write_json", full)
    with pytest.raises(ConfigError, match="is not writable: .*No space left on device"):
        folder.record_start()
    folder.close()


def test_a_run_from_before_the_plugin_had_a_module_goes_on(tmp_path):
    """Its config.json says custom_import = "titan_disp"; the new name is a change like any other."""
    old, new = job_config(tmp_path), job_config(tmp_path)
    old.experimental.custom_import, new.experimental.custom_import = "titan_disp", "titan_disp.plugin"
    started(old).close()
    again = RunFolder(new, world_size=1)
    assert again.config_changes == {"experimental.custom_import": ["titan_disp", "titan_disp.plugin"]}
    again.close()
