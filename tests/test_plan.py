"""These tests compare the plan's numbers with hand computations and with the real
model, optimizer and autograd.
"""

import dataclasses
import json
import math
import re
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.optimizer import OptimizersContainer

from tests.command_line import DEMO, ROOT, typed
from tests.pages import changed, loaded
from tests.streams import write_texts
from titan_disp import cpu
from titan_disp.cluster import cost
from titan_disp.cluster import plan as plans
from titan_disp.cluster.cost import GPUS, find_gpu, gpu_name
from titan_disp.cluster.job_check import hub_warnings
from titan_disp.cluster.plan import NodeCount, make_plan, render
from titan_disp.cluster.suggest import suggest
from titan_disp.config.command_options import Machine
from titan_disp.errors import ConfigError
from titan_disp.job_config import Source
from titan_disp.models.qwen3 import Qwen3DispModel, flavors

PAPER = ROOT / "train_configs" / "qwen3_0.6b_c4.toml"
TP = "parallelism.tensor_parallel_degree"
CP = "parallelism.context_parallel_degree"
SHARDS = "parallelism.data_parallel_shard_degree"
REPLICAS = "parallelism.data_parallel_replicate_degree"
RESHARD = "parallelism.fsdp_reshard_after_forward"
MODE = "activation_checkpoint.mode"
MOST = 250  # nodes


def config(changes=()):
    return changed(loaded(PAPER), dict(changes))


def paper(replicas=80, changes=()):
    return config({REPLICAS: replicas, SHARDS: -1} | dict(changes))


def demo(sample, changes=()):
    inputs = {
        "model.hf_assets_path": f"{sample}/tokenizer",
        "training.dataset_path": str(sample),
    }
    return changed(loaded(DEMO), inputs | dict(changes))


@pytest.fixture(autouse=True)
def few_node_counts(monkeypatch):
    monkeypatch.setattr(plans, "MAX_NODES", 1)


@pytest.fixture
def every_node_count(monkeypatch, few_node_counts):
    monkeypatch.setattr(plans, "MAX_NODES", MOST)


def test_the_papers_run():
    plan = make_plan(config(), Machine(80, 8))
    batch = plan.batch
    memory = plan.memory
    shard = 596_049_920 // 8 * 4
    assert plan.model.parameters == 596_049_920
    assert (
        plan.mesh.replicate,
        plan.mesh.shard,
        plan.mesh.context,
        plan.mesh.tensor,
    ) == (80, 8, 1, 1)
    assert (
        batch.global_batch_size,
        batch.accumulation_steps,
        batch.tokens_per_step,
    ) == (1920, 3, 1920 * 2048)
    assert 156e9 <= batch.total_tokens < 156e9 + batch.tokens_per_step
    assert (batch.steps, plan.checkpoints.saved, plan.checkpoints.kept) == (
        39_673,
        4,
        4,
    )
    assert plan.checkpoints.disk == 4 * plan.checkpoints.size
    assert (memory.weights, memory.gradients, memory.optimizer) == (
        shard,
        shard,
        2 * shard,
    )
    assert (
        memory.total
        == 4 * shard
        + memory.unsharded
        + memory.activations
        + memory.dispersion
        + memory.logits
    )
    # its gradients are computed in the backward pass
    assert (memory.dispersion, memory.logits) == (0, 2048 * 151_936 * 4)


@pytest.mark.parametrize(
    ("nodes", "changes", "batches", "numbers"),
    [
        # 1920 sequences, 8 for each node: the divisors of 240
        (7, {}, "56; the nearest: 1904, 1960", "6 or 8 nodes"),
        (1000, {}, "8000; the nearest: 8000", "240 nodes"),
        # 4 for each node: the divisors of 480
        (9, {TP: 2, SHARDS: 4}, "36; the nearest: 1908, 1944", "8 or 10 nodes"),
    ],
)
def test_the_nearest_numbers_of_nodes(nodes, changes, batches, numbers):
    with pytest.raises(ConfigError) as error:
        make_plan(config(changes), Machine(nodes, 8))
    assert f"= {batches}. This is for {nodes:,} nodes of 8 GPUs" in str(error.value)
    assert str(error.value).endswith(
        f"--gpus-per-node); {numbers} would work with this mesh and batch"
    )
    for works in map(int, re.findall(r"\d+", numbers)):
        assert make_plan(config(changes), Machine(works, 8))
    for batch in map(int, re.findall(r"\d+", batches)[1:]):
        fitting = config(changes | {"training.global_batch_size": batch})
        assert make_plan(fitting, Machine(nodes, 8)).batch.global_batch_size == batch


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        # a mesh of 80 replicas of 8
        ({REPLICAS: 80}, "; 80 nodes would work with this mesh and batch"),
        # without a batch: 3 nodes hold a replica of 24
        (
            {SHARDS: 24, "training.global_batch_size": -1},
            "; 6 or 9 nodes would work with this mesh and batch",
        ),
        # no number of nodes helps
        ({"optimizer.lr": -1.0}, "it is the highest learning rate, such as 1e-3"),
        ({REPLICAS: 81}, "--gpus-per-node)"),
    ],
)
def test_numbers_of_nodes_for_a_mesh(changes, numbers):
    with pytest.raises(ConfigError) as error:
        make_plan(config(changes), Machine(7, 8))
    assert str(error.value).endswith(numbers)


