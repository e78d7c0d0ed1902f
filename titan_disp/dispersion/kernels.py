"""This module holds what differs between GPU and CPU: the dtype of products, and compiled pointwise operations.

On a GPU, bf16 activations are multiplied on bf16 tensor cores; sums, and everything computed from a cosine, are in
float32. Otherwise everything is computed in float32 (float64 stays float64), because bf16 products are slow on a CPU
and float16 could overflow.
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
    """Return the dtype of sums: float64 for float64, which tests compute in, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of x are formed: bf16 if x is bf16 on an accelerator, else the sums' dtype."""
    if x.dtype == torch.bfloat16 and x.device.type != "cpu":
        return torch.bfloat16
    return accumulation_dtype(x.dtype)


def bf16_autocast(device: str) -> bool:
    """Return whether bf16 AMP is active, as on one GPU. Block outputs are then float32, but products should be bf16."""
    return device != "cpu" and torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.bfloat16


@functools.cache
def _float32_results(device: torch.device) -> bool:
    # CUDA can return bf16 products in float32 since torch 2.8.
    try:
        x = torch.ones(2, 16, 16, device=device, dtype=torch.bfloat16)
        out = torch.bmm(x, x, out_dtype=torch.float32)
        view = out[:, :8]
        torch.baddbmm(view, x[:, :8], x, out_dtype=torch.float32, out=view)
        return bool((out[:, :8] == 32).all())
    except (RuntimeError, TypeError):
        return False


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the accumulation dtype, for a [B, m, k] and b [B, k, n]."""
    if a.dtype == accumulation_dtype(a.dtype):
        return torch.bmm(a, b)
    if _float32_results(a.device):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(a, b).float()  # rounded to bf16 once, as the saved gradient is


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to ``out`` [B, m, n] in place. ``out`` has the accumulation dtype."""
    if a.dtype == out.dtype:
        out.baddbmm_(a, b)
    elif _float32_results(a.device):
        torch.baddbmm(out, a, b, out_dtype=torch.float32, out=out)
    else:
        out.add_(torch.bmm(a, b))


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Compile a function into one kernel without temporaries, if its first argument is on an accelerator.

    If compilation fails (no compiler, no Triton), the function warns and runs as it is.
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
        except Exception as error:  # Dynamo, Inductor, Triton and compilers raise different types, before anything runs
            warnings.warn(f"{function.__name__} could not be compiled and runs slower: {error}", stacklevel=2)
            compiled[0] = function
            return function(*args, **kwargs)

    return call
