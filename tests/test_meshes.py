"""Parameter gradients of one real training step agree with one process's, on every mesh and with every memory option."""

import functools

import pytest
import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.distributed import ParallelDims

import titan_disp.plugin  # noqa: F401
from tests.distributed import spawn
from tests.mesh import assert_tied, global_batch, job_config, plain_model, run_cases
from tests.oracle import EVERY_ESTIMATOR, PAPERS
from titan_disp.cluster.cost import traffic
from titan_disp.cluster.plan import meta_model
from titan_disp.config.checks import check_config
from titan_disp.dispersion import DispersionLoss, DispersionObjective
from titan_disp.dispersion.variants import VARIANTS
from titan_disp.models.registry import MODELS

FSDP, TP = (), ("--parallelism.tensor_parallel_degree", "2")
HSDP = ("--parallelism.data_parallel_replicate_degree", "2")
CP = ("--parallelism.context_parallel_degree", "2")  # by tests/ring_attention.py
COMPILE = ("--compile.enable",)
SELECTIVE_OP = ("--activation_checkpoint.mode", "selective", "--activation_checkpoint.selective_ac_option", "op")
FULL_AC = ("--activation_checkpoint.mode", "full")
WHOLE_BATCH, ONE_BY_ONE = (("--training.local_batch_size", size) for size in "81")
WHOLE_LOGITS = ("--parallelism.disable_loss_parallel",)
CHUNKED = ("--training.head_chunk_tokens", "24")  # of 64 tokens, or of half of them: the last chunk is smaller
ALWAYS = ("--parallelism.fsdp_reshard_after_forward", "always")

FINAL_NORM = ("--dispersion.final_norm",)
SMALL = ("--model.overrides", "n_layers=2")
UNTIED = ("--model.overrides", "n_layers=2,enable_weight_tying=false")
GPT2_UNTIED = ("--model.name", "gpt2_disp", "--model.flavor", "nano_untied")
# Another place of a token in the batch, or another position, would be another gradient.
NOISE = ("--baseline.method", "noisy_embedding", "--baseline.with_dispersion", "--baseline.noise_alpha", "100")