def test_all_problems_at_once(tmp_path):
    wrong = config(
        {
            "training.dataset_path": str(tmp_path / "nowhere"),
            "model.hf_assets_path": str(tmp_path / "none"),
            "optimizer.lr": -0.01,
            "lr_scheduler.total_steps": 8,  # follows from keys, one of which is wrong
            "checkpoint.exclude_from_loading": ["train_state"],
            "training.local_batch_size": 7,
            "profiling.enable_profiling": True,
            "profiling.profile_freq": 1,
        }
    )
    with pytest.raises(ConfigError) as error:
        make_plan(wrong, Machine(7, 8), strict=True)
    heading, *problems, size = str(error.value).splitlines()
    assert heading == "6 problems:"
    begins = [
        "optimizer.lr is -0.01",
        "training.global_batch_size 1920 is not a positive multiple",
        "profiling.profile_freq is 1",
        "checkpoint.exclude_from_loading has 'train_state'",
        "model.hf_assets_path",
        "training.dataset_path",
    ]
    assert len(problems) == 6
    for begin in begins:
        assert any(line.startswith(f"- {begin}") for line in problems), begin
    assert size.startswith("This is for 7 nodes of 8 GPUs")
    with pytest.raises(ConfigError, match="^optimizer.lr is .* such as 1e-3$") as error:
        make_plan(wrong, Machine(7, 8))
    assert "\n" not in str(error.value)


def test_a_refused_key_hides_no_other_problem():
    """With a batch of 0, other checks divide by 0."""
    wrong = config({"training.local_batch_size": 0, "optimizer.eps": -1.0})
    with pytest.raises(ConfigError, match="^3 problems:\n") as error:
        make_plan(wrong, Machine(80, 8), strict=True)
    assert "training.local_batch_size is 0" in str(error.value)
    assert "optimizer.eps is -1.0" in str(error.value)


def test_flops_and_days_by_hand():
    plan = make_plan(config(), Machine(80, 8, "MI250X-GCD", mfu=0.5))
    # Forward and backward: 6 per weight that multiplies (the tied embedding does, as
    # output), and attention's two products.
    model = (6 * 596_049_920 + 28 * 6 * 2 * (16 * 128) * 2048) * 1920 * 2048
    dispersed = 1920 * 28 * 3 * 2048**2 * 1024
    assert (plan.model.flops, plan.model.dispersion_flops) == (model, dispersed)
    # 12 bytes per number of the tokens, and 5 for 3/4 of the pairs
    dispersed_bytes = 1920 * 28 * (12 * 2048 * 1024 + 5 * 3 / 4 * 2048**2)
    assert plan.model.dispersion_bytes == dispersed_bytes
    passes = dispersed_bytes / (640 * 0.85 * 1.6e12)
    peak = 640 * 191.5e12 * 0.5
    fp32 = 640 * 47.85e12 * 0.5
    seconds = [
        (model + dispersed) / peak + passes,
        model / peak,
        model / peak + dispersed / fp32 + passes,
    ]
    found = [
        plan.time.days,
        plan.time.days_without_dispersion,
        plan.time.days_fp32_dispersion,
    ]
    assert found == pytest.approx(
        [39_673 * (one + plan.time.exposed_seconds) / 86400 for one in seconds]
    )


# The 0.6B model's parameters: the embedding and the final norm, and 28 blocks of
# attention (16 and 8 heads of 128, two norms of heads), feed-forward (3072) and two
# norms. FSDP gathers bf16 and reduces fp32.
ROOT_GROUP = 151_936 * 1024 + 1024
BLOCKS = 28 * (
    2 * 16 * 128 * 1024 + 2 * 8 * 128 * 1024 + 2 * 128 + 3 * 3072 * 1024 + 2 * 1024
)


def test_bytes_and_seconds_of_hsdp_by_hand():
    """An all-gather over n ranks sends (n−1)/n of the bytes.

    A step has 3 microbatches.
    """
    plan = make_plan(config(), Machine(80, 8))
    time = plan.time
    assert ROOT_GROUP + BLOCKS == 596_049_920
    gathered_once = 2 * ROOT_GROUP
    gathered_twice = 2 * 2 * BLOCKS
    reduced = 4 * (ROOT_GROUP + BLOCKS)
    assert time.within_bytes == pytest.approx(
        3 * 7 / 8 * (gathered_once + gathered_twice + reduced)
    )
    # Each step sums a shard's gradients over 80 replicas once, whatever the number of
    # microbatches.
    assert time.between_bytes == pytest.approx(2 * 79 / 80 * reduced / 8)
    seconds = (time.within_bytes / 450e9, time.between_bytes / 50e9)
    assert (time.within_seconds, time.between_seconds) == pytest.approx(seconds)
    # A microbatch begins with the embedding's all-gather and ends with its
    # reduce-scatter. Its all-reduce ends the step.
    ends = (
        3 * 7 / 8 * ROOT_GROUP * (2 + 4) / 450e9
        + 2 * 79 / 80 * ROOT_GROUP / 8 * 4 / 50e9
    )
    assert time.exposed_seconds == pytest.approx(ends)
    assert (time.computing_seconds, time.step_seconds) == pytest.approx(
        (0.0813, 0.0813 + ends), abs=5e-5
    )
    assert time.tokens_per_second_per_gpu == pytest.approx(3 * 2048 / time.step_seconds)
    assert plan.checkpoints.interval_seconds == pytest.approx(
        10_000 * time.step_seconds
    )
    assert plan.checkpoints.seconds == pytest.approx(plan.checkpoints.size / 2e9)
    assert not any("communication" in w or "checkpoint" in w for w in plan.warnings)


