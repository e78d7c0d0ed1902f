"""The real trainer, as a whole: it trains, saves, is built anew and resumes, in one
process and in two.
"""

import json
import logging
import os
import re
import shutil
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.command_line import ROOT
from tests.distributed import spawn
from tests.mesh import GLOBAL_BATCH, SEQ_LEN, build, weights
from tests.pages import loaded
from tests.run_invariants import EVENTS, FILES, check_run, pages_names
from titan_disp.errors import ConfigError
from titan_disp.run import reader
from titan_disp.run.liveness import straggler
from titan_disp.run.reader import (
    read_config,
    read_events,
    read_json_lines,
    read_metrics,
)

# all steps, and those of the first start
STEPS = 5
FIRST = 3
TOKENS = GLOBAL_BATCH * SEQ_LEN  # of a step
# λ at each step: a warm-up of two steps, then linear to a quarter at the last one
COEFF = (0.5, 1.0, 1.0, 0.625, 0.25)
OPTIONS = (
    *(
        "--training.steps",
        str(STEPS),
        "--metrics.log_freq",
        "1",
        "--checkpoint.enable",
        "--checkpoint.interval",
        "9",
    ),
    *(
        "--metrics.enable_tensorboard",
        "--condensation.interval",
        "0",
        "--stream.prefetch",
        "0",
    ),
    *("--guard.max_skipped_steps", "7"),
    # Whatever depends on the step, which a resume must know.
    *("--dispersion.estimator", "sampled", "--dispersion.max_tokens", "8"),
    *(
        "--dispersion.warmup_steps",
        "2",
        "--dispersion.decay",
        "linear",
        "--dispersion.final_coeff",
        "0.25",
    ),
    *(
        "--lr_scheduler.warmup_steps",
        "2",
        "--lr_scheduler.decay_ratio",
        "0.6",
        "--lr_scheduler.decay_type",
        "linear",
    ),
)
# Of some positions: the mean over all of them does not depend on their order.
HELD_OUT = ("--condensation.sequences", "2", "--condensation.max_tokens", "12")
MEASURES = (
    *(
        *HELD_OUT,
        "--condensation.interval",
        "2",
        "--validation.enable",
        "--validation.freq",
        "2",
    ),
    *(
        "--validation.steps",
        "1",
        "--validation.seq_len",
        "32",
        "--validation.local_batch_size",
        "2",
    ),
)
CHANGED = (
    *(
        "--optimizer.name",
        "Adam",
        "--optimizer.lr",
        "4e-3",
        "--optimizer.beta1",
        "0.8",
        "--optimizer.beta2",
        "0.9",
    ),
    *(
        "--optimizer.eps",
        "1e-6",
        "--optimizer.weight_decay",
        "0.5",
        "--lr_scheduler.decay_type",
        "sqrt",
    ),
    *("--metrics.log_freq", "1", "--metrics.save_tb_folder", "tensorboard"),
)
# The last step that the first start begins: the number is between two steps, and the
# job trains at least so much.
FIRST_PART = ("--budget.stop_at_tokens", str((FIRST - 1) * TOKENS + 1))


def trainer_of(sample, run, *options):
    return closing(build(sample, run, *OPTIONS, *options))


def start(sample, run, *options):
    with trainer_of(sample, run, *options) as trainer:
        before = weights(trainer)
        trainer.train()
        return before, weights(trainer), trainer.dataloader.state_dict()


def resume(sample, run, *options):
    """The start that completes the run.

    What it is made of is joined as it should be. Its last heartbeat is kept.
    """
    with trainer_of(sample, run, *options) as trainer:
        saved = trainer.checkpointer
        guard = trainer.optimizers
        assert saved.states["train_state"] is trainer
        identity = json.loads(saved.states["identity"]["json"])
        assert (identity["hidden_dim"], identity["tokens of a step"]) == (192, TOKENS)
        assert guard.max_skipped_steps == 7
        assert saved.hooks.owns_folder()
        trainer.train()
        assert guard._counts.tolist() == [STEPS, 0, 0]  # with those before the resume
        assert saved.hooks.healthy()
        guard._counts[2] = 1
        assert not saved.hooks.healthy()
        shutil.copy(run / "heartbeat.json", run.parent)
        return None, weights(trainer), trainer.dataloader.state_dict()


