"""docs/reproduce.md: its configs and sweeps can start, its models and runs have names, and its costs are the plan's."""

import re

import pytest

from tests.command_line import ROOT
from tests.pages import can_start, commands, loaded, understood
from titan_disp.cluster import plan as plans
from titan_disp.config.options import Machine
from titan_disp.data.hub import is_hub_name
from titan_disp.lab.inspection.targets import parse_group, parse_id
from titan_disp.lab.sweeps.definition import points, read_sweep

PAGE = ROOT / "docs" / "reproduce.md"
SWEEPS = {path.stem: path for path in (ROOT / "train_configs" / "sweeps" / "paper").glob("*.toml")}


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture(scope="module")
def options():
    return [understood(words[1:]) for words in commands(PAGE) if words[0] == "titan-disp"]


@pytest.fixture(scope="module")
def sweeps(options):
    return {str(one.file): read_sweep(ROOT / one.file) for name, one in options if name == "sweep run"}


def test_runs_can_start_and_data_sets_have_names(options):
    for name, one in options:
        if name == "train":
            can_start(one.nproc, one.config, *one.overrides)
        elif name == "submit":
            can_start(one.nodes * one.gpus_per_node, one.config, *one.overrides)
        elif name == "data fetch":
            assert one.dataset == "c4" or is_hub_name(one.dataset)


def test_models_and_runs(options, sweeps):
    runs = {loaded(*one.argv[1:]).job.dump_folder for name, one in options if name in ("train", "submit")}
    runs |= {str(point.folder) for sweep in sweeps.values() for point in points(sweep)}
    found = []
    for name, one in options:
        if name not in ("condensation", "evaluate", "report"):
            continue
        pairs = [pair.split(",") for pair in getattr(one, "pair", ())]
        assert all(len(pair) == 2 for pair in pairs)
        targets = getattr(one, {"condensation": "targets", "evaluate": "models", "report": "runs"}[name])
        groups = [parse_group(target) or (None, [target]) for target in (*targets, *getattr(one, "family", ()))]
        found += [model for models in (*pairs, *(models for _, models in groups)) for model in models]
    assert len(found) > 40
    for name in found:
        assert name in runs or name == "assets/hf/gpt2" or not name.startswith("outputs/") and parse_id(name), name


@pytest.mark.parametrize("name", sorted(SWEEPS.keys() - {"qwen3_methods"}))
def test_sweeps_at_the_papers_size(name, sweeps):
    """The last condition of each listed point can start on one GPU."""
    sweep = sweeps[str(SWEEPS[name].relative_to(ROOT))]
    conditions = {point.condition: point for point in points(sweep)}
    assert sweep.against in conditions
    for point in {condition.partition("_")[0]: point for condition, point in conditions.items()}.values():
        config = can_start(1, *point.argv())
        assert config.lr_scheduler.warmup_steps == -(-config.training.steps // 5)  # 20 %, as in the authors' scripts


def test_the_sweeps_of_both_models_are_the_same(sweeps):
    """But for κ, of which Qwen3's recipe has the default."""
    gpt2, qwen3 = (sweeps[str(SWEEPS[f"{model}_methods"].relative_to(ROOT))] for model in ("gpt2", "qwen3"))
    without = [(one.name, tuple(o for o in one.overrides if "clamp" not in o), one.axes) for one in gpt2.listed]
    assert without == [(one.name, one.overrides, one.axes) for one in qwen3.listed]
    assert (gpt2.axes, gpt2.overrides, gpt2.against) == (qwen3.axes, qwen3.overrides, qwen3.against)


def test_costs(monkeypatch):
    monkeypatch.setattr(plans, "MAX_NODES", 1)  # else it tries a thousand
    section = PAGE.read_text().split("## Cost\n")[1].split("\n## ")[0]
    row = r"^\| `(train_configs/.*?)`.*? \| \d+ \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$"
    rows = re.findall(row, section, flags=re.M)
    assert len(rows) == 4
    for words, *numbers in rows:
        steps, gigabytes, on_eight, on_one = (float(number.replace(",", "")) for number in numbers)
        config = loaded(*words.split())
        eight, one = (plans.make_plan(config, Machine(1, gpus)) for gpus in (8, 1))
        assert eight.batch.steps == one.batch.steps == steps
        assert eight.memory.total / 1e9 == pytest.approx(gigabytes, abs=0.05)
        assert eight.time.days * 1440 == pytest.approx(on_eight, rel=0.06)
        assert one.time.days * 1440 == pytest.approx(on_one, rel=0.01)
