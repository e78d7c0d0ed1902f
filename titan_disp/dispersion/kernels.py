"""Where GPU and CPU differ: the dtype of matrix products, and compiled pointwise
operations.

On a GPU, bf16 activations are multiplied on bf16 tensor cores. Sums, and everything
computed from a cosine, are in float32. In all other cases, everything is computed in
float32 (float64 stays float64), because bf16 products are slow on a CPU and float16
could overflow.
"""

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

# texts in the result of ``path``
EAGER_ON_CPU = "eager: on a CPU"
BF16_PRODUCTS = "bfloat16, added in float32"
_functions: dict[str, str] = {}
_products: set[str] = set()
# If set, this is called instead of a fused function, with the function and its
# arguments. A benchmark counts kernels with this hook, on meta tensors, for which
# nothing can be compiled.
run_fused: Callable[..., Any] | None = None


def path() -> dict[str, Any]:
    """Return how this process has computed dispersion losses so far.

    ``kernels`` tells for each fused function whether it ran compiled or eager, and for
    each kernel of ``triton_pairs`` whether it is used, with the reason. ``products``
    lists the dtypes of the operands of matrix products. Both are empty before the first
    loss.
    """
    return {"kernels": dict(_functions), "products": sorted(_products)}


def record(kernel: str, how: str) -> None:
    """Store how a kernel ran, for ``path``. Only the first call for a kernel counts."""
    _functions.setdefault(kernel, how)


def part_size(count: int, most: int, multiple: int = 1) -> int:
    """Return the size of the parts into which ``count`` is divided: as few as possible,
    about equal, at most ``most`` each. The size is rounded up to a multiple of
    ``multiple``.
    """
    parts = math.ceil(count / most)
    return math.ceil(count / parts / multiple) * multiple


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums: float64 for float64 (in tests), otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of x in matrix products: bf16 if x is bf16 on an accelerator,
    otherwise the accumulation dtype.
    """
    if x.dtype == torch.bfloat16 and x.device.type != "cpu":
        return torch.bfloat16
    return accumulation_dtype(x.dtype)


def bf16_autocast(device: str) -> bool:
    """Return whether bf16 AMP is active, which TorchTitan uses on a single GPU.

    Blocks then return float32, but products should be bf16.
    """
    return (
        device != "cpu"
        and torch.is_autocast_enabled(device)
        and torch.get_autocast_dtype(device) == torch.bfloat16
    )


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    return torch.bmm(a, b, out_dtype=torch.float32)


def _baddbmm(out: Tensor, a: Tensor, b: Tensor, beta: int = 1) -> Tensor:
    return torch.baddbmm(out, a, b, out_dtype=torch.float32, beta=beta, out=out)


@functools.cache
def _float32_results(device: torch.device, function: str) -> bool:
    """Return whether torch.bmm or torch.baddbmm can add bf16 products in float32.

    On CUDA, both functions can do so since torch 2.8.
    """
    try:
        x = torch.ones(2, 16, 16, device=device, dtype=torch.bfloat16)
        y = torch.where(torch.arange(16, device=device)[:, None] == 15, x + 16, 16 * x)
        out = torch.zeros(2, 16, 16, device=device)
        if function == "bmm":
            result = _bmm(x, y)
        else:
            result = _baddbmm(out[:, :8], x[:, :8], y)
        right = bool((result == 257).all())  # which bf16 rounds to 256
        why = "its result is rounded"
    except (RuntimeError, TypeError) as error:
        right = False
        why = str(error).splitlines()[0]
    if not right:
        _products.add(f"float32, as torch.{function} cannot add bfloat16 in float32")
        warnings.warn(
            f"torch.{function} cannot return bf16 products in float32 on {device} "
            f"({why}): they are formed in float32, and the dispersion loss runs slower",
            stacklevel=2,
        )
    return right


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b in the accumulation dtype, for a [B, m, k] and b [B, k, n]."""
    if a.dtype == accumulation_dtype(a.dtype):
        _products.add(str(a.dtype).removeprefix("torch."))
        return torch.bmm(a, b)
    # If cosines near 1 were rounded to bf16, they would lose the digits that determine
    # the gradient.
    if _float32_results(a.device, "bmm"):
        _products.add(BF16_PRODUCTS)
        return _bmm(a, b)
    return product(a.float(), b.float())


def add_product_(out: Tensor, a: Tensor, b: Tensor, overwrite: bool = False) -> None:
    """Add a @ b to ``out`` [B, m, n] in place, or overwrite ``out`` with a @ b.

    ``out`` has the accumulation dtype.
    """
    beta = 0 if overwrite else 1  # with 0, ``out`` is not read
    if a.dtype == out.dtype:
        _products.add(str(a.dtype).removeprefix("torch."))
        out.baddbmm_(a, b, beta=beta)
    elif _float32_results(a.device, "baddbmm"):
        _products.add(BF16_PRODUCTS)
        _baddbmm(out, a, b, beta)
    elif overwrite:
        out.copy_(product(a, b))
    else:
        out.add_(product(a, b))


def fused(function: Callable[P, T]) -> Callable[P, T]:
    """Return ``function``, which is compiled into one kernel without temporaries when
    its first argument is on an accelerator.

    If compilation fails (no compiler, no Triton), it warns and runs the eager code.
    """
    compiled: list[Callable[P, T]] = []
    name = function.__name__.strip("_")

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if run_fused is not None:
            return cast(T, run_fused(function, *args, **kwargs))
        first = args[0]
        assert isinstance(first, Tensor)
        if first.device.type == "cpu":
            _functions.setdefault(name, EAGER_ON_CPU)
            return function(*args, **kwargs)
        if not compiled:
            # With fullgraph, Dynamo raises an error at its limit of recompilations
            # instead of silently running the eager code.
            compiled.append(torch.compile(function, fullgraph=True))
        if compiled[0] is function:
            return function(*args, **kwargs)
        try:
            result = compiled[0](*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        # Dynamo, Inductor, Triton and compilers raise different types of errors, but
        # all before the function runs.
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            warnings.warn(
                f"{function.__name__} could not be compiled and runs slower: {why}",
                stacklevel=2,
            )
            _functions[name] = f"eager: {why.splitlines()[0]}"
            compiled[0] = function
            return function(*args, **kwargs)
        _functions.setdefault(name, "compiled")
        return result

    return call
