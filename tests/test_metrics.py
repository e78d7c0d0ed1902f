"""What is logged beside TorchTitan's metrics: time left, counters of the data,
condensation, one TensorBoard folder.

Condensation is measured while the real trainer runs: the same numbers on every mesh,
and no effect on training.
"""

import dataclasses
import logging
import math
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.validate import Validator

import titan_disp.plugin  # noqa: F401
from tests.command_line import DEMO
from tests.distributed import spawn
from tests.mesh import SEQ_LEN, build, dims
from tests.streams import VALIDATION_FILE, first_sequences_by_hand
from tests.test_condensation import condensed
from titan_disp.condensation.record import load_steps
from titan_disp.config.load import load_config
from titan_disp.data.assignment import Share
from titan_disp.data.listing import DataFile
from titan_disp.data.loader import StreamLoader
from titan_disp.data.validation import StreamValidator
from titan_disp.errors import DataError
from titan_disp.metric import Metric
from titan_disp.objective import LossLedger
from titan_disp.run.liveness import Clock
from titan_disp.run.metrics import DispersionMetrics, TensorBoardFolder
from titan_disp.run.reader import read_condensation, read_json_lines, read_metrics


class DamagedFiles:
    """A loader of 100 files in their first epoch, ``skipped`` of which ended early."""

    check_counters = StreamLoader.check_counters
    fingerprint: dict = {}

    def __init__(self, skipped):
        self.groups = [Share("", 0, 8, 8, 1.0)]
        self.options = SimpleNamespace(max_skipped_fraction=0.2)
        self.files = [DataFile("", "", 1)] * 100
        self.skipped = skipped
        self.read = 0
        self.waited = 0.5
        self.texts = [1.0]

    def counters(self):
        names = ("documents", "skipped_documents", "skipped_bytes", "epoch")
        counts = dict.fromkeys(map(Metric, names), 0)
        counts[Metric("skipped_files")] = self.skipped
        counts[Metric("stored_bytes")] = self.read
        counts[Metric("seconds_waited")] = self.waited
        counts[Metric("epochs_read")] = 0.375
        return counts


def metrics(run, loader=None, tensorboard=False, **degrees):
    options = (
        "--training.seq_len",
        "32",
        "--training.global_batch_size",
        "16",
        "--training.steps",
        "100",
    )
    config = load_config(
        ["--job.config_file", str(DEMO), "--job.dump_folder", str(run), *options]
    )
    config.metrics.enable_tensorboard = tensorboard
    built = DispersionMetrics(
        config, dims(math.prod(degrees.values()), **degrees), LossLedger(), loader
    )
    built.num_flops_per_token = 1
    return built


