"""The real trainer, as a whole: it trains, saves, is built anew and resumes, in one process and in two."""

import io
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.distributed import spawn
from tests.mesh import GLOBAL_BATCH, SEQ_LEN, build, weights
from tests.run_invariants import check_run
from titan_disp.errors import ConfigError
from titan_disp.run.reader import read_config, read_events, read_json_lines, read_metrics

STEPS, FIRST = 5, 3  # all steps, and those of the first start
TOKENS = GLOBAL_BATCH * SEQ_LEN  # of a step
COEFF = (0.5, 1.0, 1.0, 0.625, 0.25)  # λ at each step: a warm-up of two steps, then linear to a quarter at the last one
OPTIONS = (
    *("--training.steps", str(STEPS), "--metrics.log_freq", "1", "--checkpoint.enable", "--checkpoint.interval", "9"),
    *("--metrics.enable_tensorboard", "--condensation.interval", "0", "--stream.prefetch", "0"),
    # Whatever depends on the step, which a resume must know.
    *("--dispersion.estimator", "sampled", "--dispersion.max_tokens", "8"),
    *("--dispersion.warmup_steps", "2", "--dispersion.decay", "linear", "--dispersion.final_coeff", "0.25"),
    *("--lr_scheduler.warmup_steps", "2", "--lr_scheduler.decay_ratio", "0.6", "--lr_scheduler.decay_type", "linear"),
)
CHANGED = (
    *("--optimizer.name", "Adam", "--optimizer.lr", "4e-3", "--optimizer.beta1", "0.8", "--optimizer.beta2", "0.9"),
    *("--optimizer.eps", "1e-6", "--optimizer.weight_decay", "0.5", "--lr_scheduler.decay_type", "sqrt"),
    *("--metrics.log_freq", "1", "--metrics.save_tb_folder", "tensorboard"),
)
# The last step that the first start begins: the number is between two steps, and the job trains at least so much.
FIRST_PART = ("--budget.stop_at_tokens", str((FIRST - 1) * TOKENS + 1))


def start(sample, run, *options, train=True):
    trainer = build(sample, run, *OPTIONS, *options)
    try:
        before = weights(trainer)
        if train:
            trainer.train()
        return before, weights(trainer), trainer.dataloader.state_dict()
    finally:
        trainer.close()


def other_tokenizer(sample, folder):
    from sentencepiece import sentencepiece_model_pb2

    shutil.copytree(Path(sample) / "tokenizer", folder)
    (file,) = folder.glob("*.model")
    model = sentencepiece_model_pb2.ModelProto.FromString(file.read_bytes())
    model.pieces[-1].piece, model.pieces[-2].piece = model.pieces[-2].piece, model.pieces[-1].piece
    file.write_bytes(model.SerializeToString())
    return folder


def one_process(sample, folder):
    folder = Path(folder)
    whole, parts = folder / "whole", folder / "parts"
    found = {"whole": start(sample, whole), "first": start(sample, parts, *FIRST_PART), "refusals": {}}
    for name, options in {
        "tokenizer": ("--model.hf_assets_path", str(other_tokenizer(sample, folder / "tokenizer"))),
        "seq_len": ("--training.seq_len", "64"),
        "n_layers": ("--model.overrides", "n_layers=3"),
    }.items():
        with pytest.raises(ConfigError) as refused:
            start(sample, parts, *options)
        found["refusals"][name] = str(refused.value)
    shutil.copytree(parts, folder / "changed")
    found["group"], found["said"] = start_with_other_keys(sample, folder / "changed")
    found["last"] = start(sample, parts)
    found["seed"] = start(sample, folder / "seed", "--debug.seed", "12", train=False)
    torch.save(found, folder / "found.pt")


def start_with_other_keys(sample, run):
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger().addHandler(handler)
    trainer = build(sample, run, *OPTIONS, *CHANGED)
    trainer.train()
    logging.getLogger().removeHandler(handler)
    trainer.close()
    (group,) = trainer.optimizers.optimizers[0].param_groups
    return {key: value for key, value in group.items() if key != "params"}, said.getvalue()


def two_nodes(sample, folder):
    """Each rank is the first of its node. One start with context parallelism, and the next one with FSDP2."""
    from tests import ring_attention

    ring_attention.install()
    os.environ["LOCAL_RANK"] = "0"
    run = Path(folder) / "nodes"
    batch = ("--training.global_batch_size", "-1", "--training.local_batch_size")  # one microbatch of each rank
    start(sample, run, *FIRST_PART, *batch, "8", "--parallelism.context_parallel_degree", "2")
    start(sample, run, *batch, "4")


