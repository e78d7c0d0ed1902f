"""The loss at its edges: repeating tokens, zero tokens, layers of different dtypes, lengths of 0 and 1, wrong arguments."""

import pytest
import torch

from tests.distributed import spawn
from tests.oracle import drawn, oracle
from titan_disp.dispersion import DispersionLoss, dispersion_loss, dispersion_losses
from titan_disp.dispersion.loss import ESTIMATORS
from titan_disp.dispersion.moments import FIT_TOKENS, sample
from titan_disp.dispersion.sampled import order
from titan_disp.dispersion.variants import VARIANTS


def gradient(z, **options):
    z = z.clone().requires_grad_(True)
    value = dispersion_loss(z, **options)
    value.sum().backward()
    return value.detach(), z.grad


def repeating(period, n=512, f=64):
    """Noisy copies of ``period`` tokens in turn, as in a list or a table."""
    generator = torch.Generator().manual_seed(period)
    kinds = torch.randn(period, f, generator=generator)
    return (kinds[torch.arange(n) % period] + 0.1 * torch.randn(n, f, generator=generator))[None]


@pytest.mark.parametrize("options", [{}, {"tau": 0.2}, {"clamp": 0.1}, {"clamp": 0.01}], ids=str)
@pytest.mark.parametrize("period", [2, 3, 4, 7, 8, 16])
def test_moments_of_a_text_that_repeats(period, options):
    """Tokens at a regular distance would all be of one kind, so that no fit would see the others."""
    z = repeating(period)
    shuffled = z[:, torch.randperm(512, generator=torch.Generator().manual_seed(1))]
    errors = []
    for one in (z, shuffled):
        value, expected = gradient(one, estimator="moments", **options)[0], gradient(one, **options)[0]
        assert value.item() == pytest.approx(expected.item(), abs=0.01)
        errors.append(relative_error(one, **options))
    assert errors[0] <= 1.5 * errors[1] + 0.01


