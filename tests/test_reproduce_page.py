"""docs/reproduce.md: its configs and sweeps can start, its models and runs have names, and its costs are the plan's."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import ROOT
from tests.pages import can_start, commands, loaded, subcommand, understood
from titan_disp.cluster import plan as plans
from titan_disp.config.options import Machine
from titan_disp.data.hub import is_hub_name
from titan_disp.lab.inspection.targets import parse_group, parse_id
from titan_disp.lab.sweeps.definition import points, read_sweep

PAGE = ROOT / "docs" / "reproduce.md"
ARGUMENTS = {"text_column.py": 3, "wikitext.py": 2}  # of examples
TITAN_DISP = [words[1:] for words in commands(PAGE) if words[0] == "titan-disp"]


def sweeps():
    return {
        words[1]: read_sweep(ROOT / words[1]) for words in TITAN_DISP if words[0] == "sweep" and words[1] != "table"
    }


def run_folders():
    """Of all runs that the page trains."""
    single = [
        loaded(words[1], *(word for word in words[2:] if "." in word or "/" in word)).job.dump_folder
        for words in TITAN_DISP
        if words[0] in ("train", "submit")
    ]
    return {*single, *(str(point.folder) for sweep in sweeps().values() for point in points(sweep))}


def test_every_line_of_a_block_is_known():
    """tests/test_docs.py parses those that call titan-disp."""
    for words in commands(PAGE):
        if words[0] == "python":
            assert (ROOT / words[1]).is_file(), words
            assert len(words) - 2 == ARGUMENTS[Path(words[1]).name], words
        else:
            assert words[:2] == ["hf", "download"] or words[0] == "titan-disp", words


def test_runs_can_start_and_data_sets_have_names(monkeypatch):
    monkeypatch.chdir(ROOT)
    for words in TITAN_DISP:
        if subcommand(words) not in ("train", "submit", "data fetch"):
            continue
        args, _ = understood(monkeypatch, words)
        if subcommand(words) == "train":
            can_start(args[0].nproc, args[0].config, *args[0].overrides)
        elif subcommand(words) == "submit":
            can_start(args[0].nodes * args[0].gpus_per_node, args[0].config, *args[0].overrides)
        else:
            assert args[0].dataset == "c4" or is_hub_name(args[0].dataset)


def test_models_and_runs(monkeypatch):
    """What is measured and evaluated: models of the hub, or runs that the page trains, each pair and family well formed."""
    runs, found = run_folders(), []
    for words in TITAN_DISP:
        if words[0] not in ("condensation", "evaluate", "report"):
            continue
        (options, *_), _ = understood(monkeypatch, words)
        for pair in getattr(options, "pair", ()):
            assert len(pair.split(",")) == 2
            found += pair.split(",")
        for family in getattr(options, "family", ()):
            found += parse_group(family)[1]
        of_command = {"condensation": "targets", "evaluate": "models"}.get(words[0])
        for target in getattr(options, of_command) if of_command else options:  # the runs of a report
            group = parse_group(target)
            found += group[1] if group else [target]
    assert len(found) > 50
    for name in found:
        assert name in runs or name == "assets/hf/gpt2" or not name.startswith("outputs/") and parse_id(name), name


SWEEPS = {path.stem: path for path in (ROOT / "train_configs" / "sweeps" / "paper").glob("*.toml")}


@pytest.mark.parametrize("name", sorted(SWEEPS.keys() - {"qwen3_methods"}))
def test_sweeps_at_the_papers_size(name, monkeypatch):
    """The point to compare with is there; the last condition of each listed point can start on one GPU."""
    monkeypatch.chdir(ROOT)
    sweep = read_sweep(SWEEPS[name])
    conditions = {point.condition: point for point in points(sweep)}
    assert sweep.against in conditions
    for point in {condition.partition("_")[0]: point for condition, point in conditions.items()}.values():
        config = can_start(1, *point.argv())
        assert config.job.dump_folder == str(point.folder)
        assert config.lr_scheduler.warmup_steps == -(
            -config.training.steps // 5
        )  # 20 %, as the authors' scripts have it


def test_the_sweeps_of_both_models_are_the_same():
    """But for κ, of which Qwen3's recipe has the default, so that no variant needs it back."""
    gpt2, qwen3 = (read_sweep(SWEEPS[f"{model}_methods"]) for model in ("gpt2", "qwen3"))
    without = [(one.name, tuple(o for o in one.overrides if "clamp" not in o), one.axes) for one in gpt2.listed]
    assert without == [(one.name, one.overrides, one.axes) for one in qwen3.listed]
    assert (gpt2.axes, gpt2.overrides, gpt2.against) == (qwen3.axes, qwen3.overrides, qwen3.against)
    assert {str(path.relative_to(ROOT)) for path in SWEEPS.values()} <= set(sweeps())  # all are on the page


def test_costs(monkeypatch):
    """The table of costs against the plan of each config."""
    monkeypatch.setattr(plans, "MAX_NODES", 1)  # else it tries a thousand
    monkeypatch.chdir(ROOT)
    section = PAGE.read_text().split("## Cost\n")[1].split("\n## ")[0]
    rows = re.findall(
        r"^\| `(train_configs/.*?)`.*? \| \d+ \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", section, flags=re.M
    )
    assert len(rows) == 4
    for words, *numbers in rows:
        steps, gigabytes, on_eight, on_one = (float(number.replace(",", "")) for number in numbers)
        config = loaded(*words.split())
        eight, one = (plans.make_plan(copy.deepcopy(config), Machine(1, gpus)) for gpus in (8, 1))
        assert eight.batch.steps == one.batch.steps == steps
        assert eight.memory.total / 1e9 == pytest.approx(gigabytes, abs=0.05)
        assert eight.time.days * 1440 == pytest.approx(on_eight, rel=0.06)
        assert one.time.days * 1440 == pytest.approx(on_one, rel=0.01)


def test_a_column_as_text(tmp_path):
    """Rows of the train split, in the order of files; empty ones and nulls left out, and no second end of a line."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "data" / "plain_text"
    folder.mkdir(parents=True)
    files = {"train-00001-of-2": ["c\n"], "train-00000-of-2": ["a", "", None, "b é"], "validation-0": ["no"]}
    for name, texts in files.items():
        pyarrow.parquet.write_table(pyarrow.table({"context": texts, "id": texts}), folder / f"{name}.parquet")
    script, out = ROOT / "examples" / "text_column.py", tmp_path / "text.txt"
    subprocess.run([sys.executable, script, tmp_path / "data", "context", out], check=True, capture_output=True)
    assert out.read_bytes().decode() == "a\nb é\nc\n"