# By number of ranks, the options of each case. Gradients are compared with "reference"'s, or with those of the other of
# REFERENCES that the name begins with.
SLOW = {
    1: {
        "reference": WHOLE_BATCH,
        "accumulation_4": (),
        "last_layer": ("--dispersion.layers", "last"),
        "untied": (*UNTIED, *WHOLE_BATCH),
        "final_norm": (*FINAL_NORM, *WHOLE_BATCH),
        "noise": (*NOISE, *WHOLE_BATCH),
    },
    2: {
        "fsdp": FSDP,
        "fsdp_full_ac": FULL_AC,
        "tp": TP,
        "tp_full_ac": (*TP, *FULL_AC),
        # The norm is gathered once more in backward.
        "final_norm_fsdp_full_ac": (*FINAL_NORM, *FULL_AC, *ALWAYS),
        "final_norm_chunked_fsdp": (*FINAL_NORM, *CHUNKED, *SELECTIVE_OP, *ALWAYS),
    },
    4: {
        "hsdp": (*HSDP, *ONE_BY_ONE),  # two microbatches
        "fsdp_4": FSDP,
        "fsdp_tp": TP,
        "untied_fsdp_tp": (*TP, *UNTIED),
        "final_norm_fsdp_tp": (*TP, *FINAL_NORM),
        "noise_fsdp_tp": (*TP, *NOISE),
    },
}
NIGHT = {
    1: {
        "local_batch_1": ONE_BY_ONE,
        "selective_op": SELECTIVE_OP,
        "full": FULL_AC,
        "chunked_compile": (*CHUNKED, *COMPILE),
        "compile_selective_op": (*COMPILE, *SELECTIVE_OP),
        "final_norm_compile_selective_op": (*FINAL_NORM, *COMPILE, *SELECTIVE_OP),
        "gpt2_untied": (*GPT2_UNTIED, *WHOLE_BATCH),
    },
    2: {
        "fsdp_compile": COMPILE,
        "tp_compile": (*TP, *COMPILE),
        "tp_no_loss_parallel": (*TP, *WHOLE_LOGITS),
        "chunked_tp_no_loss_parallel": (*CHUNKED, *TP, *WHOLE_LOGITS),
        "chunked_tp_compile": (*CHUNKED, *TP, *COMPILE),
        "chunked_cp": (*CHUNKED, *CP),
        "final_norm_tp_compile": (*FINAL_NORM, *TP, *COMPILE),
        "cp": CP,
        "noise_cp": (*CP, *NOISE),
    },
    4: {"fsdp_cp": CP, "hsdp_cp": (*HSDP, *CP), "noise_cp_tp": (*CP, *TP, *NOISE)},
    8: {  # two replicas of two shards of two parts of every layer
        "hsdp_tp": (*HSDP, *TP, *ONE_BY_ONE),  # two microbatches
        "untied_hsdp_tp": (*HSDP, *TP, *UNTIED),
        "untied_chunked_hsdp_tp": (*HSDP, *TP, *UNTIED, *CHUNKED, *ALWAYS),
        "final_norm_hsdp_tp": (*HSDP, *TP, *FINAL_NORM),
        "gpt2_untied_fsdp_tp": (*GPT2_UNTIED, *TP),  # over 4 × 2 ranks torch would share 2,049 rows out wrongly
    },
}
# Every other model: its nano flavor.
OTHER_MODELS = [name.removesuffix("_disp") for name in MODELS if name != "qwen3_disp"]
for model in OTHER_MODELS:
    for cases, of_model in (
        (SLOW[1], {"": WHOLE_BATCH}),
        (SLOW[2], {"_fsdp_full_ac": FULL_AC, "_tp_selective_op": (*TP, *SELECTIVE_OP)}),
        (SLOW[4], {"_hsdp": (*HSDP, *ONE_BY_ONE), "_fsdp_tp": TP}),
        (NIGHT[1], {"_compile_selective_op": (*COMPILE, *SELECTIVE_OP), "_accumulation_full_ac": FULL_AC}),
        (NIGHT[2], {"_tp": TP, "_fsdp_compile": COMPILE, "_tp_compile": (*TP, *COMPILE), "_cp": CP}),
        (NIGHT[2], {"_tp_no_loss_parallel": (*TP, *WHOLE_LOGITS), "_tp_full_ac": (*TP, *FULL_AC)}),
        (NIGHT[4], {"_fsdp_cp": CP, "_hsdp_cp": (*HSDP, *CP)}),
        (NIGHT[8], {"_hsdp_tp": (*HSDP, *TP, *ONE_BY_ONE)}),
    ):
        cases.update({model + n: ("--model.name", f"{model}_disp", *options) for n, options in of_model.items()})
for model, prefix in (("qwen3", ""), *((name, f"{name}_") for name in OTHER_MODELS)):
    every = ("--model.name", f"{model}_disp", *CP, *TP)
    NIGHT[4] |= {f"{prefix}cp_tp{n}": (*every, *o) for n, o in (("", ()), ("_compile", COMPILE), ("_full_ac", FULL_AC))}
    NIGHT[8][f"{prefix}fsdp_cp_tp"] = every
REFERENCES = ("reference", "untied", "final_norm", "noise", "gpt2_untied", *OTHER_MODELS)
# Every other variant × estimator: one process, FSDP2, TP, and FSDP2 × TP. The losses of other papers: exact, and FSDP2 × TP only.
FAMILY = {
    f"{variant}_{estimator}": (
        *("--dispersion.variant", variant, "--dispersion.estimator", estimator),
        *(("--dispersion.max_tokens", "10") if estimator == "sampled" else ()),
        # Few pairs are above the default margin at first.
        *(("--dispersion.options", "margin=1.5") if variant == "simctg" else ()),
    )
    for variant, estimator in EVERY_ESTIMATOR
    if (variant, estimator) != ("angular", "exact") and (variant in PAPERS or estimator == "exact")
}
FEW_MESHES = [f"{variant}_exact" for variant in VARIANTS if variant not in PAPERS]
FAMILY_CASES = {
    1: {"reference": WHOLE_BATCH, "without": ("--dispersion.no-enabled", *WHOLE_BATCH)}
    | {f"{name}_alone": (*options, *WHOLE_BATCH) for name, options in FAMILY.items()},
    2: {
        f"{name}_{mesh}": (*options, *degree)
        for name, options in FAMILY.items()
        for mesh, degree in (("fsdp", FSDP), ("tp", TP))
        if name not in FEW_MESHES
    },
    4: {f"{name}_fsdp_tp": (*options, *TP) for name, options in FAMILY.items()},
}
# On four ranks in a few seconds, against plain PyTorch: (model, options, its overrides).
FAST = {
    "hsdp": ("qwen3_disp", (*HSDP, *ONE_BY_ONE), "n_layers=2"),
    "fsdp_tp": ("qwen3_disp", TP, "n_layers=2"),
    "untied_fsdp_tp": ("qwen3_disp", TP, "n_layers=1,enable_weight_tying=false"),
    "gpt2_fsdp_tp": ("gpt2_disp", TP, "n_layers=1"),
    "chunked_hsdp": ("qwen3_disp", (*CHUNKED, *HSDP, *ONE_BY_ONE, *FULL_AC), "n_layers=1"),
    "chunked_untied_fsdp": ("qwen3_disp", (*CHUNKED, *ALWAYS), "n_layers=1,enable_weight_tying=false"),
    "chunked_gpt2_fsdp_tp": ("gpt2_disp", (*CHUNKED, *TP), "n_layers=1"),
}


