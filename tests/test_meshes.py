"""Parameter gradients of one real training step agree with one process's, on every mesh
and with every memory option.
"""

import functools

import pytest
import torch
from torchtitan.components.loss import cross_entropy_loss

import titan_disp.plugin  # noqa: F401
from tests import mesh
from tests.distributed import spawn
from tests.mesh import errors, job_config, options_of
from tests.oracle import EVERY_ESTIMATOR, PAPERS, within
from titan_disp.checks import check_config
from titan_disp.cluster.cost import traffic
from titan_disp.cluster.plan import meta_model
from titan_disp.dispersion import DispersionLoss
from titan_disp.models.parallelize import parallelize_model
from titan_disp.models.registry import MODELS

# By number of ranks, the cases in the words of tests/mesh.py; "*" is each other model,
# with its nano flavor. Gradients are compared with those of the one of REFERENCES that
# the name begins with, else with "reference"'s.
OTHER_MODELS = [name.removesuffix("_disp") for name in MODELS if name != "qwen3_disp"]
REFERENCES = (
    "reference",
    "untied",
    "final_norm-angular_sampled",
    "final_norm",
    "noise",
    "gpt2_untied",
    *OTHER_MODELS,
)
SLOW = {
    1: "reference batch2 untied final_norm noise *",
    # The norm is gathered once more in the backward pass of the fifth.
    2: "fsdp fsdp-full tp tp-full final_norm-fsdp-full-always final_norm-chunked-fsdp-op-always *-fsdp-full *-tp-op",
    4: "hsdp-batch1 fsdp4 fsdp-tp untied-fsdp-tp final_norm-fsdp-tp noise-fsdp-tp *-hsdp-batch1 *-fsdp-tp",
}
NIGHT = {
    1: "reference untied final_norm final_norm-angular_sampled noise * gpt2_untied batch1 op full chunked-compile "
    "compile-op final_norm-compile-op "
    "*-compile-op *-batch2-full",
    2: "fsdp-compile tp-compile tp-logits chunked-tp-logits chunked-tp-compile chunked-cp final_norm-tp-compile cp noise-cp "
    "final_norm-angular_sampled-tp *-tp *-fsdp-compile *-tp-compile *-cp *-tp-logits *-tp-full",
    4: "fsdp-cp hsdp-cp noise-cp-tp cp-tp cp-tp-compile cp-tp-full *-fsdp-cp *-hsdp-cp *-cp-tp *-cp-tp-compile *-cp-tp-full",
    8: "hsdp-tp-batch1 untied-hsdp-tp untied-chunked-hsdp-tp-always final_norm-hsdp-tp fsdp-cp-tp *-hsdp-tp-batch1 *-fsdp-cp-tp "
    "gpt2_untied-fsdp-tp",  # over 4 × 2 ranks torch would share 2,049 rows out wrongly
}
# On four ranks in a few seconds, against plain PyTorch.
FAST = (
    *(
        "hsdp-batch1",
        "fsdp-tp",
        "single_untied-fsdp-tp",
        "gpt2-single-fsdp-tp",
        "llama-single-fsdp-tp-op",
        "chunked-hsdp-batch1-full-single",
    ),
    *("chunked-fsdp-always-single_untied", "chunked-gpt2-fsdp-tp-single"),
)
# Every other variant × estimator: one process, FSDP2, TP, and FSDP2 × TP. The losses of
# other papers: exact, and FSDP2 × TP only.
FAMILY = [
    f"{variant}_{estimator}"
    for variant, estimator in EVERY_ESTIMATOR
    if (variant, estimator) != ("angular", "exact")
    and (variant in PAPERS or estimator == "exact")
]
OF_PAPERS = [name for name in FAMILY if name.startswith(tuple(PAPERS))]
TABLES = {
    "slow": SLOW,
    "night": NIGHT,
    # Those that begin with "within" have no masks of attention.
    "documents": {
        1: "restart-full gpt2-mask-op llama-restart-op within-alone",
        2: "restart-fsdp-compile-single gpt2-restart-tp-compile-single",
        4: "mask-hsdp mask-fsdp-tp-single restart-fsdp-tp-op-single gpt2-restart-fsdp-tp-full-single within-hsdp within-fsdp-tp",
    },
    "family": {
        1: " ".join(
            ["reference", *(f"{name}-batch8" for name in ["without", *FAMILY])]
        ),
        2: " ".join(f"{name}-{mesh}" for name in OF_PAPERS for mesh in ("fsdp", "tp")),
        4: " ".join(f"{name}-fsdp-tp" for name in FAMILY),
    },
}


