"""Whose the numbers are: every default in docs/loss.md."""

import ast
import dataclasses
import inspect
import re

import tomli

from tests.cluster_of_one import ROOT
from titan_disp import job_config

WHOSE = {"the paper's text", "the authors' released code", "our choice", "our measurement"}
DEFAULTS = {
    f"{section.name}.{key.name}": getattr(getattr(job_config.JobConfig(), section.name), key.name)
    for section in dataclasses.fields(job_config.JobConfig)
    for key in dataclasses.fields(section.type)
}
# Keys that the table may have before the config has them.
ANNOUNCED = {"dispersion.final_norm", "dispersion.include_diagonal"}


def table():
    """Rows of "Whose numbers": key → (value, whose, source)."""
    rows = re.findall(
        r"^\| `(\w+\.\w+)` \| `(.+?)` \| (.*?) \| ?(.*?) ?\|$", (ROOT / "docs" / "loss.md").read_text(), re.M
    )
    assert len(rows) == len({key for key, *_ in rows}), "a default has two rows"
    return {key: (tomli.loads(f"value = {value}")["value"], whose, source) for key, value, whose, source in rows}


def test_every_default_has_its_row():
    found = {key: value for key, (value, _, _) in table().items() if key not in ANNOUNCED - DEFAULTS.keys()}
    assert found == DEFAULTS
    assert {key: type(value) for key, value in found.items()} == {key: type(v) for key, v in DEFAULTS.items()}


def test_every_default_of_the_loss_says_whose_it_is():
    """In the table, with a source, and with the same words in the help text."""
    (section,) = ast.parse(inspect.getsource(job_config.Dispersion)).body
    help_texts = {
        f"dispersion.{field.target.id}": " ".join(text.value.value.split()).lower()
        for field, text in zip(section.body, section.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }
    for key, (_, whose, source) in table().items():
        assert whose in WHOSE, key
        if key.startswith("dispersion.") and key in DEFAULTS:
            assert source, key
            assert whose in help_texts[key], key
