"""A Triton kernel that computes S and q of pairs of tokens in one pass.

Without this kernel, a library function writes the matrix products of a tile, and a
compiled epilogue reads them to compute w and q (``pairwise``). On a GPU, these reads and
writes take longer than the products themselves. The kernel keeps products, w and r in
registers, and writes only q.

``in_triton`` declares a second form of a pair function, which the kernel calls. The
epilogue is used for pair functions without this form, and on devices without Triton.
"""

import functools
import importlib
import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from titan_disp.dispersion.kernels import part_size, record
from titan_disp.dispersion.masks import apart
from titan_disp.dispersion.vectors import norms

# Takes cosines [B, m, n], which it may overwrite. Returns w and r = dw/dc.
PairFunction = Callable[[Tensor], tuple[Tensor, Tensor]]

KERNELS = "titan_disp.dispersion.triton_kernels"
# By default, the kernel is used for bf16 tokens on a GPU. "0": it is never used. "1": it
# is also used in float32, and on a CPU with TRITON_INTERPRET=1. (In float32, it cannot
# use tensor cores, and the library function is faster.)
CHOICE = os.environ.get("TITAN_DISP_TRITON", "")

# Arguments of the kernel. A program computes a tile of TILE rows and TILE columns, and
# multiplies STEP features at a time. ``maxnreg`` is the number of registers per thread.
#
# bf16 on an H100: three stages of two 128×64 operands take 96 KiB of an SM's 227 KiB of
# shared memory, and 256 threads of 128 registers take half of the SM's registers. So two
# programs run on an SM, and the tensor cores work for one while the other computes w and
# r. (With 128 registers, a few values are spilled after the products, but none in the
# loop over features.) Smaller tiles would exceed the bandwidth of the L2 cache, because
# they read the tokens more often.
TILE_SHAPES = {
    torch.bfloat16: {
        "TILE": 128,
        "STEP": 64,
        "num_warps": 8,
        "num_stages": 3,
        "maxnreg": 128,
    },
    torch.float32: {
        "TILE": 64,
        "STEP": 32,
        "num_warps": 4,
        "num_stages": 2,
        "maxnreg": 128,
    },
}
# The largest number of elements of q: 128 MiB in bf16
Q_ELEMENTS = 1 << 26
# The kernel is used if its relative error of S and q on an example is at most this. q
# is rounded to bf16, with an error of 2⁻⁹, or 2⁻⁸ in the interpreter.
LARGEST_ERROR = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


@dataclass(frozen=True)
class TileFunction:
    """The Triton form of a pair function, which is compiled into the kernel."""

    name: str  # a function in ``triton_kernels``, or "package.module:function"
    options: tuple[float, ...]  # its arguments after the cosines

    def load(self) -> Any:
        """Return the function. This imports Triton."""
        module, _, function = self.name.rpartition(":")
        return getattr(importlib.import_module(module or KERNELS), function)


# Weak references, because a variant may create a new pair function for each call.
_tile_functions: WeakKeyDictionary[PairFunction, TileFunction] = WeakKeyDictionary()


def in_triton(name: str, *options: float) -> Callable[[PairFunction], PairFunction]:
    """Return a decorator that declares the Triton form of a pair function.

    The Triton function ``name`` (as in ``TileFunction``) is called with (c, *options).
    It must return what the decorated function returns for c.
    """

    def declare(pair: PairFunction) -> PairFunction:
        _tile_functions[pair] = TileFunction(name, options)
        return pair

    return declare


@dataclass(frozen=True)
class Tokens:
    """Some tokens of a shard: the rows or the columns of a span."""

    x: Tensor  # [B, m, F], in the dtype of products
    scale: Tensor  # [B, m, 1]
    marks: Tensor | None  # [B, m, 1]; None if all tokens form pairs