def names(kind, ranks):
    return [
        name.replace("*", m)
        for name in TABLES[kind][ranks].split()
        for m in (OTHER_MODELS if "*" in name else "-")
    ]


def reference_of(name):
    """Return the case in one process with whose gradients those of a case agree."""
    return next((r for r in REFERENCES if name.startswith(r)), "reference")


def is_needed(case, kind, tested):
    """Return whether one of the ``tested`` names of a table needs this case."""
    if kind == "family":
        return case.partition("-")[0] in {"reference", "without", *tested}
    return case in {*tested, *map(reference_of, tested)}


def cases(kind, ranks, tested):
    """Return the options of the cases that tests of these names need, by case."""
    whole = dict.fromkeys(REFERENCES, ("--training.local_batch_size", "8"))
    return {
        case: (*options_of(case), *whole.get(case, ()))
        for case in names(kind, ranks)
        if is_needed(case, kind, tested)
    }


# fp32 sums in another order over ranks and microbatches: about 1e-6 seen; ten times
# that is still far below any wrong scale.
TOLERANCE = 1e-5


def run_fast(sample, folder):
    """TP replaces both parameters.

    ``init_weights`` would tie them again, but FSDP groups them before.
    """
    for entry in MODELS.values():
        with torch.device("meta"):
            model = entry.model_cls(entry.flavors["nano"])
        config = job_config(sample, folder / "unused", "--model.name", entry.name)
        parallelize_model(
            model,
            mesh.dims(4, dp_shard=2, tp=2),
            config,
            apply_tp=entry.apply_tp,
            saved_ops=entry.saved_ops,
        )
        mesh.assert_tied(model)
    mesh.run_cases(
        sample, folder, {name: options_of(name) for name in FAST}, checkpoint=False
    )


@pytest.fixture(scope="module")
def of(sample, tmp_path_factory, request):
    """of(kind): what the cases of one table gave; they run when they are asked for
    first, and once, if they fail, too. Only cases of the selected tests run.
    """
    tested = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and "name" in getattr(item, "fixturenames", ())
    }

    @functools.cache
    def of(kind):
        folder = tmp_path_factory.getbasetemp() / f"meshes_{kind}"
        if not folder.exists():
            folder.mkdir()
            if kind == "fast":
                spawn(4, run_fast, sample, folder)
            for ranks in TABLES.get(kind, ()):
                checkpoint = kind in ("slow", "night") and ranks > 1
                needed = cases(kind, ranks, tested)
                spawn(ranks, mesh.run_cases, sample, folder, needed, checkpoint)
        return {file.stem: torch.load(file) for file in folder.glob("*.pt")}

    return of


def assert_equal_gradients(found, reference):
    error = errors(found, reference)
    worst = max(error, key=error.get)
    assert error[worst] <= TOLERANCE, f"{worst}: {error[worst]:.1e}"