@pytest.fixture
def clock(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    clock = SimpleNamespace(now=5000.0)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    return clock


def lines(caplog):
    """The console's lines of steps. TorchTitan's own have "step:"."""
    return [message for message in caplog.messages if message.startswith("step ")]


def log(metrics, step):
    metrics.data_loading_times.append(0.0)
    metrics.log(step, 3.0, 3.0, 1.0)


def test_terms_are_those_of_the_logged_step(one_rank, tmp_path, caplog):
    logged = metrics(tmp_path)
    for step in (9, 10, 11, 20, 30, 40):
        logged.ledger.add(
            torch.tensor(step * 2.0), torch.tensor(step * -1.0), torch.tensor(2)
        )
        logged.ledger.add_fit_errors(torch.tensor([0.5 / step if step < 30 else 0.2]))
        if logged.should_log(step):
            log(logged, step)
    rows = read_metrics(tmp_path)
    terms = {step: (row["ce"], row["dispersion"]) for step, row in rows.items()}
    assert terms == {step: (step, -step / 2) for step in (10, 20, 30, 40)}
    assert rows[20]["dispersion_fit_error"] == pytest.approx(0.025)
    (said,) = [message for message in caplog.messages if "moments" in message]
    assert said.startswith(
        "step 30: the moments estimator fits some tokens badly: the error of its "
        "gradient may be 20%"
    )


def test_time_left_after_a_resume(one_rank, tmp_path, clock, caplog):
    """The pace is that of this start, which first logs at step 41: 10 steps in 20 s. 49
    steps are left.
    """
    resumed = metrics(tmp_path)
    clock.now += 300  # compilation
    log(resumed, 41)
    clock.now += 20
    log(resumed, 51)
    clock.now += 98
    log(resumed, 100)
    first, second, last = lines(caplog)
    assert re.fullmatch(
        r"step  41/100  loss 3.000  ce 3.000  dispersion 0.000  grad 1.00  .* GiB",
        first,
    )
    assert second.startswith("step  51/100  ")
    assert second.endswith(" GiB  0:01:38 left")
    assert last.endswith("  0:00:00 left")


def test_a_line_leaves_out_what_says_nothing(one_rank, tmp_path, clock, caplog):
    gpu = metrics(tmp_path)
    gpu.gpu_peak_flops = 1000.0
    gpu.parallel_dims.build_mesh()
    gpu.parallel_dims.world_size = 640
    gpu.job_config.dispersion.enabled = False
    gpu._loader = DamagedFiles(0)
    gpu._loader.counters = lambda: {
        Metric("stored_bytes"): 0,
        Metric("seconds_waited"): 0,
        Metric("epochs_read", "web"): 0.5,
        Metric("epochs_read", "wiki"): 1.25,
    }
    gpu._loader.check_counters = lambda data: None
    clock.now += 2
    gpu.ntokens_since_last_log = 250
    gpu.data_loading_times.append(0.0)
    gpu.log(7, 3.0, 3.0, 0.25, {"lr": 6e-4})
    (line,) = lines(caplog)
    assert re.fullmatch(
        r"step   7/100  loss 3.000  grad 0.250  lr 0.00060  640 × 125 tokens/s"
        r"  \d.\d\d GiB  mfu 12.5%  epoch 1.25",
        line,
    )


def test_tokens_are_those_of_all_replicas_once(one_rank, tmp_path):
    built = metrics(tmp_path, dp_replicate=2, dp_shard=3, cp=5)
    built.job_config.training.global_batch_size = -1
    built.job_config.training.local_batch_size = 7
    assert built.tokens_seen(11) == 11 * 2 * 3 * 7 * 32


def test_data_since_the_last_log(one_rank, tmp_path, clock, caplog):
    """4000 bytes in 8 s, 2 s of them spent waiting; then 600 bytes in 3 s without
    waiting. More damaged files end the run.
    """
    loader = DamagedFiles(20)
    logged = metrics(tmp_path, loader=loader)
    for seconds, loader.read, loader.waited in ((8, 4000, 2.0), (3, 4600, 2.0)):
        clock.now += seconds
        logged.ntokens_since_last_log = 1200
        log(logged, int(clock.now))
    assert [row["tps"] for row in read_metrics(tmp_path).values()] == [150.0, 400.0]
    data = [row["data"] for row in read_metrics(tmp_path).values()]
    assert [(d["stored_bytes_per_second"], d["wait_fraction"]) for d in data] == [
        (500.0, 0.25),
        (200.0, 0.0),
    ]
    waiting, not_waiting = lines(caplog)
    assert waiting.endswith(" GiB  25% waiting for data")
    assert "waiting" not in not_waiting
    loader.skipped = 21
    clock.now = 5020.0
    with pytest.raises(DataError, match="21 of 100 files are damaged"):
        log(logged, 5020)
    # the step that ends the run is on disk too
    assert list(read_metrics(tmp_path)) == [5008, 5011, 5020]


def test_condensation_in_tensorboard(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(
        TensorBoardFolder, "log_heatmap", lambda self, found, step: None
    )
    for per_layer in (False, True):
        logged = metrics(tmp_path / str(per_layer), tensorboard=True)
        logged.job_config.condensation.per_layer = per_layer
        for step, ce, found in (
            (0, 3.25, condensed(0.1, 0.1, 0.101, 0.102)),
            (7, 3.5, condensed(0.1, 0.3, 0.6, 0.2)),
        ):
            logged.log_condensation(
                step, dataclasses.replace(found, cross_entropy=ce), 0.5
            )
        logged.close()
        board = EventAccumulator(str(tmp_path / str(per_layer) / "tb")).Reload()
        found = {
            tag: [(e.step, round(e.value, 4)) for e in board.Scalars(tag)]
            for tag in board.Tags()["scalars"]
        }
        # Two blocks have no late third
        parts = {"blocks", "early_blocks", "middle_blocks", "last_block", "final_norm"}
        layers = {"layer_00", "layer_01", "layer_02"} if per_layer else set()
        numbers = ("mean_cosine", "std_cosine", "mean_angle", "effective_rank")
        assert {tag for tag in found if tag.startswith("condensation_")} == {
            f"condensation_{name}/{part}" for name in numbers for part in parts | layers
        }
    expected = {
        "condensation_mean_cosine/blocks": [(0, 0.1005), (7, 0.45)],
        "condensation_mean_angle/final_norm": [(0, 0.306), (7, 0.6)],
        "condensation_effective_rank/last_block": [(0, 0.404), (7, 2.4)],
        # for 0.1, 0.1, 0.101: √3/2
        "condensation/spearman_before_norm": [(0, 0.866), (7, 1)],
        # for 0.1, 0.1, 0.102: 2/√6, and for 0.1, 0.3, 0.2
        "condensation/kendall_after_norm": [(0, 0.8165), (7, 0.3333)],
        "held_out/cross_entropy": [(0, 3.25), (7, 3.5)],
        "condensation_mean_cosine/layer_02": [(0, 0.101), (7, 0.6)],
    }
    assert found | expected == found
    assert read_condensation(tmp_path / "True")[7]["mean_cosine"] == [
        0.1,
        0.3,
        0.6,
        0.2,
    ]


def test_heatmaps_are_ever_farther_apart(tmp_path, monkeypatch):
    """Each shows the model before training, also after a resume, which reads it in the
    run folder.
    """
    monkeypatch.setattr(
        "titan_disp.condensation.heatmap.heatmaps", lambda rows: [*rows[0].values()][0]
    )
    drawn = {}
    before = condensed(0.1, 0.2, 0.3)
    writer = SimpleNamespace(
        add_figure=lambda tag, shown, at: drawn.update(
            {at: shown.untrained_mean_cosine}
        )
    )
    monkeypatch.setattr(TensorBoardFolder, "_open", lambda self, step: writer)
    before.save(tmp_path / "condensation" / "step-0.npz")
    for begin, end in ((0, 100), (100, 310)):
        board = TensorBoardFolder(str(tmp_path / "tb"), str(tmp_path))
        for step in range(begin, end, 10):
            board.log_heatmap(condensed(0.4, 0.5, 0.6) if step else before, step)
    assert list(drawn) == [0, 10, 20, 30, 40, 50, 70, 90, 100, 130, 170, 220, 280]
    assert {*map(tuple, drawn.values())} == {(0.1, 0.2, 0.3)}
    (tmp_path / "condensation" / "step-0.npz").write_bytes(b"damaged")
    TensorBoardFolder(str(tmp_path / "tb"), str(tmp_path)).log_heatmap(before, 400)
    assert drawn[400] is None


def test_throughput_is_of_steps_alone(one_rank, tmp_path, clock, monkeypatch):
    """The steps take 4 and 2 s, as TorchTitan's metrics, the data's and the row say."""
    loader = DamagedFiles(0)
    logged = metrics(tmp_path, loader=loader)
    logged.clock = Clock(began=0.0)

    def validate(validator, parts, step):
        logged.ntokens_since_last_log += 77
        clock.now += 6
        logged.log_validation(3.0, step)

    validator = StreamValidator.__new__(StreamValidator)
    validator.metrics_processor = logged
    monkeypatch.setattr(Validator, "validate", validate)
    clock.now += 500  # loading
    for step, loader.read, loader.waited in ((10, 4000, 1.5), (20, 4600, 1.5)):
        logged.ntokens_since_last_log += 600
        with logged.clock.during("checkpoints"):
            clock.now += 45
        with logged.clock.during("validation"):
            validator.validate([], step - 1)
        validation = logged._last.metrics
        assert validation["validation_metrics/throughput(tps)"] == 77 / 6
        clock.now += 1  # of no kind
        with logged.clock.during("steps"):
            clock.now += 40 / step
            logged.ntokens_since_last_log += 600
            log(logged, step)
        titan = logged._last.metrics
        assert titan["throughput(tps)"] == 1200 / (40 / step)
    rows = [row for row in read_metrics(tmp_path).values() if "tps" in row]
    assert [row["tps"] for row in rows] == [300.0, 600.0]
    assert [row["data"]["stored_bytes_per_second"] for row in rows] == [1000.0, 300.0]


def test_the_time_of_a_measurement_includes_its_drawing(
    one_rank, tmp_path, clock, monkeypatch
):
    logged = metrics(tmp_path, tensorboard=True)
    monkeypatch.setattr(
        logged._tensorboard,
        "log_heatmap",
        lambda *_: setattr(clock, "now", clock.now + 3),
    )
    logged.log_condensation(0, condensed(0.1, 0.2, 0.3), 5.0)
    assert read_json_lines(tmp_path / "metrics.jsonl")[-1]["seconds"] == 8


def test_tensorboard_hides_what_a_killed_start_wrote_after_its_checkpoint(
    tmp_path, monkeypatch
):
    now = time.time()
    for seconds, steps, factor in ((0, (1, 2, 3, 4, 5, 6), 1.0), (60, (4, 5), 10.0)):
        # which files are named by
        monkeypatch.setattr(time, "time", lambda seconds=seconds: now + seconds)
        folder = TensorBoardFolder(str(tmp_path), str(tmp_path))
        for step in steps:
            folder.log({"loss": step * factor, f"norm_{seconds}": 1.0}, step)
        folder.close()
    board = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in board.Scalars("loss")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 40),
        (5, 50),
    ]
    assert [e.step for e in board.Scalars("norm_0")] == [1, 2, 3]