@contextmanager
def console(file):
    handler = logging.FileHandler(file)
    logger = logging.getLogger()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)


def one_process(sample, tokenizer, folder):
    """One run of one start, and one of two starts, which also measures.

    Copies of it go on in other ways.
    """
    folder = Path(folder)
    whole, parts, changed = (folder / name for name in ("whole", "parts", "changed"))
    measures = (
        *MEASURES,
        "--validation.dataset",
        "c4_validation",
        "--validation.dataset_path",
        sample,
    )
    found = {"whole": start(sample, whole), "refusals": {}}
    with console(folder / "parts.log"):
        found["first"] = start(sample, parts, *measures, *FIRST_PART)
    others = {
        "seq_len": ("--training.seq_len", "64"),
        "n_layers": ("--model.overrides", "n_layers=3"),
    }
    for name, options in (
        others | {"tokenizer": ("--model.hf_assets_path", tokenizer)}
    ).items():
        with pytest.raises(ConfigError) as refused:
            start(sample, parts, *options)
        found["refusals"][name] = str(refused.value)
    shutil.copytree(parts, changed)
    start(
        sample,
        shutil.copytree(parts, folder / "stopped"),
        *FIRST_PART,
        "--optimizer.lr",
        "0.5",
    )
    with console(folder / "parts.log"):
        found["last"] = resume(sample, parts, *measures)
    with (
        console(folder / "changed.log"),
        trainer_of(sample, changed, *CHANGED) as trainer,
    ):
        trainer.train()
        (group,) = trainer.optimizers.optimizers[0].param_groups
    found["group"] = {key: value for key, value in group.items() if key != "params"}
    start(sample, shutil.copytree(parts, folder / "complete"), "--optimizer.lr", "0.5")
    with trainer_of(sample, folder / "seed", "--debug.seed", "12") as trainer:
        found["seed"] = weights(trainer)
        for name in (".lock", "heartbeat.json"):  # another start takes the folder
            (folder / "seed" / name).write_text('{"id": "of the other", "pid": 1}')
    assert (folder / "seed/heartbeat.json").exists()
    torch.save(found, folder / "found.pt")


def two_nodes(sample, folder):
    """Each rank is the first of its node.

    One start with context parallelism, and the next one with FSDP2.
    """
    from tests import ring_attention

    ring_attention.install()
    os.environ["LOCAL_RANK"] = "0"
    run = Path(folder) / "nodes"
    # one microbatch of each rank
    batch = ("--training.global_batch_size", "-1", "--training.local_batch_size")
    cp = (
        "--parallelism.context_parallel_degree",
        "2",
        "--condensation.interval",
        str(FIRST),
    )
    start(sample, run, *FIRST_PART, *batch, "8", *cp, *HELD_OUT)
    start(sample, run, *batch, "4")


@pytest.fixture(scope="module")
def folder(sample, hf_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("assembly")
    spawn(1, one_process, str(sample), str(hf_tokenizer), str(folder))
    for run in ("whole", "parts"):
        check_run(folder / run)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return torch.load(folder / "found.pt", weights_only=False)


@pytest.fixture(scope="module")
def run(folder):
    return folder / "parts"


def test_a_run_of_two_starts_equals_one_of_one_start(folder, found):
    whole = read_metrics(folder / "whole")
    parts = read_metrics(folder / "parts")
    assert list(whole) == list(parts) == [1, 2, 3, 4, 5]
    for name in ("loss", "ce", "dispersion", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in whole.values()] == [
            row[name] for row in parts.values()
        ], name
    (_, weights, data) = found["whole"]
    (_, resumed_weights, resumed_data) = found["last"]
    assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
    assert str(data) == str(resumed_data)


def test_what_depends_on_the_step(folder):
    rows = read_metrics(folder / "whole").values()
    assert [
        (row["loss"] - row["ce"]) / row["dispersion"] for row in rows
    ] == pytest.approx(COEFF, rel=1e-5)
    # TorchTitan's: a warm-up of two steps, then linear over three
    rates = [row["lr"] / 8e-4 for row in rows]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3], rel=1e-5)
    assert [row["tokens"] for row in rows] == [
        step * TOKENS for step in range(1, STEPS + 1)
    ]
    assert len({row["dispersion"] for row in rows}) == STEPS


