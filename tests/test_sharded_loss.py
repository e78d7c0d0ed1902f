"""The loss of sequences sharded over 2 and 4 ranks, against the float64 oracle on the whole sequences."""

import dataclasses
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import padding
from tests.distributed import spawn
from tests.mesh import assert_tied
from tests.oracle import angular
from titan_disp.dispersion import DispersionLoss, DispersionObjective, LossLedger, autograd, dispersion_loss

B, N, F = 3, 48, 16
PARAMETERS = {"tau": 0.5, "clamp": 0.25, "norm_eps": 1e-2}


def full_tokens():
    return torch.randn(B, N, F, generator=torch.Generator().manual_seed(3)) + 0.3


def check_shards():
    rank, world = dist.get_rank(), dist.get_world_size()
    z = full_tokens()
    reference = z.double().requires_grad_(True)
    expected = angular(reference, **PARAMETERS)
    weights = torch.tensor([1.0, 2.0, 3.0])
    (expected * weights).sum().backward()
    contiguous = torch.arange(N).chunk(world)[rank]
    # As context parallelism's head-tail balancing: rank r holds chunks r and 2·world − 1 − r.
    halves = torch.arange(N).chunk(2 * world)
    head_tail = torch.cat([halves[rank], halves[2 * world - 1 - rank]])
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("seq",))
    for group in (dist.group.WORLD, mesh):
        for positions in (contiguous, head_tail):
            for dtype, value_tolerance, grad_tolerance in ((torch.float32, 4e-6, 1e-5), (torch.float64, 1e-13, 1e-12)):
                local = z[:, positions].to(dtype).requires_grad_(True)
                loss = dispersion_loss(local, group=group, **PARAMETERS)
                torch.testing.assert_close(loss.double(), expected.detach(), rtol=0, atol=value_tolerance)
                (loss * weights).sum().backward()
                error = (local.grad.double() - reference.grad[:, positions]).norm() / reference.grad[
                    :, positions
                ].norm()
                assert error <= grad_tolerance, error

    # bf16 travels as bf16, also from a view that is not contiguous; compared with one process on the same values.
    whole = z.bfloat16().requires_grad_(True)
    alone = dispersion_loss(whole, **PARAMETERS)
    alone.sum().backward()
    local = z.bfloat16().chunk(world, dim=1)[rank].requires_grad_(True)
    assert not local.is_contiguous()
    with mock.patch.object(autograd, "all_gather", wraps=autograd.all_gather) as gather:
        sharded = dispersion_loss(local, group=mesh, **PARAMETERS)
    (call,) = gather.call_args_list
    assert call.args[1].is_contiguous(), "gloo takes any tensor, NCCL takes contiguous ones only"
    sharded.sum().backward()
    torch.testing.assert_close(sharded, alone, rtol=0, atol=4e-6)
    torch.testing.assert_close(local.grad, whole.grad[:, contiguous], rtol=2**-7, atol=1e-6)

    # The same full value on every rank.
    values = [torch.empty_like(sharded) for _ in range(world)]
    dist.all_gather(values, sharded.detach())
    assert all(torch.equal(v, values[0]) for v in values)