# 5 sequences divide among no number of ranks here, and 10 of 32 positions are not the
# first ones.
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
        trainer = build(sample, folder / name, *SECTION, *options)
        change_final_norm(trainer.model_parts[0])
        trainer.measure_condensation()
        assert trainer.model_parts[0].training
        if name == "one":
            save_by_hand(trainer, sample, folder / "by_hand.npz")
        trainer.close()
        dist.barrier()


@torch.no_grad()
def change_final_norm(model):
    """The initial one, of ones, leaves cosines as they are."""
    weight = model.norm.weight
    values = torch.linspace(0.1, 3, len(weight))
    weight.copy_(
        distribute_tensor(values, weight.device_mesh, weight.placements)
        if isinstance(weight, DTensor)
        else values
    )


@torch.no_grad()
def save_by_hand(trainer, sample, path):
    tokens = first_sequences_by_hand(sample / VALIDATION_FILE, sample, 5, SEQ_LEN + 1)
    model = trainer.model_parts[0].double().eval()
    logits, (block, normed), _ = model(tokens[:, :-1], return_activations=(6, 7))
    assert logits.dtype == torch.float64
    log_probabilities = logits.numpy() - np.logaddexp.reduce(
        logits.numpy(), axis=-1, keepdims=True
    )
    ce = -np.take_along_axis(
        log_probabilities, tokens[:, 1:, None].numpy(), axis=-1
    ).mean()
    cosines = []
    for z in (block, normed):
        u = z[:, np.linspace(0, SEQ_LEN - 1, 10).round().astype(int)].numpy()
        u /= np.linalg.norm(u, axis=-1, keepdims=True)
        cosines.append((u @ u.transpose(0, 2, 1)).mean())
    np.savez(path, cross_entropy=ce, cosines=cosines)