def test_a_budget_between_two_steps_is_reached(folder, found):
    events = read_events(folder / "parts")
    assert [(e["event"], e["step"]) for e in events] == [
        *(
            ("start", 0),
            ("checkpoint", FIRST),
            ("stop", FIRST),
            *[("refused", FIRST)] * 3,
        ),
        *(("resume", FIRST), ("checkpoint", STEPS), ("complete", STEPS)),
    ]
    assert read_config(folder / "parts")["budget"]["stop_at_tokens"] == 0
    assert events[6]["config_changes"] == {
        "budget.stop_at_tokens": [(FIRST - 1) * TOKENS + 1, 0]
    }
    assert [event["reason"] for event in events[3:6]] == list(
        found["refusals"].values()
    )
    assert all(name in reason for name, reason in found["refusals"].items())


def test_the_seed_draws_the_weights(found):
    seed = found["first"][0]
    other = found["seed"]
    assert all(torch.equal(seed[name], found["whole"][0][name]) for name in seed)
    drawn = [name for name, weight in seed.items() if weight.std() > 0]
    assert len(drawn) >= len(seed) / 2
    assert not any(torch.equal(seed[name], other[name]) for name in drawn)


def test_keys_of_the_optimizer_and_its_schedule_may_change(folder, found):
    """They hold from the first step on.

    TorchTitan would take the former ones back from the checkpoint.
    """
    rows = read_metrics(folder / "changed")
    assert [rows[step]["lr"] for step in (4, 5)] == pytest.approx(
        [4e-3 * (1 - (n / 3) ** 0.5) for n in (1, 2)]
    )
    adam = {"decoupled_weight_decay": False}  # which AdamW has
    expected = {
        "initial_lr": 4e-3,
        "weight_decay": 0.5,
        "betas": (0.8, 0.9),
        "eps": 1e-6,
        **adam,
    }
    assert found["group"] | expected == found["group"]
    log = (folder / "changed.log").read_text()
    said = log.split("The config differs from that of the last start: ")[
        1
    ].splitlines()[0]
    assert "lr_scheduler.decay_type: 'linear' → 'sqrt', " in said
    assert "optimizer.lr: 0.0008 → 0.004, " in said
    assert "metrics." not in said
    # A start that finds the run complete, or at its stop, trains nothing, so that its
    # config is not that of the run.
    assert (folder / "complete/config.json").read_bytes() == (
        folder / "parts/config.json"
    ).read_bytes()
    assert read_config(folder / "stopped")["optimizer"]["lr"] == 8e-4


def test_two_nodes(folder, sample):
    spawn(2, two_nodes, str(sample), str(folder))
    run = folder / "nodes"
    check_run(run)
    steps = [row["step"] for row in read_json_lines(run / "metrics.jsonl")]
    # with condensation at the start and at the end of the first start
    assert steps == [0, 1, 2, 3, 3, 4, 5]
    assert len(list((run / "tb").iterdir())) == 2  # one writer in each start
    rows = read_metrics(run)
    expected = read_metrics(folder / "whole")
    assert [row["tokens"] for row in rows.values()] == [
        row["tokens"] for row in expected.values()
    ]
    # Context parallelism permutes the tokens, and so draws others.
    for name, tolerance in {
        "lr": 1e-6,
        "ce": 1e-3,
        "dispersion": 2e-2,
        "grad_norm": 1e-2,
    }.items():
        values = [[row[name] for row in of.values()] for of in (rows, expected)]
        assert values[0] == pytest.approx(values[1], rel=tolerance), name
    # Each rank has half of a sequence's tokens, in the order of load balancing.
    found, expected = (reader.read_condensation(of) for of in (run, folder / "parts"))
    assert list(found) == [0, FIRST]
    for name in ("mean_cosine", "mean_angle", "effective_rank", "cross_entropy"):
        assert found[0][name] == pytest.approx(expected[0][name], rel=1e-5), name