def names(cases):
    return [name for of_ranks in cases.values() for name in of_ranks]


# fp32 sums in another order over ranks and microbatches: about 1e-6 seen; ten times that is still far below any wrong scale.
TOLERANCE = 1e-5


def run_all(sample, folder, cases_by_ranks, checkpoint=True):
    for ranks, cases in cases_by_ranks.items():
        few_layers = {n: (*(() if "--model.overrides" in options else SMALL), *options) for n, options in cases.items()}
        spawn(ranks, run_cases, sample, folder, few_layers, checkpoint and ranks > 1)
    return {name: torch.load(folder / f"{name}.pt") for name in names(cases_by_ranks)}


def run_fast(sample, folder, cases):
    """TP replaces both parameters. ``init_weights`` would tie them again, but FSDP groups them before."""
    degrees = {"dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2, "pp": 1, "ep": 1, "etp": 1}
    for entry in MODELS.values():
        with torch.device("meta"):
            model = entry.model_cls(entry.flavors["nano"])
        config = job_config(sample, folder / "unused", "--model.name", entry.name)
        entry.parallelize(model, ParallelDims(**degrees, world_size=4), config)
        assert_tied(model)
    run_cases(sample, folder, cases, checkpoint=False)


@pytest.fixture(scope="module")
def fast(sample, tmp_path_factory):
    cases = {n: ("--model.name", model, "--model.overrides", o, *options) for n, (model, options, o) in FAST.items()}
    folder = tmp_path_factory.mktemp("fast")
    spawn(4, run_fast, sample, folder, cases)
    return {name: torch.load(folder / f"{name}.pt") for name in FAST}


@pytest.fixture(scope="module")
def of(sample, tmp_path_factory):
    """of(kind): what the cases of one table gave; they run when they are asked for first."""
    references = {name: SLOW[1][name] for name in REFERENCES if name in SLOW[1]}
    tables = {"slow": SLOW, "night": NIGHT | {1: references | NIGHT[1]}, "family": FAMILY_CASES}
    return functools.cache(
        lambda kind: run_all(sample, tmp_path_factory.mktemp(kind), tables[kind], checkpoint=kind != "family")
    )


def across_replicas(found, pair):
    return [size for kind, ranks, size in found["collectives"] if (kind, ranks) == ("all_reduce", pair)]


def errors(gradients, reference):
    assert gradients.keys() == reference.keys()
    # A bias of the keys adds the same to all scores of a query: its gradient is 0 but for rounding; the scale is the queries'.
    scale = {n: reference[n.replace("wk.bias", "wq.bias")].norm() for n in reference}
    return {n: ((gradients[n] - g).norm() / scale[n]).item() for n, g in reference.items()}


def assert_equal_gradients(found, reference):
    error = errors(found, reference)
    worst = max(error, key=error.get)
    assert error[worst] <= TOLERANCE, f"{worst}: {error[worst]:.1e}"


@pytest.mark.parametrize("name", FAST)
def test_gradients_equal_plain_pytorch(fast, name):
    """Of the whole batch at once, without TorchTitan. A dispersion that is dropped or scaled wrongly would be seen."""
    model_name, _, overrides = FAST[name]
    layers = int(overrides[len("n_layers=")])
    model = plain_model(fast[name]["before"], overrides, model_name, activations=tuple(range(1, layers + 1)))
    inputs, labels = global_batch()
    for coeff in (1.0, 0.0, 2.0):
        model.zero_grad()
        objective = DispersionObjective(cross_entropy_loss, DispersionLoss(), lambda step, coeff=coeff: coeff)
        (objective(model(inputs), labels) / (labels != -100).sum()).backward()
        expected = {n: p.grad for n, p in model.named_parameters()}
        if coeff == 1.0:
            assert_equal_gradients(fast[name]["gradients"], expected)
        else:
            assert max(errors(fast[name]["gradients"], expected).values()) > 100 * TOLERANCE


def test_gradients_cross_replicas_once_a_step(fast):
    """Two blocks and the embedding's group, with two microbatches. Of two shards, one's."""
    sent = across_replicas(fast["hsdp"], (0, 2))
    assert len(sent) == 2 + 1
    assert sum(sent) >= 4 * sum(g.numel() for g in fast["hsdp"]["gradients"].values()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("gpus_per_node", [1, 2, 4])
@pytest.mark.parametrize(
    "name",
    [
        *("fsdp", "fsdp_full_ac", "tp", "tp_full_ac", "hsdp", "fsdp_4", "fsdp_tp"),
        *(model + name for model in OTHER_MODELS for name in ("_fsdp_full_ac", "_tp_selective_op", "_hsdp")),
    ],
)
def test_bytes_of_the_plan(of, sample, name, gpus_per_node):
    """What PyTorch was called to send, by rings, against what the plan counts from the shapes."""
    ranks = 2 if name in SLOW[2] else 4
    config = job_config(sample, "unused", *SMALL, *SLOW[ranks][name])
    check_config(config, ranks)
    within = between = 0.0
    for kind, group, size in of("slow")[name]["collectives"]:
        sent = (len(group) - 1) / len(group) * size * (2 if kind == "all_reduce" else 1)
        nodes = len({rank // gpus_per_node for rank in group})
        if nodes < len(group):
            within += sent
        if nodes > 1:
            between += sent * nodes / len(group)
    planned = traffic(config, meta_model(config), gpus_per_node, ranks).total
    # Not planned: the sums of losses, counts and norms, and of the norms' gradients under TP.
    assert (planned.within, planned.between) == pytest.approx((within, between), rel=0.01)
    assert within + between > 1e5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("slow", name) for name in names(SLOW) if name not in {"last_layer", *REFERENCES}),
        *(pytest.param("night", n, marks=pytest.mark.night) for n in names(NIGHT) if n != "gpt2_untied"),
    ],
)
def test_gradients_equal_one_process(of, kind, name):
    """Initial weights too, which do not depend on the mesh."""
    found, reference = of(kind)[name], of(kind)[next((r for r in REFERENCES if name.startswith(r)), "reference")]
    assert all(torch.equal(found["before"][n], w) for n, w in reference["before"].items())
    assert_equal_gradients(found["gradients"], reference["gradients"])


@pytest.mark.slow
@pytest.mark.night
def test_gradients_cross_replicas_once_a_step_beside_tensor_parallel(of):
    """Two blocks and the tied embedding's group; of the untied model also the output with its norm."""
    for name, groups in (("hsdp_tp", 2 + 1), ("untied_hsdp_tp", 2 + 2)):
        assert len(across_replicas(of("night")[name], (0, 4))) == groups


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("name", FAMILY)
def test_gradients_of_every_variant_and_estimator(of, name):
    """On every mesh with accumulation as in one process; and the term is there, and another than angular exact's."""
    gradients = {name: found["gradients"] for name, found in of("family").items()}
    alone = gradients[f"{name}_alone"]
    for mesh in ("fsdp_tp",) if name in FEW_MESHES else ("fsdp", "tp", "fsdp_tp"):
        assert_equal_gradients(gradients[f"{name}_{mesh}"], alone)
    assert max(errors(alone, gradients["without"]).values()) > 100 * TOLERANCE
    assert max(errors(alone, gradients["reference"]).values()) > 10 * TOLERANCE  # moments are close to exact


@pytest.mark.slow
@pytest.mark.parametrize("name", ["last_layer", "final_norm", "noise"])
def test_another_objective_would_be_seen(of, name):
    error = errors(of("slow")[name]["gradients"], of("slow")["reference"]["gradients"])
    # At the start the norm's weights are one, and it changes no direction: its own gradient tells, and little else.
    assert max(error.values()) > (10 if name == "final_norm" else 100) * TOLERANCE
