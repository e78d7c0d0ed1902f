"""titan-disp config and docs/configuration.md, against the dataclasses that are really
used and the files in train_configs.
"""

import dataclasses

import pytest
import tomli
from torchtitan.config import JobConfig

from tests.command_line import ROOT, typed
from titan_disp import job_config
from titan_disp.config import reference
from titan_disp.config.keys import torchtitan_facts
from titan_disp.errors import ConfigError


def table(text, title):
    section = text.split(f"### {title}\n", 1)[1].split("\n### ")[0]
    rows = [
        line.strip("| ").split(" | ")
        for line in section.splitlines()
        if line.startswith("| `")
    ]
    return {row[0].strip("`"): (row[1], row[2].strip("`")) for row in rows}


def of_toml(default):
    return None if default == "unset" else tomli.loads(f"value = {default}")["value"]


def test_the_page_and_what_the_command_prints(monkeypatch, capsys):
    assert typed(monkeypatch, "config", "--markdown") == 0
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert capsys.readouterr().out == page, (
        "run: titan-disp config --markdown > docs/configuration.md"
    )
    assert typed(monkeypatch, "config") == 0
    out = capsys.readouterr().out
    assert all(f"\n{name.split('.')[1]} = " in out for name in job_config.all_keys())
    assert typed(monkeypatch, "config", "dispersion", "--markdown") == 2


def test_every_key_of_titan_disp_with_its_default():
    ours = reference.markdown().split("## TorchTitan's keys")[0]
    for section in dataclasses.fields(job_config.JobConfig):
        expected = {
            f.name: repr(getattr(section.type(), f.name))
            for f in dataclasses.fields(section.type)
        }
        found = {
            key: repr(of_toml(default))
            for key, (_, default) in table(ours, f"[{section.name}]").items()
        }
        assert found == expected
    assert set(table(ours, "[[stream.sources]]")) == {
        f.name for f in dataclasses.fields(job_config.Source)
    }


def test_the_keys_of_torchtitan_that_our_files_set():
    files = [
        *(ROOT / "train_configs").glob("*.toml"),
        *(ROOT / "train_configs" / "authors").glob("*.toml"),
    ]
    configs = [tomli.loads(file.read_text()) for file in files]
    set_there = {
        f"{section}.{key}"
        for config in configs
        for section, keys in config.items()
        for key in keys
    }
    used = {name for name, facts in torchtitan_facts().items() if facts.means}
    assert used == set_there - set(job_config.all_keys())
    _, _, rest = reference.markdown().partition("## TorchTitan's keys")
    page, _, limits = rest.partition("## What is checked of TorchTitan's keys")
    assert all(f"\n| `{name}` | " in limits for name in torchtitan_facts())
    for name in used:
        section, key = name.split(".")
        assert of_toml(table(page, f"[{section}]")[key][1]) == getattr(
            getattr(JobConfig(), section), key
        ), name


def test_parts():
    for name, shown in (
        (
            "dispersion.tau",
            "[dispersion]\ntau = 1.0    # a number ≥ 0.0125; default: the paper's text\n    τ, the t",
        ),
        (
            "layers",
            '[dispersion]\nlayers = "all"    # a list of whole numbers, "all", "last", "early_half" or "late_half"; ',
        ),
        # As it is typed
        ("--dispersion.norm-eps", "[dispersion]\nnorm_eps = 0.01    # a number"),
        # Of TorchTitan, without its section
        ("min_lr_factor", "[lr_scheduler]\nmin_lr_factor = 0.0    # a number"),
        ("quantize", "[quantize.linear.float8]\n"),
        ("weight", "[[stream.sources]]\nweight = required    # a number"),
        ("seq_len", "[validation]\nseq_len = -1"),
        # Both sections that have a key are shown
        ("seq_len", "[training]\nseq_len = 2048"),
    ):
        assert f"\n{shown}" in f"\n{reference.reference(name)}"
    for name, message in (
        ("dispersoin", r"'dispersoin' is neither .* \(did you mean dispersion\?\)"),
        ("dispersion.lambda", r"\(did you mean dispersion.coeff\?\)"),
        ("lambda", r"\(did you mean dispersion.coeff\?\)"),
        ("qqqqqqqq", r"\(see titan-disp config\)"),
    ):
        with pytest.raises(ConfigError, match=message):
            reference.reference(name)