def test_bytes_of_an_untied_model_by_hand():
    """The embedding is its own FSDP group, gathered again for backward like the blocks.

    Output and norm stay gathered.
    """
    hows = ("default", "never", "always")
    matrix = 151_936 * 4096
    norm = 4096
    sent = 120 * 7 / 8
    plans = {
        how: make_plan(config({"model.flavor": "8B", RESHARD: how}), Machine(2, 8))
        for how in hows
    }
    parameters = plans["default"].model.parameters
    # gathered for backward
    again = {"default": parameters - matrix - norm, "never": 0, "always": parameters}
    for how, plan in plans.items():
        assert plan.time.within_bytes == pytest.approx(
            sent * ((2 + 4) * parameters + 2 * again[how])
        )
    assert plans["default"].time.between_bytes == pytest.approx(
        2 * 1 / 2 * 4 * parameters / 8, rel=1e-9
    )
    assert plans["never"].memory.unsharded == 2 * 2 * parameters
    # A microbatch begins with the embedding's first gather and ends with its
    # reduce-scatter. Its all-reduce ends the step.
    ends = sent * matrix * (2 + 4) / 450e9 + 2 * 1 / 2 * matrix / 8 * 4 / 50e9
    assert plans["default"].time.exposed_seconds == pytest.approx(ends)
    # Backward begins by gathering the output.
    assert plans["always"].time.exposed_seconds == pytest.approx(
        ends + sent * 2 * (matrix + norm) / 450e9
    )


# Billions of parameters without embedding and output, from Qwen's model cards.
NON_EMBEDDING = {
    "0.6B": 0.44,
    "0.6B_untied": 0.44,
    "1.7B": 1.4,
    "4B": 3.6,
    "8B": 6.95,
    "14B": 13.2,
    "32B": 31.2,
}


@pytest.mark.parametrize("flavor", NON_EMBEDDING)
def test_every_size(flavor):
    """A checkpoint has every weight and Adam's two moments.

    A tied matrix has two names.
    """
    plan = make_plan(config({"model.flavor": flavor}), Machine(2, 8))
    args = flavors[flavor]
    own = plan.model.parameters_non_embedding
    parameters = plan.model.parameters
    tied = args.enable_weight_tying
    assert own / 1e9 == pytest.approx(NON_EMBEDDING[flavor], rel=0.015)
    vocabulary = 151_936 * args.dim
    assert parameters == own + (1 if tied else 2) * vocabulary
    assert plan.checkpoints.size == 4 * (3 * parameters + (vocabulary if tied else 0))
    # Two blocks and the output are gathered at the same time, and also the embedding if
    # it is tied to the output.
    assert plan.memory.unsharded == 2 * 2 * (
        vocabulary + args.dim + 2 * (own - args.dim) // args.n_layers
    )


def test_bytes_of_shards_that_span_nodes():
    """A ring over 4 nodes of 8 leaves each node once, for all of its 8 GPUs.

    The blocks stay gathered here.
    """
    plan = make_plan(paper(1, {RESHARD: "never"}), Machine(4, 8))
    sent = 60 * 31 / 32 * (ROOT_GROUP + BLOCKS) * (2 + 4)
    assert (plan.time.within_bytes, plan.time.between_bytes) == pytest.approx(
        (sent, sent / 8)
    )


FOUR_MICROBATCHES = {
    "training.global_batch_size": 8,
    "training.local_batch_size": 2,
    "training.seq_len": 32,
}


def test_bytes_of_tensor_parallel(sample):
    """Each block's forward has 4 collectives of [2, 32, 64], embedding and output have
    2, and backward has as many.
    """
    time = make_plan(
        demo(sample, {TP: 2, MODE: "none"} | FOUR_MICROBATCHES), Machine(1, 2)
    ).time
    activation = 2 * 32 * 64 * 4
    tensor = 4 * (2 * (4 * 6 + 2)) * activation / 2
    dispersion = 4 * 6 * activation / 2  # gathers the outputs of 6 blocks
    assert (time.within_bytes, time.between_bytes) == (
        pytest.approx(tensor + dispersion),
        0,
    )
    assert time.exposed_seconds >= tensor / 450e9


@pytest.mark.parametrize(("mode", "gathers"), [("none", 2), ("full", 3)])
def test_bytes_of_context_parallel(sample, mode, gathers):
    """torch gathers keys and values, [2, 32, 2 heads of 16], in forward, its
    recomputation and backward; then gradients.
    """
    plan = make_plan(
        demo(sample, {CP: 2, MODE: mode} | FOUR_MICROBATCHES), Machine(1, 2)
    )
    root = 2048 * 64 + 64
    blocks = 427_008 - (2048 * 64 + 64)
    fsdp = root * (4 + 4) + blocks * (2 * 4 + 4)
    keys_and_values = 2 * (2 * 32 * 2 * 16) * 4
    ring = 6 * (gathers * keys_and_values / 2 + 2 * keys_and_values / 2)
    dispersion = 6 * (2 * 32 * 64) * 4
    assert plan.time.within_bytes == pytest.approx(
        4 * (fsdp / 2 + ring + dispersion / 2)
    )


def test_one_gpu_sends_nothing():
    one = config({"checkpoint.enable": False, "training.local_batch_size": 2})
    plan = make_plan(one, Machine(1, 1, mfu=1.0, node_bandwidth=0.5))
    assert (
        plan.time.within_bytes,
        plan.time.between_bytes,
        plan.time.exposed_seconds,
    ) == (0, 0, 0)
    assert (plan.checkpoints.saved, plan.checkpoints.interval_seconds) == (0, 0.0)
    assert (
        plan.config,
        plan.batch.local_batch_size,
        plan.batch.accumulation_steps,
    ) == (str(PAPER), 2, 960)
    assert plan.time.step_seconds == plan.time.computing_seconds


