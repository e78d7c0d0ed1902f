"""A sweep's file, its points, and their training.

Except for the last test, a stub trains.
"""

import dataclasses
import functools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time

import pytest
from torchtitan.config import ConfigManager

from tests.command_line import (
    DEMO,
    ROOT,
    SECONDS,
    children,
    environment,
    is_running,
    train,
    typed,
)
from tests.pages import can_start, changed, loaded, understood
from titan_disp.checks import check_config
from titan_disp.cluster import plan as plans
from titan_disp.config import load
from titan_disp.config.command_options import Machine, SweepOptions
from titan_disp.errors import ConfigError
from titan_disp.lab.sweeps import preparation, runner
from titan_disp.lab.sweeps.definition import points, read_sweep
from titan_disp.lab.sweeps.preparation import prepare, ranges, state, submit
from titan_disp.lab.sweeps.runner import first_error, run, summary
from titan_disp.run.lock import Lock
from titan_disp.run.reader import read_events, read_metrics


def write(path, text, overrides=()):
    head = f"[sweep]\nconfig = {json.dumps(str(DEMO))}\nfolder = {json.dumps(str(path.parent / 'runs'))}\n"
    path.write_text(f"{head}overrides = {json.dumps(list(overrides))}\n{text}")
    return path


@pytest.fixture
def sweep(tmp_path):
    return lambda text, *overrides: read_sweep(
        write(tmp_path / "sweep.toml", text, overrides=overrides)
    )


