"""The loss of the pairs within documents, against float64 oracles of no others.

On ranks: ``test_sharded_loss``.
"""

from unittest import mock

import pytest
import torch

from tests.oracle import EVERY_LOSS, drawing_order, drawn, tokens, within
from titan_disp.dispersion import (
    DispersionLoss,
    dispersion_loss,
    dispersion_losses,
    layers,
    pairwise,
)
from titan_disp.dispersion.variants import VARIANTS, l2_repel

CASES = [(v, e, o) for v, e, o in EVERY_LOSS if e != "moments" and VARIANTS[v].of_pairs]


def ids(n, batch=3):
    """Documents of 1 to about N/3 tokens, others in every sequence; the last sequence
    has padding and lone tokens only.
    """
    generator = torch.Generator().manual_seed(n)
    found = torch.full((batch, n), -1)
    for b in range(batch - 1):
        at = 0
        number = 7 * b
        while at < n:
            length = int(torch.randint(1, n // 3 + 2, (), generator=generator))
            found[b, at : at + length] = number
            at = at + length
            number = number + 1
    found[0, : n // 8] = -1
    found[-1, :3] = torch.arange(3)
    return found


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("features", [6, 90])
@pytest.mark.parametrize(("variant", "estimator", "more"), CASES, ids=str)
def test_documents(monkeypatch, variant, estimator, more, features, wide):
    monkeypatch.setattr(pairwise, "CPU_TILE", 16)
    monkeypatch.setattr("titan_disp.dispersion.masks.BLOCK", 16)
    # Two of the six sequences of two layers at a time
    monkeypatch.setattr(layers, "BATCH_ELEMENTS", 2 * 80 * features)
    if wide:
        monkeypatch.setattr(pairwise.Shard, "wide", True)
    check(variant, estimator, more, features)


def check(variant, estimator, more, features, group=None, rank=0, ranks=1):
    """Of this rank's tokens, if ``group`` shares the sequences."""
    n = 80
    options = {
        "variant": variant,
        "estimator": estimator,
        **more,
        **drawn(estimator, 50),
    }
    segments = ids(n)
    weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    own = torch.arange(n).chunk(ranks)[rank]
    clean = [tokens(3, n, features, seed=seed).double() for seed in (1, 2)]
    zs = [
        z.masked_fill((segments < 0)[..., None], torch.nan)[:, own].requires_grad_()
        for z in clean
    ]
    found = DispersionLoss(**options, seed=3)(
        zs, group, step=5, segments=segments[:, own]
    )
    (found * weights).sum().backward()
    assert found[0, 2] == 0
    for layer, (z, value) in enumerate(zip(clean, found, strict=True)):
        z.requires_grad_()
        taken = segments.clone()
        if estimator == "sampled":
            order = drawing_order(n, seed=3, step=5, layer=layer)
            for row in taken:
                row[order[(row[order] >= 0).cumsum(0) > 50]] = -1
        expected = within(z, taken, variant, more)
        (expected * weights).sum().backward()
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(zs[layer].grad, z.grad[:, own])


def test_lone_tokens_have_no_gradient():
    """Of no variant: at tau 1, l2_repel divided 0 by a number near 0."""
    segments = torch.stack([torch.arange(8), torch.zeros(8, dtype=torch.int64)])
    for variant, estimator, _ in CASES:
        z = tokens(2, 8, 4).requires_grad_()
        found = dispersion_loss(
            z, variant=variant, estimator=estimator, segments=segments
        )
        found.sum().backward()
        assert found[0] == 0
        assert z.grad[0].eq(0).all(), variant
        assert z.grad[1].isfinite().all()


@pytest.mark.parametrize(
    ("variant", "module", "of_tile"),
    [
        ("angular", pairwise, pairwise.tile_pairs),
        ("l2_repel", l2_repel, l2_repel._exponents),
    ],
)
def test_tiles_without_pairs_are_left_out(monkeypatch, variant, module, of_tile):
    monkeypatch.setattr(pairwise, "CPU_TILE", 128)
    places = torch.arange(1024)
    # the last are scattered
    for segments, tiles in (
        (None, 8 * 9 / 2),
        (places // 128, 8),
        (places % 2, 8 * 9 / 2),
    ):
        with mock.patch.object(module, of_tile.__name__, side_effect=of_tile) as pairs:
            dispersion_loss(
                tokens(2, 1024, 4),
                variant=variant,
                segments=None if segments is None else segments.expand(2, 1024),
            )
        assert pairs.call_count == tiles


NUMBERS = torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("options", "given", "message"),
    [
        (
            {},
            {"valid": torch.ones(2, 8, dtype=torch.bool)},
            "segments and valid are both given",
        ),
        (
            {"variant": "vicreg"},
            {},
            "is 'vicreg', which is not a loss of pairs.*expected one of angular, .*simctg",
        ),
        (
            {},
            {"segments": NUMBERS.float()},
            r"\(2, 8\) and dtype torch.float32, expected int32 or int64",
        ),
        ({}, {"segments": NUMBERS[:, :7]}, r"segments has shape \(2, 7\) .*\(2, 8\)"),
    ],
)
def test_refused(options, given, message):
    with pytest.raises(ValueError, match=message):
        dispersion_losses(
            [tokens(2, 8, 4)], **options, **({"segments": NUMBERS} | given)
        )


@pytest.mark.parametrize("estimator", ["exact", "sampled"])
def test_a_batch_of_padding_alone(estimator):
    z = tokens(2, 12, 8).requires_grad_()
    segments = torch.full((2, 12), -1)
    options = {"estimator": estimator, **drawn(estimator, 5)}
    loss = dispersion_loss(z, segments=segments, **options)
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert not z.grad.any()
