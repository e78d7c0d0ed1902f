"""The exact estimator of every variant against its float64 oracle; its tiles, dtypes,
memory and numerical edges.
"""

import math

import numpy as np
import pytest
import torch

from tests.oracle import (
    EVERY_LOSS,
    EVERY_VARIANT,
    PAPERS,
    Largest,
    angular,
    drawn,
    loss_and_gradient,
    oracle,
    tokens,
)
from titan_disp.dispersion import (
    DispersionLoss,
    dispersion_loss,
    layers,
    moments,
    pairwise,
    vectors,
)
from titan_disp.dispersion.variants import VARIANTS, options_of

# fp32 keeps about 1e-7 a product, and sums over tiles take more. The returned gradient
# has the dtype of z (bf16: 2^-9).
TOLERANCE = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (4e-6, 3e-5),
    torch.bfloat16: (4e-6, 2**-8),
}
SHAPES = [
    (2, 3, 5),
    (1, 2, 3),
    (3, 33, 17),
    (2, 40, 64),
    (1, 130, 16),
    (2, 47, 1000),
    (2, 213, 7),
]
CASES = [
    *EVERY_VARIANT,
    *(
        ("angular", {"tau": tau, "clamp": clamp})
        for tau, clamp in ((0.05, 0.25), (2.0, 0.0))
    ),
]


def assert_agrees(z, variant, value_tolerance, grad_tolerance, **options):
    value, grad = loss_and_gradient(dispersion_loss, z, variant=variant, **options)
    expected, expected_grad = loss_and_gradient(
        lambda x: oracle(variant, x, **options), z.double()
    )
    assert (value - expected).abs().max() <= value_tolerance * max(
        1.0, expected.abs().max()
    )
    error = (grad - expected_grad).norm() / expected_grad.norm().clamp_min(1e-30)
    assert error <= grad_tolerance, (
        f"{tuple(z.shape)}: relative gradient error {error:.1e}"
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("variant", "options"), CASES, ids=str)
def test_odd_shapes(variant, options, dtype, monkeypatch):
    """Several tiles, and both forms of decorrelation (F < N and F ≥ N)."""
    # At small τ the sum is dominated by few pairs: the error of a cosine is multiplied
    # by 1/(πτ).
    steep = max(1.0, 1 / options.get("tau", 1.0))
    for shape in SHAPES:
        if (variant, shape[1]) == ("feature_decorrelation", 2):
            # the correlation of two features is 1 or −1, and what is left of its
            # gradient is rounding
            continue
        monkeypatch.setattr(pairwise, "TILE_ELEMENTS", shape[0] * 16 * 16)
        assert_agrees(
            tokens(*shape).to(dtype),
            variant,
            *(steep * t for t in TOLERANCE[dtype]),
            **options,
        )


def test_float16_bears_the_gradient_of_the_sum():
    """∂S/∂z, which is saved, is far beyond float16's 65504 here; ∂L/∂z, which is
    returned, is about 1.
    """
    assert_agrees(
        1e-4 * tokens(1, 600, 3, mean=0.0).half(),
        "angular",
        2e-6,
        2**-11,
        norm_eps=1e-5,
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("variant", "estimator", "more"), EVERY_LOSS)
def test_small_layers_are_computed_together(
    monkeypatch, variant, estimator, more, padded
):
    """In packs of two, as each alone, in parts and blocks: values, gradients, and the
    errors of fits, in the layers' order.
    """
    zs = [
        tokens(2, 40, features, seed=i).double()
        for i, features in enumerate((8, 8, 8, 6, 8))
    ]
    if estimator == "sampled":
        zs = [z[..., :6] for z in zs]
    valid = torch.arange(40) < torch.tensor([[40], [23]]) if padded else None
    options = {
        "variant": variant,
        "estimator": estimator,
        **more,
        **drawn(estimator, 20),
    }
    found = []
    for pack, sequence, rows, features in (
        (0, 40 * 8, 7 * 8, 3),
        (2 * zs[0].numel(), *[1 << 20] * 3),
    ):
        monkeypatch.setattr(layers, "PACK_ELEMENTS", pack)
        monkeypatch.setattr(layers, "BATCH_ELEMENTS", sequence)
        monkeypatch.setattr(vectors, "BLOCK_ELEMENTS", rows)
        monkeypatch.setattr(moments, "GRAM_BLOCK", features)
        leaves = [z.clone().requires_grad_() for z in zs]
        errors = []
        losses = DispersionLoss(**options)(
            leaves, step=3, fit_errors=errors, valid=valid
        )
        (losses * torch.arange(1.0, 11).view(5, 2)).sum().backward()
        found.append([losses, *(z.grad for z in leaves), *errors])
    for alone, together in zip(*found, strict=True):
        torch.testing.assert_close(together, alone)
    sizes = [len(pack) for pack in layers.packed(zs)]
    assert sizes == ([2, 1, 1, 1] if estimator != "sampled" else [2, 2, 1])