class TestPoints:
    def test_a_grid(self, sweep):
        grid = GRID.replace("debug.seed", "debug.seed, stream.seed")
        found = points(sweep(grid, "--training.steps=4"))
        assert (
            [point.name for point in found]
            == [point.folder.name for point in found]
            == NAMES
        )
        assert [point.condition for point in found] == [
            "coeff-0.0",
            "coeff-0.0",
            "coeff-0.1",
            "coeff-0.1",
        ]
        assert found[2].argv() == [
            *(
                str(DEMO),
                "--training.steps=4",
                "--dispersion.coeff=0.1",
                "--debug.seed=1",
                "--stream.seed=1",
            ),
            *("--job.dump_folder", str(found[2].folder)),
        ]
        assert found[1].seeds == {"debug.seed": 2, "stream.seed": 2}
        assert {
            point.condition for point in points(sweep('[grid]\n"debug.seed" = [1, 2]'))
        } == {"demo_cpu"}

    def test_a_list_and_a_grid(self, sweep):
        off = '[[points]]\nname = "off"\noverrides = ["--dispersion.no-enabled"]\n'
        on = '[[points]]\nname = "on"\n[points.grid]\n"dispersion.tau" = [0.5, 1]\n'
        found = points(sweep(f'{off}{on}[grid]\n"debug.seed" = [7, 8]\n'))
        conditions = ["off", "on_tau-0.5", "on_tau-1"]
        assert [point.name for point in found] == [
            f"{one}_seed-{seed}" for one in conditions for seed in (7, 8)
        ]
        assert list(dict.fromkeys(point.condition for point in found)) == conditions
        assert found[0].overrides == ("--dispersion.no-enabled", "--debug.seed=7")

    def test_names_are_safe_and_unique(self, sweep):
        text = """[grid]
"dispersion.enabled" = [true, false]
"dispersion.layers" = ["all", [0, 2]]
"training.dataset_path" = ["/a b/c", "/a/b/c"]
"debug.seed" = [-1]
"stream.seed" = [3]
"""
        found = points(sweep(text))
        assert len({point.name for point in found}) == len(found) == 8
        for point in found:
            assert not set(point.name) - set(
                "abcdefghijklmnopqrstuvwxyz0123456789._+-"
            ), point.name
            assert (
                point.folder.parent / point.name
            ).resolve() == point.folder.resolve()
        first = found[0]
        last = found[-1]
        assert re.fullmatch(
            r"enabled-true_layers-all_dataset_path-a-b-c-\w+_debug.seed--1_stream.seed-3",
            first.name,
        )
        assert last.name.startswith("enabled-false_layers-0+2_dataset_path-")
        assert first.overrides[:2] == (
            "--dispersion.enabled",
            "--dispersion.layers=all",
        )
        assert last.overrides[:4] == (
            "--dispersion.no-enabled",
            "--dispersion.layers",
            "0",
            "2",
        )

    def test_tables_in_a_grid(self, sweep):
        (point,) = points(sweep('[grid]\n"dispersion.options" = [{margin = 0.3}]'))
        assert (point.name, point.overrides) == (
            "options-margin-0.3",
            ("--dispersion.options=margin=0.3",),
        )
        for value, name, option in (
            (
                '["hidden_dim=32", "n_layers=2"]',
                "hidden_dim-32+n_layers-2",
                "hidden_dim=32,n_layers=2",
            ),
            (
                "{hidden_dim = 48, n_layers = 2}",
                "hidden_dim-48-n_layers-2",
                "hidden_dim=48,n_layers=2",
            ),
            ('""', "empty", ""),
        ):
            (point,) = points(sweep(f'[grid]\n"model.overrides" = [{value}]'))
            assert (point.name, point.overrides) == (
                f"overrides-{name}",
                (f"--model.overrides={option}",),
            )

    def test_lists_reach_the_config_as_they_are_written(self, sweep):
        for key, value in (
            ("compile.components", ["model", "loss"]),
            ("quantize.grouped_mm.mx.fqns", ["experts", "router"]),
            ("dispersion.layers", [0, 2]),
            ("dispersion.layers", []),
            (
                "parallelism.module_fqns_per_model_part",
                [["tok_embeddings", "layers.0"], ["layers.1"], ["norm"]],
            ),
        ):
            (point,) = points(sweep(f'[grid]\n"{key}" = [{json.dumps(value)}]'))
            argv = [
                "--job.custom_config_module",
                load.MODULE,
                "--model.hf_assets_path",
                ".",
                *point.overrides,
            ]
            parsed = ConfigManager().parse_args(argv)
            assert functools.reduce(getattr, key.split("."), parsed) == value

    def test_what_is_wrong_is_said(self, tmp_path):
        for text, told in (
            ("", "nothing varies"),
            (
                '[grid]\n"compile.components" = [["model,loss"]]',
                "'model,loss', which TorchTitan's .* splits at the comma",
            ),
            (
                '[grid]\n"compile.components" = [["model", 1]]',
                "expected a string, a number",
            ),
            (
                '[grid]\n"parallelism.module_fqns_per_model_part" = [[["norm"], "output"]]',
                "expected a string",
            ),
            ("[grids]", "unknown key in of '.*': grids \\(did you mean grid"),
            (
                "[grid]\ndispersion.coeff = [1]",
                'quote keys with dots: "dispersion.coeff"',
            ),
            ('[grid]\n"dispersion.coeff" = 1', "expected a list of values"),
            ('[grid]\n"dispersion.coeff" = []', "expected a list of values"),
            ("[grid]\nseed = [1]", "'seed' cannot vary"),
            ('[grid]\n"job.dump_folder" = ["a"]', "'job.dump_folder' cannot vary"),
            (
                '[grid]\n"debug.seed" = [1]\n"stream.seed, debug.seed" = [2]',
                "varies debug.seed twice",
            ),
            (
                '[grid]\n"debug.seed" = [1, 1]',
                "2 points of the sweep have the name 'seed-1-.*'",
            ),
            (
                '[[points]]\nname = "../a"',
                "the name of one of \\[\\[points\\]\\] is '../a'",
            ),
            (
                '[[points]]\nname = "a"\noverrides = "--x"',
                "overrides of the point 'a' is '--x', expected a list",
            ),
            (
                '[[points]]\nname = "a"\noverrides = ["--job.dump-folder=x"]',
                "which the sweep sets itself",
            ),
            (
                '[[points]]\nname = "a"\n[points.grid]\n"debug.seed" = [1]\n[grid]\n"debug.seed" = [2]',
                "name it once",
            ),
            (f'[[points]]\nname = "{"a" * 201}"', "is too long for a folder"),
            ("WHOLE[sweep]\nconfig = 'a'", "has no folder"),
            ("WHOLE[grid]", "has no \\[sweep\\] section"),
            ("WHOLE[sweep]\nconfig = 1\nfolder = 'b'", "sweep.config is 1"),
            (
                "WHOLE[sweep]\nconfig = 'a'\nfolder = 'b'\nseed = 1",
                "unknown key in \\[sweep\\] of",
            ),
        ):
            file = write(tmp_path / "sweep.toml", text)
            if text.startswith("WHOLE"):
                file.write_text(text.removeprefix("WHOLE"))
            with pytest.raises(ConfigError, match=told):
                points(read_sweep(file))