def test_warnings_of_communication_and_checkpoints():
    plan = make_plan(
        config(), Machine(80, 8, network_bandwidth=5.0, storage_bandwidth=0.5)
    )
    # The last microbatch's backward no longer hides the whole all-reduce of the blocks'
    # gradients.
    ends = (
        3 * 7 / 8 * ROOT_GROUP * (2 + 4) / 450e9
        + 2 * 79 / 80 * ROOT_GROUP / 8 * 4 / 5e9
    )
    hidden = plan.time.computing_seconds * 2 / 3 / 3
    assert plan.time.exposed_seconds == pytest.approx(
        ends + 2 * 79 / 80 * BLOCKS / 8 * 4 / 5e9 - hidden
    )
    communication = next(
        w for w in plan.warnings if "communication that computing cannot hide" in w
    )
    assert (
        f"{plan.time.exposed_seconds / plan.time.step_seconds:.0%} of a step"
        in communication
    )
    for enabled in (True, False):
        often = make_plan(
            config({"checkpoint.interval": 400, "checkpoint.enable": enabled}),
            Machine(80, 8),
        )
        assert (
            any(
                "is saved every 35.9 s and takes about 3.9 s to write" in w
                for w in often.warnings
            )
            == enabled
        )


def test_warnings_of_a_save_that_grows_and_of_a_long_interval():
    """FSDP over all 640 ranks: of a norm of 1,024 elements, 512 ranks have two."""
    plan = make_plan(
        config(
            {
                "parallelism.data_parallel_replicate_degree": 1,
                "parallelism.data_parallel_shard_degree": 640,
            }
        ),
        Machine(80, 8),
    )
    block = 7 * 512 + 2 * 615 + 2 * 128
    of_tensors = 3 * (28 * block + 512) + 4 * 639
    assert plan.checkpoints.parts == of_tensors + 12 * 310
    assert any("rank 0 gathers 0.11 GB of plans" in w for w in plan.warnings)
    small = make_plan(config(), Machine(1, 8))
    assert not any("of plans in every save" in w for w in small.warnings)
    seconds = 10_000 * small.time.step_seconds
    assert seconds > 3600
    said = f"checkpoint.interval = {round(1200 / small.time.step_seconds):,}"
    assert any(said in w for w in small.warnings)
    off = make_plan(config({"checkpoint.enable": False}), Machine(1, 8))
    assert not any("a crash loses" in w for w in off.warnings)


def test_dispersion_flops(sample):
    for changes, factor in (
        ({"dispersion.layers": [1, 5]}, 3 * 2),
        ({"dispersion.layers": "last", TP: 2}, 4),
        # From here, 6 blocks. 16 of 32 tokens are a quarter of the pairs; with TP, both
        # ranks take them all.
        ({"dispersion.estimator": "sampled", "dispersion.max_tokens": 16}, 6 * 3 / 4),
        (
            {"dispersion.estimator": "sampled", "dispersion.max_tokens": 16, TP: 2},
            6 * 3 / 4 * 2,
        ),
        ({"dispersion.estimator": "moments"}, 6 * 4 * 2),  # 4 N F², where F is 2 N
        ({"dispersion.variant": "decorrelation"}, 6 * 3),  # of pairs, as F > N
        ({"dispersion.variant": "vicreg"}, 6 * 4 * 2),
        ({"dispersion.variant": "koleo"}, 6 * 3),
        ({"dispersion.variant": "koleo", TP: 2}, 6 * 3 * 2),
        (
            {
                "dispersion.losses": [
                    {"variant": "cosine"},
                    {"variant": "angular", "estimator": "moments"},
                ]
            },
            6 * 14,
        ),
        ({"dispersion.enabled": False}, 0),
        # F is N / 2: by moments in a whole sequence, by pairs in documents.
        ({"training.seq_len": 128, "dispersion.variant": "cosine"}, 6 * 4 / 2),
        (
            {
                "training.seq_len": 128,
                "dispersion.variant": "cosine",
                "dispersion.within_documents": True,
            },
            6 * 3,
        ),
        (
            {
                "training.seq_len": 256,
                "dispersion.variant": "cosine",
                "dispersion.estimator": "sampled",
                "dispersion.max_tokens": 128,
                "dispersion.within_documents": True,
            },
            6 * 3 / 4,
        ),
    ):
        plan = make_plan(
            demo(sample, {"training.seq_len": 32} | changes), Machine(1, 2)
        )
        assert (
            plan.model.dispersion_flops
            == plan.batch.global_batch_size * factor * plan.batch.seq_len**2 * 64
        )
        assert (plan.memory.dispersion > 0) == (factor > 0)


def test_dispersion_traffic(sample):
    """With TP 2, per layer and sequence: half of the tokens gathered, or F² + F numbers
    or the sampled tokens reduced.
    """

    def sent(**changes):
        changes = {f"dispersion.{key}": value for key, value in changes.items()}
        return make_plan(
            demo(sample, {"training.seq_len": 512, TP: 2} | changes), Machine(1, 2)
        ).time.within_bytes

    off = sent(enabled=False)
    sequences = 16
    n = 512
    f = 64
    for changes, elements in (
        ({}, n / 2 * f),
        ({"estimator": "moments"}, f * f + f),
        ({"variant": "decorrelation"}, f * f + f),
        ({"estimator": "sampled", "max_tokens": 16}, 16 * f),
        ({"losses": [{"variant": "cosine"}]}, n / 2 * f + f * f + f),
    ):
        assert sent(**changes) - off == pytest.approx(6 * sequences * elements * 4)


