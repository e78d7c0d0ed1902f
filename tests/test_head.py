"""The output layer and the cross-entropy in chunks: against float64, and in the real
trainer against whole logits.
"""

from unittest import mock

import pytest
import torch
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.train import Trainer

from tests.distributed import spawn
from tests.mesh import VOCAB, build, canonical, dims, full, job_config, step
from tests.oracle import Largest, cross_entropy
from tests.run_invariants import check_run
from titan_disp.errors import ConfigError
from titan_disp.models import qwen3
from titan_disp.models.head import (
    HiddenStates,
    chunked_cross_entropy,
    loss_and_gradient,
)
from titan_disp.models.parallelize import parallelize_model
from titan_disp.models.registry import MODELS
from titan_disp.run.reader import read_condensation, read_metrics

B = 2
N = 1024
F = 64
V = 2000
CHUNKED = ("--training.head_chunk_tokens", "24")


def problem(seed=0):
    """Hidden states, weight and labels whose loss is about 8 per token; a third of the
    labels do not count.
    """
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(B, N, F, generator=generator).bfloat16()
    weight = (torch.randn(V, F, generator=generator) * F**-0.5).bfloat16()
    labels = torch.randint(V, (B, N), generator=generator)
    labels[torch.rand(B, N, generator=generator) < 1 / 3] = -100
    return h, weight, labels


def differentiated(loss_of, h, weight, dtype):
    h, weight = (x.detach().to(dtype, copy=True).requires_grad_() for x in (h, weight))
    loss = loss_of(h, weight)
    (loss / 777).backward()
    return loss.detach().double(), h.grad.double(), weight.grad.double()


def whole(labels):
    return lambda h, weight: cross_entropy_loss(h @ weight.T, labels)


def chunks(labels, chunk, of_chunk=loss_and_gradient):
    return lambda h, weight: chunked_cross_entropy(
        HiddenStates(h, weight), labels, chunk, of_chunk
    )[0]


