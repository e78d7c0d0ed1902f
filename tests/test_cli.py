"""The subcommands as they are typed, in this process.

Everything that would start another one is replaced.
"""

import dataclasses
import io
import json
import re
import sys
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import docstring_parser
import pytest

from tests.command_line import DEMO, ROOT, typed
from tests.pages import understood
from titan_disp import __main__, cli
from titan_disp.cluster import launch, preflight
from titan_disp.cluster.cost import GPUS
from titan_disp.config import command_options
from titan_disp.errors import EXIT_CODE
from titan_disp.lab import digest
from titan_disp.lab.sweeps import preparation, runner

OVERRIDES = (
    *(
        "--training.seq_len",
        "64",
        "--training.global_batch_size=8",
        "--dispersion.no-enabled",
    ),
    *("--lr_scheduler.min_lr_factor", "0.5", "--debug.seed", "-7"),
)
# for processes that read the config themselves
HANDED_ON = ["--job.config_file", str(DEMO), *OVERRIDES]


def test_words_that_are_refused(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "text.jsonl").write_text(
        "".join(f'{{"text": "{i} {"word " * 999}"}}\n' for i in range(99))
    )
    # Reading it takes seconds
    monkeypatch.setattr("titan_disp.lab.sample.prose", lambda: iter(()))
    for words, message in (
        (
            "trian CONFIG",
            "'trian' is not a subcommand of titan-disp (did you mean train?); expected init, ",
        ),
        (
            "data fecth there",
            "'fecth' is not a subcommand of titan-disp data (did you mean fetch?); expected check, ",
        ),
        (
            "sweep tabel FILE",
            "'tabel' is not a subcommand of titan-disp sweep (did you mean table?); expected ",
        ),
        (
            "sweep qqqq",
            "'qqqq' is not a subcommand of titan-disp sweep; expected a TOML file, run, table",
        ),
        ("sweep qqqq.tml", "cannot read the config 'qqqq.tml'"),
        ("sweep there/qqqq", "cannot read the config 'there/qqqq'"),
        ("train CONFIG --nproc 0", "--nproc is 0, expected at least 1"),
        ("data index CONFIG --workers 0", "--workers is 0, expected at least 1"),
        ("data fetch DIR --workers 0", "--workers is 0, expected at least 1"),
        ("sample-data file/x", "'file' is not a writable folder"),
        (
            "init file/x --text text.jsonl",
            f"'{tmp_path}/file' is not a writable folder",
        ),
    ):
        assert typed(monkeypatch, *words.split()) == EXIT_CODE == 2
        assert f"titan-disp: error: {message}" in capsys.readouterr().err


def test_version(monkeypatch, capsys):
    """Without torch, which takes seconds to import."""
    monkeypatch.setattr("sys.argv", ["titan-disp", "--version"])
    monkeypatch.setitem(sys.modules, "titan_disp.cli", None)
    __main__.main()
    assert capsys.readouterr().out == f"titan-disp {metadata.version('titan-disp')}\n"


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupt)
    with pytest.raises(SystemExit, match="130"):
        __main__.main()
    assert capsys.readouterr().err == "titan-disp: stopped by Ctrl-C\n"


def among(own):
    """Put a subcommand's own options between those of the config, as users do."""
    return (*OVERRIDES[:2], *own.split(), *OVERRIDES[2:])


def test_data_index_reads_its_options_among_the_keys_of_the_config():
    name, found = understood(
        ["data", "index", str(DEMO), *among("--workers 2 --out x")]
    )
    assert (name, found.workers, found.out, found.argv) == (
        "data index",
        2,
        Path("x"),
        HANDED_ON,
    )


def test_all_subcommands_with_a_config_are_tested_here():
    found = {
        one.__name__
        for one in vars(command_options).values()
        if isinstance(one, type) and hasattr(one, "argv")
    }
    names = (
        "Config",
        "Check",
        "Index",
        "Train",
        "Plan",
        "Preflight",
        "Submit",
        "Digest",
    )
    assert found == {f"{name}Options" for name in names}


def test_train_hands_its_overrides_to_the_ranks(monkeypatch, tmp_path):
    checked = []
    started = []
    # Torchrun's folder for logs is created in the run's, which is relative
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "check_inputs", checked.append)
    monkeypatch.setattr(
        launch,
        "elastic_launch",
        lambda how, entry: lambda *argv: started.append((how, argv)),
    )
    assert typed(monkeypatch, "train", DEMO, *among("--nproc 2")) == 0
    (job,) = checked
    assert (job.training.seq_len, job.dispersion.enabled, job.debug.seed) == (
        64,
        False,
        -7,
    )
    ((how, (dash_m, module, *argv)),) = started
    assert (how.nproc_per_node, dash_m, module, argv) == (
        2,
        "-m",
        "titan_disp.train",
        HANDED_ON,
    )
    # A chroot, or a container without /etc/hosts, may not resolve localhost, nor a
    # laptop its own name.
    assert (how.rdzv_endpoint, how.local_addr) == ("127.0.0.1:0", "127.0.0.1")