def test_checkpoint_and_memory_of_the_real_model_and_optimizer(sample):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = Qwen3DispModel(flavors["nano"])
    model.init_weights()
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": 1e-3})
    model(torch.zeros(1, 8, dtype=torch.long)).sum().backward()
    optimizers.step()
    plan = make_plan(demo(sample), Machine(1, 1))
    moments = optimizers.optimizers[0].state.values()
    sizes = [
        sum(w.nbytes for w in model.parameters()),
        sum(w.grad.nbytes for w in model.parameters()),
    ]
    sizes.append(
        sum(
            state[name].nbytes
            for state in moments
            for name in ("exp_avg", "exp_avg_sq")
        )
    )
    assert [plan.memory.weights, plan.memory.gradients, plan.memory.optimizer] == sizes
    states = {**get_model_state_dict(model), **optimizers.state_dict()}
    # Counters of steps are scalars
    tensors = [v for v in states.values() if isinstance(v, torch.Tensor) and v.ndim]
    assert plan.checkpoints.size == sum(v.nbytes for v in tensors)


def test_checkpoint_counts():
    for changes, expected in (
        ({}, (4, 4, 4)),  # 30, 60, 90, 100
        ({"interval": 50, "keep_latest_k": 3}, (2, 2, 2)),
        ({"keep_latest_k": 2}, (4, 2, 3)),
        ({"enable_first_step_checkpoint": True}, (5, 5, 5)),
        ({"keep_latest_k": 0}, (4, 4, 4)),
        ({"keep_latest_k": 2, "keep_every": 60}, (4, 3, 4)),
        ({"enable": False}, (0, 0, 0)),
    ):
        changes = {"enable": True, "interval": 30, "keep_latest_k": 9} | changes
        job = changed(
            loaded(DEMO),
            {"training.steps": 100}
            | {f"checkpoint.{key}": changes[key] for key in changes},
        )
        assert cost.checkpoint_counts(job) == expected


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ({"nodes": 0}, "--nodes is 0, expected at least 1"),
        ({"mfu": 0.0}, "mfu is 0.0"),
        ({"mfu": 1.5}, "mfu is 1.5, expected a number in"),
        *(
            ({f"{what}_bandwidth": 0.0}, f"--{what}-bandwidth is 0 GB/s")
            for what in ("node", "network", "storage")
        ),
    ],
)
def test_refused(machine, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(paper(), Machine(**{"nodes": 80} | machine))


def test_missing_inputs_are_warned_about_one_by_one(sample):
    # So small a model's steps take microseconds on a GPU
    complete = demo(sample, {"checkpoint.enable": False})
    assert make_plan(complete, Machine(1, 1), strict=True).warnings == []
    complete.model.hf_assets_path = "/nowhere/tokenizer"
    complete.training.dataset_path = "/nowhere/data"
    hub = {"training.dataset_path": None}  # which is not asked
    names = {
        "validation.enable": True,
        "validation.steps": 1,
        "validation.dataset_path": "/nowhere/validation",
    }
    for changes, more in (
        ({}, ["training.dataset_path is '/nowhere/data'"]),
        (hub, []),
        (hub | names, ["validation.dataset_path is '/nowhere/validation'"]),
    ):
        found = [
            said.split(",")[0]
            for said in make_plan(changed(complete, changes), Machine(1, 1)).warnings
        ]
        assert found == ["model.hf_assets_path is '/nowhere/tokenizer'", *more]


def test_sources_and_their_parts_of_the_tokens(sample):
    mixed = demo(sample, {"checkpoint.enable": False, "training.dataset_path": None})
    mixed.stream.sources = [
        Source(0.9, f"{sample}/en", "c4", "web"),
        Source(0.1, "/nowhere/code"),
    ]
    plan = make_plan(mixed, Machine(1, 1))
    assert [(one.name, one.slots, one.tokens) for one in plan.sources] == [
        ("web", 14, 0.875),
        ("code", 2, 0.125),
    ]
    missing, coarse = plan.warnings  # of a share more than 10 % off
    assert missing.startswith("stream.sources.code.path is '/nowhere/code'")
    assert "code: 12.50% of the tokens (10.00% asked for), 2 of 16 slots" in coarse
    assert "web: 87.50% of the tokens (90.00% asked for), 14 of 16 slots\n" in render(
        plan
    )


@pytest.mark.parametrize("ranks", [1, 2, 16])
def test_what_a_resume_reads_again(sample, tmp_path, ranks):
    """With one file, each rank reads half of it. With 16 files, each of 16 slots has
    one; on 8 ranks, a rank reads half of two files, at the same time.
    """
    slots = {"training.global_batch_size": 16, "training.dataset": "text"}
    for count, files_per_rank in ((1, 1), (16, 16 // ranks)):
        folder = tmp_path / str(count)
        folder.mkdir()
        texts = [f"{i} words of equal documents " * 40 for i in range(500)]
        for i in range(count):
            write_texts(folder / f"{i}.json.gz", texts)
        (size, *_) = (path.stat().st_size for path in folder.iterdir())
        here = slots | {"training.dataset_path": str(folder)}
        here |= {"training.local_batch_size": 16 // ranks, SHARDS: ranks}
        job = demo(sample, here | {"stream.tokenizer_threads": 2})
        (resume,) = make_plan(job, Machine(1, ranks)).resume.values()
        assert resume.rank_bytes == pytest.approx(files_per_rank * size / 2, rel=0.01)
        assert resume.total_bytes == pytest.approx(ranks * resume.rank_bytes, rel=0.01)
        at_once = min(2, files_per_rank)
        assert resume.seconds == pytest.approx(
            5.9 * resume.rank_bytes / at_once / 1e9, rel=0.01
        )
    text = render(make_plan(job, Machine(1, ranks)))
    assert re.search(r"resume +at 50 % of an epoch: a rank reads up to .* again", text)
    # with an index, reading begins at any block
    job.training.dataset_path = str(write_texts(tmp_path / "plain.jsonl", texts))
    job.stream.index = "memory"
    (resume,) = make_plan(job, Machine(1, ranks)).resume.values()
    assert resume.total_bytes == 0


def test_streaming_from_the_hub_on_many_nodes_is_warned_about(sample):
    """An epoch of C4 takes at most 1024 files + 640 ranks = 1,664 reads, with one
    request each.
    """
    job = paper()
    (warning,) = hub_warnings(job, 640, 80)
    assert warning in make_plan(job, Machine(80, 8)).warnings
    assert "by 640 ranks on 80 nodes. Every epoch takes 1,664 requests" in warning
    assert "titan-disp data fetch DIR, and training.dataset_path = DIR" in warning
    # both ranks of a pair read the pair's data
    job.parallelism.tensor_parallel_degree = 2
    assert "2,688 requests" in hub_warnings(job, 640, 80)[0]
    job.training.dataset = "hf:a/b:c"
    (warning,) = hub_warnings(job, 640)  # the number of its files is not known
    assert "on 80 nodes. Every epoch takes at least 1,280 requests" in warning
    assert "titan-disp data fetch DIR --dataset 'hf:a/b:c'" in warning
    assert (
        len(hub_warnings(job, 33)),
        hub_warnings(job, 32),
        hub_warnings(job, 32, 4),
    ) == (1, [], [])
    job.training.dataset_path = "/data"
    assert hub_warnings(job, 640, 80) == []
    for name, expected in (("hf:a", "hf:OWNER/NAME, "), ("pile", "c4 or")):
        with pytest.raises(
            ConfigError, match=f"training.dataset is '{name}', expected {expected}"
        ):
            make_plan(demo(sample, {"training.dataset": name}), Machine(1, 1))


def test_node_counts(every_node_count):
    """32 shards need four nodes of 8.

    With -1, other numbers work with the unchanged config, whose degrees adapt.
    """
    counts = [n for n in range(1, MOST + 1) if 1920 % (8 * n) == 0]
    plan = make_plan(config(), Machine(80, 8))
    assert plan.node_counts == [NodeCount(n, -1) for n in counts]
    assert "data_parallel_replicate_degree = -1 (tried" in render(plan)
    for nodes in (1, 80, 240):
        assert make_plan(paper(nodes), Machine(nodes, 8)).node_counts == [
            NodeCount(n, n) for n in counts
        ]
    slots = make_plan(paper(80, {"stream.slots": 640}), Machine(80, 8)).node_counts
    assert [c.nodes for c in slots] == [
        n for n in range(1, MOST + 1) if 640 % (8 * n) == 0
    ]
    assert make_plan(paper(1), Machine(4, 8)).node_counts == [
        NodeCount(n, 1) for n in counts
    ]
    fixed = make_plan(paper(1, {SHARDS: 32}), Machine(4, 8))
    assert fixed.node_counts == [NodeCount(n, n // 4) for n in counts if n % 4 == 0]
    assert "4 (1), 8 (2), 12 (3)" in render(fixed)


def test_a_batch_that_grows_with_the_ranks(sample, every_node_count):
    batch = {"training.global_batch_size": -1, "training.local_batch_size": 2}
    job_config = demo(
        sample, batch | {"training.steps": -1, "budget.tokens": 10_000_000}
    )
    plan = make_plan(job_config, Machine(3, 4))
    assert plan.batch.global_batch_size == 24
    assert [c.nodes for c in plan.node_counts] == list(range(1, MOST + 1))
    assert job_config.training.steps == -1, "make_plan changed the config it was given"
    assert (
        len(
            next(
                line
                for line in render(plan).splitlines()
                if line.startswith("also runs on")
            )
        )
        < 250
    )


def test_context_and_tensor_parallel(monkeypatch, every_node_count):
    monkeypatch.setattr(cpu, "active", lambda: False)
    both = {CP: 2, TP: 2}
    # the replicas follow
    mesh = make_plan(config(both | {SHARDS: 4}), Machine(10, 8)).mesh
    assert (mesh.replicate, mesh.shard, mesh.context, mesh.tensor) == (5, 4, 2, 2)
    whole = make_plan(paper(10), Machine(10, 8))
    parts = make_plan(paper(10, both), Machine(10, 8))
    assert (
        parts.mesh.shard,
        parts.mesh.data_parallel,
        parts.batch.accumulation_steps,
    ) == (2, 20, 96)
    # CP with TP, and CP alone
    for shards in (parts, make_plan(paper(40, {CP: 2}), Machine(40, 8))):
        assert shards.model.dispersion_flops == whole.model.dispersion_flops * 4 / 3
    # Only sharded sequences save gradients, each rank those of a quarter.
    of_sequence = 28 * 2048 * 1024 * 2
    assert (whole.memory.dispersion, parts.memory.dispersion) == (0, of_sequence // 4)
    # FSDP also shards over CP: 4 × TP 2 = 8 parts as before, except for the norms,
    # which TP does not shard.
    assert whole.memory.weights <= parts.memory.weights < 1.001 * whole.memory.weights
    # A rank has half of the tokens and of the vocabulary. The loss is eager (12 bytes),
    # not compiled (4).
    assert parts.memory.logits == whole.memory.logits * 3 // 4
    assert all(c.replicate == c.nodes for c in parts.node_counts)


def test_memory_that_does_not_fit():
    plan = make_plan(
        paper(1, {"training.local_batch_size": 240}), Machine(1, 8, "MI250X-GCD")
    )
    said = f"would need about {sum(vars(plan.memory).values()) / 1e9:.1f} GB, but MI250X-GCD has 64 GB"
    assert any(said in warning for warning in plan.warnings)


def test_text(every_node_count):
    plan = make_plan(config(), Machine(80, 8))
    text = render(plan)
    assert ", ".join(
        line[:16].strip() for line in text.splitlines() if "warning" not in line
    ) == (
        "plan, machine, mesh, batch, steps, learning rate, λ, parameters, memory, weights, gradients, "
        "optimizer, unsharded, activations, dispersion, logits, checkpoint, parts, "
        "over the run, every, FLOPs, step, within nodes, between, not hidden, throughput, "
        "time, without, fp32, also runs on"
    )
    for said in (
        "every         15.0 minutes; written in 3.9 s at 2 GB/s",
        "11,168; rank 0 gathers 2.74 MB of plans in a save, .metadata has 2.07 MB",
        "89.9 ms: 81.3 ms of computing at 40% of the bf16 peak, 989.4 TFLOP/s per GPU",
        "11.70 GB sent per GPU, 26.0 ms at 450 GB/s",
        *(
            "0.59 GB, 11.8 ms at 50 GB/s",
            "8.5 ms, 9.5% of a step",
            "68,374 tokens/s per GPU",
        ),
        *(
            "4.37 GB of 80 GB per GPU",
            "gradients     0.30 GB",
            "dispersion    0.00 MB",
            "596,049,920",
        ),
        *("1, 2, 3, 4, 5, 6, 8,", "120, 240 nodes;"),
    ):
        assert said in text
    assert text.splitlines()[-1] == f"warning: {plan.warnings[-1]}"
    days = {
        0.0327: "47 minutes",
        1 / 12: "2.0 hours",
        0.95: "22.8 hours",
        3.06: "3.1 days",
    }
    assert {one: plans._days(one) for one in days} == days


def here(monkeypatch, device, memory):
    """Give this computer a GPU with this name and so many bytes."""
    properties = SimpleNamespace(total_memory=memory)
    for function, value in (
        ("is_available", True),
        ("get_device_name", device),
        ("get_device_properties", properties),
    ):
        monkeypatch.setattr(torch.cuda, function, lambda *_, value=value: value)


def test_a_gpu_is_the_named_one_or_has_given_sizes():
    assert gpu_name("") == "H100"
    # with more memory than the table's
    named = find_gpu(Machine(gpu="RTX4090", gpu_memory=48))
    assert (named.memory, named.bf16_flops) == (48e9, 165.2e12)
    other = find_gpu(Machine(gpu="T4", gpu_memory=16, gpu_flops=65))
    assert (other.memory, other.bf16_flops) == (16e9, 65e12)


def test_a_gpu_of_given_sizes_needs_no_name(monkeypatch):
    """Neither the default nor this computer's GPU is named in its place."""
    machine = Machine(1, 2, gpu_memory=16, gpu_flops=65)
    for device in (None, "NVIDIA H100 80GB HBM3"):
        if device:
            here(monkeypatch, device, 85e9)
        plan = make_plan(loaded(DEMO), machine)
        assert "1 node × 2 GPU (16 GB, 65 TFLOP/s) = 2 GPUs" in render(plan)
        named = make_plan(loaded(DEMO), dataclasses.replace(machine, gpu="T4"))
        assert dataclasses.replace(plan.machine, gpu="T4") == named.machine
        assert plan.time == named.time
        assert "those of a desktop GPU" in "".join(plan.warnings)


@pytest.mark.parametrize(
    ("device", "memory", "name", "similar"),
    [
        ("NVIDIA A100-SXM4-80GB", 85.1e9, "A100", "A100"),
        ("NVIDIA H100 80GB HBM3", 85.0e9, "H100", "H100"),
        ("AMD Instinct MI250X", 68.7e9, "MI250X-GCD", "MI250X-GCD"),
        ("NVIDIA A100-SXM4-40GB", 42.3e9, None, "A100"),
        ("NVIDIA H100 PCIe", 85.0e9, None, "H100"),
        ("NVIDIA GeForce RTX 3090 Ti", 25.3e9, None, "RTX3090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.8e9, None, "RTX4090"),
    ],
)
def test_a_gpu_is_this_computers_with_its_own_memory(
    monkeypatch, device, memory, name, similar
):
    """A variant of a GPU of the table is said to be a guess."""
    here(monkeypatch, device, memory)
    gpu = find_gpu(Machine())
    assert (gpu.memory, gpu.bf16_flops) == (memory, GPUS[similar].bf16_flops)
    assert gpu_name("") == (name or device)
    plan = make_plan(loaded(DEMO), Machine(1, 2))
    assert plan.machine.gpu_memory == pytest.approx(memory / 1e9)
    said = f"{device} is not in the table of GPUs: numbers that you do not give are guesses, those of {similar} ("
    assert sum(warning.startswith(said) for warning in plan.warnings) == (name is None)
    # Of another one that is asked for, the device says nothing.
    assert find_gpu(Machine(gpu="H200")).memory == 141e9


@pytest.mark.parametrize("device", ["Tesla T4", "NVIDIA GH200 480GB"])
def test_a_gpu_that_is_like_none_of_the_table(monkeypatch, device):
    here(monkeypatch, device, 16e9)
    with pytest.raises(
        ConfigError,
        match=f"gpu is '{device}', expected one of A100, .*--gpu-memory .*--gpu-flops",
    ):
        find_gpu(Machine())
    plan = make_plan(loaded(DEMO), Machine(1, 2, gpu_flops=65))
    assert plan.machine.gpu_memory == 16
    assert any("guesses, those of a desktop GPU (" in text for text in plan.warnings)
    with pytest.raises(
        ConfigError,
        match=r"gpu is 'A100-SXM4-40GB', expected one of .*, or --gpu-memory \(GB\), with the other numbers of A100$",
    ):
        find_gpu(Machine(gpu="A100-SXM4-40GB"))
    assert find_gpu(Machine(gpu="A100-SXM4-40GB", gpu_memory=40)).memory == 40e9


@pytest.mark.parametrize("option", ["gpu_memory", "gpu_flops"])
@pytest.mark.parametrize("number", [0, -4, math.nan])
def test_the_numbers_of_a_gpu_are_positive(option, number):
    """Zero does not stand for the number in the table."""
    message = f"--{option.replace('_', '-')} is {number}, expected a number > 0"
    with pytest.raises(ConfigError, match=message):
        make_plan(loaded(DEMO), Machine(1, 2, **{option: number}))


def test_peaks_follow_from_the_units_and_their_clock():
    for name, units, bf16, bf16_clock, fp32, fp32_clock in (
        ("A100", 108, 2048, 1.41e9, 128, 1.41e9),
        ("H100", 132, 4096, 1.83e9, 256, 1.98e9),
        ("H200", 132, 4096, 1.83e9, 256, 1.98e9),
        ("MI250X-GCD", 110, 1024, 1.7e9, 256, 1.7e9),
        ("MI300X", 304, 2048, 2.1e9, 256, 2.1e9),
    ):
        gpu = find_gpu(Machine(gpu=name))
        assert units * bf16 * bf16_clock == pytest.approx(gpu.bf16_flops, rel=1e-3)
        assert units * fp32 * fp32_clock == pytest.approx(gpu.fp32_flops, rel=1e-3)


# ---- plan --suggest: what it lists, against the plan of each of its configs

MACHINE = Machine(1, 8, "MI250X-GCD")


@pytest.mark.slow
def test_suggestions_for_the_paper_on_one_node():
    now, *others = suggest(loaded(PAPER), MACHINE)
    assert now.options == []
    assert others[0].step_seconds < 0.9 * now.step_seconds
    assert [one.step_seconds for one in others] == sorted(
        one.step_seconds for one in others
    )
    batches = []
    for one in [now, *others]:
        job = loaded(
            PAPER, *(word for option in one.options for word in option.split("="))
        )
        plan = make_plan(job, MACHINE)
        assert plan.memory.total == one.memory <= 0.9 * GPUS[MACHINE.gpu].memory
        assert plan.batch.global_batch_size == 1920
        again = {"none": 0, "selective": 0.5, "full": 1}[job.activation_checkpoint.mode]
        assert one.step_seconds == pytest.approx(
            plan.time.step_seconds + again * plan.time.computing_seconds / 3
        )
        batches.append(job.training.local_batch_size)
    largest = loaded(
        PAPER,
        "--activation_checkpoint.mode",
        "full",
        "--training.head_chunk_tokens",
        "2048",
    )
    # no larger one fits
    for size in (n for n in range(max(batches) + 1, 241) if 240 % n == 0):
        largest.training.local_batch_size = size
        assert make_plan(largest, MACHINE).memory.total > 0.9 * GPUS[MACHINE.gpu].memory


@pytest.mark.parametrize(("global_batch", "local"), [(-1, 8), (64, 4), (-1, 1)])
def test_suggestions_keep_the_global_batch(global_batch, local):
    """Also where it follows from the local batch (−1)."""
    given = changed(
        loaded(PAPER),
        {
            "training.global_batch_size": global_batch,
            "training.local_batch_size": local,
        },
    )
    same = make_plan(given, Machine(1, 8, "H100")).batch.global_batch_size
    for one in suggest(given, Machine(1, 8, "H100")):
        chosen = dict(option.removeprefix("--").split("=") for option in one.options)
        job = changed(
            given,
            {
                key: int(x) if re.fullmatch(r"-?\d+", x) else x
                for key, x in chosen.items()
            },
        )
        assert make_plan(job, Machine(1, 8, "H100")).batch.global_batch_size == same
        assert one.options != ["--training.global_batch_size=64"]


def test_the_command_that_suggests(monkeypatch, capsys):
    words = f"plan {DEMO} --gpus-per-node 2 --training.global_batch_size 4 --suggest --training.local_batch_size 2"
    # of all blocks
    words += " --activation_checkpoint.mode selective --activation_checkpoint.selective_ac_option 1"
    assert typed(monkeypatch, *words.split(), "--json") == 0
    first = json.loads(capsys.readouterr().out)["suggestions"][0]
    assert (first["options"], first["memory"] > 1e6) == ([], True)
    assert typed(monkeypatch, *words.split()) == 0
    page = capsys.readouterr().out
    lines = [
        line for line in page.splitlines() if line.startswith(("now", "suggested"))
    ]
    assert lines[0].endswith(" GB: the config as it is")
    assert all(" --" in line for line in lines[1:])
    assert "activation checkpointing computes again, unlike the plan's step" in page
    monkeypatch.setattr("titan_disp.cluster.suggest.FILLED", 0)
    assert typed(monkeypatch, *words.split()) == 0
    assert "suggested       nothing: no other" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="tensor_parallel_degree 3"):
        suggest(loaded(PAPER, f"--{TP}", "3"), MACHINE)