def named(heading=None, page="run_folder.md"):
    """What a page in docs/ names in `code`, in all of it or below one heading."""
    page = (ROOT / "docs" / page).read_text()
    if heading is not None:
        page = re.split(r"\n(?=## )", page.split(f"\n## {heading}\n")[1])[0]
    return set(re.findall(r"`([^`]+)`", page))


def test_the_page_names_every_file(run):
    assert FILES.keys() <= named()
    assert len({*pages_names(run).values()}) == 11


def test_the_page_names_every_field(run):
    config = read_config(run)
    environment = reader.read_environment(run)
    assert config.keys() == loaded("train_configs/demo_cpu.toml").to_dict().keys()
    assert environment.keys() <= named("config.json and environment.json")
    events = read_events(run)
    rows = reader.read_rows(run)
    assert {e["event"] for e in events} == {
        "start",
        "checkpoint",
        "stop",
        "refused",
        "resume",
        "complete",
    }
    assert {key for event in events for key in event} <= named("events.jsonl")
    measured = [
        row for row in read_json_lines(run / "metrics.jsonl") if "condensation" in row
    ]
    parts = [row["spent"] for row in rows] + [row["condensation"] for row in measured]
    assert {key for row in rows for key in row["data"]} <= named("Metrics", "data.md")
    fields = {key for part in (*rows, *measured, *parts) for key in part}
    assert fields | {"spearman", "kendall", "range"} <= named("metrics.jsonl")
    assert (
        {"rank", "host", "seconds", "median"}
        == straggler([1.0, 9.0], ["a", "b"]).keys()
        <= named("metrics.jsonl")
    )
    beat = reader.read_heartbeat(run.parent)
    assert beat["step"] == STEPS
    assert beat.keys() <= named("heartbeat.json")
    hashes = json.loads(
        (run / "checkpoint" / f"step-{STEPS}" / "hashes.json").read_text()
    )
    assert hashes.keys() <= named("Checkpoints")


def test_the_page_names_every_event():
    sources = "".join(path.read_text() for path in (ROOT / "titan_disp").rglob("*.py"))
    written = set(
        re.findall(r'\bevent\(\s*"(\w+)"(?: if [\w.]+ else "(\w+)")?', sources)
    )
    table = (
        (ROOT / "docs" / "run_folder.md")
        .read_text()
        .split("| `event` |")[1]
        .split("\n\n")[0]
    )
    cells = [
        line.split("|")[1] for line in table.splitlines() if line.startswith("| `")
    ]
    listed = set(re.findall(r"`(\w+)`", "".join(cells)))
    assert {name for names in written for name in names if name} == listed == EVENTS


# (what check_run says; a key of the lines that count, the place of one of them, and
# what is changed in it, or it is repeated)
SPOILED = (
    ("rows of two writers", "loss", -1, {"time": 0}),
    ("a row before the first start", "loss", 0, {"time": 0}),
    ("a step has two rows", "loss", -1, {}),
    ("steps go back, within one start: .1, 4, 3", "loss", 1, {"step": 4}),
    ("a start from step 3 has rows of steps .3, 5", "loss", 3, {"step": 3}),
    ("a start from step 3 measured at steps .2, 5", "condensation", 3, {"step": 2}),
    ("tokens do not grow", "loss", 1, {"tokens": 1}),
    ("tokens of the sources", "loss", 2, {"data": {"tokens/web": 1, "tokens/code": 2}}),
    ("no such event: saved", "event", 1, {"event": "saved"}),
    ("checkpoint outside of a start", "event", 0, {"event": "checkpoint"}),
    ("checkpoints go back", "event", 1, {}),
    ("an end without a beginning", "event", -1, {}),
    ("no checkpoint to resume from", "event", 6, {"step": 2}),
    ("'event': 'start', 'step': 3", "event", 6, {"event": "start"}),
)


