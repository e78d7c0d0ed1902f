"""The report of synthetic runs, seeds of one condition in it, and how a real browser
shows it.
"""

import dataclasses
import functools
import html
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from datetime import datetime, timezone
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from markupsafe import escape
from PIL import Image
from scipy import stats

from tests.command_line import typed
from tests.test_pictures import condensed
from titan_disp.condensation.heatmap import new_figure
from titan_disp.errors import ConfigError
from titan_disp.lab.plots import OKABE_ITO
from titan_disp.lab.report import charts, series
from titan_disp.lab.report import page as picture_makers
from titan_disp.lab.report.charts import BINS, MANY, Line, binned, by_condition
from titan_disp.lab.report.gather import conditions, defaults, gather
from titan_disp.lab.report.headline import Headline
from titan_disp.lab.report.page import Report, render, write_report
from titan_disp.lab.report.tables import data_counters, details, final_numbers, state

DEFAULTS = functools.cache(defaults)  # parsing them takes half a second
T0 = datetime(2026, 3, 1, tzinfo=timezone.utc).timestamp()


def row(step, time, **changes):
    data = {
        "documents": 3.0 * step,
        "skipped_documents": float(step // 10),
        "epoch": 0.0,
    }
    numbers = {
        "loss": 5.0,
        "ce": 9 - step / 100,
        "dispersion": -0.3,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tps": 500.0,
    }
    return {
        "step": step,
        "time": time,
        **numbers,
        "tokens": step * 4096,
        "data": data,
        **changes,
    }


def event(name, step, time, **details):
    iso = datetime.fromtimestamp(time, timezone.utc).isoformat(timespec="milliseconds")
    return {"time": iso, "event": name, "step": step, **details}


def measurement(level, layers=7):
    # the last one is after the final norm
    return condensed(*level * np.linspace(0.1, 1, layers - 1), level / 2)


def write_run(folder, rows=(), events=(), measured=(), steps=100, gpus=0, **sections):
    """Write a run's folder.

    ``sections`` change the default config. ``measured``: (step, last block's mean
    cosine).
    """
    folder.mkdir(parents=True)
    config = {}
    for key, value in DEFAULTS().items():
        *path, name = key.split(".")
        functools.reduce(
            lambda section, part: section.setdefault(part, {}), path, config
        )[name] = value
    own = {
        "model": {"name": "qwen3_disp", "flavor": "nano"},
        "training": {"steps": steps},
    }
    for section, changes in (*own.items(), *sections.items()):
        config[section] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    environment = {
        "packages": {"torch": "2.13.0"},
        "world_size": 2,
        "accelerators": ["H100"] * gpus,
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if events:
        (folder / "events.jsonl").write_text(
            "".join(json.dumps(e) + "\n" for e in events)
        )
    for step, level in measured:
        measurement(level).save(folder / "condensation" / f"step-{step}.npz")
    return folder


def whole(steps=100):
    rows = [row(s, T0 + 10 * s) for s in range(1, steps + 1)]
    return rows, [event("start", 0, T0), event("complete", steps, T0 + 10 * steps + 5)]


def faulty():
    """Killed after step 40, the run resumed from 30 with a damaged checkpoint, stopped
    at 60, and completed at 100.
    """
    rows = [row(s, T0 + 10 * s) for s in range(1, 41)]
    rows += [row(s, T0 + 1000 + 10 * (s - 30), ce=2.0) for s in range(31, 61)]
    rows += [row(s, T0 + 2000 + 10 * (s - 60)) for s in range(61, 101)]
    events = [
        event("start", 0, T0, job="7.0"),
        *(event("checkpoint", s, T0 + 10 * s, job="7.0") for s in (10, 20, 30, 40)),
        event("checkpoint_damaged", 40, T0 + 995, reason="too short", job="7.1"),
        event(
            "resume",
            30,
            T0 + 1000,
            config_changes={"training.local_batch_size": [8, 4]},
            job="7.1",
        ),
        event("skip", 35, T0 + 1050, terms=["grad_norm"], in_a_row=1, job="7.1"),
        event("checkpoint", 60, T0 + 1300, job="7.1"),
        event("stop", 60, T0 + 1301, reason="SIGUSR1", job="7.1"),
        event("resume", 60, T0 + 2000, config_changes={}, job="7.2"),
        event("complete", 100, T0 + 2400, job="7.2"),
    ]
    return rows, events


def cells(page, heading):
    """Return the texts of a table's row."""
    found = re.search(
        rf'<th scope="row">{re.escape(escape(heading))}</th>(.*?)</tr>', page, re.DOTALL
    )
    assert found, f"no row {heading!r}"
    return [
        " ".join(html.unescape(cell).split())
        for cell in re.findall(r"<td>(.*?)</td>", found[1], re.DOTALL)
    ]


def starts(page):
    """Return the cells of the rows of the tables of starts."""
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", page, re.DOTALL)
    lines = [re.split(r"</td>\s*<td>", row) for row in rows]
    return [[html.unescape(cell) for cell in line] for line in lines if len(line) == 11]


def drawn_lines(lines, scale=charts.as_it_is):
    axes = new_figure(5, 4).subplots()
    charts.draw_lines(axes, lines, "loss", scale)
    return axes


def page_of(*folders, now=T0):
    return render(gather(folders), now)


def pictures(page):
    return re.findall(r"<figure[^>]*>(<svg.*?</svg>)\s*</figure>", page, re.DOTALL)


@pytest.fixture(autouse=True)
def _not_drawn(monkeypatch):
    """Pages have empty pictures, because drawing takes seconds.

    Those of ``compared`` are made before.
    """
    monkeypatch.setattr(picture_makers, "to_svg", lambda figure, salt: "<svg></svg>")


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The page shows a run with faults and dispersion, and one without either.

    Their names and texts are hostile.
    """
    folder = tmp_path_factory.mktemp("runs")
    hostile = {"description": "<script>document.title = 'broken'</script>"}
    cosines = [(0, 0.1), (50, 0.2), (100, 0.3)]
    on = write_run(
        folder / "_on$1$2",
        *faulty(),
        cosines,
        dispersion={"enabled": True},
        job=hostile,
    )
    off = write_run(
        folder / "off", *whole(90), [(0, 0.1), (90, 0.9)], steps=90, job=hostile
    )
    return write_report([on, off], folder / "report.html")


def test_numbers(compared):
    page = compared.read_text()
    for heading, on, off in (
        ("tokens seen", f"{100 * 4096:,}", f"{90 * 4096:,}"),
        ("parameters", "427,008", "427,008"),  # the number for nano
        ("ranks", "2", "2"),
        ("mean cosine of the last block, last", "0.3", "0.9"),
        ("skipped documents", "10", "9"),
        ("up to step", "100", "90"),
        ("packages.torch", '"2.13.0"', '"2.13.0"'),
    ):
        assert cells(page, heading)[:2] == [on, off]


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory):
    """Twelve steps with dispersion, and eight without, although their rows have it.

    A row has six different numbers.
    """
    on = [
        row(
            s,
            T0 + s,
            ce=13.0 - s,
            loss=63.0 - s,
            dispersion=-s / 4,
            grad_norm=1.5 / s,
            lr=s / 1000,
            tps=tps,
        )
        for s, tps in enumerate([100.0] * 5 + [300.0] * 6 + [None], start=1)
    ]
    off = [
        row(
            s,
            T0 + s,
            ce=24.5 - s / 2,
            loss=90.0,
            dispersion=7.0,
            grad_norm=3.0,
            tps=40.0,
        )
        for s in range(1, 9)
    ]
    folder = tmp_path_factory.mktemp("by_hand")
    resume = [event("start", 0, T0), event("resume", 5, T0 + 5)]
    on = write_run(folder / "on", on, resume, steps=12, dispersion={"enabled": True})
    runs = gather([on, write_run(folder / "off", off, steps=8)])

    def measured(*mean, rank, ce):
        return dataclasses.replace(
            condensed(*mean),
            effective_rank=np.array([8, 7, 6, rank, 1]),
            cross_entropy=ce,
        )

    first = measured(0.1, 0.2, 0.3, 0.9, 0.25, rank=5.5, ce=9.5)
    # its mean cosines have the ranks 3, 1, 2, 4
    last = measured(0.5, 0.1, 0.25, 0.75, 0.2, rank=4.5, ce=6.5)
    more = {"condensation": {4: first, 12: last}, "validation": {6: 7.5, 12: 6.25}}
    return [dataclasses.replace(runs[0], **more), runs[1]]


def test_final_numbers_by_hand(by_hand):
    of_both = {
        "training cross-entropy, last": ["1", "20.5"],
        # the mean of 10, 9, … 1; the other run has 8 rows
        "training cross-entropy, mean of 10 rows, last": ["5.5", "–"],
        "learning rate, last": ["0.012", "0.001"],
        "gradient norm, before clipping, last": ["0.125", "3"],
        "tokens/s of one rank, last": ["–", "40"],
        "tokens/s of one rank, median": ["300", "40"],
    }
    of_one = {
        "validation cross-entropy, last": "6.25",
        "cross-entropy on held-out text, last": "6.5",
        "dispersion loss (without λ), last": "-3",
        "mean cosine of all blocks, last": "0.36667",  # of 0.1, 0.25 and 0.75
        "mean cosine of all blocks, highest": "0.46667 (step 4)",  # of 0.2, 0.3 and 0.9
        "mean cosine of the last block, last": "0.75",
        "mean cosine after the final norm, last": "0.2",
        # of 0.1, 0.25, 0.2
        "Spearman's ρ up to the final norm, without the embedding, last": "0.5",
        "Kendall's τ up to the final norm, without the embedding, last": "0.33333",
        "effective rank of the last block, last": "4.5",
    }
    assert final_numbers(by_hand) == of_both | {
        heading: [number, "–"] for heading, number in of_one.items()
    }
    further = dataclasses.replace(by_hand[0], step=13)
    assert final_numbers([further])["cross-entropy on held-out text, last"] == [
        "6.5 (step 12)"
    ]


def test_what_was_seen(tmp_path):
    """Of each of several sources: counters of the last row, and the mean of its ten
    last cross-entropies.
    """
    rows = [
        row(
            s,
            T0 + s,
            **{"ce/<web>": float(s), "ce/code": 3.0},
            data={"documents": 9.0, "epochs_read/<web>": 3.5 * s, "tokens/code": 7.0},
        )
        for s in range(1, 13)
    ]
    mixed = write_run(tmp_path / "mixed", rows)
    plain = write_run(tmp_path / "plain", *whole(12))
    page = page_of(plain, mixed)
    assert cells(page, "ce/<web>") == ["–", "7.5"]
    assert cells(page, "epochs read/<web>") == ["–", "42"]
    assert data_counters(gather([mixed])) == {
        "up to step": ["12"],
        "documents": ["9"],
        "epochs read/<web>": ["42"],
        "tokens/code": ["7"],
        "ce/<web>": ["7.5"],
        "ce/code": ["3"],
    }


def test_curves_by_hand(by_hand, monkeypatch):
    drawn = []
    monkeypatch.setattr(
        picture_makers,
        "to_svg",
        lambda figure, salt: drawn.append(figure.axes[0]) or "",
    )
    report = Report(by_hand)
    for table in (series.LOSSES, series.OPTIMIZATION, series.CONDENSATION):
        report.gallery(table)
    found = {}
    for axes in drawn:
        label = axes.yaxis.label
        low, high = label.get_window_extent().intervaly
        assert 0 <= low < high <= axes.figure.bbox.height
        # the other lines mark where a run resumed, or the ceiling of the loss
        lines = axes.lines[:4:2][: len(axes.lines) // 2]
        ends = {
            line.get_label(): line.get_xydata()[[0, -1]].round(6).tolist()
            for line in lines
        }
        assert axes.get_xlabel() == "step"
        found[label.get_text().replace("\n", " ")] = ends
    assert found == {
        "training cross-entropy": {
            "on": [[1, 12], [12, 1]],
            "off": [[1, 24], [8, 20.5]],
        },
        "dispersion loss (without λ)": {"on": [[1, -0.25], [12, -3]]},
        "validation cross-entropy": {"on": [[6, 7.5], [12, 6.25]]},
        "cross-entropy on held-out text": {"on": [[4, 9.5], [12, 6.5]]},
        "learning rate": {
            "on": [[1, 0.001], [12, 0.012]],
            "off": [[1, 0.001], [8, 0.001]],
        },
        "gradient norm, before clipping": {
            "on": [[1, 1.5], [12, 0.125]],
            "off": [[1, 3], [8, 3]],
        },
        "tokens/s of one rank": {
            "on": [[1, 100], [11, 300]],
            "off": [[1, 40], [8, 40]],
        },
        "mean cosine of all blocks": {"on": [[4, 0.466667], [12, 0.366667]]},
        "mean cosine of the last block": {"on": [[4, 0.9], [12, 0.75]]},
        "mean cosine after the final norm": {"on": [[4, 0.25], [12, 0.2]]},
        "Spearman's ρ up to the final norm, without the embedding": {
            "on": [[4, 0.5], [12, 0.5]]
        },
        "Kendall's τ up to the final norm, without the embedding": {
            "on": [[4, 0.333333], [12, 0.333333]]
        },
        "effective rank of the last block": {"on": [[4, 5.5], [12, 4.5]]},
    }
    on, at, off, never = drawn[0].lines
    assert (at.get_xdata().tolist(), len(never.get_xdata())) == ([5], 0)
    assert on.get_color() == at.get_color() == OKABE_ITO[0] != off.get_color()
    # the highest value that the loss can have
    assert drawn[1].lines[-1].get_ydata() == pytest.approx(
        [-np.arccos(0.75) / np.pi] * 2
    )
    ticks = drawn[0].xaxis.get_major_formatter()
    assert [ticks(x) for x in (5, 4096, 2e6, 1.5e9, 3e12)] == [
        "5",
        "4.096 k",
        "2 M",
        "1.5 B",
        "3 T",
    ]


def one(name, seed, group=None, **settings):
    seeds = {
        "debug.seed": seed,
        "stream.seed": seed,
        "job.dump_folder": name,
        "validation.freq": seed,
    }
    return SimpleNamespace(
        name=name,
        group=group,
        settings={"dispersion.enabled": False, **seeds, **settings},
    )


ON = {"dispersion.enabled": True}
OTHER = {"optimizer.lr": 1.0}


def test_conditions():
    """Different seeds are one condition.

    A different λ, other held-out text, or the same seed again is another one.
    """
    runs = [one(f"off-seed-{i}", i) for i in (1, 2)]
    runs += [
        one(f"on-seed-{i}", i, **ON, **{"checkpoint.interval": i}) for i in (1, 2, 3)
    ]
    runs += [
        one("small-lambda", 1, **ON, **{"dispersion.coeff": 0.01}),
        *(one(f"again-{i}", 7, **OTHER) for i in "ab"),
    ]
    runs += [
        one(key, 3, **{f"validation.{key}": "other"})
        for key in ("dataset_path", "enable")
    ]
    runs.append(one("on-seed-2-repeated", 2, **ON))
    of_seeds = [("off (2 seeds)", [0, 1]), ("on (3 seeds)", [2, 3, 4])]
    others = [
        ("small-lambda", [5]),
        ("again-a", [6]),
        ("again-b", [7]),
        ("dataset_path", [8]),
        ("enable", [9]),
    ]
    runs.append(
        one("other-weights", 4, **{"checkpoint.initial_load_path": "elsewhere"})
    )
    others += [("on-seed-2-repeated", [10]), ("other-weights", [11])]
    assert conditions(runs) == of_seeds + others
    # Of runs that were named together, configs, seeds and the runs between them do not
    # matter.
    runs = [
        one("a", 1),
        one("b", 1, "x", **OTHER),
        one("c", 2),
        one("d", 1, "x"),
        one("e", 3, "y"),
    ]
    assert conditions(runs) == [
        ("a (2 seeds)", [0, 2]),
        ("x (2 runs)", [1, 3]),
        ("y", [4]),
    ]
    for names, common in (
        (("off-1", "off-12"), "off"),
        (("on_seed_1_long", "on_seed_2_long"), "on"),
        (("seed-1", "seed-2"), "seed"),
        (("lr0.1-a", "lr0.1-b"), "lr0.1"),
        (("a", "b"), "a"),
    ):
        assert conditions([one(name, i) for i, name in enumerate(names)]) == [
            (f"{common} (2 seeds)", [0, 1])
        ]


def test_runs_given_under_one_name(tmp_path):
    a, b, c = (write_run(tmp_path / name, whole(30)[0]) for name in "abc")
    runs = gather([str(a), f"both={c},{b}"])
    assert [(run.name, run.group) for run in runs] == [
        ("a", None),
        ("c", "both"),
        ("b", "both"),
    ]
    page = render(runs, T0)
    assert cells(page, "condition") == ["", "both (2 runs)", "both (2 runs)"]
    labels = re.findall(r'aria-label="(training cross-entropy[^"]*)"', page)
    assert (
        labels
        == [
            "training cross-entropy: a: 8.99 → 8.7; both (2 runs): 8.99 → 8.7, against steps"
        ]
        * 2
    )
    with pytest.raises(ConfigError, match="given twice"):
        gather([str(a), f"x={a},{b}"])


# cross-entropy and mean cosine of the only block at step 100, and tokens/s, by seed
NUMBERS = {
    "off": {1: (4.0, 0.5, 100.0), 2: (4.1, 0.6, 110.0), 3: (4.4, 0.7, 120.0)},
    "on": {2: (4.0, 0.25, 99.0), 3: (4.5, 0.3, 114.0), 4: (9.0, 0.9, 1.0)},
}


def of_two_conditions(folder):
    for name, by_seed in NUMBERS.items():
        for seed, (ce, cosine, speed) in by_seed.items():
            run = write_run(
                folder / f"{name}-{seed}",
                [row(s, T0 + s, tps=speed) for s in range(1, 101)],
                [event("start", 0, T0), event("complete", 100, T0 + 101)],
                dispersion={"enabled": name == "on"},
                debug={"seed": seed},
                stream={"seed": seed},
            )
            for step, level in ((0, 8.0), (50, 7.0), (100, ce)):
                found = condensed(0.0, cosine, cosine)
                dataclasses.replace(found, cross_entropy=level).save(
                    run / "condensation" / f"step-{step}.npz"
                )
    return gather(sorted(folder.glob("o*-*")))


def test_the_difference_of_two_conditions_comes_first(tmp_path):
    """It is paired by the seeds that both have, 2 and 3."""
    runs = of_two_conditions(tmp_path)
    headline = Headline(runs, T0 + 200)
    ce, cosine, speed = headline.tiles
    half = stats.t.ppf(0.975, 1)
    assert ce == (
        "cross-entropy on held-out text",
        "+0.0000",  # of −0.1 and 0.1
        f"95\N{NO-BREAK SPACE}%: {-0.1 * half:+.4f} to {0.1 * half:+.4f}, 2 pairs of seeds"
        "; 4.2500 ± 0.1500 → 4.2500 ± 0.2500 at step 100",
    )
    assert cosine.value == "-0.3750"  # of −0.35 and −0.4
    low, high = np.expm1(
        np.log([0.9, 0.95]).mean() + 0.5 * np.log(0.95 / 0.9) * half * np.array([-1, 1])
    )
    assert speed == (
        "tokens/s of one rank",
        f"{np.sqrt(0.9 * 0.95) - 1:+.1%}",
        f"95\N{NO-BREAK SPACE}%: {low:+.1%} to {high:+.1%}, 2 pairs of seeds"
        "; 115 → 106.5 median",
    )
    assert headline.progress == ("complete", "6 of 6 runs", "")
    assert headline.sentence.startswith(
        f"on (3 seeds) minus off (3 seeds): {ce.label} +0.0000 ({ce.note})."
    )
    page = html.unescape(render(runs, T0 + 200))
    first_screen = page[: page.index("<details")]
    assert all(tile.value in first_screen for tile in headline.tiles)


def test_other_headlines(tmp_path):
    runs = of_two_conditions(tmp_path)
    off = Headline(runs[:3], T0 + 200)
    ce = [4.0, 4.1, 4.4]
    assert off.tiles[0] == (
        "cross-entropy on held-out text",
        f"{np.mean(ce):.4f} ± {stats.sem(ce):.4f}",
        "at step 100",
    )
    assert off.sentence.startswith("3 of 3 runs complete. The cross-entropy on held")
    single = Headline(runs[4:5], T0 + 200)
    assert [tile.value for tile in single.tiles] == [
        "4.5000",
        "0.3000",
        "-0.3000",
        "114",
    ]
    assert single.sentence == (
        "on-3 is complete: all 100 steps are done. The cross-entropy on held-out text is "
        "4.5000. The mean cosine of all blocks is 0.3000."
    )
    pair = Headline([runs[1], runs[3]], T0 + 200)
    ce_label = "cross-entropy on held-out text"
    assert pair.tiles[0] == (
        ce_label,
        "-0.1000",
        "1 pair of seeds; 4.1000 → 4.0000 at step 100",
    )
    no_pair = Headline([runs[0], runs[5]], T0 + 200)
    assert no_pair.tiles[0] == (
        ce_label,
        "–",
        "no seed in common; 4.0000 → 9.0000 at step 100",
    )
    other = dataclasses.replace(runs[1], name="other", group="other")
    three = Headline([*runs, other], T0 + 200)
    assert (three.tiles, three.sentence) == (
        [],
        "7 of 7 runs complete. The baseline is off (3 seeds).",
    )
    page = render([*runs, other], T0 + 200)
    assert cells(page, "other")[:4] == [
        "4.1000",
        "+0.0000 (1 pair of seeds)",
        "0.6000",
        "+0.0000 (1 pair of seeds)",
    ]
    # What is compared is the latest common step, and what all runs have.
    early = dataclasses.replace(
        runs[3], condensation={s: runs[3].condensation[s] for s in (0, 50)}
    )
    assert Headline([runs[1], early], T0).outcomes[0].note == "at step 50"
    unmeasured = dataclasses.replace(runs[3], condensation={})
    labels = [o.label for o in Headline([runs[1], unmeasured], T0).outcomes]
    assert labels == ["training cross-entropy, mean of 10 rows", "tokens/s of one rank"]
    empty = dataclasses.replace(
        runs[3], condensation={}, rows=[], written=[], events=[]
    )
    assert Headline([empty], T0).sentence == "on-2 is empty: nothing was logged yet."


def test_headlines_of_odd_runs(tmp_path):
    runs = of_two_conditions(tmp_path)
    healthy = Headline(runs, T0 + 200).tiles
    # A run without a partner neither counts nor sets the step. Of an empty one, only the
    # state is told.
    alone = dataclasses.replace(
        runs[5], condensation={s: runs[5].condensation[s] for s in (0, 50)}
    )
    assert Headline([*runs[:5], alone], T0 + 200).tiles == healthy
    no_rows = {"condensation": {}, "rows": [], "written": [], "events": []}
    empty = dataclasses.replace(runs[0], **no_rows)
    headline = Headline([empty, *runs[1:]], T0 + 200)
    assert headline.tiles == healthy
    assert headline.progress == ("complete", "5 of 6 runs", "off-1 is empty")
    # Runs without a speed, as without a row after the first, are in no pair of it.
    slow = [dataclasses.replace(run, rows=[row(100, T0, tps=None)]) for run in runs]
    assert Headline(slow, T0 + 200).tiles[-1].value == "–"
    # One that has diverged is not given its last finite number.
    rows = [row(s, T0 + s, ce=9.0 if s < 30 else float("nan")) for s in range(1, 101)]
    diverged = gather([write_run(tmp_path / "diverged", rows)])
    assert "rows is nan." in Headline(diverged, T0 + 200).sentence
    # Runs with other batches are compared at the same number of tokens.
    twice = [row(s, T0 + s, tokens=8192 * s) for s in range(1, 101)]
    other = write_run(tmp_path / "twice", twice, training={"local_batch_size": 16})
    base = write_run(tmp_path / "base", *whole())
    pair = Headline(gather([base, other]), T0 + 2000)
    assert pair.outcomes[0].note == f"at {100 * 4096:,} tokens"
    # steps 100 and 50, without rows of the other batch's odd steps
    assert pair.tiles[0].value == "–"  # the seeds are not set
    seeds = {"debug": {"seed": 1}, "stream": {"seed": 1}}
    folders = [
        write_run(tmp_path / "a", whole()[0], **seeds),
        write_run(tmp_path / "b", twice, training={"local_batch_size": 16}, **seeds),
    ]
    pair = Headline(gather(folders), T0 + 2000)
    means = [8.0 + 0.01 * 4.5, 8.5 + 0.01 * 4.5]  # of 91 … 100 and 41 … 50
    assert pair.tiles[0].value == f"{means[1] - means[0]:+.4f}"


def test_runs_of_other_versions_and_trainers(tmp_path):
    """They may lack a section or a key."""
    bare = write_run(tmp_path / "bare", *whole(), dispersion={"enabled": True})
    config = json.loads((bare / "config.json").read_text())
    del config["dispersion"]["norm_eps"]
    (bare / "config.json").write_text(json.dumps(config))
    stock = write_run(tmp_path / "stock", *whole())
    del config["dispersion"]
    (stock / "config.json").write_text(json.dumps(config))
    assert "ε = 0.01" in page_of(bare, stock)
    # A run with measurements and no row yet, beside runs with different batches
    measured = [(0, 0.1), (50, 0.2)]
    twice = [row(s, T0 + s, tokens=8192 * s) for s in range(1, 101)]
    fresh = write_run(tmp_path / "fresh", measured=measured)
    assert "fresh" in page_of(bare, write_run(tmp_path / "twice", twice), fresh)


def test_bands_by_hand():
    """10 + s and 13 + s have steps 2, 4 and 6 in common.

    Seeds without a shared step keep their own lines.
    """
    steps = np.arange(2.0, 12, 2)
    lines = [
        Line("off-1", steps[:3], 10 + steps[:3], 0),
        Line("off-2", steps, 13 + steps, 1),
    ]
    lines.append(Line("on", np.arange(1.0, 4), np.full(3, 4.0), 2))
    runs = [one("off-1", 1), one("off-2", 2), one("on", 1, **ON)]
    off, on = by_condition(conditions(runs), lines)
    assert (off.name, off.place, on.name, on.place) == ("off (2 seeds)", 0, "on", 1)
    assert off.x.tolist() == [2, 4, 6]
    assert [y.tolist() for y in (off.low, off.y, off.high)] == [
        [12, 14, 16],
        [13.5, 15.5, 17.5],
        [15, 17, 19],
    ]
    assert (on.low, on.high, on.x.tolist(), on.y.tolist()) == (
        None,
        None,
        [1, 2, 3],
        [4, 4, 4],
    )
    axes = drawn_lines([off, on])
    (band,) = axes.collections
    corners = band.get_paths()[0].vertices
    assert {tuple(corner) for corner in corners} == {
        (2, 12),
        (4, 14),
        (6, 16),
        (2, 15),
        (4, 17),
        (6, 19),
    }
    assert [line.get_label() for line in axes.lines[::2]] == ["off (2 seeds)", "on"]
    assert band.get_facecolor()[0][:3] == pytest.approx(
        matplotlib.colors.to_rgb(off.style["color"])
    )

    # the third one has only begun
    groups = conditions([one(f"off-{i}", i) for i in range(3)])
    a = Line("a", np.array([1.0, 3]), np.ones(2), 0)
    b = Line("b", np.array([2.0, 4]), np.ones(2), 1)
    found = [(line.name, line.place, line.low) for line in by_condition(groups, [a, b])]
    assert found == [("a", 0, None), ("b", 0, None)]
    a_hole = Line("a", np.array([1.0, 2, 3]), np.array([5.0, np.nan, 7]), 0)
    (line,) = by_condition(
        groups, [a_hole, Line("b", np.arange(1.0, 4), np.ones(3), 1)]
    )
    assert (line.name, line.x.tolist(), line.high.tolist()) == (
        "off (3 seeds), 2 of them drawn",
        [1, 3],
        [5, 7],
    )


def test_many_points_keep_their_extremes():
    x = np.arange(1500.0)
    line = Line("a", x, x % 3, 0, low=x % 3 - 10, high=x % 3 + 10)
    axes = drawn_lines([line])
    vertices = axes.collections[0].get_paths()[0].vertices
    assert (vertices[:, 1].min(), vertices[:, 1].max()) == (-10, 12)
    assert axes.lines[0].get_ydata() == pytest.approx(np.ones(BINS))
    axes = drawn_lines([line], charts.without_the_beginning)
    assert axes.get_ylim()[0] < -10
    rng = np.random.default_rng(0)
    x = np.arange(40000.0)
    y = rng.standard_normal(40000)
    y[[5, 6, 12345]] = np.nan, np.inf, 99
    bins = binned(x, y)
    finite = np.isfinite(y)
    assert {len(column) for column in vars(bins).values()} == {BINS}
    assert (bins.low.min(), bins.high.max()) == (y[finite].min(), 99)
    assert np.average(
        bins.y, weights=np.histogram(x[finite], BINS)[0]
    ) == pytest.approx(y[finite].mean())
    few = binned(x[:9], y[:9])
    assert (len(few.x), few.y is few.low is few.high) == (7, True)


def test_configs_are_compared(compared, tmp_path):
    differing, shared = compared.read_text().split("Common values that")
    # the default, then the runs
    assert cells(differing, "dispersion.enabled") == ["false", "true", "false"]
    assert cells(shared, "model.flavor") == ['"debugmodel"', '"nano"', '"nano"']
    assert "model.flavor" not in differing.split("Where the runs differ")[1]
    one = page_of(write_run(tmp_path / "one", training={"seq_len": 77}))
    assert cells(one, "training.seq_len") == ["2048", "77"]
    assert "dispersion.tau</th>" not in one


def test_history(compared):
    (run,) = gather([compared.parent / "_on$1$2"])
    found = run.attempts
    assert [(a.job, a.first_step, a.last_step, a.how()) for a in found] == [
        ("7.0", 0, 40, "no end recorded"),
        ("7.1", 30, 60, "stop: SIGUSR1"),
        ("7.2", 60, 100, "complete"),
    ]
    lost_and_gaps = [
        (line[7], line[9]) for line in starts(compared.read_text()) if line[1] != "–"
    ]
    assert lost_and_gaps == [("10", "10 min 0 s"), ("0", "11 min 39 s"), ("–", "–")]
    for told in (
        "checkpoint × 4",
        "training.local_batch_size 8 → 4",
        "checkpoint damaged",
    ):
        assert told in compared.read_text()
    # repeated steps count once, with their last values
    assert (run.series("ce")[34], len(run.rows)) == (2.0, 100)


def test_only_what_counts_after_a_resume(tmp_path):
    rows, events = faulty()
    condensed = {
        "step": 0,
        "time": T0 + 1,
        "condensation": {"mean_cosine": [0.1]},
        "seconds": 1.0,
    }
    run = write_run(
        tmp_path / "run",
        [condensed, *rows[:43]],
        events[:7],
        [(0, 0.1), (32, 0.2), (40, 0.3)],
    )
    (found,) = gather([run])
    assert (found.step, len(found.written)) == (33, 43)
    assert [r["step"] for r in found.rows] == list(range(1, 34))
    assert list(found.condensation) == [0, 32]
    assert [state(found, T0 + after)[0] for after in (1040, 5000)] == [
        "running",
        "interrupted",
    ]
    assert cells(render([found], T0 + 1040), "step") == ["33 of 100"]


def test_states(tmp_path):
    rows, events = faulty()
    late = T0 + 1e6
    failed = event("save_failed", 40, T0 + 410, error="no space")
    # and knew of no step
    trained_nothing = event("stop", 0, T0 + 420, allocated=T0 + 410, reason="RUN/stop")
    after_the_end = event("stop", 0, T0 + 9000, allocated=T0 + 8990, reason="RUN/stop")
    nothing_to_do = event("resume", 100, T0 + 9000)
    cases = (
        (rows[:70], events[:10], late, ("stopped", "stop: SIGUSR1, after step 60")),
        (rows, [*events, nothing_to_do], late, ("complete", "all 100 steps are done")),
        (rows, [*events, after_the_end], late, ("complete", "all 100 steps are done")),
        (
            rows[:40],
            [*events[:5], failed],
            T0 + 420,
            ("interrupted", "save failed: no space, after step 40"),
        ),
        (
            rows[:40],
            [*events[:5], trained_nothing],
            late,
            ("stopped", "stop: RUN/stop, after step 40"),
        ),
        (
            rows[:40],
            events[:5],
            late,
            ("interrupted", "no end recorded, last activity at step 40"),
        ),
    )
    for i, (logged, told, now, expected) in enumerate(cases):
        (run,) = gather([write_run(tmp_path / str(i), logged, told)])
        assert state(run, now) == expected


def test_a_run_that_validates_more_often_than_it_logs(tmp_path):
    validated = [
        {"step": step, "time": T0 + 10 * step + 1, "validation": 9.0 - step / 10}
        for step in (1, 5, 10)
    ]
    for logged in ([row(1, T0 + 10)], []):
        folder = write_run(
            tmp_path / str(len(logged)), [*logged, *validated], [event("start", 0, T0)]
        )
        (run,) = gather([folder])
        assert (run.step, run.validation) == (10, {1: 8.9, 5: 8.5, 10: 8.0})
    assert "8.9 → 8, against steps" in page_of(folder)


def test_bare_runs(tmp_path):
    rows = [
        row(
            s,
            T0 + s,
            ce=None if s == 3 else float("nan") if s == 4 else 5.0,
            grad_norm=None,
        )
        for s in range(1, 9)
    ]
    del rows[5]["lr"], rows[5]["data"]
    bare = write_run(tmp_path / "bare", rows)
    empty = write_run(tmp_path / "empty")
    (bare / "environment.json").unlink()
    page = page_of(bare)
    # CE (in the first screen, too), learning rate, throughput, history; no gradient norm
    assert len(pictures(page)) == 5
    for said in (
        "Condensation was not measured",
        "There is no events.jsonl",
        "There is no environment.json",
    ):
        assert said in page
    assert cells(page_of(empty, bare), "training cross-entropy, last") == ["–", "5"]
    page = page_of(empty)
    assert (pictures(page), cells(page, "state")) == (
        [],
        ["empty: nothing was logged yet"],
    )


def test_a_truncated_measurement_costs_only_itself(tmp_path):
    run = write_run(
        tmp_path / "run", *whole(), measured=[(0, 0.1), (50, 0.2), (100, 0.3)]
    )
    path = run / "condensation" / "step-50.npz"
    path.write_bytes(path.read_bytes()[:300])
    whole_one = measurement(0.2)
    for step, change in enumerate(
        ({"std_cosine": np.zeros(2)}, {"histogram": whole_one.histogram[:, :64]}), 60
    ):
        dataclasses.replace(whole_one, **change).save(
            path.with_name(f"step-{step}.npz")
        )
    measurement(0.2, layers=9).save(path.with_name("step-70.npz"))
    (run / "job.json").write_text(
        json.dumps({"failures": 2, "step": 30, "reason": "node n3 <died>"})
    )
    (found,) = gather([run])
    assert (list(found.condensation), len(found.problems)) == ([0, 100], 4)
    page = render([found], T0)
    assert "cannot be read" in cells(page, "not readable")[0]
    assert "2 in a row; the last: node n3 <died>" in cells(
        page, "failures without a new checkpoint"
    )


def test_broken_runs_beside_another(tmp_path, capsys):
    cases = (
        ("config.json", "wb", b'{"model": 5}'),
        ("config.json", "wb", b"\xff\xfe"),
        # of another program
        ("metrics.jsonl", "wb", b'{"iteration": 1, "loss": 3.0}\n'),
        *(
            ("metrics.jsonl", "ab", json.dumps({"step": 9, "time": 1e9} | row).encode())
            for row in (
                {"step": "abc"},
                {"step": None},
                {"step": -3},
                {"time": "now"},
                {"ce": "low"},
                {"data": 5},
            )
        ),
        ("events.jsonl", "ab", b'{"step": 9, "time": "2026-03-01T00:00:00+00:00"}'),
        ("events.jsonl", "ab", b'{"step": 9, "event": "start"}'),
        # These can be read, but not shown.
        ("metrics.jsonl", "ab", json.dumps(row(101, 1e20)).encode()),
        (
            "metrics.jsonl",
            "ab",
            json.dumps(row(101, T0 + 1e4, data={"documents": {}})).encode(),
        ),
        (
            "events.jsonl",
            "ab",
            json.dumps(event("resume", 9, T0 + 2e4, config_changes=5)).encode(),
        ),
        (
            "events.jsonl",
            "ab",
            json.dumps(event("start", 9, T0 + 2e4, allocated="x")).encode(),
        ),
    )
    good = write_run(tmp_path / "good", *whole())
    (tmp_path / "results.json").write_text(
        json.dumps({"published": [["piqa", "score", "on", "+25.00", "ours"]]})
    )
    every = []
    for i, (file, mode, content) in enumerate(cases):
        every.append(write_run(tmp_path / f"broken-{i}", *whole()))
        with open(every[i] / file, mode) as damaged:
            damaged.write(content)
        with pytest.raises(ConfigError, match=f"broken-{i}\\b"):
            write_report([every[i]], tmp_path / "report.html")
    capsys.readouterr()
    for broken in (every[:-4], every):  # the last four can be read
        page = write_report(
            [good, *broken], tmp_path / "report.html", tmp_path
        ).read_text()
        assert (cells(page, "state"), "Left out" in page) == (
            ["complete: all 100 steps are done"],
            True,
        )
        assert "<td>+25.00</td>" in page  # of the evaluation
        told = [
            re.fullmatch(r"left out: .*(broken-\d+)\b.*", line)[1]
            for line in capsys.readouterr().err.splitlines()
        ]
        assert sorted(told) == sorted(run.name for run in broken)


def test_details_of_events(tmp_path):
    rows = [row(1, T0 + 1e-6)]
    spent = {"start_up": 85.4, "steps": 0.0, "checkpoints": 3700.0}
    ends = [
        event("start", 0, T0, allocated=T0 - 30.5),
        event("complete", 1, T0 + 1e-6, spent=spent),
    ]
    (run,) = gather([write_run(tmp_path / "run", rows, ends, steps=1)])
    told = list(map(details, run.events))
    assert told == [
        "allocated: 2026-02-28 23:59:29 UTC",
        "spent: start-up 1 min 25 s, checkpoints 1 h 1 min",
    ]
    # no tokens/s of a millisecond
    assert starts(render([run], T0))[0][6] == "–"
    # of a single row
    assert Report([run]).gallery([*series.LOSSES, *series.OPTIMIZATION]) == []


def test_many_runs(tmp_path):
    """They share a legend, which would cover their charts.

    Pictures of single runs are of the first conditions.
    """
    measured = [(0, 0.1), (30, 0.5)]
    runs = [
        write_run(tmp_path / f"r{i}", *whole(30), measured, optimizer={"lr": float(i)})
        for i in range(13)
    ]
    runs = gather(
        [*runs, write_run(tmp_path / "seed", debug={"seed": 9}, optimizer={"lr": 0.0})]
    )
    page = render(runs, T0)
    labels = re.findall('aria-label="([^"]*)"', page)
    assert (
        sum(label.startswith("mean cosine by layer and step") for label in labels)
        == MANY // 2 + 1
    )
    assert "those of r0, r1, r2, r3, r4, r5: the first run" in " ".join(page.split())
    assert page.count("<h3>r") == 13
    # of each condition, in front of three groups of pictures
    assert page.count("<li><svg") == 3 * 13
    lines = [Line(f"r{i}", np.arange(1000.0), np.arange(1000.0), i) for i in range(13)]
    axes = drawn_lines(lines)
    assert len(axes.collections) == 0
    assert (
        len(
            {
                tuple(dataclasses.replace(lines[0], place=i).style.items())
                for i in range(50)
            }
        )
        == 50
    )
    assert sum(len(line.get_xdata()) for line in axes.lines) <= 3000


def test_models_of_different_depth_and_one_measurement(tmp_path):
    deep = write_run(
        tmp_path / "deep", *whole(), model={"flavor": "of another version"}
    )
    measurement(0.5, layers=29).save(deep / "condensation" / "step-0.npz")
    once = write_run(tmp_path / "once", *whole(), measured=[(100, 0.2)])
    # A config may name any number of blocks: no model has as many to be counted.
    overrides = {"overrides": {"n_layers": 10**6}}
    crafted = write_run(tmp_path / "crafted", *whole(), model=overrides)
    page = page_of(deep, once, crafted)
    assert cells(page, "parameters") == ["–", "427,008", "49,312,131,136"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "steps", "most"), [(1, 40000, 1.5e6), (50, 600, 3e6)]
)
def test_long_and_many_runs_make_a_small_page(
    tmp_path, monkeypatch, count, steps, most
):
    monkeypatch.undo()  # with its pictures
    noise = np.random.default_rng(0).standard_normal(steps)
    rows = [
        row(s, T0 + s, ce=4 + e, grad_norm=float(np.exp(e)), tps=500 + e)
        for s, e in enumerate(noise, start=1)
    ]
    measured = [(s, s / steps / 2) for s in range(0, steps + 1, max(steps // 40, 100))]
    runs = [
        write_run(
            tmp_path / f"{i}", rows, measured=measured, steps=steps, optimizer={"lr": i}
        )
        for i in range(count)
    ]
    started = time.process_time()
    assert write_report(runs, tmp_path / "report.html").stat().st_size < most
    assert time.process_time() - started < 60  # 15 s on a slow core


def test_nothing_is_markup_or_fetched(compared):
    page = compared.read_text()
    svgs = pictures(page)
    assert (
        page.count("<script"),
        page.count("&lt;script&gt;") >= 2,
        "@import" in page,
    ) == (0, True, False)
    addresses = re.findall(
        r'(?:src|href)\s*=\s*"([^"]*)"|url\(([^)]*)\)', "".join([page, *svgs])
    )
    outside = {
        "".join(address)
        for address in addresses
        if not "".join(address).startswith(("#", "data:"))
    }
    assert outside == {"https://arxiv.org/abs/2602.00217"}
    assert "default-src 'none'" in html.unescape(page)
    assert "_on$1$2" in svgs[0]  # in the title, and not as mathematics


def test_errors(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run", *whole(20), steps=20)
    out = tmp_path / "report.html"
    for name in ("folder/config.json", "torn/config.json", "torn/metrics.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    out.write_text("before")
    for paths, target, reason in (
        ([], out, "no run"),
        ([tmp_path / "folder"], out, "folder' lacks config.json"),
        ([run, tmp_path / "nowhere"], out, "nowhere' does not exist"),
        ([run, tmp_path / "folder" / ".." / "run"], out, "given twice"),
        ([run], tmp_path / "folder", "is a folder"),
        ([run], tmp_path / "missing" / "report.html", "does not exist"),
        ([run], tmp_path / ("x" * 250 + ".html"), "File name too long"),
        ([tmp_path / "torn"], out, "torn/config.json' cannot be read"),
    ):
        with pytest.raises(ConfigError, match=reason):
            write_report(paths, target)
    assert (out.read_text(), list(tmp_path.glob(".*"))) == ("before", [])
    assert typed(monkeypatch, "report", run, "--out", out) == 0
    assert re.search(r"report.html: [\d.]+ [kM]B", capsys.readouterr().out)
    page = out.read_text()
    assert (page.startswith("<!doctype html>"), "run is complete" in page) == (
        True,
        True,
    )


CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    *(
        "--headless",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
    ),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
    # with its sandbox, Chromium refuses to start as root
    *(("--no-sandbox",) if os.geteuid() == 0 else ()),
)


def run_command(*command):
    return subprocess.run(
        command, timeout=120, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


# Folded parts are opened, and the x axes are switched to tokens.
MEASURE = """<script>addEventListener("load", () => {
  const select = selector => [...document.querySelectorAll(selector)];
  const width = element => element.getBoundingClientRect().width;
  const folded = select("details");
  const visible = name => select(".scale-" + name).filter(s => width(s) > 0).length;
  folded.forEach(part => part.open = true);
  const pictures = select("figure > svg");
  const steps = [visible("step"), visible("tokens")];
  document.getElementById("by-tokens").click();
  const tokens = [visible("step"), visible("tokens")];
  parent.postMessage(JSON.stringify({
    width: document.scrollingElement.scrollWidth,
    drawn: pictures.filter(p => width(p) > 200 && p.parentElement.ariaLabel).length,
    cut: pictures.filter(p => width(p) > p.parentElement.clientWidth + 1 && p.parentElement.className != "wide").length,
    scripts: document.scripts.length,
    steps, tokens,
  }), "*")
})</script>"""

# The page is in a frame, because Chromium's windows are at least 500 pixels wide.
FRAME = """<!doctype html><title></title><script>addEventListener("message", e => { document.title = e.data })</script>
<iframe src="copy.html" style="border: 0" width="WIDTH" height="800"></iframe>"""


@pytest.mark.slow
def test_in_a_browser(compared, tmp_path):
    """Everything is drawn, nothing is wider than the window, and no text of a run is
    executed, even with scripts on.
    """
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    page = compared.read_text()
    try:
        # Ubuntu's may be a stub that asks for a snap
        run_command(browser or "chromium", "--version")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(
            "no browser (install chromium and fonts-dejavu-core, as .ci/run does): "
            f"{error}"
        )

    def load(path, width, height, action):
        profile = tempfile.mkdtemp(dir=tmp_path)
        command = [
            browser,
            *OPTIONS,
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            action,
        ]
        return run_command(*command, path.resolve().as_uri())

    copy = re.sub(r"<meta http-equiv[^>]*>", "", page).replace(
        "</body>", MEASURE + "</body>"
    )
    (tmp_path / "copy.html").write_text(copy)
    scales = len(re.findall('class="scale-step"', page))
    for width in (390, 1200, 1600):
        (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
        dom = load(tmp_path / "frame.html", 1700, 900, "--dump-dom")
        found = json.loads(
            html.unescape(re.search(r"<title>(.*?)</title>", dom).group(1))
        )
        assert found.pop("width") <= width
        assert found == {
            "cut": 0,
            "scripts": 1,
            "drawn": len(pictures(page)),
            "steps": [scales, 0],
            "tokens": [0, scales],
        }

    # Under its own security policy, the page has its style and pictures.
    load(compared, 1200, 2500, f"--screenshot={tmp_path}/page.png")
    image = np.asarray(Image.open(tmp_path / "page.png").convert("RGB"))
    assert 0.05 < (image < 250).any(-1).mean() < 0.6
    # Antialiased text and curves in colours
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 500


def test_slow_ranks(tmp_path):
    def slow(step, rank, host, seconds):
        return row(
            step,
            T0 + step,
            straggler={"rank": rank, "host": host, "seconds": seconds, "median": 0.5},
        )

    rows = [
        slow(1, 3, "n1", 9.0),
        row(2, T0 + 2),
        slow(3, 3, "n1", 1.25),
        slow(4, 7, "n2", 0.8),
    ]
    rows += [slow(step, step, "n3", 0.9) for step in (5, 6)]
    page = page_of(
        write_run(tmp_path / "slow", rows), write_run(tmp_path / "even", *whole())
    )
    first, none = cells(page, "slow ranks")
    assert re.match(
        r"rank 3 on n1 in 2 of 6 .* step 3: 1.25 s, .*; rank 7 on n2 in 1 of 6 .* step 4: 0.8 s",
        first,
    )
    assert (first.endswith("; and 1 more"), none) == (True, "")


def test_a_collapse_is_in_the_pictures_by_layer(tmp_path, monkeypatch):
    """One of the measurements every 10 steps is high.

    Steps at equal distances missed it.
    """
    high = {"one": 30, "other": 60}
    runs = []
    figures = []
    for name, step in high.items():
        measured = [(s, 0.9 if s == step else 0.2) for s in range(0, 310, 10)]
        runs.append(write_run(tmp_path / name, *whole(300), measured, steps=300))
    monkeypatch.setattr(
        picture_makers, "to_svg", lambda figure, salt: figures.append(figure) or ""
    )
    Report(gather(runs)).condensation_by_layer()
    _, _, by_layer, heatmaps = figures
    steps = [int(text.get_text()) for text in by_layer.legends[0].texts]
    assert steps == [0, 10, 20, 30, 40, 60, 80, 150, 300]
    assert [len(axes.lines) for axes in by_layer.axes] == [len(steps)] * 2
    # step 0
    assert (
        heatmaps.axes[1].lines[1].get_ydata().tolist()
        == heatmaps.axes[0].lines[0].get_ydata().tolist()
    )
    titles = [axes.get_title() for axes in heatmaps.axes[:6]]
    assert titles == [
        f"{name}, step {s}" for name in high for s in (0, high[name], 300)
    ]
