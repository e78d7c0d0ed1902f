"""titan-disp config and docs/configuration.md, against the dataclasses that are really used and the files in train_configs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import tomli
from torchtitan.config import JobConfig

from tests.command_line import ROOT
from tests.test_cli import typed
from titan_disp import job_config
from titan_disp.config import reference
from titan_disp.errors import ConfigError

OURS = set(job_config.all_keys())


def table(text, title):
    """Rows of one section of the page: key → (type, default)."""
    section = text.split(f"### {title}\n", 1)[1].split("\n### ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): (row[1], row[2].strip("`")) for row in rows}


def defaults(cls):
    fields = dataclasses.fields(cls)
    return {f.name: f.default_factory() if f.default is dataclasses.MISSING else f.default for f in fields}


def of_toml(default):
    return None if default == "unset" else tomli.loads(f"value = {default}")["value"]


def test_the_page_is_what_the_command_prints(monkeypatch, capsys):
    assert typed(monkeypatch, "config", "--markdown") == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "configuration.md").read_text(), (
        "run: titan-disp config --markdown > docs/configuration.md"
    )


def test_every_key_of_titan_disp_with_its_default():
    ours = reference.markdown().split("## TorchTitan's keys")[0]
    for section in dataclasses.fields(job_config.JobConfig):
        expected = defaults(section.type)
        found = {key: of_toml(default) for key, (_, default) in table(ours, f"[{section.name}]").items()}
        assert found == expected
        assert {key: type(value) for key, value in found.items()} == {key: type(v) for key, v in expected.items()}
    sources = table(ours, "[[stream.sources]]")
    assert sources["weight"] == ("number", "required")
    assert sources["path"] == ("string", "unset")
    assert set(sources) == {f.name for f in dataclasses.fields(job_config.Source)}


def test_the_keys_of_torchtitan_that_our_files_set():
    files = [*(ROOT / "train_configs").glob("*.toml"), *(ROOT / "train_configs" / "authors").glob("*.toml")]
    configs = [tomli.loads(file.read_text()) for file in files]
    set_there = {f"{section}.{key}" for config in configs for section, keys in config.items() for key in keys}
    assert set(reference.USED) == set_there - OURS
    page = reference.markdown().split("## TorchTitan's keys")[1]
    for name in reference.USED:
        section, key = name.split(".")
        assert of_toml(table(page, f"[{section}]")[key][1]) == getattr(getattr(JobConfig(), section), key), name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        (
            "dispersion.tau",
            "[dispersion]\ntau = 1.0    # number ≥ 0.0125; default: the paper's text\n    τ, the temperature.",
        ),
        ("estimator", '[dispersion]\nestimator = "exact"    # "exact", "moments" or "sampled"; default: our choice\n'),
        ("layers", '[dispersion]\nlayers = "all"    # list of integers, "all", "last", "early_half" or "late_half"; '),
        ("--dispersion.norm-eps", "[dispersion]\nnorm_eps = 0.01    # number"),  # as it is typed
        ("budget", "[budget]\ntokens = 0    # integer ≥ 0; "),
        ("[guard]", "[guard]\nmax_skipped_steps = 10    # integer"),
        (
            "min_lr_factor",
            "[lr_scheduler]\nmin_lr_factor = 0.0    # number",
        ),  # a key without its section, of TorchTitan
        ("quantize", "[quantize.linear.float8]\n"),
        ("weight", "[[stream.sources]]\nweight = required    # number"),
    ],
)
def test_parts(name, shown):
    assert reference.reference(name).startswith(shown)


def test_both_sections_that_have_a_key_are_shown():
    found = reference.reference("seq_len")
    assert "[validation]\nseq_len = -1" in found
    assert "[training]\nseq_len = 2048" in found


def test_misspelled():
    with pytest.raises(ConfigError, match=r"'dispersoin' is neither .* \(did you mean dispersion\?\)"):
        reference.reference("dispersoin")
    for name in ("dispersion.lambda", "lambda"):
        with pytest.raises(ConfigError, match=r"\(did you mean dispersion.coeff\?\)"):
            reference.reference(name)
    with pytest.raises(ConfigError, match="titan-disp config lists them"):
        reference.reference("qqqqqqqq")


def test_everything_is_printed_without_a_name(monkeypatch, capsys):
    assert typed(monkeypatch, "config") == 0
    out = capsys.readouterr().out
    assert all(f"\n{name.split('.')[1]} = " in out for name in OURS)
    assert "\nlr = 0.0008    # number\n    The highest learning rate.\n" in out
    assert typed(monkeypatch, "config", "dispersion", "--markdown") == 2


def test_nothing_heavy_is_imported():
    """The command is for looking something up while one types."""
    source = Path(reference.__file__).read_text()
    imported = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))}
    assert imported - set(sys.stdlib_module_names) == {"titan_disp"}


def test_train_help_says_where_the_keys_are(monkeypatch, capsys):
    assert typed(monkeypatch, "train", "--help") == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "titan-disp config" in out
    assert "docs/configuration.md" in out
