"""Predict the time of a measurement of condensation in a run on GPUs. Some parts are timed
on a CPU, and the others are calculated.

    python benchmarks/measurement.py             # the numbers of docs/measurements.md, in seconds
    python benchmarks/measurement.py --config train_configs/debug.toml --nodes 1 2

The eigenvalues of a layer's Gram matrix, a heatmap and the files are timed on one core.
The forward pass and the cross-entropy of the held-out sequences, and the products of
their tokens, are calculated from the peak numbers below. The monitor determines how the
ranks divide the work, and ``titan-disp plan`` predicts the time of the steps between two
measurements.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from torch.utils.tensorboard import SummaryWriter
from torchtitan.config import JobConfig

from measuring import Printed, show, timed
from titan_disp.cluster.cost import find_gpu
from titan_disp.cluster.plan import Plan, make_plan
from titan_disp.condensation.heatmap import heatmaps as draw
from titan_disp.condensation.measure import (
    Accumulator,
    MeshPosition,
    Monitor,
    _effective_rank,
)
from titan_disp.config.command_options import Machine
from titan_disp.config.load import load_config
from titan_disp.models.registry import args_of
from titan_disp.run.metrics import HEATMAP_RATIO
from titan_disp.run.storage import append_json

# NVIDIA H100 Tensor Core GPU data sheet, SXM: 67 TFLOP/s of float64 on tensor cores (we
# expect 60), and 3.35 TB/s
FLOAT64_FLOPS = 60e12
MEMORY_BANDWIDTH = 3.35e12
# Logits are written and read in bf16, and converted to float32 for the logarithms, 512
# tokens at a time: 20 bytes
BYTES_PER_LOGIT = 20


@dataclass
class Options(Printed):
    config: str = "train_configs/qwen3_0.6b_c4.toml"
    nodes: tuple[int, ...] = (1, 8, 80)
    gpus_per_node: int = 8
    rounds: int = 9
    """Rounds of each timing, the first of which warms up. The least counts."""


def least_seconds(tokens: int, dim: int, layers: int, rounds: int) -> dict[str, float]:
    """Return the least CPU seconds of one core for a layer's eigenvalues, a heatmap in
    TensorBoard, and a measurement's files.
    """
    torch.set_num_threads(1)
    u = torch.randn(min(tokens, dim), max(tokens, dim), dtype=torch.float64)
    gram = u @ u.T
    sums = Accumulator(layers)
    for layer in range(layers):
        # These tokens are enough: the size of pictures and files is always the same.
        sums.add(layer, torch.randn(1, 64, 16))
    measurement = sums.result(64)
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as board:

        def eigenvalues() -> None:
            _effective_rank(torch.linalg.eigvalsh(gram))

        def heatmap() -> None:
            board.add_figure("heatmap", draw([{"step 0": measurement}]), 0)

        def files() -> None:
            measurement.save(Path(folder) / "step-0.npz")
            append_json(Path(folder) / "metrics.jsonl", measurement.to_json())

        return {
            part.__name__: min(timed(part)[1] for _ in range(rounds))
            for part in (eigenvalues, heatmap, files)
        }


def busiest_rank(
    ranks: int, sequences: int, batch_size: int, layers: int
) -> tuple[int, int]:
    """Return the number of sequences in the forward pass of a rank, and the number of
    pairs of a sequence and a layer that the busiest rank measures.
    """
    most = 0
    for rank in range(ranks):
        monitor = Monitor(
            torch.zeros(sequences, 3, dtype=torch.int64),
            batch_size,
            max_tokens=2,
            mesh=MeshPosition(rank, ranks),
        )
        copy_of_layer = torch.arange(layers)[:, None] % monitor.copies
        most = max(most, int((monitor.copy == copy_of_layer).sum()))
    return monitor.copy.numel(), most


def heatmaps(measurements: Sequence[int]) -> int:
    """Return the number of heatmaps, given the steps of the measurements."""
    drawn = 0
    following = 0.0
    for step in measurements:
        if step >= following:
            drawn += 1
            following = HEATMAP_RATIO * step
    return drawn


def cost(
    job_config: JobConfig, plan: Plan, taken: Mapping[str, float]
) -> dict[str, float]:
    """Return the seconds of each part of a measurement, their sum, and the measurements'
    fraction of the time ("part"). "layers" counts the layers that the busiest rank measures,
    over all its sequences.
    """
    section = job_config.condensation
    args = args_of(job_config)
    n = min(section.max_tokens, plan.batch.seq_len)
    layers = args.n_layers + 2
    sequences, pairs = busiest_rank(
        plan.mesh.data_parallel, section.sequences, plan.batch.local_batch_size, layers
    )
    flops = find_gpu(plan.machine).bf16_flops * plan.machine.mfu
    measurements = range(0, plan.batch.steps + 1, section.interval)
    forward_flops = plan.model.flops / plan.batch.global_batch_size / 3
    logits = plan.batch.seq_len * args.vocab_size
    parts = {
        "forward": sequences * forward_flops / flops,
        "cross-entropy": sequences * logits * BYTES_PER_LOGIT / MEMORY_BANDWIDTH,
        "products": pairs * 2 * 2 * n**2 * args.dim / FLOAT64_FLOPS,
        "eigenvalues": pairs * taken["eigenvalues"],
        "files": taken["files"],
        "heatmaps": taken["heatmap"] * heatmaps(measurements) / len(measurements),
    }
    total = sum(parts.values())
    part = total / (total + section.interval * plan.time.step_seconds)
    return {"layers": pairs, **parts, "sum": total, "part": part}


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    job_config = load_config(["--job.config_file", options.config])
    args = args_of(job_config)
    n = min(job_config.condensation.max_tokens, job_config.training.seq_len)
    taken = least_seconds(n, args.dim, args.n_layers + 2, options.rounds)
    rows = []
    for nodes in options.nodes:
        plan = make_plan(job_config, Machine(nodes, options.gpus_per_node))
        rows.append(
            {"gpus": nodes * options.gpus_per_node, **cost(job_config, plan, taken)}
        )
    show(options.json, timed=[taken], rows=rows)


if __name__ == "__main__":
    main()
