"""Published numbers beside ours: every number has its source, and is shown only beside
what it can be compared with.
"""

import json
import re

import numpy as np
import pytest
import tomli

from tests.command_line import ROOT, typed
from tests.test_compare import of_seeds, rows_of
from tests.test_report import row, write_run
from titan_disp.errors import ConfigError
from titan_disp.lab.evaluate.compare import compare
from titan_disp.lab.evaluate.evaluation import scores
from titan_disp.lab.evaluate.harness import PAPER
from titan_disp.lab.published import NOTE, beside, costs
from titan_disp.lab.report.gather import gather
from titan_disp.lab.report.page import write_report

GROUPS = tomli.loads((ROOT / "titan_disp" / "lab" / "published.toml").read_text())[
    "published"
]


def test_every_number_has_its_source():
    found = [one for group in GROUPS for one in group["numbers"]]
    for one in found:
        assert re.match(r"(P, (Table 3|§5\.4|introduction)|R)(,|;|$)", one["source"]), (
            one
        )
    known = {
        (35.37, "P"),
        (34.95, "R"),
        (1.17, "P"),
        (1.07, "P"),
        (7.4, "P"),
        (1.122, "R"),
        (1.01, "R"),
    }
    assert known <= {(one["value"], one["source"][0]) for one in found}
    packaged = tomli.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "package-data"
    ]
    assert "published.toml" in packaged["titan_disp.lab"]


def ours(tasks):
    """By seed, off has the scores 0.25 and 0.75, and on 0.75 and 0.75."""
    off = of_seeds(np.array([[0.0, 0, 0, 1], [1, 1, 1, 0]]), "ab")
    on = of_seeds(np.array([[1.0, 1, 0, 1], [1, 1, 1, 0]]), "cd")
    models = {"off": dict.fromkeys(tasks, off), "on": dict.fromkeys(tasks, on)}
    return beside(scores(compare(rows_of(tasks), models)), "ours")


def test_only_the_same_task_or_average_is_shown():
    assert ours(["arc_easy", "winogrande"]) == []
    what = "difference, points"
    published = "dispersion − off (Qwen3-0.6B, 156 B tokens of C4)"
    piqa = [
        ("piqa", what, "on − off", "+25.00 ± 25.00", "ours"),
        ("piqa", what, published, "4.0", "P, §5.4"),
    ]
    assert ours(["piqa", "arc_easy"]) == piqa
    means = [line[2:] for line in ours(list(PAPER)) if line[:2] == ("mean", "score, %")]
    assert means[:2] == [
        ("off", "50.00 ± 25.00", "ours"),
        ("on", "75.00 ± 0.00", "ours"),
    ]
    assert (
        "dispersion, λ 0.5, τ 1 (GPT-2, 200 M tokens of wikitext-103)",
        "35.37",
        "P, Table 3",
    ) in means


def test_costs_by_hand_and_in_the_report(tmp_path, monkeypatch):
    """Ranks take 4096 tokens at 512 tokens/s, and then as many at the named speed."""
    for name, last, method in (
        ("noisy", 1.0, "noisy_embedding"),
        ("off", 512.0, "none"),
        ("on", 256.0, "none"),
    ):
        changes = {
            "dispersion": {"enabled": name == "on"},
            "baseline": {"method": method},
        }
        write_run(
            tmp_path / name,
            [row(1, 1.0, tps=512.0), row(2, 2.0, tps=last)],
            steps=2,
            gpus=2,
            **changes,
        )
    write_run(tmp_path / "empty", gpus=2)
    # Two ranks that share a CPU are no comparison for one rank on it.
    disperses = {"dispersion": {"enabled": True}}
    write_run(tmp_path / "alone", [row(1, 1.0, tps=256.0)], gpus=2, **disperses)
    (tmp_path / "alone" / "environment.json").write_text('{"world_size": 1}')
    write_run(tmp_path / "cpu", [row(1, 1.0)])
    found = costs(
        gather(
            [
                tmp_path / name
                for name in ("noisy", "off", "on", "empty", "cpu", "alone")
            ]
        )
    )
    hours = {
        "noisy": f"{4104 / 3600:.4g}",
        "off": f"{16 / 3600:.4g}",
        "on": f"{24 / 3600:.4g}",
        "empty": "–",
    }
    assert found == {
        ("cost", "GPU-hours"): hours,
        ("cost", "time per token"): {
            "noisy ÷ off, 2 ranks on H100": "256.5",
            "on ÷ off, 2 ranks on H100": "1.5",
        },
    }

    out = tmp_path / "report.html"
    (tmp_path / "results.json").write_text(json.dumps({"published": ours(["piqa"])}))
    assert (
        typed(
            monkeypatch,
            "report",
            tmp_path / "off",
            "--evaluation",
            tmp_path,
            "--out",
            out,
        )
        == 0
    )
    page = out.read_text()
    assert all(
        text in page
        for text in (
            "<td>+25.00 ± 25.00</td>",
            "<td>1.122</td>",
            f"<td>{hours['off']}</td>",
            NOTE,
        )
    )
    assert "<td>1.01</td>" not in page  # a single run is relative to no other
    with pytest.raises(
        ConfigError,
        match="--evaluation .*nowhere' cannot be read, expected the --out folder",
    ):
        write_report([tmp_path / "off"], out, tmp_path / "nowhere")
