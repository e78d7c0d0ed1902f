"""A Triton kernel that computes S and q of pairs of tokens in one pass.

Without it, a library writes the products of a tile, and a compiled epilogue reads them
to compute w and q (``pairwise``). On a GPU, these reads and writes take longer than the
products. The kernel keeps products, w and r in registers, and writes q only.

A pair function has a second form for the kernel, which ``in_triton`` declares. Pair
functions without one, and devices without Triton, use the epilogue.
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

# cosines [B, m, n], which it may overwrite → w and r = dw/dc
PairFunction = Callable[[Tensor], tuple[Tensor, Tensor]]

KERNELS = "titan_disp.dispersion.triton_kernels"
# "0": the kernel is never used. "1": it is also used in float32, and on a CPU under
# TRITON_INTERPRET=1. Otherwise it is used for bf16 tokens on a GPU. (In float32, its
# products use no tensor cores, and the library's are faster.)
CHOICE = os.environ.get("TITAN_DISP_TRITON", "")

# Arguments of the kernel: one program computes a tile of TILE rows and as many columns,
# and multiplies STEP features at a time. ``maxnreg`` is registers per thread.
#
# bf16 on an H100: three stages of two 128×64 operands are 96 KiB of an SM's 227 KiB of
# shared memory, and 256 threads of 128 registers are half of its registers. So two
# programs run on an SM: the tensor cores work for one while the other computes w and r.
# (With 128 registers, a few values are spilled after the products; none is in the loop
# over features.) Smaller tiles would read the tokens from the L2 cache more often than
# it can deliver them.
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
# of q: 128 MiB in bf16
Q_ELEMENTS = 1 << 26
# of S and q, relative, with which the kernel is used: q is rounded to bf16, by 2⁻⁹ or,
# under the interpreter, 2⁻⁸
LARGEST_ERROR = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


@dataclass(frozen=True)
class TileFunction:
    """What Triton compiles into the kernel in place of a pair function."""

    name: str  # of a function in ``triton_kernels``, or "package.module:function"
    options: tuple[float, ...]

    def load(self) -> Any:
        """Return the function. Its module imports Triton."""
        module, _, function = self.name.rpartition(":")
        return getattr(importlib.import_module(module or KERNELS), function)


# weak, since a variant may make a new pair function for each call
_tile_functions: WeakKeyDictionary[PairFunction, TileFunction] = WeakKeyDictionary()


def in_triton(name: str, *options: float) -> Callable[[PairFunction], PairFunction]:
    """Declare the Triton function that takes the place of the decorated pair function.

    Given (c, *options), it returns what the pair function returns of c. ``name`` is
    that of ``TileFunction``.
    """

    def declare(pair: PairFunction) -> PairFunction:
        _tile_functions[pair] = TileFunction(name, options)
        return pair

    return declare


@dataclass(frozen=True)
class Tokens:
    """Tokens of a shard: the rows or the columns of a span."""

    x: Tensor  # [B, m, F], in the dtype of products
    scale: Tensor  # [B, m, 1]
    marks: Tensor | None  # [B, m, 1]; None if all tokens form pairs


def rows_at_once(tokens: int, batch: int) -> int:
    """Return how many rows a span of a shard should have, a multiple of 128.

    This covers all tokens if their q, with as many columns, has at most Q_ELEMENTS
    elements. Otherwise, spans are of about equal size.
    """
    most = max(128, Q_ELEMENTS // max(1, batch * tokens))
    return part_size(tokens, most, multiple=128)


def takes(x: Tensor, pair: PairFunction) -> bool:
    """Return whether the kernel is to compute the pairs of tokens x.

    The first time, the host waits for the kernel's result on a small example.
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
    """Return whether the kernel may be used on the device; warn if it fails there."""
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
    """Return how the kernel fails on an example, or None if it agrees with float64."""
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
    """Return the largest relative error of Σ w and of q, beside float64, in three
    spans: a mirrored one, one with a mask, and one with segments.
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
            # the tokens of the other sequence, so that none pairs with itself
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
        mirrored: the first columns are the rows. Of the square that these form, only
            the tiles on and above the diagonal are computed, and q is symmetric. A
            token and itself are no pair. Σ w has both (i, j) and (j, i) of every pair:
            those of columns beyond the square count twice.
    """
    # imports Triton
    from titan_disp.dispersion.triton_kernels import span_kernel

    batch, row_count, features = rows.x.shape
    col_count = cols.x.shape[1]
    shape = TILE_SHAPES[rows.x.dtype]
    # In bf16, rows of q begin at multiples of 128 bytes: writes and products are faster.
    width = math.ceil(col_count / 64) * 64
    q = rows.x.new_empty(batch, row_count, width)
    tiles_down = math.ceil(row_count / shape["TILE"])
    tiles_across = math.ceil(col_count / shape["TILE"])
    # A sum for each tile, not atomic additions, whose order and rounding would vary.
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
    """Features, scales or marks, as the kernel takes them.

    The values of a sequence are adjacent in memory.
    """

    first: Tensor  # in the kernel, a pointer to the first value
    stride: int  # values from the beginning of a sequence to that of the next


class Side(NamedTuple):
    """``Tokens`` as the kernel takes them."""

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

    It is copied if the values of a sequence are not adjacent.
    """
    if tensor.stride()[1:] != (tensor.shape[2], 1):
        tensor = tensor.contiguous()
    return Values(tensor, stride=tensor.stride(0))