GRID = '[grid]\n"dispersion.coeff" = [0.0, 0.1]\n"debug.seed" = [1, 2]\n'
NAMES = ["coeff-0.0_seed-1", "coeff-0.0_seed-2", "coeff-0.1_seed-1", "coeff-0.1_seed-2"]


def nano(sample):
    return (
        *(
            "--training.steps=4",
            "--training.seq_len=32",
            "--lr_scheduler.warmup_steps=1",
            "--metrics.log_freq=1",
        ),
        *(
            f"--training.dataset_path={sample}",
            f"--model.hf_assets_path={sample}/tokenizer",
        ),
    )


ONE = '[grid]\n"debug.seed" = [1]'


class TestPrepare:
    def test_every_config_is_checked_before_anything_is_written(self, sweep, sample):
        wrong = {
            "fine": "--debug.seed=1",
            "unknown": "--dispersion.coef=1",
            "type": "--dispersion.tau=warm",
        }
        wrong["batch"] = "--training.global_batch_size=3"
        wrong |= dict.fromkeys(
            ("data", "same"), f"--model.hf_assets_path={sample}/nothing"
        )
        listed = "".join(
            f'[[points]]\nname = "{name}"\noverrides = ["{option}"]\n'
            for name, option in wrong.items()
        )
        made = sweep(listed, *nano(sample))
        told = [
            "unknown: .*--dispersion.coef",
            "type: .*warm",
            "batch: .*size 3 is not",
        ]
        told += ["data: .*tokenizer", "same: .*tokenizer"]
        with pytest.raises(
            ConfigError,
            match="^" + "\n".join(f"the point {one}.*" for one in told) + "$",
        ):
            prepare(made, 1)
        assert not made.folder.exists()

    def test_the_device_is_checked_for_every_point(self, sweep, sample):
        """Also after a point with the same inputs."""
        made = sweep(
            '[grid]\n"profiling.enable_profiling" = [false, true]', *nano(sample)
        )
        with pytest.raises(
            ConfigError,
            match="^the point enable_profiling-true: .*there is no accelerator",
        ):
            prepare(made, 1)

    def test_points_that_are_new_or_changed(self, sweep, sample, tmp_path):
        one = prepare(sweep('[grid]\n"debug.seed" = [2]', *nano(sample)), 1)
        assert [(p.point.name, p.place, p.steps) for p in one] == [("seed-2", 0, 4)]
        two = prepare(sweep('[grid]\n"debug.seed" = [1, 2]', *nano(sample)), 1)
        assert [(p.point.name, p.place) for p in two] == [("seed-1", 1), ("seed-2", 0)]
        listed = json.loads((tmp_path / "runs" / "points.json").read_text())["points"]
        assert [entry["name"] for entry in listed] == ["seed-2", "seed-1"]
        assert tuple(listed[1]["argv"]) == two[0].argv
        assert two[0].argv[0] == str(tmp_path / "runs" / "seed-1" / "point.toml")
        assert (
            tmp_path / "runs" / "seed-1" / "point.toml"
        ).read_bytes() == DEMO.read_bytes()
        # it has not started
        (changed,) = prepare(sweep(ONE, *nano(sample), "--dispersion.tau=2.0"), 1)
        assert "--dispersion.tau=2.0" in changed.argv
        two = prepare(sweep(ONE, *nano(sample)), 1)
        (tmp_path / "runs" / "seed-1" / "events.jsonl").touch()
        # A config that is written differently is the same point.
        (same,) = prepare(sweep(ONE, *nano(sample), "--dispersion.tau=1.0"), 1)
        # as in its first start, with the copy of the file from then
        assert same.argv == two[0].argv
        with pytest.raises(
            ConfigError,
            match=r"seed-1: its config has changed .*: dispersion.tau 1.0 → 2.0\. ",
        ):
            prepare(sweep(ONE, *nano(sample), "--dispersion.tau=2.0"), 1)

    def test_a_model_that_is_no_more_overridden(self, sweep, sample, tmp_path):
        for same in ("hidden_dim=16,n_layers=2", "n_layers=2, hidden_dim=16"):
            prepare(sweep(ONE, *nano(sample), f"--model.overrides={same}"), 1)
            (tmp_path / "runs" / "seed-1" / "events.jsonl").touch()
        for other, told in (
            ((), r"config has changed .* model.overrides.hidden_dim 16 → None[,.]"),
            (
                ("--model.overrides=dim=32,n_layers=2",),
                r"dim None → 32, model.overrides.hidden_dim 16 → None\. ",
            ),
        ):
            with pytest.raises(ConfigError, match=told):
                prepare(sweep(ONE, *nano(sample), *other), 1)

    def test_an_older_version_knew_fewer_keys(self, sweep, sample, tmp_path):
        made = sweep(ONE, *nano(sample))
        file = tmp_path / "runs" / "seed-1" / "point.json"
        prepare(made, 1)
        (file.parent / "events.jsonl").touch()
        record = json.loads(file.read_text())
        del record["resolved"]["dispersion.tau"], record["resolved"]["training.seq_len"]
        file.write_text(json.dumps(record))
        # 2048 is the default, which this run never had; that of tau it had.
        with pytest.raises(
            ConfigError,
            match=r"its config has changed [^:]*: training.seq_len 2048 → 32\. ",
        ):
            prepare(made, 1)

    def test_a_folder_that_is_something_else(self, sweep, sample, tmp_path):
        made = sweep(ONE, *nano(sample))
        run = tmp_path / "runs" / "seed-1"
        run.mkdir(parents=True)
        for name in ("point.toml", ".point.json.partial", "metrics.jsonl"):
            (run / name).touch()
        with pytest.raises(
            ConfigError, match="already exists and is not a point of this sweep"
        ):
            prepare(made, 1)
        (run / "metrics.jsonl").unlink()
        prepare(made, 1)
        assert (run / "point.toml").read_bytes() == DEMO.read_bytes()
        with pytest.raises(
            ConfigError, match="^the point seed-1: .*is not a positive multiple"
        ):
            prepare(made, 3, inputs=False)  # nothing else has changed