def test_plan(monkeypatch, capsys):
    # else it tries a thousand
    monkeypatch.setattr("titan_disp.cluster.plan.MAX_NODES", 1)
    assert (
        typed(
            monkeypatch,
            "plan",
            DEMO,
            *among("--nodes 2 --gpus-per-node 1 --gpu A100 --mfu 0.5 --json"),
        )
        == 0
    )
    plan = json.loads(capsys.readouterr().out)
    assert [
        plan["batch"][key] for key in ("seq_len", "global_batch_size", "steps")
    ] == [64, 8, 300]
    machine = ("nodes", "gpus_per_node", "gpu", "mfu", "gpu_memory", "gpu_flops")
    assert [plan["machine"][key] for key in machine] == [2, 1, "A100", 0.5, 80, 312]
    missing = ("--gpus-per-node", "1", "--model.hf_assets_path", "nowhere")
    assert typed(monkeypatch, "plan", DEMO, *missing) == 0
    assert "warning: model.hf_assets_path is 'nowhere'" in capsys.readouterr().out
    assert typed(monkeypatch, "plan", DEMO, *missing, "--strict") == EXIT_CODE


def test_preflight_hands_its_overrides_to_the_step(monkeypatch, capsys):
    started = []
    counts = dict.fromkeys(
        ("accumulation", "parameters", "own_parameters", "seconds", "peak_bytes"), 1
    )

    def one_step(command, **_):
        started.append(command)
        (Path(command[3]) / "measured.json").write_text(
            json.dumps(counts | {"device": "CPU", "mesh": {}})
        )
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(preflight.subprocess, "run", one_step)
    assert (
        typed(
            monkeypatch,
            "preflight",
            DEMO,
            *among("--ranks 2 --flavor debugmodel --seq-len 32"),
        )
        == 0
    )
    ((*_, given),) = started
    found = command_options.PreflightOptions(**json.loads(given))
    assert (found.argv, found.ranks, found.flavor) == (HANDED_ON, 2, "debugmodel")
    assert "training.seq_len 64 → 32" in capsys.readouterr().out