def train_with_and_without(sample, folder):
    random = {}
    for interval in (0, 2):
        options = (
            "--training.steps",
            "5",
            "--metrics.log_freq",
            "1",
            "--condensation.interval",
            str(interval),
        )
        # Steps that are saved are measured, too.
        options += (
            "--checkpoint.enable",
            "--checkpoint.interval",
            "2",
            "--optimizer.lr",
            "1e-2",
        )
        trainer = build(
            sample,
            folder / str(interval),
            *SECTION,
            *options,
            "--metrics.enable_tensorboard",
        )
        trainer.train()
        random[interval] = torch.get_rng_state()
        trainer.close()
        dist.barrier()
    assert torch.equal(random[0], random[2])


@pytest.mark.slow
def test_same_numbers_on_every_mesh(sample, tmp_path):
    spawn(1, measure, sample, tmp_path, {"one": ("--training.local_batch_size", "8")})
    spawn(4, measure, sample, tmp_path, MESHES)
    expected = load_steps(tmp_path / "one" / "condensation")[0]
    assert (expected.sequences, expected.tokens) == (5, 10)
    by_hand = np.load(tmp_path / "by_hand.npz")
    # float32 against float64.
    assert expected.cross_entropy == pytest.approx(
        by_hand["cross_entropy"].item(), abs=2e-6
    )
    np.testing.assert_allclose(expected.mean_cosine[-2:], by_hand["cosines"], atol=1e-6)
    assert abs(np.diff(by_hand["cosines"])) > 1e-3
    for name in MESHES:
        found = load_steps(tmp_path / name / "condensation")[0]
        for key, values in expected.by_layer().items():
            # Activations in float32, whose sums TP orders otherwise.
            np.testing.assert_allclose(
                found.by_layer()[key],
                values,
                rtol=0,
                atol=1e-5,
                err_msg=f"{name} {key}",
            )
        # A cosine near the edge of a bin may fall on its other side: few of 5 × 100.
        assert np.abs(found.histogram - expected.histogram).sum() < 0.05
        assert (found.sequences, found.tokens) == (5, 10)
        assert found.cross_entropy == pytest.approx(expected.cross_entropy, abs=2e-6)


@pytest.mark.slow
def test_training_is_the_same_with_it(sample, tmp_path):
    spawn(2, train_with_and_without, sample, tmp_path)
    keys = ("loss", "ce", "dispersion", "grad_norm", "tokens")
    run = tmp_path / "2"
    with_it, without = (
        {step: [row[key] for key in keys] for step, row in read_metrics(folder).items()}
        for folder in (run, tmp_path / "0")
    )
    assert list(without) == [1, 2, 3, 4, 5]
    assert with_it == without  # bit for bit
    steps = load_steps(run / "condensation")
    assert list(steps) == [0, 2, 4, 5]
    assert not np.allclose(steps[0].mean_cosine, steps[5].mean_cosine, atol=1e-4)
    assert read_condensation(run)[5] == steps[5].to_json()
    assert steps[5].cross_entropy < steps[0].cross_entropy - 0.1
    assert not load_steps(tmp_path / "0" / "condensation")

    board = EventAccumulator(str(run / "tb"), size_guidance={"images": 0}).Reload()
    assert [e.step for e in board.Images("condensation/heatmap")] == list(steps)
