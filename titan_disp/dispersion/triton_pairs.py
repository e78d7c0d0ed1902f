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
from typing import Any

import torch
from torch import Tensor

from titan_disp.dispersion.kernels import record

# cosines [B, m, n], which it may overwrite → w and r = dw/dc
PairFunction = Callable[[Tensor], tuple[Tensor, Tensor]]

KERNELS = "titan_disp.dispersion.triton_kernels"
# "0": the kernel is never used. "1": it is also used in float32, and on a CPU under
# TRITON_INTERPRET=1. Otherwise it is used for bf16 tokens on a GPU. (In float32, its
# products use no tensor cores, and the library's are faster.)
CHOICE = os.environ.get("TITAN_DISP_TRITON", "")


@dataclass(frozen=True)
class TileShape:
    """What one program computes, and with which resources."""

    tokens: int  # of the rows, and as many of the columns
    features: int  # that are loaded and multiplied at a time
    warps: int
    stages: int  # of loads that are under way
    registers: int  # per thread, at most


# bf16 on an H100: three stages of two 128×64 operands are 96 KiB of an SM's 227 KiB of
# shared memory, and 256 threads of 128 registers are half of its registers. So two
# programs run on an SM: the tensor cores work for one while the other computes w and r.
# (With 128 registers, a few values are spilled after the products; none is in the loop
# over features.) Smaller tiles would read the tokens from the L2 cache more often than
# it can deliver them.
TILE_SHAPES = {
    torch.bfloat16: TileShape(
        tokens=128, features=64, warps=8, stages=3, registers=128
    ),
    torch.float32: TileShape(tokens=64, features=32, warps=4, stages=2, registers=128),
}
# of q: 128 MiB in bf16
Q_ELEMENTS = 1 << 26
# of S and q, relative, with which the kernel is used: q is rounded to bf16, by 2⁻⁹ or,
# under the interpreter, 2⁻⁸
LARGEST_ERROR = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


@dataclass(frozen=True)
class TileFunction:
    """A function that Triton compiles into the kernel, and its options."""

    name: str  # in ``triton_kernels``, or "package.module:function"
    options: tuple[float, ...]

    @property
    def function(self) -> Any:
        module, _, function = self.name.rpartition(":")
        return getattr(importlib.import_module(module or KERNELS), function)


_tile_functions: dict[PairFunction, TileFunction] = {}


def in_triton(name: str, *options: float) -> Callable[[PairFunction], PairFunction]:
    """Declare that a function of this name, decorated with ``triton.jit``, computes of
    (c, *options) what the pair function computes of c.
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
    """Return of how many rows of a shard q is computed at once: all, if their q has at
    most Q_ELEMENTS elements, or else parts of about equal size.
    """
    most = max(128, Q_ELEMENTS // max(1, batch * tokens))
    parts = math.ceil(tokens / most)
    return math.ceil(tokens / parts / 128) * 128


def takes(x: Tensor, pair: PairFunction) -> bool:
    """Return whether the kernel computes the pairs of tokens x.

    The first time, the host waits for the kernel's result on a small example.
    """
    if pair not in _tile_functions or x.dtype not in TILE_SHAPES:
        return False
    is_default = x.device.type == "cuda" and x.dtype == torch.bfloat16
    if not is_default and CHOICE != "1":
        return False
    # Dynamo cannot trace a kernel that takes a function.
    if torch.compiler.is_compiling():
        return False
    return _is_accurate(pair, x.device, x.dtype)


@functools.cache
def _is_accurate(pair: PairFunction, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernel runs on the device and agrees with float64; warn if it
    does not.
    """
    name = _tile_functions[pair].name
    if CHOICE == "0":
        record(name, "not used: TITAN_DISP_TRITON is 0")
        return False
    try:
        error = _error_of_example(pair, device, dtype)
        reason = f"its relative error is {error:.1e}"
    except torch.OutOfMemoryError:
        raise
    # Triton, its compilers and the driver raise different types.
    except Exception as exception:
        error = torch.inf
        first_line = str(exception).split("\n")[0]
        reason = f"{type(exception).__name__}: {first_line}"
    if error <= LARGEST_ERROR[dtype]:
        record(name, "compiled")
        return True
    record(name, f"not used: {reason}")
    warnings.warn(
        f"the Triton kernel {name} is not used, and the dispersion loss runs slower: "
        f"{reason}",
        stacklevel=2,
    )
    return False


