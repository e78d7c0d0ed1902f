"""Predict the time of the exact loss on one H100 from its data sheet. Nothing here is measured.

    python benchmarks/roofline.py

Each kernel takes the longer of its FLOPs at 70 % of the bf16 peak and its bytes at 70 % of the memory's bandwidth, or the
host's time to launch it. "per tile" adds to W after every tile, as titan-disp did before; "per row" after every row of
tiles, as it does now. Both fractions and the time of a launch are guesses.
"""

from measuring import show
from titan_disp.cluster.cost import GPUS
from titan_disp.dispersion.layers import GPU_BATCH_ELEMENTS
from titan_disp.dispersion.pairwise import tile_size

FLOPS, BYTES = 0.7 * GPUS["H100"].bf16_flops, 0.7 * 3.35e12  # H100 data sheet, SXM: 3.35 TB/s
LAUNCH = 8e-6  # seconds of the host per kernel that PyTorch launches
OTHER = 8  # kernels per layer besides those of the tiles: norms, scales, the gradient of z
CASES = [(1, 4096, 1), (4, 2048, 1), (16, 4096, 1), (1, 512, 1), (1, 512, 28)]  # sequences, tokens, layers in a pack
FEATURES = 1024


def kernels(batch: int, n: int, f: int, side: int, per_row: bool) -> list[tuple[float, float]]:
    """Return the FLOPs and bytes of every kernel of one pass over the tiles."""
    sizes = [min(side, n - i) for i in range(0, n, side)]
    found = []

    def add(rows: int, inner: int, new: bool = False) -> None:  # to rows of W: q and tokens read, W read and written
        found.append((2.0 * rows * inner * f, 2.0 * rows * inner + 2 * inner * f + rows * f * (4 if new else 8)))

    for k, m in enumerate(sizes):
        for j, width in enumerate(sizes[k:]):
            found.append((2.0 * m * width * f, 4.0 * m * width + 2 * (m + width) * f))  # c, in float32
            found.append((0.0, (4.0 + 2.0) * m * width))  # w and q
            if not per_row:
                add(m, width)
                if j:
                    add(width, m)
        if per_row:
            rest = sum(sizes[k:])
            add(m, rest, new=k == 0)
            if rest > m:
                add(rest - m, m, new=k == 0)
    return [(batch * flops, batch * moved) for flops, moved in found]


def seconds(batch: int, n: int, per_row: bool) -> tuple[float, int, float]:
    """Return the time, the launches and the bytes of one pass over ``batch`` sequences."""
    most = max(1, GPU_BATCH_ELEMENTS // (n * FEATURES))
    parts = -(-batch // most)
    each = -(-batch // parts)
    every = kernels(each, n, FEATURES, tile_size(n, each, "cuda"), per_row) * parts
    launches = len(every) + OTHER * parts
    busy = sum(max(flops / FLOPS, moved / BYTES) for flops, moved in every) + 24 * batch * n * FEATURES / BYTES
    return max(busy, launches * LAUNCH), launches, sum(moved for _, moved in every)


def main() -> None:
    rows = []
    for batch, n, layers in CASES:
        (old, old_launches, old_bytes), (new, new_launches, new_bytes) = (
            seconds(batch * layers, n, per_row) for per_row in (False, True)
        )
        bare = 3.0 * batch * n * n * FEATURES / FLOPS
        rows.append(
            {
                "one layer": f"B {batch}, N {n}" + (f", {layers} layers together" if layers > 1 else ""),
                "launches, per tile": old_launches / layers,
                "per row": new_launches / layers,
                "GB moved, per tile": old_bytes / layers / 1e9,
                "per row ": new_bytes / layers / 1e9,
                "ms, per tile": 1e3 * old / layers,
                "per row  ": 1e3 * new / layers,
                "ms of the bare products": 1e3 * bare,
            }
        )
    show(False, prediction=rows)


if __name__ == "__main__":
    main()