def rows_at_once(tokens: int, batch: int) -> int:
    """Return the number of rows per span, a multiple of 128.

    A single span has all tokens of the shard if its q has at most Q_ELEMENTS elements.
    Otherwise, the spans have about the same number of rows.
    """
    most = max(128, Q_ELEMENTS // max(1, batch * tokens))
    return part_size(tokens, most, multiple=128)


def takes(x: Tensor, pair: PairFunction) -> bool:
    """Return whether the kernel should compute the pairs of tokens x.

    On the first call, the host waits for the kernel's result on a small example.
    """
    if pair not in _tile_functions or x.dtype not in TILE_SHAPES:
        return False
    is_default = x.device.type == "cuda" and x.dtype == torch.bfloat16
    if not is_default and CHOICE != "1":
        return False
    # Dynamo cannot trace a kernel that takes a function. Other tracers, such as
    # torch.export, pass fake tensors, which hold no numbers.
    is_traced = torch.compiler.is_compiling() or hasattr(x, "fake_mode")
    if is_traced or x.device.type == "meta":
        return False
    return _is_usable(pair, x.device, x.dtype)


@functools.lru_cache
def _is_usable(pair: PairFunction, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel works on this device; warn if it does not."""
    name = _tile_functions[pair].name
    if CHOICE == "0":
        record(name, "not used: TITAN_DISP_TRITON is 0")
        return False
    fault = _fault(pair, device, dtype)
    if fault is None:
        record(name, "compiled")
        return True
    record(name, f"not used: {fault}")
    warnings.warn(
        f"the Triton kernel {name} is not used, and the dispersion loss runs slower: "
        f"{fault}",
        stacklevel=2,
    )
    return False


def _fault(pair: PairFunction, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how the kernel fails on an example; None if its result is right."""
    try:
        error = _error_of_example(pair, device, dtype)
    except torch.OutOfMemoryError:
        raise
    # Triton, its compilers and the driver raise different types.
    except Exception as exception:
        first_line = str(exception).split("\n")[0]
        return f"{type(exception).__name__}: {first_line}"
    if error <= LARGEST_ERROR[dtype]:
        return None
    return f"its relative error is {error:.1e}"


def _error_of_example(
    pair: PairFunction, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest relative error of Σ w and of q, compared with float64, over
    three spans: mirrored, with a mask, and with segments.
    """
    shape = TILE_SHAPES[dtype]
    count = 2 * shape["TILE"] + 1
    features = shape["STEP"] + 8
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, count, features, generator=generator, device="cpu")
    x = x.to(device, dtype)
    scale = 1 / norms(x)
    numbers = torch.arange(2 * count, device=device).view(2, count, 1)
    segments = (numbers - 1) // 50  # −1 for the first token
    errors = []
    for marks in (None, segments >= 0, segments):
        rows = Tokens(x, scale, marks)
        cols = rows
        if marks is None:
            no_pair = torch.eye(count, device=device, dtype=torch.bool)
        else:
            # Columns are tokens of the other sequence, so no token meets itself.
            cols = Tokens(x.flip(0), scale.flip(0), marks)
            no_pair = apart(marks, marks.mT)
        w, r = pair((scale * x.double()) @ (cols.scale * cols.x.double()).mT)
        exact_sums = w.masked_fill(no_pair, 0.0).sum((1, 2))
        exact_q = (2 * scale * r * cols.scale.mT).masked_fill(no_pair, 0.0)
        sums, q = span_sums(rows, cols, pair, mirrored=marks is None)
        errors.append((sums - exact_sums).norm() / exact_sums.norm())
        errors.append((q - exact_q).norm() / exact_q.norm())
    return torch.stack(errors).max().item()


def span_sums(
    rows: Tokens, cols: Tokens, pair: PairFunction, mirrored: bool
) -> tuple[Tensor, Tensor]:
    """Return Σ w [B] in float32 and q_ij = 2 s_i r_ij s_j [B, m, n] in the dtype of x.

    Tokens of a sequence that are not adjacent in memory are copied.

    Args:
        mirrored: whether the first columns are the same tokens as the rows. Rows and
            these columns form a square, in which only the tiles on and above the
            diagonal are computed, and are mirrored in q; a token and itself are not a
            pair. Σ w has both (i, j) and (j, i) of every pair, so pairs with columns
            beyond the square count twice.
    """
    # This imports Triton.
    from titan_disp.dispersion.triton_kernels import span_kernel

    batch, row_count, features = rows.x.shape
    col_count = cols.x.shape[1]
    shape = TILE_SHAPES[rows.x.dtype]
    # Rows of q begin at multiples of 64 elements (128 bytes in bf16), which makes writes
    # and products faster.
    width = math.ceil(col_count / 64) * 64
    q = rows.x.new_empty(batch, row_count, width)
    tiles_down = math.ceil(row_count / shape["TILE"])
    tiles_across = math.ceil(col_count / shape["TILE"])
    # One sum per tile instead of atomic additions, whose order and rounding would vary.
    sums = rows.scale.new_empty(batch, tiles_down * tiles_across)
    tile_function = _tile_functions[pair]
    with torch.cuda.device_of(rows.x):
        span_kernel[(sums.numel(),)](
            rows=_side(rows),
            cols=_side(cols),
            q=q,
            q_width=width,
            sums=sums,
            constants=tile_function.options,
            FEATURES=features,
            FUNCTION=tile_function.load(),
            MIRRORED=mirrored,
            **shape,
        )
    return sums.sum(1), q[..., :col_count]


class Values(NamedTuple):
    """Features, scales or marks of all tokens, as arguments of the kernel.

    The values of a sequence are adjacent in memory.
    """

    first: Tensor  # in the kernel, a pointer to the first value
    stride: int  # number of values between the beginnings of two sequences


class Side(NamedTuple):
    """``Tokens`` as arguments of the kernel."""

    x: Values
    scale: Values
    marks: Values | None
    tokens: int  # per sequence


def _side(tokens: Tokens) -> Side:
    return Side(
        x=_values(tokens.x),
        scale=_values(tokens.scale),
        marks=None if tokens.marks is None else _values(tokens.marks),
        tokens=tokens.x.shape[1],
    )


def _values(tensor: Tensor) -> Values:
    """Return the values of a tensor [B, m, k].

    The tensor is copied if the values of a sequence are not adjacent in memory.
    """
    if tensor.stride()[1:] != (tensor.shape[2], 1):
        tensor = tensor.contiguous()
    return Values(tensor, stride=tensor.stride(0))
