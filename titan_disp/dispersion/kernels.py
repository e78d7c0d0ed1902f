"""What a GPU wants otherwise than a CPU: tensor cores for products, one kernel for a chain of pointwise operations.

bf16 activations meet bf16 tensor cores, with sums, and all that happens to a cosine, in float32. Everything else is computed in
float32 (float64 stays float64), as bf16 products on a CPU would be slow, and fp16 could overflow.
"""

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64 (for reference computations); everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand_dtype(x: Tensor) -> torch.dtype:
    """In which products of x are formed: bf16 where x is, on an accelerator; else the accumulation dtype."""
    if x.dtype == torch.bfloat16 and x.device.type != "cpu":
        return torch.bfloat16
    return accumulation_dtype(x.dtype)


def bf16_autocast(device: str) -> bool:
    """Whether products of float32 are to be taken in bf16: AMP, with which TorchTitan trains on one GPU (no FSDP2).

    Its blocks' outputs are float32, as sums of bf16 branches with float32 embeddings.
    """
    return device != "cpu" and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


@functools.cache
def _float32_results(device: torch.device) -> bool:
    """Whether this device's bf16 products can be written in float32, as they are accumulated (CUDA since torch 2.8)."""
    try:
        x = torch.ones(2, 16, 16, device=device, dtype=torch.bfloat16)
        out = torch.bmm(x, x, out_dtype=torch.float32)
        view = out[:, :8]
        torch.baddbmm(view, x[:, :8], x, out_dtype=torch.float32, out=view)
        return bool((out[:, :8] == 32).all())
    except (RuntimeError, TypeError):
        return False


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [B, m, k] and [B, k, n], in the accumulation dtype."""
    if a.dtype == accumulation_dtype(a.dtype):
        return torch.bmm(a, b)
    if _float32_results(a.device):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()  # rounded once, as the saved gradient will be


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b, in the accumulation dtype of ``out`` [B, m, n]."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b)
    elif _float32_results(a.device):
        torch.baddbmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.add_(torch.bmm(a, b))


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Compiled for tensors on an accelerator: one kernel, and no temporaries in memory. On a CPU, the function itself.

    The first argument decides. Where nothing can be compiled (no compiler, no Triton), a warning, and the function itself.
    """
    compiled: list[Callable[P, T]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        first = args[0]
        assert isinstance(first, Tensor)
        if first.device.type == "cpu":
            return function(*args, **kwargs)
        if not compiled:
            compiled.append(torch.compile(function))
        if compiled[0] is function:
            return function(*args, **kwargs)
        try:
            return compiled[0](*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # Dynamo, Inductor, Triton and compilers raise their own, before anything has run
            warnings.warn(f"{function.__name__} is not compiled, and slower: {error}", stacklevel=2)
            compiled[0] = function
            return function(*args, **kwargs)

    return call
