"""Measure time and extra peak memory of the dispersion loss, forward and backward, by
estimator.

    python benchmarks/dispersion.py                                   # a table
    python benchmarks/dispersion.py --n 4096 --f 1024 --b 1 --json    # only an object with "rows"

"naive" is plain autograd in the same dtype: normalise, one N×N product, clamp, arccos,
mask, logsumexp. "floor" is only the matrix products of all pairs: 3 N²F FLOPs, as each
tile above the diagonal has one product for the cosines and two for the gradient.

Times are the least of --repeat rounds in one process, in which the estimators take turns,
after a round that warms up. (On a GPU, ``gpu_cost.py --measure`` measures the time of the
kernels.) Memory is the peak of a call in a fresh process, minus the memory before the
call: resident pages on a CPU, and the allocator's count on a GPU. "gradient cosine" is that
of an estimator's gradient and the gradient of "exact".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from torch.nn.functional import cosine_similarity

from measuring import DEVICE, Printed, in_a_fresh_process, show, timed
from titan_disp.cpu import high_water_mark, resident_bytes
from titan_disp.dispersion import DispersionLoss
from titan_disp.dispersion.pairwise import tile_size


@dataclass
class Options(Printed):
    n: tuple[int, ...] = (1024, 2048, 4096, 8192)
    """Tokens per sequence."""
    f: int = 1024
    """Features."""
    b: int = 1
    """Sequences."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    variant: str = "angular"
    """Variant of exact, moments and sampled. (naive and floor are always angular.)"""
    estimators: tuple[str, ...] = ("naive", "floor", "exact", "moments", "sampled")
    device: str = DEVICE
    repeat: int = 3


def tokens(options: Options, n: int) -> Tensor:
    """Return tokens [B, N, F] with a common direction and a decaying spectrum, like the
    activations of a model in training.
    """
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, options.f + 1) ** -0.5
    z = torch.randn(options.b, n, options.f, generator=generator) * spectrum
    z[..., 0] += 1.0
    return z.to(options.device, getattr(torch, options.dtype))


def naive(zs: list[Tensor]) -> Tensor:
    """Return the angular loss [B] of one layer with plain autograd code."""
    (z,) = zs
    n = z.shape[1]
    u = z / (z.norm(dim=-1, keepdim=True) + 1e-2)
    d = torch.acos((u @ u.mT).clamp(-0.75, 0.75)) / math.pi
    d = d.masked_fill(torch.eye(n, dtype=torch.bool, device=z.device), math.inf)
    return (-d).logsumexp((1, 2)) - math.log(n * (n - 1))


def floor(z: Tensor) -> None:
    """Compute the matrix products that the gradient of a loss of all pairs needs."""
    tile = tile_size(z.shape[1], z.shape[0], z.device.type)
    gradient = torch.zeros_like(z)
    tiles = zip(z.split(tile, 1), gradient.split(tile, 1), strict=True)
    for first, second in combinations_with_replacement(tiles, 2):
        rows, gradient_of_rows = first
        columns, gradient_of_columns = second
        c = torch.bmm(rows, columns.mT)
        gradient_of_rows.baddbmm_(c, columns)
        if columns is not rows:
            gradient_of_columns.baddbmm_(c.mT, rows)


def call(estimator: str, options: Options) -> Callable[[Tensor], Any]:
    """Return a function of z that returns ∂(sum of losses)/∂z, or None for floor."""
    if estimator == "floor":
        return floor
    loss: Callable[[list[Tensor]], Tensor] = naive
    if estimator != "naive":
        loss = DispersionLoss(options.variant, estimator)

    def forward_and_backward(z: Tensor) -> Tensor:
        z = z.detach().requires_grad_()
        (grad,) = torch.autograd.grad(loss([z]).sum(), z)
        return grad

    return forward_and_backward


def least_seconds(options: Options, n: int) -> dict[str, float]:
    """Return the least seconds of a call, by estimator, after a round that warms up."""
    z = tokens(options, n)
    calls = {name: call(name, options) for name in options.estimators}
    rounds = [
        {name: timed(function, z)[0] for name, function in calls.items()}
        for _ in range(options.repeat + 1)
    ]
    return {name: min(seconds[name] for seconds in rounds[1:]) for name in calls}


def gradient_cosines(options: Options, n: int) -> dict[str, float]:
    """Return the cosine of each estimator's gradient with the exact gradient."""
    z = tokens(options, n)
    names = {"exact", *options.estimators} - {"floor"}
    gradients = {name: call(name, options)(z).double().flatten() for name in names}
    return {
        name: cosine_similarity(gradient, gradients["exact"], dim=0).item()
        for name, gradient in gradients.items()
    }


def peak_bytes(options: Options, n: int, estimator: str) -> int:
    """Return the peak memory of one call in this process, minus the memory before the
    call.
    """
    function = call(estimator, options)
    function(tokens(options, 32))  # allocates thread pools and the kernels' workspaces
    z = tokens(options, n)
    if options.device == "cuda":
        function(z)  # compiling and tuning for this shape takes memory too
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function(z)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # this resets the high-water mark
    before = resident_bytes()
    function(z)
    return high_water_mark() - before


def rows(options: Options) -> list[dict[str, Any]]:
    """Return a row for each length and estimator."""
    table = []
    for n in options.n:
        seconds = least_seconds(options, n)
        cosines = gradient_cosines(options, n)
        for name in options.estimators:
            row = {
                "estimator": name,
                "n": n,
                "f": options.f,
                "b": options.b,
                "dtype": options.dtype,
                "device": options.device,
                "seconds": seconds[name],
                "peak_bytes": in_a_fresh_process(peak_bytes, options, n, name),
                "gradient_cosine": cosines.get(name),
            }
            table.append(row)
    return table


def main(options: Options) -> None:
    show(options.json, rows=rows(options))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