def write_events(run, lines):
    text = [
        {"time": "2026-01-01T00:00:00+00:00", "event": e, "step": s, "reason": r}
        | dict(more)
        for e, s, r, *more in lines
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in text))


START = ("start", 0, "")
COMPLETE = ("complete", 4, "")


def test_the_last_event_or_a_failure_decides_the_state(tmp_path):
    for lines, expected in (
        ([], ("not started", "it has not begun to train")),
        ([START], ("unfinished", "begun, step 0 or later")),
        ([START, ("stop", 2, "SIGTERM")], ("unfinished", "stop at step 2: SIGTERM")),
        ([START, COMPLETE], ("finished", "step 4")),
        ([COMPLETE, COMPLETE], ("finished", "step 4")),
        ([START, ("stop", 3, "budget.stop_at_tokens")], ("finished", "step 3")),
        ([START, COMPLETE, ("checkpoint", 4, "")], ("finished", "step 4")),
        (
            [START, COMPLETE, ("refused", 4, "other data", ("allocated", 1.0))],
            ("finished", "step 4"),
        ),
        (
            [COMPLETE, START, ("checkpoint", 2, "")],
            ("unfinished", "begun, step 4 or later"),
        ),
    ):
        write_events(tmp_path, lines)
        assert state(tmp_path) == expected
    # The record of the sweep or of the supervisor decides, unless the point is
    # finished.
    write_events(tmp_path, [START])
    for file, text, expected in (
        (
            "supervisor.jsonl",
            '{"state": "train"}\n{"state": "give up", "reason": "three times"}\n',
            "three times",
        ),
        ("failed.json", '{"status": 1, "error": "no data"}', "no data"),
    ):
        (tmp_path / file).write_text(text)
        assert state(tmp_path) == ("failed", expected)
    write_events(tmp_path, [START, COMPLETE])
    assert state(tmp_path) == ("finished", "step 4")


