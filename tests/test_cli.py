"""These tests type the subcommands. They run in this process and replace everything that would start another one."""

import inspect
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.command_line import DEMO, ROOT
from titan_disp import cli
from titan_disp.cluster import launch, preflight
from titan_disp.config import options
from titan_disp.errors import EXIT_CODE
from titan_disp.lab import digest

OVERRIDES = (
    *("--training.seq_len", "64", "--training.global_batch_size=8", "--dispersion.no-enabled"),
    *("--lr_scheduler.min_lr_factor", "0.5", "--debug.seed", "-7"),
)
HANDED_ON = ("--job.config_file", str(DEMO), *OVERRIDES)  # for processes that read the config themselves


def typed(monkeypatch, *argv):
    """Run titan-disp with these words and return its exit status."""
    monkeypatch.setattr("sys.argv", ["titan-disp", *map(str, argv)])
    try:
        cli.main()
    except SystemExit as exit:
        return exit.code
    return 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian CONFIG", "'trian' is not a subcommand of titan-disp (did you mean train?); expected sample-data, "),
        ("qqqq", "'qqqq' is not a subcommand of titan-disp; expected sample-data, data, "),
        (
            "data fecth there",
            "'fecth' is not a subcommand of titan-disp data (did you mean fetch?); expected digest, fetch",
        ),
        ("sweep tabel FILE", "'tabel' is not a subcommand of titan-disp sweep (did you mean table?); expected "),
        ("sweep tabel", "'tabel' is not a subcommand of titan-disp sweep (did you mean table?); expected "),
        ("sweep qqqq", "'qqqq' is not a subcommand of titan-disp sweep; expected a TOML file, run, table"),
        ("sweep qqqq.tml", "cannot read the config 'qqqq.tml'"),
        ("sweep there/qqqq", "cannot read the config 'there/qqqq'"),
        ("sweep table9.toml", "cannot read the config 'table9.toml'"),
    ],
)
def test_misspelled_subcommands(monkeypatch, capsys, words, message):
    assert typed(monkeypatch, *words.split()) == EXIT_CODE
    assert f"titan-disp: error: {message}" in capsys.readouterr().err


def among(*own):
    """Put a subcommand's own options between those of the config, as users do."""
    return (*OVERRIDES[:2], *own, *OVERRIDES[2:])


def assert_overridden(job_config):
    """The TOML file has seq_len 256, global batch 16, dispersion on, min_lr_factor 0.1 and seed 42."""
    assert (job_config.training.seq_len, job_config.training.global_batch_size) == (64, 8)
    assert (job_config.dispersion.enabled, job_config.lr_scheduler.min_lr_factor) == (False, 0.5)
    assert job_config.debug.seed == -7
    assert job_config.training.local_batch_size == 4  # from the TOML file; without it, the rest would be defaults
    assert job_config.job.config_file == str(DEMO)


def test_all_subcommands_with_overrides_are_tested_below():
    classes = inspect.getmembers(options, inspect.isclass)
    found = {name for name, one in classes if issubclass(one, options.ConfigOptions)} - {"ConfigOptions"}
    assert found == {f"{name}Options" for name in ("Train", "Plan", "Preflight", "Submit", "Digest")}


def test_train_hands_its_overrides_to_the_ranks(monkeypatch, tmp_path):
    checked, started = [], []
    monkeypatch.chdir(tmp_path)  # torchrun's folder for logs is created in the run's, which is relative
    monkeypatch.setattr(launch, "check_inputs", checked.append)
    monkeypatch.setattr(launch, "elastic_launch", lambda how, entry: lambda *argv: started.append((how, argv)))
    assert typed(monkeypatch, "train", DEMO, *among("--nproc", "2")) == 0
    assert_overridden(checked[0])
    ((how, (dash_m, module, *argv)),) = started
    assert (how.nproc_per_node, dash_m, module) == (2, "-m", "titan_disp.train")
    assert argv == list(HANDED_ON)
    # A chroot, or a container without /etc/hosts, may not resolve localhost, nor a laptop its own name.
    assert (how.rdzv_endpoint, how.local_addr) == ("127.0.0.1:0", "127.0.0.1")


def test_plan(monkeypatch, capsys):
    own = ("--nodes", "2", "--gpus-per-node", "1", "--gpu", "A100", "--mfu", "0.5", "--json")
    assert typed(monkeypatch, "plan", DEMO, *among(*own)) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [plan["batch"][key] for key in ("seq_len", "global_batch_size", "tokens_per_step")] == [64, 8, 512]
    assert plan["model"]["dispersion_flops"] == 0
    assert [plan["machine"][key] for key in ("nodes", "gpus_per_node", "gpu", "mfu")] == [2, 1, "A100", 0.5]
    assert plan["machine"]["node_bandwidth"] == 300
    assert plan["batch"]["steps"] == 300  # from the TOML file