BASE = tokens(1, 1, 32).expand(1, 20, 32)
OTHERS = tokens(1, 20, 32, seed=1)
ZEROS = torch.zeros(1, 20, 32)
# so long that ε does not show: cosines of −1 in fp32
LONG = OTHERS * torch.tensor([1e6, 1.0]).repeat(10)[:, None]
EXTREME = {
    "identical": BASE,
    "huge": 1e4 * BASE,
    "antiparallel": torch.cat([LONG, -LONG], 1),
    "zeros": ZEROS,
    "a zero": torch.cat([OTHERS, ZEROS[:, :1]], 1),
    "mixed": torch.cat([BASE[:, :10], -BASE[:, :5], ZEROS[:, :3], OTHERS[:, :4]], 1),
    # ℓ2's exponents lie far below fp32's smallest
    "far": OTHERS + torch.tensor([1e4, -1e3]).repeat(10)[:, None],
    "constant features": torch.cat([OTHERS, torch.full((1, 3, 32), 5.0)], 1),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(("variant", "estimator", "options"), EVERY_LOSS, ids=str)
def test_never_nan(variant, estimator, options, dtype):
    """For no ε either: 1e-8 is that of torch's cosine_similarity.

    The product of ε and the smallest norm is 0 in float32.
    """
    options = (
        {"variant": variant, "estimator": estimator} | options | drawn(estimator, 5)
    )
    changes = [
        {},
        *(
            {"norm_eps": eps}
            for eps in (1e-8, 1e-30)
            if "norm_eps" in options_of(VARIANTS[variant])
        ),
    ]
    changes += [
        {"tau": 0.05, "clamp": clamp} for clamp in (0.0, 0.9) if variant == "angular"
    ]
    for name, z in EXTREME.items():
        if dtype == torch.float16 and not z.half().isfinite().all():
            continue
        for change in changes:
            if change.get("norm_eps") == 1e-30 and name in ("zeros", "mixed"):
                continue  # 1/ε² of two zero tokens is infinite in float32
            value, grad = loss_and_gradient(
                dispersion_loss, z.to(dtype), **options | change
            )
            assert value.isfinite().all(), (name, change)
            # A zero token's gradient is 1/ε, which float16 and float32 cannot always
            # hold.
            assert not grad.isnan().any(), (name, change)
            if (variant, name, dtype) == ("vicreg", "far", torch.float16):
                continue  # its gradient grows with the cube of the tokens
            assert grad[:, (z[0] != 0).any(-1)].isfinite().all(), (name, change)


def test_a_zero_token_where_small_numbers_are_flushed_to_zero():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush denormal numbers")
    try:
        _, grad = loss_and_gradient(dispersion_loss, EXTREME["a zero"])
    finally:
        torch.set_flush_denormal(False)
    assert grad.isfinite().all()


@pytest.mark.parametrize("name", ["antiparallel", "mixed", "zeros"])
def test_degenerate_tokens_agree(name):
    """The oracle's ‖z‖ has subgradient 0 at 0, as here.

    Beside identical tokens the tangential gradient vanishes.
    """
    z = EXTREME[name].double()
    expected = loss_and_gradient(angular, z)
    torch.testing.assert_close(
        loss_and_gradient(dispersion_loss, z), expected, rtol=1e-9, atol=1e-12
    )


def by_sequence(z, valid, **options):
    """Of each sequence: value, the oracle's of its tokens alone, the error of the
    gradient, and the gradient's norm.
    """
    filled = z.masked_fill(~valid[..., None], math.nan).requires_grad_(True)
    values = dispersion_loss(filled, valid=None if valid.all() else valid, **options)
    values.sum().backward()
    for b, own in enumerate(valid):
        expected, grad = loss_and_gradient(
            lambda x: oracle(z=x, **options), z[b : b + 1, own].double()
        )
        yield (
            values[b : b + 1].double(),
            expected,
            (filled.grad[b, own] - grad[0]).norm(),
            grad.norm(),
        )


@pytest.mark.parametrize("case", ["random", "collapsed", "identical", "padded"])
@pytest.mark.parametrize("variant", PAPERS)
def test_value_and_gradient_are_the_authors(variant, case):
    """To 1e-12 of their norms.

    Their code takes one sequence without padding at a time.
    """
    z = tokens(3, 40, 16, mean=0.0).double() / 4
    valid = torch.ones(3, 40, dtype=torch.bool)
    if case == "collapsed":
        z = z[:, :1] + 1e-3 * z
    elif case == "identical":
        z = z[:, :1].repeat(1, 40, 1)
    elif case == "padded":
        valid[1, 25:] = valid[2, :3] = valid[2, 20:30] = False
    for value, expected, error, norm in by_sequence(z, valid, variant=variant):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14)
        if (variant, case) == ("decorrelation", "identical"):
            # the derivative is 0, and what either computes is rounding
            assert max(error, norm) <= 1e-14
        else:
            assert error <= 1e-12 * norm


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    ("variant", "options"),
    [
        *(
            ("l2_repel", {"tau": 20.0, "norm_coeff": 0.0, "include_diagonal": own})
            for own in (True, False)
        ),
        ("feature_decorrelation", {}),
        ("vicreg", {}),
    ],
)
def test_accurate_far_from_the_origin(variant, options, padded):
    """Tokens are taken relative to their mean, in which padding has no part. ‖a‖² +
    ‖b‖² − 2ab would lose all digits, and so would M − s sᵀ/N.
    """
    tolerance = (
        {"rtol": 0, "atol": 1e-5}
        if variant == "l2_repel"
        else {"rtol": 1e-4, "atol": 0}
    )
    z = tokens(2, 50, 16) + 1000.0
    valid = torch.ones(2, 50, dtype=torch.bool)
    if padded:
        valid[1, 9:] = False
    for value, expected, error, norm in by_sequence(
        z, valid, variant=variant, **options
    ):
        torch.testing.assert_close(value, expected, **tolerance)
        assert error <= 1e-4 * norm


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**14])
def test_a_token_of_equal_features_has_no_correlation(scale):
    """Rounding leaves its features unequal to their mean, which must not be taken for a
    direction.
    """
    z = scale * tokens(1, 3, 999)
    z[:, 2] = 0.1 * scale
    assert (z[:, 2] - z[:, 2].mean()).norm() > 0
    correlation = np.corrcoef(z[0, :2].double().numpy())[0, 1]
    value, grad = loss_and_gradient(dispersion_loss, z, variant="decorrelation")
    # of the six pairs, two are not 0
    assert value.item() == pytest.approx(2 * correlation**2 / 6, abs=1e-6)
    assert not grad[:, 2].any()


def test_autocast_does_not_reach_inside():
    z = tokens(2, 100, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = dispersion_loss(z)
    assert torch.equal(inside, dispersion_loss(z))


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_n_by_n_matrix(variant, monkeypatch):
    monkeypatch.setattr(pairwise, "TILE_ELEMENTS", 64 * 64)
    z = tokens(1, 1024, 8).requires_grad_(True)
    with Largest() as largest:
        dispersion_loss(z, variant=variant).sum().backward()
    assert largest.elements <= max(1024 * 8, 64 * 64)