def plain_gradients(model, case, coeff=1.0):
    """Of the whole batch at once, without TorchTitan; without masks, one document at a
    time.
    """
    inputs, labels = mesh.global_batch()
    weights = (labels != -100).sum(1)
    masked = "mask" in case or "restart" in case
    segments = mesh.documents()
    if masked:
        logits, layers = mesh.alone(model, inputs, segments, "restart" in case)
    else:
        logits, layers, _ = model(inputs)
    if case.startswith("within"):
        losses = torch.stack(
            [within(z.double(), segments, "angular", {}) for z in layers]
        )
    else:
        losses = DispersionLoss()(layers)
    model.zero_grad()
    (
        (cross_entropy_loss(logits, labels) + coeff * (weights * losses.mean(0)).sum())
        / weights.sum()
    ).backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "name"),
    [("fast", name) for name in FAST]
    + [
        pytest.param("documents", name, marks=pytest.mark.slow)
        for ranks in TABLES["documents"]
        for name in names("documents", ranks)
    ],
)
def test_gradients_equal_plain_pytorch(of, kind, name):
    """A dispersion that is dropped or scaled wrongly would be seen, and so would pairs
    across documents.
    """
    found = of(kind)[name]
    model = mesh.plain_model_of(name, found["before"])
    assert_equal_gradients(found["gradients"], plain_gradients(model, name))
    for case, coeff in (
        (name, 0.0),
        (name, 2.0),
        *([("alone", 1.0)] if kind == "documents" else []),
    ):
        assert (
            max(
                errors(found["gradients"], plain_gradients(model, case, coeff)).values()
            )
            > 100 * TOLERANCE
        )


def test_gradients_cross_replicas_once_a_step(of):
    """Two blocks and the embedding's group, with two microbatches.

    Of two shards, one's.
    """
    found = of("fast")["hsdp-batch1"]
    sent = [
        size
        for kind, ranks, size in found["collectives"]
        if (kind, ranks) == ("all_reduce", (0, 2))
    ]
    assert len(sent) == 2 + 1
    assert sum(sent) >= 4 * sum(g.numel() for g in found["gradients"].values()) / 2


@pytest.mark.slow
@pytest.mark.parametrize("gpus_per_node", [1, 2, 4])
@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (n, name)
        for n in (2, 4)
        for name in names("slow", n)
        if not name.startswith(REFERENCES[1:5]) and name != "gpt2-fsdp-tp"
    ],
)
def test_bytes_of_the_plan(of, sample, ranks, name, gpus_per_node):
    """What PyTorch was called to send, by rings, against what the plan counts from the
    shapes.
    """
    config = job_config(sample, "unused", *options_of(name))
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
    # Not planned: the sums of losses, counts and norms, and of the norms' gradients
    # under TP.
    assert (planned.within, planned.between) == pytest.approx(
        (within, between), rel=0.01
    )
    assert within + between > 1e5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kind, name, marks=[pytest.mark.night] * (kind == "night"))
        for kind in ("slow", "night")
        for ranks in TABLES[kind]
        for name in names(kind, ranks)
        if name not in REFERENCES
    ],
)
def test_gradients_equal_one_process(of, kind, name):
    """Initial weights too, which do not depend on the mesh."""
    found = of(kind)[name]
    reference = of(kind)[reference_of(name)]
    assert all(
        torch.equal(found["before"][n], w) for n, w in reference["before"].items()
    )
    assert_equal_gradients(found["gradients"], reference["gradients"])


@pytest.mark.slow
@pytest.mark.night
@pytest.mark.parametrize("name", FAMILY)
def test_gradients_of_every_variant_and_estimator(of, name):
    """On every mesh with accumulation as in one process; and the term is there, and
    another than angular exact's.
    """
    gradients = {name: found["gradients"] for name, found in of("family").items()}
    alone = gradients[f"{name}-batch8"]
    for parallel in ("fsdp", "tp", "fsdp-tp") if name in OF_PAPERS else ("fsdp-tp",):
        assert_equal_gradients(gradients[f"{name}-{parallel}"], alone)
    assert max(errors(alone, gradients["without-batch8"]).values()) > 100 * TOLERANCE
    # Moments are close to exact
    assert max(errors(alone, gradients["reference"]).values()) > 10 * TOLERANCE