def test_submit_hands_its_overrides_to_sbatch(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("titan_disp.cluster.plan.MAX_NODES", 1)
    monkeypatch.chdir(tmp_path)
    started = []
    done = SimpleNamespace(returncode=3, stderr="")
    monkeypatch.setattr(
        launch.subprocess, "run", lambda line, **_: started.append(line) or done
    )
    own = f"--nodes 2 --gpus-per-node 0 --inputs-on-nodes --site={ROOT}/slurm/sites/local_cpu.sh --sbatch time=1:00:00"
    assert typed(monkeypatch, "submit", DEMO, *among(own)) == 3
    (line,) = started
    assert line[:3] == ["sbatch", "--nodes=2", "--time=1:00:00"]
    script = next(i for i, word in enumerate(line) if word.endswith("pretrain.sbatch"))
    # between the launch folder's config and its run
    assert line[script + 2 : -2] == [*OVERRIDES]
    assert "300 of 512 tokens" in capsys.readouterr().out


def test_data_digest(monkeypatch, capsys):
    driven = []
    monkeypatch.setattr(
        digest,
        "digest",
        lambda *args: driven.append(args) or digest.Digest(hashes=["abc"]),
    )
    own = "--resume-at 3 5 --resume-ranks 1 4 --steps 9 --json"
    assert typed(monkeypatch, "data", "digest", DEMO, *among(own)) == 0
    ((job, steps, phases),) = driven
    assert (job.training.seq_len, steps, phases) == (64, 9, [(0, 1), (3, 1), (5, 4)])
    assert json.loads(capsys.readouterr().out)["hashes"] == ["abc"]


def test_sweep(monkeypatch, capsys, tmp_path):
    """`sweep FILE` means `sweep run FILE`.

    Its status tells whether all points finished.
    """
    file = tmp_path / "sweep.toml"
    file.write_text(
        f'[sweep]\nconfig = "{DEMO}"\nfolder = '
        f'"{tmp_path}/runs"\n[grid]\n"debug.seed" = [1, 2]\n'
    )
    called = []
    second = ["failed"] * 2 + ["finished"] * 2

    def run(sweep, jobs, nproc):
        called.append((sweep.folder.name, jobs, nproc))
        return [
            runner.Result("seed-1", "finished", ""),
            runner.Result("seed-2", second.pop(0), "why"),
        ]

    monkeypatch.setattr(runner, "run", run)
    for status in (1, 0):
        for words in (["sweep", file], ["sweep", "run", file]):
            assert typed(monkeypatch, *words, "--jobs", "3", "--nproc", "2") == status
    assert called == [("runs", 3, 2)] * 4
    assert "  seed-2: failed: why" in capsys.readouterr().out

    monkeypatch.setattr(
        preparation, "submit", lambda sweep, given: called.append(given) or 5
    )
    own = "--submit --jobs 3 --nodes 2 --gpus-per-node 0 --site local_cpu --dry-run --sbatch time=15 exclusive"
    assert typed(monkeypatch, "sweep", file, *own.split()) == 5
    expected = {
        "jobs": 3,
        "nodes": 2,
        "gpus_per_node": 0,
        "site": "local_cpu",
        "sbatch": ("time=15", "exclusive"),
    }
    assert {name: getattr(called[-1], name) for name in expected} == expected

    assert (
        typed(
            monkeypatch,
            "sweep",
            "table",
            file,
            "--out",
            tmp_path / "out",
            "--metric",
            "ce",
        )
        == 0
    )
    assert "| demo_cpu  | 0 of 2 |" in capsys.readouterr().out


# ---- help, as a user sees it: in terminals of several widths


def functions(commands, words=()):
    for name, member in commands.items():
        if isinstance(member, dict):
            yield from functions(member, (*words, name))
        else:
            yield (*words, name), member[0]


ALL = dict(functions(cli.COMMANDS))
LISTS = [(), ("data",), ("sweep",)]


@pytest.fixture
def shown(monkeypatch, capsys):
    def print_help(words, columns):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert typed(monkeypatch, *words, "--help") == 0
        return capsys.readouterr().out

    return print_help


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_a_description_is_broken_only_where_the_terminal_ends(shown, words):
    out = shown(words, 2000)
    assert f"\n\n  {' '.join(cli.description(ALL[words]).split())}\n\n" in out
    documented = docstring_parser.parse(ALL[words].__doc__).params
    assert {one.arg_name for one in documented} == {
        field.name for field in dataclasses.fields(ALL[words])
    }
    for one in documented:
        assert " ".join(one.description.split()) in out, one.arg_name


@pytest.mark.parametrize("words", [*LISTS, *ALL], ids=" ".join)
def test_no_line_is_too_long_and_no_argument_is_named_by_its_type(shown, words):
    for columns in (80, 140):
        # Tyro does not wrap the usage
        usage, *lines = shown(words, columns).splitlines()
        assert max(map(len, lines)) <= columns
        box = "\n".join(lines)
        assert not re.search(r"None|default: \)|--no-|\[\[", usage + box)
        assert not re.search(r"^[│ ]+(STR|PATH)\b", box, flags=re.M)
        assert not re.search(r"\n[│ ]*\n[│ ]+-", box)  # an empty line before an option


@pytest.mark.parametrize("words", LISTS, ids=" ".join)
def test_lists_have_the_first_paragraph_of_each_subcommand(shown, words):
    # the whole help of another subcommand, in the same process
    shown(("checkpoint",), 2000)
    out = shown(words, 2000)
    for name, kind in ALL.items():
        if name[:-1] == words:
            summary = " ".join(cli.description(kind).partition("\n\n")[0].split())
            assert re.search(
                rf"^\W*{name[-1]} +{re.escape(summary)}\W*$", out, flags=re.M
            )


def test_the_kinds_of_gpu_are_those_of_the_table(shown):
    *others, last = GPUS
    for words in (("plan",), ("submit",), ("sweep", "run")):
        assert f"{', '.join(others)} or {last}" in shown(words, 2000)


def test_a_terminal_without_unicode(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert typed(monkeypatch, "condensation", "--help") == 0
    sys.stdout.flush()
    assert b"show this help message" in sys.stdout.buffer.getvalue()


def test_a_repeated_option_keeps_all_of_its_values(monkeypatch, capsys):
    """reproduce.md gives --family once for each family."""
    words = ["condensation", "--family", "A=a", "b", "--json", "--family=B=c", "d"]
    collected = cli._collected(
        [*words, "--pair", "x,y"], command_options.CondensationOptions
    )
    expected = ["--family", "A=a", "b", "B=c", "d", "--json", "--pair", "x,y"]
    assert collected == ["condensation", *expected]
    twice = ("plan", DEMO, "--nodes", "1", "--nodes=2")
    assert typed(monkeypatch, *twice) == 2
    assert "--nodes is repeated; expected it once" in capsys.readouterr().err
    # Of options for keys of the config, the last one counts, as in TorchTitan.
    steps = ("--training.steps", "3", "--training.steps", "4")
    words = ("plan", DEMO, "--gpus-per-node", "1", *steps, "--json")
    assert typed(monkeypatch, *words) == 0
    assert json.loads(capsys.readouterr().out)["batch"]["steps"] == 4


@pytest.mark.parametrize(
    "words",
    [
        "plan CONFIG --gpus-per-node 1 --training.dataset_path FILES",
        "plan CONFIG --training.steps FILES",
        "plan CONFIG --gpus-per-node 1 FILES",
        "plan FILES",
        "init folder --text FILES",
        "condensation gpt2 --dataset FILES --out out",
    ],
)
def test_a_pattern_that_the_shell_has_expanded(monkeypatch, capsys, tmp_path, words):
    files = [str(tmp_path / f"{name} 1.txt") for name in "abc"]
    for file in files:
        Path(file).touch()
    monkeypatch.chdir(tmp_path)
    values = {"CONFIG": [str(DEMO)], "FILES": files}
    argv = chain.from_iterable(values.get(word, [word]) for word in words.split())
    assert typed(monkeypatch, *argv) == EXIT_CODE
    assert (
        f"to '{files[-1]}', expected one value: the shell expanded a pattern; quote it"
        in capsys.readouterr().err
    )
    assert not Path("folder").exists()