def check_context_parallel_objective():
    """CE and dispersion over a CP-like group: values summed over ranks, and gradients, equal one process's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    vocab = 11
    generator = torch.Generator().manual_seed(5)
    z = full_tokens().double()
    head = torch.randn(F, vocab, generator=generator).double()
    labels = torch.randint(vocab, (B, N), generator=generator)
    labels[0, :30] = -100  # sequences weigh differently
    labels[1, 5] = -100

    def ce(logits, labels):
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")

    whole = z.clone().requires_grad_(True)
    alone = DispersionObjective(ce, DispersionLoss(**PARAMETERS), lambda step: 2.0)
    expected = alone((whole @ head, [whole, 2 * whole]), labels)
    expected.backward()

    positions = torch.arange(N).chunk(world)[world - 1 - rank]
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    ledger = LossLedger()
    objective = DispersionObjective(
        ce, DispersionLoss(**PARAMETERS), lambda step: 2.0, group=mesh, cp_group=mesh, ledger=ledger
    )
    local = z[:, positions].clone().requires_grad_(True)
    loss = objective((local @ head, [local, 2 * local]), labels[:, positions])
    loss.backward()
    torch.testing.assert_close(local.grad, whole.grad[:, positions])
    total = loss.detach().clone()
    dist.all_reduce(total)
    torch.testing.assert_close(total, expected.detach())

    weights = (labels != -100).sum(1).double()
    per_sequence = (angular(z, **PARAMETERS) + angular(2 * z, **PARAMETERS)) / 2
    terms = ledger.mean(mesh)
    assert abs(terms["dispersion"] - (weights * per_sequence).sum().item() / weights.sum().item()) < 1e-12
    assert abs(terms["ce"] - ce(z @ head, labels).item() / weights.sum().item()) < 1e-12
    ledger.add_fit_errors(torch.tensor([0.5 * (rank + 1)]))
    assert ledger.worst_fit(mesh) == 0.5 * world


def dims(**degrees):
    from torchtitan.distributed import ParallelDims

    every = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees
    return ParallelDims(**every, world_size=4)


def check_mesh_of_context_and_tensor_parallel():
    """CP × TP is one flattened group over the whole sequence."""
    from titan_disp.spec import sequence_mesh

    both = sequence_mesh(dims(cp=2, tp=2))
    assert (both.ndim, both.size()) == (1, 4)
    assert sequence_mesh(dims(dp_shard=2, tp=2)).size() == 2
    assert sequence_mesh(dims(dp_shard=2, cp=2)).size() == 2
    assert sequence_mesh(dims(dp_shard=4)) is None
    # The two halves of a rank's sequence, sharded over both, give the whole loss.
    z = full_tokens()
    positions = torch.arange(N).chunk(4)[dist.get_rank()]
    loss = dispersion_loss(z[:, positions], group=both, **PARAMETERS)
    torch.testing.assert_close(loss, dispersion_loss(z, **PARAMETERS), rtol=0, atol=4e-6)


def check_objective_of_context_and_tensor_parallel():
    """Labels are sharded over CP alone, activations over CP × TP: against the oracle on the whole sequence."""
    from titan_disp.spec import sequence_mesh

    meshes = dims(cp=2, tp=2)
    cp, tp = meshes.get_mesh("cp"), meshes.get_mesh("tp")
    generator = torch.Generator().manual_seed(5)
    z = full_tokens().double()
    whole = z.clone().requires_grad_(True)
    labels = torch.randint(11, (B, N), generator=generator)
    labels[0, :30] = -100  # sequences weigh differently, and so do the CP ranks' parts of the first
    weights = (labels != -100).sum(1)
    expected = 2.0 * (weights * angular(whole, **PARAMETERS)).sum()
    expected.backward()

    labels_here = torch.arange(N).chunk(2)[cp.get_local_rank()]
    tokens_here = labels_here.chunk(2)[tp.get_local_rank()]
    ledger = LossLedger()
    objective = DispersionObjective(
        cross_entropy=lambda logits, labels: logits.sum(),
        loss=DispersionLoss(**PARAMETERS),
        coeff=lambda step: 2.0,
        group=sequence_mesh(meshes),
        cp_group=cp,
        ledger=ledger,
    )
    local = z[:, tokens_here].clone().requires_grad_(True)
    loss = objective((torch.zeros(()).double(), [local]), labels[:, labels_here])
    loss.backward()
    torch.testing.assert_close(local.grad, whole.grad[:, tokens_here])
    total = loss.detach().clone()
    dist.all_reduce(total, group=cp.get_group())
    torch.testing.assert_close(total, expected.detach())
    assert abs(ledger.mean(cp)["dispersion"] - expected.item() / 2.0 / weights.sum().item()) < 1e-12


def check_embedding_and_output_after_tensor_parallel():
    """TP replaces both parameters; ``init_weights`` would tie them again, but FSDP groups them before. Tied ones are one group of
    FSDP with the final norm; an untied embedding is gathered and reduced by itself, as TorchTitan has it."""
    from titan_disp.config.load import load_config
    from titan_disp.models.registry import MODELS

    qwen3 = MODELS["qwen3_disp"]

    def groups(flavor, **changes):
        config = load_config(["--model.name", "qwen3_disp"])
        with torch.device("meta"):
            model = qwen3.model_cls(dataclasses.replace(qwen3.flavors[flavor], **changes))
        qwen3.parallelize(model, dims(dp_shard=2, tp=2), config)
        assert_tied(model, tied=flavor == "nano")
        return [module._get_fsdp_state()._modules for module in (model.tok_embeddings, model.norm, model.output)], model

    (one, two, three), model = groups("nano")
    assert one == two == three == (model.tok_embeddings, model.norm, model.output)
    (one, two, three), model = groups("8B", n_layers=1)
    assert one == (model.tok_embeddings,)
    assert two == three == (model.norm, model.output)


def check_context_and_tensor_parallel():
    check_mesh_of_context_and_tensor_parallel()
    check_objective_of_context_and_tensor_parallel()
    check_embedding_and_output_after_tensor_parallel()


def check_padding():
    """On all ranks; on four also in two groups, of which no one's ranks are numbered as the world's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for features, case in padding.NARROW_AND_WIDE if world == 2 else padding.NARROW_AND_WIDE[:3]:
        padding.check(features, case, dist.group.WORLD, rank, world)
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("seq", "dp"))["seq"]
        for features, case in padding.NARROW_AND_WIDE:
            padding.check(features, case, mesh.get_group(), mesh.get_local_rank(), 2)
        ledger = LossLedger()
        ledger.add_fit_errors(torch.tensor([0.5 * (rank + 1)]))
        assert ledger.worst_fit(mesh) == (1.5, 2.0)[rank % 2]


def run_all():
    check_shards()
    check_context_parallel_objective()
    check_padding()


def test_two_ranks():
    spawn(2, run_all)


def test_four_ranks():
    spawn(4, run_all)


def test_context_and_tensor_parallel():
    spawn(4, check_context_and_tensor_parallel)