def relative(found, expected):
    return [
        ((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
    ]


def exact(h, weight, labels):
    return differentiated(
        lambda h, weight: cross_entropy(h @ weight.T, labels), h, weight, torch.float64
    )


@pytest.mark.parametrize("chunk", [1, 7, 300, B * N, 10**6])
def test_float32_equals_float64(chunk):
    h, weight, labels = problem()
    h, weight, labels = (
        (h[:, :50], weight, labels[:, :50]) if chunk == 1 else (h, weight, labels)
    )
    found = differentiated(chunks(labels, chunk), h, weight, torch.float32)
    assert max(relative(found, exact(h, weight, labels))) < 2e-6


def test_bfloat16_is_added_up_in_float32():
    h, weight, labels = problem()
    expected = exact(h, weight, labels)
    stock = relative(differentiated(whole(labels), h, weight, torch.bfloat16), expected)
    found = relative(
        differentiated(chunks(labels, 16), h, weight, torch.bfloat16), expected
    )
    assert found[0] < 2e-5
    assert found[1] < 1.1 * stock[1]
    assert found[2] < 1.1 * stock[2]
    assert chunks(labels, 16)(h, weight).dtype == torch.float32


def test_a_sure_token_has_a_gradient_in_bfloat16():
    """Its probability of 0.9995 is 1 in bfloat16."""
    logits = torch.tensor([[8.0, 0.4, 0.0]], dtype=torch.bfloat16)
    expected = logits.float().softmax(1) - torch.tensor([[1.0, 0, 0]])
    _, gradient = loss_and_gradient(
        logits, torch.eye(3, dtype=torch.bfloat16), torch.tensor([0])
    )
    assert torch.allclose(gradient.float(), expected, rtol=2**-7)


def test_under_autocast_as_a_linear_layer():
    h, weight, labels = problem()
    results = []
    for loss in (whole(labels), chunks(labels, 500)):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(differentiated(loss, h, weight, torch.float32))
    loss, *gradients = relative(results[1], results[0])
    assert loss < 1e-6
    assert max(gradients) < 5e-3


def test_numbers_that_are_not_finite_are_seen_and_tokens_that_do_not_count_are_not():
    h, weight, labels = problem()
    assert chunks(torch.full_like(labels, -100), 300)(h, weight) == 0
    loss, h_gradient, weight_gradient = differentiated(
        chunks(labels, 300), h, weight, torch.float32
    )
    assert not h_gradient[labels == -100].any()
    assert h_gradient[labels != -100].any(1).all()
    counting = (labels != -100).nonzero()[5]
    h[tuple(counting)] = float("nan")
    loss, *_ = differentiated(chunks(labels, 300), h, weight, torch.float32)
    assert loss.isnan()
    loss = chunks(labels, 300)(h.requires_grad_(), weight)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="keeps its gradients for one backward pass"):
        loss.backward()


def real_trainers(sample, folder):
    """Runs that differ in the head, or in when layers are computed.

    Then a step of the stock trainer with each head.
    """
    measures = (
        *(
            "--validation.enable",
            "--validation.dataset",
            "c4_validation",
            "--validation.dataset_path",
            sample,
        ),
        *(
            "--validation.freq",
            "2",
            "--validation.steps",
            "1",
            "--validation.local_batch_size",
            "2",
        ),
        *("--condensation.interval", "2", "--condensation.sequences", "4"),
    )
    options = (
        *(
            "--metrics.log_freq",
            "1",
            "--checkpoint.enable",
            "--checkpoint.interval",
            "9",
            "--training.steps",
            "4",
        ),
        *("--stream.prefetch", "0", "--model.overrides", "n_layers=2"),
        *("--parallelism.fsdp_reshard_after_forward", "always"),
    )
    found = {}
    large = ("--condensation.interval", "0")
    for name, own in {
        "whole": measures,
        "chunked": (*measures, *CHUNKED),
        "large": large,
    }.items():
        losses = found[name] = []
        with mock.patch(
            "titan_disp.dispersion.layers.PACK_ELEMENTS",
            0 if name == "large" else 1 << 20,
        ):
            trainer = build(sample, f"{folder}/{name}", *options, *own)
            trainer.metrics_processor.log_validation = (
                lambda loss, step, losses=losses: losses.append((step, loss))
            )
            trainer.train()
        trainer.close()
    validation = found
    found = {}
    for name, start in (("whole", ()), ("chunked", CHUNKED)):
        low = ("--training.mixed_precision_param", "bfloat16")
        job = job_config(
            sample,
            f"{folder}/stock_{name}",
            *start,
            *low,
            "--model.overrides",
            "n_layers=1",
        )
        job.training.local_batch_size = 4
        trainer = Trainer(job)
        with Largest() as largest:
            gradients = step(trainer)
        weights = {
            n: full(p.detach()) for n, p in canonical(trainer.model_parts[0]).items()
        }
        found[name] = largest.elements, gradients, weights
        trainer.close()
    torch.save((validation, found), f"{folder}/found_{torch.distributed.get_rank()}.pt")


@pytest.fixture(scope="module")
def folder(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    spawn(2, real_trainers, str(sample), str(folder))
    for run in ("whole", "chunked", "large"):
        check_run(folder / run)
    return folder


def test_a_run_is_the_same_with_a_chunked_head_or_large_layers(folder):
    """Of large layers, the trainer adds what the backward pass has found to the loss
    that TorchTitan prints.
    """
    runs = {name: read_metrics(folder / name) for name in ("whole", "chunked", "large")}
    assert list(runs["whole"]) == [1, 2, 3, 4]
    for name in ("loss", "ce", "dispersion", "grad_norm"):
        whole, chunked, large = (
            [row[name] for row in run.values()] for run in runs.values()
        )
        assert chunked == pytest.approx(whole, rel=1e-5), name
        assert large == pytest.approx(whole, rel=1e-6), name
    validation, _ = torch.load(folder / "found_0.pt")
    read = {name: read_condensation(folder / name) for name in runs}
    measured = {
        name: [(step, row["cross_entropy"]) for step, row in rows.items()]
        for name, rows in read.items()
    }
    for steps, found in (((1, 2, 4), validation), ((0, 2, 4), measured)):
        assert [step for step, _ in found["whole"]] == list(steps)
        assert [x for _, x in found["chunked"]] == pytest.approx(
            [x for _, x in found["whole"]], rel=1e-5
        )


def test_the_logits_never_exist_in_full_under_the_stock_trainer(folder):
    _, found = torch.load(folder / "found_0.pt")
    (whole, gradients, weights) = found["whole"]
    (chunked, of_chunks, chunked_weights) = found["chunked"]
    assert whole >= 4 * 32 * VOCAB > chunked
    assert max(relative(of_chunks.values(), gradients.values())) < 2e-2
    assert max(relative(chunked_weights.values(), weights.values())) < 1e-2


def test_an_output_layer_that_a_converter_has_replaced_is_refused(
    sample, one_rank, tmp_path
):
    class Float8Linear(torch.nn.Linear):
        pass

    with torch.device("meta"):
        model = MODELS["qwen3_disp"].model_cls(MODELS["qwen3_disp"].flavors["nano"])
        model.output = Float8Linear(64, VOCAB, bias=False)
    with pytest.raises(
        ConfigError, match='made it a Float8Linear: add "output" to the filter_fqns'
    ):
        parallelize_model(
            model,
            dims(1),
            job_config(sample, tmp_path, *CHUNKED),
            apply_tp=qwen3.apply_tp,
            saved_ops=qwen3.SAVED_OPS,
        )