cached_defaults = functools.cache(
    preparation.defaults
)  # parsing them takes half a second


def loaded_once(argv):
    """Cache the configs of points whatever their folder, because loading one takes a
    quarter of a second.
    """
    where = argv.index("--job.dump_folder")
    return changed(
        loaded(*argv[1:where], *argv[where + 2 :]), {"job.dump_folder": argv[where + 1]}
    )


@pytest.fixture(autouse=True)
def loads_once(monkeypatch):
    monkeypatch.setattr(preparation, "defaults", cached_defaults)
    monkeypatch.setattr(preparation, "load_config", loaded_once)


@pytest.fixture
def prepared(sweep, sample, monkeypatch, heard):
    """Run a 2 × 2 sweep that the stub trains: ``what`` says by the point's name what it
    does.
    """

    def prepared(text=GRID, jobs=1, **what):
        monkeypatch.setenv("STUB", json.dumps(what))
        return run(sweep(text, *nano(sample)), jobs, module="tests.stub_train")

    monkeypatch.setattr(runner, "REPORT", 0.1)
    return prepared


def outcomes(results):
    return [result.outcome for result in results]


def starts(tmp_path):
    runs = [
        tmp_path / "runs" / name
        for name in (NAMES if (tmp_path / "runs" / NAMES[0]).exists() else ["seed-1"])
    ]
    return [
        sum(event["event"] == "start" for event in read_events(run)) for run in runs
    ]


