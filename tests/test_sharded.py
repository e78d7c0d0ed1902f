import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import spawn
from tests.oracle import dispersion_oracle
from titan_disp.dispersion import DispersionLoss, DispersionObjective, LossLedger, dispersion_loss

B, N, F = 3, 48, 16
PARAMETERS = {"tau": 0.5, "clamp": 0.25, "norm_eps": 1e-2}


def full_tokens():
    return torch.randn(B, N, F, generator=torch.Generator().manual_seed(3)) + 0.3


def check_shards():
    rank, world = dist.get_rank(), dist.get_world_size()
    z = full_tokens()
    reference = z.double().requires_grad_(True)
    expected = dispersion_oracle(reference, **PARAMETERS)
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

    # bf16 travels as bf16; compared with one process on the same values.
    whole = z.bfloat16().requires_grad_(True)
    alone = dispersion_loss(whole, **PARAMETERS)
    alone.sum().backward()
    local = z.bfloat16()[:, contiguous].requires_grad_(True)
    sharded = dispersion_loss(local, group=mesh, **PARAMETERS)
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
    per_sequence = (dispersion_oracle(z, **PARAMETERS) + dispersion_oracle(2 * z, **PARAMETERS)) / 2
    terms = ledger.mean(mesh)
    assert abs(terms["dispersion"] - (weights * per_sequence).sum().item() / weights.sum().item()) < 1e-12
    assert abs(terms["ce"] - ce(z @ head, labels).item() / weights.sum().item()) < 1e-12


def check_mesh_of_context_and_tensor_parallel():
    """CP × TP is one flattened group over the whole sequence."""
    from torchtitan.distributed import ParallelDims

    from titan_disp.spec import sequence_mesh

    def dims(**degrees):
        every = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1} | degrees
        return ParallelDims(**every, world_size=4)

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


def run_all():
    check_shards()
    check_context_parallel_objective()


def test_two_ranks():
    spawn(2, run_all)


def test_four_ranks():
    spawn(4, run_all)


def test_context_and_tensor_parallel_group():
    spawn(4, check_mesh_of_context_and_tensor_parallel)
