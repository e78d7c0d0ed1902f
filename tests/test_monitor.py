"""Condensation measured while the real trainer runs: the same numbers on every mesh, and no effect on training."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.distributed import spawn
from tests.mesh import build
from titan_disp.condensation.record import load_steps
from titan_disp.run.folder import read_json_lines, read_metrics

# 5 sequences divide among no number of ranks here, and 10 of 32 positions are not the first ones.
SECTION = ("--condensation.sequences", "5", "--condensation.max_tokens", "10")
MESHES = {
    "fsdp": (),
    "hsdp": ("--parallelism.data_parallel_replicate_degree", "2"),
    "fsdp_tp": ("--parallelism.tensor_parallel_degree", "2"),
}


def measure(sample, folder, meshes):
    for name, options in meshes.items():
        trainer = build(sample, Path(folder) / name, *SECTION, *options)
        trainer.measure_condensation()
        assert trainer.model_parts[0].training
        trainer.close()
        dist.barrier()


def train_with_and_without(sample, folder):
    random = {}
    for interval in (0, 2):
        options = ("--training.steps", "5", "--metrics.log_freq", "1", "--condensation.interval", str(interval))
        options += (
            "--metrics.enable_tensorboard",
            "--checkpoint.enable",  # at steps that are measured, too
            "--checkpoint.interval",
            "2",
            "--optimizer.lr",
            "1e-2",
        )
        trainer = build(sample, Path(folder) / str(interval), *SECTION, *options)
        trainer.train()
        random[interval] = torch.get_rng_state()
        trainer.close()
        dist.barrier()
    assert torch.equal(random[0], random[2])


@pytest.mark.slow
def test_same_numbers_on_every_mesh(sample, tmp_path):
    spawn(1, measure, str(sample), str(tmp_path), {"one": ("--training.local_batch_size", "8")})
    spawn(4, measure, str(sample), str(tmp_path), MESHES)
    expected = load_steps(tmp_path / "one" / "condensation")[0]
    assert (expected.sequences, expected.tokens) == (5, 10)
    for name in MESHES:
        found = load_steps(tmp_path / name / "condensation")[0]
        for key, values in expected.by_layer().items():
            # Activations in float32, whose sums TP orders otherwise.
            np.testing.assert_allclose(found.by_layer()[key], values, rtol=0, atol=1e-5, err_msg=f"{name} {key}")
        # A cosine near the edge of a bin may fall on its other side: few of 5 × 100.
        assert np.abs(found.histogram - expected.histogram).sum() < 0.05
        assert (found.sequences, found.tokens) == (5, 10)


@pytest.mark.slow
def test_training_is_the_same_with_it(sample, tmp_path):
    spawn(2, train_with_and_without, str(sample), str(tmp_path))
    metrics = {
        interval: {
            step: [record[k] for k in ("loss", "ce", "dispersion", "grad_norm", "tokens")]
            for step, record in read_metrics(tmp_path / str(interval)).items()
        }
        for interval in (0, 2)
    }
    assert list(metrics[0]) == [1, 2, 3, 4, 5]
    assert metrics[2] == metrics[0]  # bit for bit
    run = tmp_path / "2"
    steps = load_steps(run / "condensation")
    assert list(steps) == [0, 2, 4, 5]
    assert not np.allclose(steps[0].mean_cosine, steps[5].mean_cosine, atol=1e-4)
    rows = [r for r in read_json_lines(run / "metrics.jsonl") if "condensation" in r]
    assert [r["step"] for r in rows] == list(steps)
    assert rows[-1]["condensation"]["mean_cosine"] == steps[5].mean_cosine.tolist()
    assert not load_steps(tmp_path / "0" / "condensation")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tb"), size_guidance={"images": 0}).Reload()
    assert [e.step for e in board.Images("condensation/heatmap")] == list(steps)
    logged = [e.value for e in board.Scalars("condensation_mean_cosine/layer_06")]
    np.testing.assert_allclose(logged, [s.mean_cosine[6] for s in steps.values()], rtol=1e-6)
    assert "condensation/spearman" in board.Tags()["scalars"]
