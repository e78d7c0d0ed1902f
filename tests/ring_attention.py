"""Context parallelism on a CPU: torch's ring attention with torch's CPU kernel, which
its dispatcher does not support.

Only the kernel differs from that on a GPU. torch decides how the sequence is sharded,
what is sent, and how parts are merged.
"""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def _arguments(op, args, kwargs):
    """The mesh, and the arguments by name with DTensors replaced by their local
    tensors.
    """
    named = (
        dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
    )
    mesh = next(v.device_mesh for v in named.values() if isinstance(v, DTensor))
    local = {n: v.to_local() if isinstance(v, DTensor) else v for n, v in named.items()}
    return mesh, local


def _wrapped(found, mesh):
    # [B, heads, N, …]
    return tuple(
        DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in found
    )


def _forward(op, args, kwargs):
    mesh, named = _arguments(op, args, kwargs)
    return _wrapped(
        ring._templated_ring_attention(mesh.get_group(), 2, FORWARD, **named), mesh
    )


def _backward(op, args, kwargs):
    mesh, named = _arguments(op, args, kwargs)
    found = ring._templated_ring_attention_backward(
        mesh.get_group(),
        2,
        BACKWARD,
        grad_out=named.pop("grad_out"),
        grad_out_name="grad_out",
        **named,
    )
    return _wrapped(found, mesh)


def install():
    """Enable context parallelism on a CPU in this process.

    The trainer then no longer refuses it.
    """
    from titan_disp import spec, train

    ring.custom_ops.update({FORWARD: _forward, BACKWARD: _backward})
    train.check_device = spec.checks.check_device = lambda job_config: None
