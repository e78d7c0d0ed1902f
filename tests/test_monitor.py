"""Condensation measured while the real trainer runs: the same numbers on every mesh, and no effect on training."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.distributed import spawn
from tests.mesh import SEQ_LEN, build
from tests.streams import first_sequences_by_hand
from titan_disp.condensation.record import load_steps
from titan_disp.run.reader import read_json_lines, read_metrics

# 5 sequences divide among no number of ranks here, and 10 of 32 positions are not the first ones.
SECTION = ("--condensation.sequences", "5", "--condensation.max_tokens", "10")
TP = ("--parallelism.tensor_parallel_degree", "2")
MESHES = {
    "fsdp": (),
    "hsdp": ("--parallelism.data_parallel_replicate_degree", "2"),
    "fsdp_tp": TP,
    "fsdp_tp_whole_logits": (*TP, "--parallelism.disable_loss_parallel"),
}


def measure(sample, folder, meshes):
    for name, options in meshes.items():
        trainer = build(sample, Path(folder) / name, *SECTION, *options)
        change_final_norm(trainer.model_parts[0])
        trainer.measure_condensation()
        assert trainer.model_parts[0].training
        if name == "one":
            save_by_hand(trainer, sample, Path(folder) / "by_hand.npz")
        trainer.close()
        dist.barrier()


@torch.no_grad()
def change_final_norm(model):
    """The initial one, of ones, leaves cosines as they are."""
    weight = model.norm.weight
    values = torch.linspace(0.1, 3, len(weight))
    weight.copy_(
        distribute_tensor(values, weight.device_mesh, weight.placements) if isinstance(weight, DTensor) else values
    )


@torch.no_grad()
def save_by_hand(trainer, sample, path):
    file = sample + "/en/c4-validation.00000-of-00001.json.gz"
    tokens = first_sequences_by_hand(file, Path(sample), 5, SEQ_LEN + 1)
    model = trainer.model_parts[0].double().eval()
    logits, (block, normed) = model(tokens[:, :-1], return_activations=(6, 7))
    assert logits.dtype == torch.float64
    log_probabilities = logits.numpy() - np.logaddexp.reduce(logits.numpy(), axis=-1, keepdims=True)
    ce = -np.take_along_axis(log_probabilities, tokens[:, 1:, None].numpy(), axis=-1).mean()
    cosines = []
    for z in (block, normed):
        u = z[:, np.linspace(0, SEQ_LEN - 1, 10).round().astype(int)].numpy()
        u /= np.linalg.norm(u, axis=-1, keepdims=True)
        cosines.append((u @ u.transpose(0, 2, 1)).mean())
    np.savez(path, cross_entropy=ce, cosines=cosines)


def train_with_and_without(sample, folder):
    random = {}
    for interval in (0, 2):
        options = ("--training.steps", "5", "--metrics.log_freq", "1", "--condensation.interval", str(interval))
        # Steps that are saved are measured, too.
        options += ("--checkpoint.enable", "--checkpoint.interval", "2", "--optimizer.lr", "1e-2")
        trainer = build(sample, Path(folder) / str(interval), *SECTION, *options, "--metrics.enable_tensorboard")
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
    by_hand = np.load(tmp_path / "by_hand.npz")
    # float32 against float64.
    assert expected.cross_entropy == pytest.approx(by_hand["cross_entropy"].item(), abs=2e-6)
    np.testing.assert_allclose(expected.mean_cosine[-2:], by_hand["cosines"], atol=1e-6)
    assert abs(np.diff(by_hand["cosines"])) > 1e-3
    for name in MESHES:
        found = load_steps(tmp_path / name / "condensation")[0]
        for key, values in expected.by_layer().items():
            # Activations in float32, whose sums TP orders otherwise.
            np.testing.assert_allclose(found.by_layer()[key], values, rtol=0, atol=1e-5, err_msg=f"{name} {key}")
        # A cosine near the edge of a bin may fall on its other side: few of 5 × 100.
        assert np.abs(found.histogram - expected.histogram).sum() < 0.05
        assert (found.sequences, found.tokens) == (5, 10)
        assert found.cross_entropy == pytest.approx(expected.cross_entropy, abs=2e-6)


@pytest.mark.slow
def test_training_is_the_same_with_it(sample, tmp_path):
    spawn(2, train_with_and_without, str(sample), str(tmp_path))
    keys, run = ("loss", "ce", "dispersion", "grad_norm", "tokens"), tmp_path / "2"
    with_it, without = (
        {step: [row[key] for key in keys] for step, row in read_metrics(folder).items()}
        for folder in (run, tmp_path / "0")
    )
    assert list(without) == [1, 2, 3, 4, 5]
    assert with_it == without  # bit for bit
    steps = load_steps(run / "condensation")
    assert list(steps) == [0, 2, 4, 5]
    assert not np.allclose(steps[0].mean_cosine, steps[5].mean_cosine, atol=1e-4)
    rows = [r for r in read_json_lines(run / "metrics.jsonl") if "condensation" in r]
    assert [r["step"] for r in rows] == list(steps)
    assert rows[-1]["condensation"]["mean_cosine"] == steps[5].mean_cosine.tolist()
    assert rows[-1]["condensation"]["cross_entropy"] == steps[5].cross_entropy < steps[0].cross_entropy - 0.1
    assert not load_steps(tmp_path / "0" / "condensation")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tb"), size_guidance={"images": 0}).Reload()
    assert [e.step for e in board.Images("condensation/heatmap")] == list(steps)
