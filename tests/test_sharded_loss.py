"""The loss of sequences sharded over two and four ranks equals one process's, and the
float64 oracle's.
"""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import test_documents_loss as documents
from tests import test_padding as padding
from tests.distributed import spawn
from tests.mesh import dims
from tests.oracle import (
    EVERY_LOSS,
    angular,
    cross_entropy,
    drawn,
    loss_and_gradient,
    tokens,
)
from titan_disp.dispersion import DispersionLoss, autograd, dispersion_loss, layers
from titan_disp.objective import DispersionObjective, LossLedger
from titan_disp.spec import sequence_mesh

B = 3
N = 48
F = 16
PARAMETERS = {"tau": 0.5, "clamp": 0.25, "norm_eps": 1e-2}


def check_every_loss(mesh, data):
    """Two ranks that share a sequence hold others than the other two, so that nothing
    may pass between these pairs.

    For exact losses, rank r holds chunks r and 2·ranks − 1 − r, as under context
    parallelism. The others depend on the order.
    """
    rank = mesh.get_local_rank()
    ranks = mesh.size()
    # Of four ranks, each has 66 positions: no multiple of the blocks of 4 tokens, of
    # each of which the moments' fit takes one.
    positions = torch.arange(264)
    halves = positions.chunk(2 * ranks)
    permuted = torch.cat([halves[rank], halves[2 * ranks - 1 - rank]])
    for variant, estimator, more in EVERY_LOSS:
        for features in (8, 300):  # decorrelation's linear and its pairwise form
            z = tokens(2, 264, features, seed=data).double() / math.sqrt(features)
            options = {
                "variant": variant,
                "estimator": estimator,
                **more,
                **drawn(estimator, 40),
            }
            expected, grad = loss_and_gradient(dispersion_loss, z, **options)
            own = permuted if estimator == "exact" else positions.chunk(ranks)[rank]
            found = loss_and_gradient(dispersion_loss, z[:, own], group=mesh, **options)
            torch.testing.assert_close(
                found, (expected, grad[:, own]), msg=lambda m, o=options: f"{o}: {m}"
            )


def check_bf16(mesh):
    """It travels as bf16, also from a view that is not contiguous; compared with one
    process on the same values.
    """
    rank = mesh.get_local_rank()
    ranks = mesh.size()
    whole = tokens(B, N, F).bfloat16().requires_grad_(True)
    alone = dispersion_loss(whole, **PARAMETERS)
    alone.sum().backward()
    local = whole.detach().chunk(ranks, dim=1)[rank].requires_grad_(True)
    assert not local.is_contiguous()
    with mock.patch.object(autograd, "all_gather", wraps=autograd.all_gather) as gather:
        sharded = dispersion_loss(local, group=mesh, **PARAMETERS)
    (call,) = gather.call_args_list
    assert call.args[1].is_contiguous(), (
        "gloo takes any tensor, NCCL takes contiguous ones only"
    )
    assert call.args[1].dtype == torch.bfloat16
    sharded.sum().backward()
    torch.testing.assert_close(sharded, alone, rtol=0, atol=4e-6)
    torch.testing.assert_close(
        local.grad, whole.grad.chunk(ranks, dim=1)[rank], rtol=2**-7, atol=1e-6
    )
    values = [torch.empty_like(sharded) for _ in range(ranks)]
    dist.all_gather(values, sharded.detach(), group=mesh.get_group())
    assert all(torch.equal(v, values[0]) for v in values), "the ranks differ"


def check_gathered_ahead(mesh):
    """While a layer is computed, the next one is gathered, and no layer twice: as often
    as its own values are asked for.
    """
    events = []

    class Gathering(autograd.Gathering):
        def __init__(self, z, group):
            events.append(f"start {int(z[0, 0, 0])}")
            super().__init__(z, group)

        def of_ranks(self):
            events.append("wait")
            return super().of_ranks()

    zs = [
        torch.cat(
            [torch.full((1, 1, 8), float(i)), tokens(1, 7, 8)], 1
        ).requires_grad_()
        for i in range(3)
    ]
    with (
        mock.patch.object(layers, "Gathering", Gathering),
        mock.patch.object(layers, "PACK_ELEMENTS", 0),
    ):
        DispersionLoss()(zs, mesh).sum().backward()
    assert events == ["start 0", "start 1", "wait", "start 2", "wait", "wait"]