@pytest.mark.changes_runs
@pytest.mark.parametrize(("said", "key", "place", "changes"), SPOILED)
def test_what_spoils_a_run_folder_is_noticed(run, tmp_path, said, key, place, changes):
    copy = shutil.copytree(
        run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint")
    )
    file = copy / ("events.jsonl" if key == "event" else "metrics.jsonl")
    lines = read_json_lines(file)
    line = [line for line in lines if key in line][place]
    place = lines.index(line)
    # A line that repeats the one before it byte by byte is read once.
    lines[place : place + bool(changes)] = [line | (changes or {"again": 1})]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(AssertionError, match=said):
        check_run(copy)


def test_a_kill_after_a_save_hides_its_event(tmp_path):
    """Retention deleted the checkpoint that a start began from. Its event is missing,
    and only a kill explains that.
    """
    (tmp_path / "checkpoint" / "step-9").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    events = [{"time": "2026-01-01T00:00:01+00:00", "event": "start", "step": 0}]
    resumed = [
        {"time": "2026-01-01T00:00:03+00:00", "event": "resume", "step": 3},
        {"time": "2026-01-01T00:00:04+00:00", "event": "checkpoint", "step": 9},
        {"time": "2026-01-01T00:00:05+00:00", "event": "complete", "step": 9},
    ]

    def write(events):
        (tmp_path / "events.jsonl").write_text(
            "".join(json.dumps(event) + "\n" for event in events)
        )

    write(events + resumed)
    check_run(tmp_path)
    ended = {"time": "2026-01-01T00:00:02+00:00", "event": "stop", "step": 3}
    write([*events, ended, *resumed])
    with pytest.raises(AssertionError, match="no checkpoint to resume from"):
        check_run(tmp_path)


def test_what_is_said_of_a_run(run):
    console = (run.parent / "parts.log").read_text()
    assert re.search(
        r"goodput\) of this start: \d+\.\d%, 0:\d\d:\d\d in steps that count, of 0:.* start-up",
        console,
    )
    for said in (
        "(goodput) of all 5 starts: ",
        f"writes to     {run}",
        f"curves        tensorboard --logdir {run}/tb",
        "5 steps, 1,280 tokens; from step 0\n",
        "ends after step 3 (budget.stop_at_tokens)\n",
        "5 steps, 1,280 tokens; resumes after step 3\n",
        "validation    every 2 steps on ",
        "step 5: checkpoint saved",
    ):
        assert said in console
    eager = dict.fromkeys(("epilogue", "write"), "eager: on a CPU")
    assert reader.read_environment(run)["dispersion"] == {
        "kernels": eager,
        "products": ["float32"],
    }
    found = reader.read_condensation(run)
    rows = read_metrics(run)
    losses = reader.read_validation(run)
    # also where it stopped
    assert (list(found), list(losses)) == ([0, 2, 3, 4, 5], [1, 2, 4])
    assert all(loss == pytest.approx(8.5, abs=0.5) for loss in losses.values())
    # The last lines: how condensation went.
    numbers = (
        f"{found[STEPS]['cross_entropy']:.3f}",
        f"{np.mean(found[STEPS]['mean_cosine'][1:7]):.2f}",
    )
    last_block = found[STEPS]["mean_cosine"][6]
    assert (
        f"  held-out text: ce {numbers[0]}  mean cosine {numbers[1]}, last "
        f"block {last_block:.2f}  ρ "
    ) in console
    assert f"  validation loss {losses[4]:.3f}\n" in console
    assert re.search(
        rf" {STEPS} +{numbers[0]} +{numbers[1]}", console.split("On held-out text")[-1]
    )
    board = EventAccumulator(str(run / "tb")).Reload()
    tags = {
        "n_tokens_seen": "tokens",
        "loss_metrics/dispersion": "dispersion",
        "grad_norm": "grad_norm",
    }
    for tag, key in tags.items():
        assert [(e.step, e.value) for e in board.Scalars(tag)] == [
            (s, pytest.approx(rows[s][key])) for s in rows
        ]
    # of the second start
    events = {event["event"]: event for event in read_events(run)}
    began = events["resume"]
    end = events["complete"]
    assert began["allocated"] < began["time"]
    assert sum(end["spent"].values()) <= end["time"] - began["allocated"] + 0.01
    # steps, checkpoints, condensation and validation
    assert min(end["spent"].values()) > 0