def _error_of_example(
    pair: PairFunction, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the relative error of S or of q, whichever is larger, for a few tokens
    beside float64.
    """
    count = 2 * TILE_SHAPES[dtype].tokens + 1
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, count, 24, generator=generator)
    x = x.to(device, dtype)
    scale = 1 / torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    example = Tokens(x=x, scale=scale, marks=None)
    sums, q = span_sums(example, example, pair, mirrored=True)

    exact_scale = scale.double()
    u = exact_scale * x.double()
    w, r = pair(u @ u.mT)
    itself = torch.eye(count, device=device, dtype=torch.bool)
    exact_q = (r * exact_scale * exact_scale.mT).masked_fill(itself, 0.0)
    exact_sums = w.masked_fill(itself, 0.0).sum((1, 2))
    error_of_sums = (sums - exact_sums).norm() / exact_sums.norm()
    error_of_q = (q - exact_q).norm() / exact_q.norm()
    return torch.maximum(error_of_sums, error_of_q).item()


def span_sums(
    rows: Tokens, cols: Tokens, pair: PairFunction, mirrored: bool
) -> tuple[Tensor, Tensor]:
    """Return Σ w [B] in float32 and q [B, m, n] in the dtype of x.

    Args:
        mirrored: the columns begin with the rows. Of the square that these form, only
            the tiles on and above the diagonal are computed, and q is the same on both
            sides. A token and itself are no pair. Σ w counts every other pair of a row
            and a column twice.
    """
    kernels = importlib.import_module(KERNELS)
    batch, row_count, features = rows.x.shape
    col_count = cols.x.shape[1]
    shape = TILE_SHAPES[rows.x.dtype]
    # Rows of q begin at multiples of 128 bytes, which makes writes and products faster.
    width = math.ceil(col_count / 64) * 64
    q = rows.x.new_empty(batch, row_count, width)[..., :col_count]
    tiles_down = math.ceil(row_count / shape.tokens)
    tiles = tiles_down * math.ceil(col_count / shape.tokens)
    # A sum for each tile, not atomic additions, whose order and rounding would vary.
    sums = rows.scale.new_empty(batch, tiles)
    row_marks = _numbers(rows.marks)
    col_marks = _numbers(cols.marks)
    tile_function = _tile_functions[pair]
    with torch.cuda.device_of(rows.x):
        kernels.span_kernel[(batch * tiles,)](
            x_rows=rows.x,
            x_rows_strides=rows.x.stride(),
            x_cols=cols.x,
            x_cols_strides=cols.x.stride(),
            scale_rows=rows.scale,
            scale_rows_strides=rows.scale.stride(),
            scale_cols=cols.scale,
            scale_cols_strides=cols.scale.stride(),
            marks_rows=row_marks,
            marks_rows_strides=None if row_marks is None else row_marks.stride(),
            marks_cols=col_marks,
            marks_cols_strides=None if col_marks is None else col_marks.stride(),
            q=q,
            q_strides=q.stride(),
            sums=sums,
            rows=row_count,
            cols=col_count,
            constants=tile_function.options,
            FEATURES=features,
            FUNCTION=tile_function.function,
            MIRRORED=mirrored,
            TILE=shape.tokens,
            STEP=shape.features,
            num_warps=shape.warps,
            num_stages=shape.stages,
            maxnreg=shape.registers,
        )
    return sums.sum(1), q


def _numbers(marks: Tensor | None) -> Tensor | None:
    """Return marks as numbers that are equal for two tokens of a pair, and negative at
    padding.
    """
    if marks is None or marks.dtype != torch.bool:
        return marks
    return marks.to(torch.int8) - 1