def test_preflight_hands_its_overrides_to_the_step(monkeypatch, capsys):
    started = []

    def one_step(command, **_):
        started.append(command)
        measured = {"device": "CPU", "mesh": {}, "accumulation": 1, "parameters": 1, "own_parameters": 1}
        (Path(command[3]) / "measured.json").write_text(json.dumps({**measured, "seconds": 1.0, "peak_bytes": 1}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(preflight.subprocess, "run", one_step)
    own = ("--ranks", "2", "--flavor", "debugmodel", "--seq-len", "32")
    assert typed(monkeypatch, "preflight", DEMO, *among(*own)) == 0
    (command,) = started
    given = options.PreflightOptions(**json.loads(command[4]))
    assert given.argv == list(HANDED_ON)
    assert (given.ranks, given.flavor, given.seq_len) == (2, "debugmodel", 32)
    assert "training.seq_len 64 → 32" in capsys.readouterr().out


def test_submit_hands_its_overrides_to_sbatch(monkeypatch, capsys):
    started = []
    monkeypatch.setattr(
        launch.subprocess, "run", lambda line, env: started.append(line) or SimpleNamespace(returncode=3)
    )
    own = ("--nodes", "2", "--gpus-per-node", "0", "--sbatch", "time=1:00:00")
    assert typed(monkeypatch, "submit", DEMO, *among(*own)) == 3
    (line,) = started
    assert line[:3] == ["sbatch", "--nodes=2", "--time=1:00:00"]
    assert line[line.index(str(ROOT / "slurm" / "pretrain.sbatch")) + 1 :] == [str(DEMO), *OVERRIDES]
    assert "300 of 512 tokens" in capsys.readouterr().out


def test_submit_prints_the_plan_and_the_command(monkeypatch, capsys):
    config = ROOT / "train_configs" / "qwen3_0.6b_c4.toml"
    options = ("--site", "frontier", "--dry-run", "--gpu", "MI250X-GCD", "--sbatch", "time=24:00:00", "account=abc")
    words = ("submit", config, *options, "--training.dataset_path", "/data/c4")
    assert typed(monkeypatch, *words, "--nodes", "80") == 0
    printed = capsys.readouterr().out
    assert "39,673 of 3,932,160 tokens" in printed
    line = printed.splitlines()[-1]
    assert line.startswith(
        "sbatch --nodes=80 --gpus-per-node=8 --time=24:00:00 --account=abc --export=ALL,TITAN_DISP_SITE=frontier"
    )
    assert line.endswith(f"slurm/pretrain.sbatch {config} --training.dataset_path /data/c4")
    assert typed(monkeypatch, *words, "--nodes", "79") == EXIT_CODE == 2
    assert "titan-disp: error" in capsys.readouterr().err


def test_data_digest(monkeypatch, capsys):
    driven = []
    monkeypatch.setattr(digest, "digest", lambda *args: driven.append(args) or digest.Digest(hashes=["abc"]))
    own = ("--steps", "9", "--ranks", "2", "--resume-at", "3", "5", "--resume-ranks", "1", "4", "--json")
    assert typed(monkeypatch, "data", "digest", DEMO, *among(*own)) == 0
    ((job_config, steps, phases),) = driven
    assert_overridden(job_config)
    assert (steps, phases) == (9, [(0, 2), (3, 1), (5, 4)])
    assert json.loads(capsys.readouterr().out)["hashes"] == ["abc"]


def test_sweep(monkeypatch, capsys, tmp_path):
    """`sweep FILE` means `sweep run FILE`. Its status tells whether all points finished. --submit passes options on."""
    from titan_disp.lab.sweeps import folder as array
    from titan_disp.lab.sweeps import local

    file = tmp_path / "sweep.toml"
    file.write_text(f'[sweep]\nconfig = "{DEMO}"\nfolder = "{tmp_path}/runs"\n[grid]\n"debug.seed" = [1, 2]\n')
    called, second = [], ["failed"] * 2 + ["finished"] * 2

    def run(sweep, jobs, nproc):
        called.append((sweep.folder.name, jobs, nproc))
        return [local.Result("seed-1", "finished", ""), local.Result("seed-2", second.pop(0), "why")]

    monkeypatch.setattr(local, "run", run)
    for status in (1, 0):
        for words in (["sweep", file], ["sweep", "run", file]):
            assert typed(monkeypatch, *words, "--jobs", "3", "--nproc", "2") == status
    assert called == [("runs", 3, 2)] * 4
    assert "  seed-2: failed: why" in capsys.readouterr().out

    monkeypatch.setattr(array, "submit", lambda sweep, given: called.append(given) or 5)
    own = ("--submit", "--jobs", "3", "--nodes", "2", "--gpus-per-node", "0", "--site", "local_cpu", "--dry-run")
    assert typed(monkeypatch, "sweep", file, *own, "--sbatch", "time=15", "exclusive") == 5
    given = called[-1]
    assert (given.jobs, given.nodes, given.gpus_per_node, given.gpu) == (3, 2, 0, "H100")
    assert (given.site, given.sbatch, given.dry_run) == ("local_cpu", ("time=15", "exclusive"), True)

    assert typed(monkeypatch, "sweep", "table", file, "--out", tmp_path / "out", "--metric", "ce") == 0
    assert "| demo_cpu  | 0 of 2 |" in capsys.readouterr().out