def relative_error(z, **options):
    (_, grad), (_, expected) = gradient(z, estimator="moments", **options), gradient(z, **options)
    return ((grad - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(
    ("options", "errors"),
    [({}, (0.11, 0.05, 0.02)), ({"tau": 0.2}, (0.57, 0.16, 0.05)), ({"clamp": 0.01}, (0.55, 0.17, 0.05))],
    ids=str,
)
def test_errors_of_a_few_tokens_outside_a_cone(options, errors):
    """The table of docs/loss.md, to the per cent: the worst of four draws, with no such token in the fit."""
    for tokens, expected in zip((128, 512, 2048), errors, strict=True):
        found = []
        for seed, outside in [(seed, outside) for seed in range(4) for outside in (1, 8)]:
            torch.manual_seed(seed)
            z = torch.randn(1, tokens, 64) / 8
            cone = torch.eye(64)[0] + 0.02 * z
            free = torch.ones(tokens, dtype=torch.bool)
            free[sample(z, tokens, None).rows[0]] = False
            chosen = free.nonzero()[:, 0][torch.randperm(int(free.sum()))[:outside]]
            cone[:, chosen] = z[:, chosen]
            found.append(relative_error(cone, **options))
        assert max(found) == pytest.approx(expected, abs=0.01)


def test_errors_without_a_common_direction():
    for features, expected in ((4, 0.18), (8, 0.11), (16, 0.05), (64, 0.02)):
        torch.manual_seed(0)
        found = [relative_error(torch.randn(1, tokens, features)) for tokens in (64, 512)]
        assert max(found) <= expected, features


@pytest.mark.parametrize("tokens", [60, 64, 127, 128, 300, 512, 1000, 4096, 5000])
def test_fitted_tokens_are_one_of_each_block(tokens):
    found = sample(torch.arange(tokens, dtype=torch.float64)[None, :, None], tokens, None)
    stride = max(1, 2 ** ((tokens // FIT_TOKENS).bit_length() - 1))
    assert torch.equal(found.z[0, :, 0].long(), found.rows[0])
    assert torch.equal(found.rows[0] // stride, torch.arange(-(-tokens // stride)))
    for period in (2, 4, 8, 16):
        if stride >= period:  # every residue comes as often as the others, to within a quarter
            counts = (found.rows[0] % period).bincount(minlength=period)
            assert (counts / len(found.rows[0]) * period - 1).abs().max() <= 0.25 * period / 2


def check_same_tokens(tokens):
    import torch.distributed as dist

    rank, n = dist.get_rank(), tokens // 2
    z = torch.arange(tokens, dtype=torch.float64)[None, :, None]
    whole, ours = sample(z, tokens, None), sample(z[:, rank * n : (rank + 1) * n], tokens, dist.group.WORLD)
    assert torch.equal(ours.z, whole.z)
    own = whole.rows[0] // n == rank
    assert torch.equal(ours.rows[0], torch.where(own, whole.rows[0] - rank * n, -1))


def check_same_fitted_tokens_on_every_mesh():
    for tokens in (64, 128, 256, 1024, 4096):
        check_same_tokens(tokens)


def test_shards_fit_the_same_tokens():
    spawn(2, check_same_fitted_tokens_on_every_mesh)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_eps", [1e-2, 1e-8, 1e-12, 1e-30])
@pytest.mark.parametrize(
    "options",
    [{}, {"estimator": "moments"}, {"estimator": "sampled", "max_tokens": 6}, {"variant": "orthogonalization"}],
    ids=str,
)
def test_a_zero_token_with_any_epsilon(options, norm_eps, dtype):
    """1e-8 is the ε of torch's cosine_similarity. The product of ε and the smallest norm is 0 in float32."""
    z = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    z[0, 3] = 0
    value, grad = gradient(z, norm_eps=norm_eps, **options)
    assert value.isfinite().all()
    assert not grad.isnan().any()
    others = [i for i in range(8) if i != 3]
    assert grad[0, others].isfinite().all()


def test_a_zero_token_where_small_numbers_are_flushed_to_zero():
    z = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(0))
    z[0, 3] = 0
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormal numbers")
    try:
        _, grad = gradient(z)
    finally:
        torch.set_flush_denormal(False)
    assert grad.isfinite().all()


def test_an_epsilon_that_is_zero_in_float32_is_refused():
    with pytest.raises(ValueError, match="norm_eps is 1e-300, expected a number"):
        DispersionLoss(norm_eps=1e-300)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_layers_of_several_dtypes(estimator):
    """transformers gives the embeddings in float32 and the blocks' outputs in bf16 under autocast."""
    z = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    options = {"estimator": estimator, **drawn(estimator, 10)}
    mixed = [z.float().requires_grad_(True), z.clone().requires_grad_(True)]
    losses = dispersion_losses(mixed, **options)
    losses.sum().backward()
    plain = [z.float().requires_grad_(True), z.float().requires_grad_(True)]
    expected = dispersion_losses(plain, **options)
    expected.sum().backward()
    torch.testing.assert_close(losses, expected, rtol=1e-2, atol=1e-3)
    for one, other in zip(mixed, plain, strict=True):
        assert one.grad.dtype == one.dtype
        torch.testing.assert_close(one.grad.float(), other.grad, rtol=5e-2, atol=1e-3)


def test_one_padded_token_has_no_pair():
    """A batch may be padded to a length of 1."""
    for options in ({}, {"estimator": "moments"}, {"estimator": "sampled"}, {"variant": "l2_repel"}):
        z = torch.randn(3, 1, 4).requires_grad_(True)
        losses = dispersion_losses([z, z], valid=torch.tensor([[True], [False], [True]]), **options)
        assert torch.equal(losses, torch.zeros(2, 3))
        losses.sum().backward()
        assert not z.grad.any()


def test_no_part_of_a_second_derivative_is_dropped():
    """d‖∂L/∂z‖²/dλ with L = λ (cross-entropy + dispersion): the dispersion's gradient depends on λ, too."""
    for estimator in ("exact", "sampled"):
        z = torch.randn(1, 8, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
        loss = weight * (z.square().sum() + dispersion_loss(z, estimator=estimator, **drawn(estimator, 4)).sum())
        (grad,) = torch.autograd.grad(loss, z, create_graph=True)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(grad.square().sum(), weight)


def test_a_seed_of_64_bits():
    assert sorted(order(10, 2**64 - 1, 10**9, 100).tolist()) == list(range(10))
    assert not torch.equal(order(100, 2**63, 0, 0), order(100, 2**63 + 1, 0, 0))


def test_layers_may_be_any_iterable():
    z = torch.randn(2, 5, 3, dtype=torch.float64)
    losses = dispersion_losses(layer for layer in (z, 2 * z))
    torch.testing.assert_close(losses[0], oracle("angular", z))
    assert losses.shape == (2, 2)


Z = torch.zeros(2, 4, 3)


@pytest.mark.parametrize(
    ("zs", "message"),
    [
        (Z, "expected one tensor per layer in a list: for a single layer, call dispersion_loss"),
        ((None, Z), "layer 0 is None, expected a float tensor"),
        ([Z, torch.zeros(1, 4, 3)], r"layers differ in sequences or tokens per sequence: \(2, 4, 3\), \(1, 4, 3\)"),
        ([torch.zeros(2, 4, 0)], "has no features"),
    ],
)
def test_wrong_layers_are_refused(zs, message):
    for options in ({}, {"variant": "l2_repel"}, {"estimator": "sampled", "max_tokens": 2}):
        with pytest.raises(ValueError, match=message):
            dispersion_losses(zs, **options)


def test_layers_of_several_widths():
    """Each layer has the value and the gradient that it has alone. ℓ2-repel divided by the first layer's features."""
    zs = [torch.randn(2, 12, f, generator=torch.Generator().manual_seed(f), dtype=torch.float64) for f in (4, 64, 9)]
    for variant in VARIANTS:
        losses = dispersion_losses(zs, variant=variant)
        for z, found in zip(zs, losses, strict=True):
            torch.testing.assert_close(found, oracle(variant, z))
    with pytest.raises(ValueError, match=r"layers differ in features: \[4, 64, 9\], which the sampled estimator"):
        dispersion_losses(zs, estimator="sampled", max_tokens=5)


def test_an_option_that_is_a_tensor_is_refused():
    """It would get no gradient."""
    with pytest.raises(ValueError, match="tau is a tensor, expected a number"):
        DispersionLoss(tau=torch.tensor(1.0, requires_grad=True))