@pytest.mark.changes_runs  # stand-ins of a trainer write these runs
class TestRun:
    def test_failures_are_named_and_a_second_call_goes_on(
        self, prepared, tmp_path, capsys
    ):
        results = prepared(**{NAMES[1]: "fail", NAMES[2]: "crash", NAMES[3]: "die"})
        assert [result.name for result in results] == NAMES
        assert outcomes(results) == ["finished", "failed", "failed", "failed"]
        told = summary(results)
        log = tmp_path / "runs" / NAMES[1] / "sweep.log"
        assert told[:2] == [
            "1 finished, 3 failed",
            f"  {NAMES[1]}: failed: the data is not there (status 2; {log})",
        ]
        assert "RuntimeError: it broke (status 1; " in told[2]
        assert "killed by SIGKILL" in told[3]
        assert [state(tmp_path / "runs" / name)[0] for name in NAMES] == outcomes(
            results
        )
        assert "1 finished, 3 failed, 0 training, 0 waiting" in capsys.readouterr().out

        results = prepared(**{NAMES[2]: "fail"})
        assert outcomes(results) == ["finished", "finished", "failed", "finished"]
        assert starts(tmp_path) == [1, 1, 1, 2]
        # not the error of the first call
        assert "the data is not there" in summary(results)[1]
        assert "1 finished, 3 to train" in capsys.readouterr().out
        for _ in range(2):
            assert set(outcomes(prepared())) == {"finished"}
            assert starts(tmp_path) == [1, 1, 2, 2]

    def signalled(self, tmp_path, count, number=signal.SIGINT, times=1, pause=1.2):
        def wait():
            deadline = time.monotonic() + SECONDS
            while (
                len([*tmp_path.glob("runs/*/heartbeat.json")]) < count
                and time.monotonic() < deadline
            ):
                time.sleep(0.02)
            for _ in range(times):
                os.kill(os.getpid(), number)
                time.sleep(pause)

        threading.Thread(target=wait, daemon=True).start()

    # timeout(1) signals a process and its group.
    @pytest.mark.parametrize(
        ("number", "times", "pause"), [(signal.SIGINT, 1, 0), (signal.SIGTERM, 2, 0.05)]
    )
    def test_asked_to_stop(self, prepared, tmp_path, number, times, pause):
        before = signal.getsignal(number)
        self.signalled(tmp_path, 2, number, times, pause)
        results = prepared(jobs=2, **dict.fromkeys(NAMES, "wait"))
        assert outcomes(results) == ["stopped"] * 4
        assert [one.detail for one in results] == [
            *["stop at step 1: SIGTERM"] * 2,
            *["not begun"] * 2,
        ]
        assert starts(tmp_path) == [1, 1, 0, 0]
        assert signal.getsignal(number) is before

    def test_asked_to_stop_twice(self, prepared, tmp_path):
        before = children(os.getpid())  # servers that fork the ranks of other tests
        self.signalled(tmp_path, 1, times=2)
        assert outcomes(prepared(**{NAMES[0]: "stubborn"}))[0] == "stopped"
        assert children(os.getpid()) == before

    def test_two_calls_do_not_train_one_point_twice(
        self, prepared, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(runner, "IN_USE", 0.5)
        held = []
        for name, lock in ((NAMES[1], runner.LOCK), (NAMES[2], ".lock")):
            (tmp_path / "runs" / name).mkdir(parents=True)
            held.append(Lock(tmp_path / "runs" / name, lock))
        results = prepared()
        assert outcomes(results) == ["finished", "in use", "in use", "finished"]
        assert "is in use by another job" in results[1].detail
        assert starts(tmp_path) == [1, 0, 0, 1]
        for lock in held:
            lock.close()
        assert set(outcomes(prepared())) == {"finished"}

    def test_another_call_has_finished_it_meanwhile(
        self, prepared, tmp_path, monkeypatch
    ):
        prepared(text=ONE)
        events = tmp_path / "runs" / "seed-1" / "events.jsonl"
        complete = events.read_text()
        lock = runner.Lock
        events.unlink()
        monkeypatch.setattr(
            runner,
            "Lock",
            lambda *args: events.write_text(complete) and lock(*args),
        )
        assert outcomes(prepared(text=ONE)) == ["finished"]
        assert starts(tmp_path) == [1]

    def test_one_core_each(self, prepared, tmp_path, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        prepared(text=ONE, jobs=3)
        found = json.loads((tmp_path / "runs" / "seed-1" / "environment").read_text())
        expected = {
            "OMP_NUM_THREADS": "1",
            "WORLD_SIZE": "1",
            "RANK": "0",
            "MASTER_PORT": "0",
            "LOCAL_WORLD_SIZE": "3",
        }
        assert {name: found[name] for name in expected} == expected

    def test_several_ranks_come_from_torchrun(self, sweep, sample, monkeypatch):
        monkeypatch.delenv("WORLD_SIZE", raising=False)
        made = prepare(sweep(ONE, *nano(sample)), 2)
        of_two_ranks = runner._Runner(made, 1, 2, "titan_disp.train")
        command = " ".join(of_two_ranks._command(made[0]))
        assert command.startswith(
            "-m torch.distributed.run --standalone --nproc-per-node=2 "
            "--max-restarts=0 -m titan"
        )
        assert "WORLD_SIZE" not in of_two_ranks._environment(0)

    def test_gpus_are_dealt_in_turn(self, monkeypatch):
        monkeypatch.setattr(runner.torch.accelerator, "device_count", lambda: 4)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert [
            runner._devices(slot, 1)["CUDA_VISIBLE_DEVICES"] for slot in range(5)
        ] == ["0", "1", "2", "3", "0"]
        assert [
            runner._devices(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(3)
        ] == ["0,1", "2,3", "0,1"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
        assert runner._devices(1, 2)["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_first_error(tmp_path):
    for text, error in (
        (
            "step 1\n[rank0]: Traceback\n[rank0]: torch.OutOfMemoryError: none\n",
            "torch.OutOfMemoryError: none",
        ),
        (
            "ValueError: first\nDuring handling\nKeyError: 'last'\nwarning\n",
            "KeyError: 'last'",
        ),
        ("RuntimeError: x\nx.errors.ChildFailedError:\n", "RuntimeError: x"),
        ("a\nb\n\nc\nd\n", "b / c / d"),
        ("", "no output"),
    ):
        earlier = "titan-disp: error: of an earlier start\n"
        (tmp_path / "log").write_text(earlier + text)
        assert first_error(tmp_path / "log", len(earlier)) == error


def test_a_dry_run_without_submit_trains_nothing(sample, tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "s.toml", GRID, nano(sample))
    assert typed(monkeypatch, "sweep", file, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert not read_sweep(file).folder.exists()
    for name in NAMES:
        assert f"{name}: not started: it has not begun to train" in printed
    assert printed.count("titan-disp train ") == len(NAMES)
    # The printed command can be typed.
    words = shlex.split(printed.splitlines()[1])[1:]
    _, options = understood(words)
    assert options.nproc == 1
    assert loaded(*options.argv[1:]).job.dump_folder.endswith(NAMES[0])


def test_submit(sweep, sample, monkeypatch, capsys):
    assert ranges([7, 0, 1, 2, 3, 9, 10]) == "0-3,7,9-10"
    monkeypatch.delenv("TITAN_DISP_PYTHON", raising=False)
    monkeypatch.setattr(plans, "MAX_NODES", 1)  # else it tries a thousand
    made = sweep(GRID, *nano(sample))
    jobs = {
        "jobs": 2,
        "gpus_per_node": 0,
        "site": "local_cpu",
        "sbatch": ("time=15", "account=abc"),
    }

    def told():
        assert submit(made, SweepOptions(made.folder, **jobs, dry_run=True)) == 0
        return capsys.readouterr().out

    exported = f"ALL,TITAN_DISP_SITE=local_cpu,TITAN_DISP_PYTHON={sys.executable}"
    line = f"sbatch --nodes=1 --array={{}}%2 --time=15 --account=abc --export={exported} {ROOT}/slurm/sweep.sbatch {made.folder}"
    first, *plan, last = told().splitlines()
    assert not made.folder.exists()  # a dry run writes nothing
    prepare(made, 1)
    assert (first.endswith("0 finished, 4 to submit"), last) == (
        True,
        line.format("0-3"),
    )
    assert "4 of 512 tokens" in "".join(plan)  # 4 steps of 16 × 32 tokens
    (made.folder / NAMES[1] / "failed.json").write_text('{"error": "it broke"}')
    for name in (NAMES[0], NAMES[2]):
        write_events(made.folder / name, [COMPLETE])
    assert told().splitlines()[-1] == line.format("1,3")
    # a dry run deletes nothing
    assert (made.folder / NAMES[1] / "failed.json").exists()
    for name in NAMES:
        write_events(made.folder / name, [COMPLETE])
    assert told() == f"4 points in {made.folder}: 4 finished, 0 to submit\n"


@pytest.mark.parametrize(
    "file",
    sorted((ROOT / "train_configs" / "sweeps").glob("*.toml")),
    ids=lambda file: file.stem,
)
def test_the_sweeps_that_come_with_it(file, monkeypatch):
    """A point of each list goes through the loader; the other values are put into its
    config, which takes no time.
    """
    monkeypatch.chdir(ROOT)  # paths are relative to it
    sweep = read_sweep(file)
    if file.stem in ("condensing_dose", "rate_or_dispersion"):
        assert sweep.against is None  # the baseline is in another file
    else:
        assert sweep.against in {point.condition for point in points(sweep)}
    for listed in sweep.listed:
        first = points(dataclasses.replace(sweep, listed=(listed,)))[0]
        can_start(1, *first.argv())
        for axis, value in (
            (one, value) for one in (*listed.axes, *sweep.axes) for value in one.values
        ):
            other = changed(loaded(*first.argv()), dict.fromkeys(axis.keys, value))
            for key in axis.keys:
                section, _, name = key.rpartition(".")
                types = load._types(getattr(other, section))
                load.check_type(key, value, types[name])
            check_config(other, 1)


def test_the_cost_of_the_experiment_at_124m(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(plans, "MAX_NODES", 1)
    file, tuning = (
        ROOT / "train_configs" / "sweeps" / f"evidence_124m{part}.toml"
        for part in ("", "_tuning")
    )
    pattern = (
        r"predicts (\d+) .*? and (\d+) without.*?: (\d+) hours .*?, and (\d+) hours"
    )
    said = [
        int(number) for number in re.search(pattern, file.read_text(), re.S).groups()
    ]
    main = read_sweep(file)
    first = read_sweep(tuning)
    minutes = {}
    for point in points(main):
        if point.seeds == {"debug.seed": 1, "stream.seed": 1}:
            plan = plans.make_plan(loaded(*point.argv()), Machine(1, 1))
            minutes[point.condition] = plan.time.days * 1440
    hours = sum(minutes.values()) / 60
    assert said == [
        round(number)
        for number in (minutes["on"], minutes["off"], 8 * hours, 6 * hours)
    ]
    assert (
        f"`plan` predicts {said[2] + said[3]} hours on an H100"
        in (ROOT / "docs" / "evidence.md").read_text()
    )
    assert (main.config, main.overrides) == (first.config, first.overrides)
    rated = [
        (one.name, (*one.overrides, "--optimizer.lr=6e-4")) for one in first.listed
    ]
    assert rated == [(one.name, one.overrides) for one in main.listed]


@pytest.mark.night
def test_killed_in_the_middle(sample, tmp_path):
    file = write(
        tmp_path / "sweep.toml",
        GRID,
        overrides=(*nano(sample), "--checkpoint.interval=1"),
    )
    command = [sys.executable, "-m", "titan_disp.cli", "sweep"]
    options = {"cwd": ROOT, "env": environment(), "text": True}
    first = subprocess.Popen([*command, str(file)], **options)
    runs = tmp_path / "runs"
    deadline = time.monotonic() + SECONDS
    while not any(e["event"] == "start" for e in read_events(runs / NAMES[1])):
        assert time.monotonic() < deadline
        assert first.poll() is None
        time.sleep(0.02)
    (trainer,) = children(first.pid)
    first.kill()
    first.wait()
    # it is not our child any more: it saves and ends by itself
    while is_running(trainer):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [state(runs / name)[0] for name in NAMES] == [
        "finished",
        "unfinished",
        "not started",
        "not started",
    ]
    last = read_events(runs / NAMES[1])[-1]
    assert (last["event"], last["reason"]) == ("stop", "SIGTERM")

    done = subprocess.run(
        [*command, str(file)], **options, capture_output=True, timeout=SECONDS
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "4 finished"), (
        done.stdout + done.stderr
    )
    begun = [
        [
            e["event"]
            for e in read_events(runs / name)
            if e["event"] in ("start", "resume")
        ]
        for name in NAMES
    ]
    assert begun == [["start"], ["start", "resume"], ["start"], ["start"]]

    # A point, interrupted or not, equals the run of `titan-disp train` with the same
    # config bit for bit.
    alone = tmp_path / "alone"
    train(
        DEMO,
        sample,
        alone,
        *nano(sample)[:4],
        "--dispersion.coeff=0.0",
        "--debug.seed=2",
    )
    losses = [
        {step: row["loss"] for step, row in read_metrics(run).items()}
        for run in (alone, runs / NAMES[1])
    ]
    assert losses[0] == losses[1]
    assert set(losses[0]) == {1, 2, 3, 4}