def check_unequal_shards(mesh):
    """As many as torch.chunk gives: every rank says so, before anything is sent.

    Equal ones are compared once.
    """
    own = tokens(2, 10, F).chunk(4, dim=1)[dist.get_rank()]  # 3, 3, 3, 1
    for how in ({}, {"estimator": "sampled", "max_tokens": 3}):
        with pytest.raises(
            ValueError,
            match=r"\(rank 0: \[\[2, 3, 16\]\]; .*; rank 3: \[\[2, 1, 16\]\]\), expected",
        ):
            dispersion_loss(own, group=mesh, **how)
    with mock.patch.object(
        dist, "all_gather_object", wraps=dist.all_gather_object
    ) as compared:
        for _ in range(2):
            dispersion_loss(tokens(2, 7, F), group=mesh)
    assert compared.call_count == 1


def check_objective(meshes):
    """Labels are sharded over CP alone, activations over CP × TP.

    Both terms and the gradients equal one process's.
    """
    generator = torch.Generator().manual_seed(5)
    z = tokens(B, N, F).double()
    logits = torch.randn(B, N, 11, generator=generator).double()
    labels = torch.randint(11, (B, N), generator=generator)
    # sequences weigh differently, and so do the CP ranks' parts of the first
    labels[0, :30] = -100
    labels[1, 5] = -100
    weights = (labels != -100).sum(1)
    whole = z.clone().requires_grad_(True)
    dispersion = (
        weights * (angular(whole, **PARAMETERS) + angular(2 * whole, **PARAMETERS)) / 2
    ).sum()
    (2.0 * dispersion).backward()
    ce = cross_entropy(logits, labels)

    cp = meshes.get_mesh("cp")
    both = sequence_mesh(meshes)
    ledger = LossLedger()
    labels_here = torch.arange(N).chunk(cp.size())[cp.get_local_rank()]
    tokens_here = labels_here.chunk(4 // cp.size())[dist.get_rank() % (4 // cp.size())]
    loss = DispersionLoss(**PARAMETERS)
    objective = DispersionObjective(
        cross_entropy, loss, lambda step: 2.0, group=both, cp_group=cp, ledger=ledger
    )
    local = z[:, tokens_here].clone().requires_grad_(True)
    found = objective(
        (logits[:, labels_here], [local, 2 * local]), labels[:, labels_here]
    )
    found.backward()
    torch.testing.assert_close(local.grad, whole.grad[:, tokens_here])
    total = found.detach().clone()
    dist.all_reduce(total, group=cp.get_group())
    torch.testing.assert_close(total, (ce + 2.0 * dispersion).detach())
    terms = ledger.mean(cp)
    assert abs(terms["ce"] - ce.item() / weights.sum()) < 1e-12
    assert abs(terms["dispersion"] - dispersion.item() / weights.sum()) < 1e-12


def check_four_ranks():
    rank = dist.get_rank()
    whole = init_device_mesh("cpu", (4,), mesh_dim_names=("sequence",))
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    # No group's ranks are numbered as the world's.
    across = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "data"))
    for mesh, data in ((whole, 0), (halves["sequence"], halves.get_local_rank("data"))):
        check_every_loss(mesh, data)
        check_bf16(mesh)
        check_gathered_ahead(mesh)
    check_unequal_shards(whole)
    for features, case in padding.NARROW_AND_WIDE:
        padding.check(
            features,
            case,
            across["sequence"].get_group(),
            across.get_local_rank("sequence"),
            2,
        )
    for features, case in padding.NARROW_AND_WIDE[:3]:
        padding.check(features, case, dist.group.WORLD, rank, 4)
    where = "titan_disp.dispersion"
    with (
        mock.patch(f"{where}.pairwise.CPU_TILE", 16),
        mock.patch(f"{where}.masks.BLOCK", 16),
    ):
        for case in documents.CASES:
            documents.check(
                *case,
                6,
                across["sequence"].get_group(),
                across.get_local_rank("sequence"),
                2,
            )
            documents.check(*case, 6, dist.group.WORLD, rank, 4)
    ledger = LossLedger()
    ledger.add_fit_errors(torch.tensor([0.5 * (rank + 1)]))
    assert ledger.worst_fit(across["sequence"]) == (1.5, 2.0)[rank % 2]
    check_objective(dims(4, cp=4))
    check_objective(dims(4, cp=2, tp=2))


def test_four_ranks():
    spawn(4, check_four_ranks)