@pytest.fixture(scope="module")
def folder(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("assembly")
    spawn(1, one_process, str(sample), str(folder))
    for run in ("whole", "parts"):
        check_run(folder / run)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return torch.load(folder / "found.pt", weights_only=False)


def test_a_run_of_two_starts_equals_one_of_one_start(folder, found):
    whole, parts = read_metrics(folder / "whole"), read_metrics(folder / "parts")
    assert list(whole) == list(parts) == [1, 2, 3, 4, 5]
    for name in ("loss", "ce", "dispersion", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in whole.values()] == [row[name] for row in parts.values()], name
    (_, weights, data), (_, resumed_weights, resumed_data) = found["whole"], found["last"]
    assert all(torch.equal(weights[name], resumed_weights[name]) for name in weights)
    assert str(data) == str(resumed_data)


def test_what_depends_on_the_step(folder):
    rows = read_metrics(folder / "whole").values()
    assert [(row["loss"] - row["ce"]) / row["dispersion"] for row in rows] == pytest.approx(COEFF, rel=1e-5)
    rates = [row["lr"] / 8e-4 for row in rows]  # TorchTitan's: a warm-up of two steps, then linear over three
    assert rates == pytest.approx([0.5, 1.0, 1.0, 2 / 3, 1 / 3], rel=1e-5)
    assert [row["tokens"] for row in rows] == [step * TOKENS for step in range(1, STEPS + 1)]
    assert len({row["dispersion"] for row in rows}) == STEPS


def test_a_budget_between_two_steps_is_reached(folder, found):
    """A job that stops at a number of tokens has trained on at least so many. Another tokenizer or model is refused."""
    events = read_events(folder / "parts")
    assert [(e["event"], e["step"]) for e in events] == [
        *(("start", 0), ("checkpoint", FIRST), ("stop", FIRST), *[("refused", FIRST)] * 3),
        *(("resume", FIRST), ("checkpoint", STEPS), ("complete", STEPS)),
    ]
    assert read_config(folder / "parts")["budget"]["stop_at_tokens"] == 0
    assert events[6]["config_changes"] == {"budget.stop_at_tokens": [(FIRST - 1) * TOKENS + 1, 0]}
    assert [event["reason"] for event in events[3:6]] == list(found["refusals"].values())
    assert all(name in reason for name, reason in found["refusals"].items())


def test_the_seed_draws_the_weights(found):
    seed, other = found["first"][0], found["seed"][0]
    assert all(torch.equal(seed[name], found["whole"][0][name]) for name in seed)
    drawn = [name for name, weight in seed.items() if weight.std() > 0]
    assert len(drawn) >= len(seed) / 2
    assert not any(torch.equal(seed[name], other[name]) for name in drawn)


def test_keys_of_the_optimizer_and_its_schedule_may_change(folder, found):
    """They hold from the first step on. TorchTitan would take the former ones back from the checkpoint."""
    rows = read_metrics(folder / "changed")
    assert [rows[step]["lr"] for step in (4, 5)] == pytest.approx([4e-3 * (1 - (n / 3) ** 0.5) for n in (1, 2)])
    adam = {"decoupled_weight_decay": False}  # which AdamW has
    expected = {"initial_lr": 4e-3, "weight_decay": 0.5, "betas": (0.8, 0.9), "eps": 1e-6, **adam}
    assert found["group"] | expected == found["group"]
    said = found["said"].split("The config differs from that of the last start: ")[1].splitlines()[0]
    assert "lr_scheduler.decay_type: 'linear' → 'sqrt', " in said
    assert "optimizer.lr: 0.0008 → 0.004, " in said
    assert "metrics." not in said


def test_two_nodes(folder, sample):
    spawn(2, two_nodes, str(sample), str(folder))
    run = folder / "nodes"
    check_run(run)
    assert [row["step"] for row in read_json_lines(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert len(list((run / "tb").iterdir())) == 2  # one writer in each start
    rows, expected = read_metrics(run), read_metrics(folder / "whole")
    assert [row["tokens"] for row in rows.values()] == [row["tokens"] for row in expected.values()]
    # Context parallelism permutes the tokens, and so draws others.
    for name, tolerance in {"lr": 1e-6, "ce": 1e-3, "dispersion": 2e-2, "grad_norm": 1e-2}.items():
        values = [[row[name] for row in of.values()] for of in (rows, expected)]
        assert values[0] == pytest.approx(values[1], rel=tolerance), name
