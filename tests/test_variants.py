"""The loss family against plain float64 autograd: every variant and estimator, whole and sharded."""

import dataclasses
import inspect
import math
import re
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.command_line import ROOT
from tests.distributed import spawn
from tests.oracle import EVERY_ESTIMATOR, EVERY_LOSS, EVERY_VARIANT, drawing_order, drawn, oracle
from titan_disp.config.checks import build_coeff_schedule, build_dispersion_loss
from titan_disp.config.load import load_config
from titan_disp.dispersion import CoeffSchedule, DispersionLoss, dispersion_loss, pairwise
from titan_disp.dispersion.loss import ESTIMATORS, options_of
from titan_disp.dispersion.moments import sample
from titan_disp.dispersion.sampled import order
from titan_disp.dispersion.variants import VARIANTS, Variant
from titan_disp.dispersion.variants.base import CosineVariant
from titan_disp.dispersion.vectors import Normalized
from titan_disp.job_config import Dispersion

# fp32 keeps about 1e-7 a product; sums over tiles in any order, and differences of distances for ℓ2, take more.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 3e-5, torch.bfloat16: 2e-2}


def tokens(b, n, f, seed=0, shift=0.3):
    return torch.randn(b, n, f, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def both(variant, z, dtype=torch.float64, **options):
    """(value, gradient) of ours on z in dtype, and of the oracle on the same values."""
    ours = z.to(dtype).requires_grad_(True)
    weights = torch.linspace(1, 2, z.shape[0], dtype=torch.float64)
    value = dispersion_loss(ours, variant=variant, **options)
    (value * weights).sum().backward()
    reference = ours.detach().double().requires_grad_(True)
    expected = oracle(variant, reference, **{k: v for k, v in options.items() if k in options_of(VARIANTS[variant])})
    (expected * weights).sum().backward()
    return value.detach().double(), ours.grad.double(), expected.detach(), reference.grad


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 2, 3), (3, 33, 17), (2, 40, 64), (1, 130, 16)])
@pytest.mark.parametrize(("variant", "options"), EVERY_VARIANT, ids=str)
def test_exact_equals_the_oracle(variant, options, shape, dtype, monkeypatch):
    """Odd shapes, several tiles, both forms of decorrelation (F < N and F ≥ N)."""
    monkeypatch.setattr(pairwise, "TILE_ELEMENTS", shape[0] * 48 * 48)
    value, grad, expected, expected_grad = both(variant, tokens(*shape), dtype, **options)
    tolerance = TOLERANCE[dtype]
    assert (value - expected).abs().max() <= tolerance * max(1.0, expected.abs().max())
    assert relative(grad, expected_grad) <= tolerance


@pytest.mark.parametrize(("variant", "estimator"), EVERY_ESTIMATOR)
@pytest.mark.parametrize("case", ["identical", "zero", "antiparallel", "far", "constant features", "fp16"])
def test_never_nan(variant, estimator, case):
    z = tokens(1, 12, 8).float()
    if case == "identical":
        z = z[:, :1].expand(1, 12, 8).clone()
    elif case == "zero":
        z[:, 3:6] = 0
    elif case == "antiparallel":
        z[:, 6:] = -z[:, :6]
        z[:, ::2] *= 1e6  # so long that ε does not show: cosines of −1 in fp32
    elif case == "far":
        z[:, 0] *= 1e4  # ℓ2's exponents lie far below fp32's smallest
        z[:, 1] -= 1e3
    elif case == "constant features":
        z[:, 2] = 5.0
    elif case == "fp16":
        z = z.half()
    z.requires_grad_(True)
    value = dispersion_loss(z, variant=variant, estimator=estimator, **drawn(estimator, 5))
    value.sum().backward()
    assert value.isfinite().all()
    assert z.grad.isfinite().all()


@pytest.mark.parametrize("include_diagonal", [True, False])
def test_l2_is_accurate_far_from_the_origin(include_diagonal):
    """‖a‖² + ‖b‖² − 2ab in fp32 would lose all digits here."""
    z = (tokens(1, 50, 16) + 1000.0).float()
    options = {"tau": 20.0, "norm_coeff": 0.0, "include_diagonal": include_diagonal}
    value, grad, expected, expected_grad = both("l2_repel", z.double(), torch.float32, **options)
    assert (value - expected).abs().max() <= 1e-5
    assert relative(grad, expected_grad) <= 1e-4


def test_l2_diagonal_decides_who_is_pushed_in_a_wide_model():
    """At F = 1024 the pairs' exp(−2048 ± 90) vanish beside the diagonal's N, and λ_norm's 2 λ_norm z/(N F) remains.

    Without the diagonal they are compared with each other: the closest pair takes it all, with 2‖z_i − z_j‖ for each of the two,
    400,000 times as much.
    """
    z = tokens(1, 512, 1024, shift=0.0)
    for include_diagonal, expected, tolerance in (
        (True, 0.2 * z.norm().item() / (512 * 1024), 1e-9),
        (False, 2 * math.sqrt(2) * torch.pdist(z[0]).min().item(), 0.01),  # the next pairs take a part
    ):
        ours = z.clone().requires_grad_(True)
        dispersion_loss(ours, variant="l2_repel", include_diagonal=include_diagonal).sum().backward()
        assert ours.grad.norm().item() == pytest.approx(expected, rel=tolerance)
        assert ours.grad.norm().item() == pytest.approx(2.76e-4 if include_diagonal else 116, rel=0.01)


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**14])
def test_a_token_of_equal_features_has_no_correlation(scale):
    """Rounding leaves its features unequal to their mean, which must not be taken for a direction."""
    z = scale * tokens(1, 3, 999).float()
    z[:, 2] = 0.1 * scale
    assert (z[:, 2] - z[:, 2].mean()).norm() > 0
    correlation = np.corrcoef(z[0, :2].double().numpy())[0, 1]
    value = dispersion_loss(z.requires_grad_(True), variant="decorrelation")
    value.sum().backward()
    assert value.item() == pytest.approx(2 * correlation**2 / 6, abs=1e-6)  # of the six pairs, two are not 0
    assert not z.grad[:, 2].any()


@pytest.mark.parametrize(("variant", "estimator", "options"), EVERY_LOSS, ids=str)
def test_a_second_derivative_is_an_error(variant, estimator, options):
    """The saved gradient is no function of z: whoever differentiates it must not get a wrong number, nor a part of one."""
    loss = DispersionLoss(variant, estimator, **options, **drawn(estimator, 5))
    z = tokens(2, 12, 8).requires_grad_(True)
    (expected,) = torch.autograd.grad(loss([z]).sum(), z)
    for of_gradient in (torch.sum, lambda grad: (grad * z).sum()):
        (grad,) = torch.autograd.grad(loss([z]).sum(), z, create_graph=True)
        torch.testing.assert_close(grad, expected)
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(of_gradient(grad), z)


def test_repelling_forces_point_away():
    """A step against the gradient spreads the tokens, whatever the variant."""
    for variant in VARIANTS:
        options = {"variant": variant} | ({"norm_coeff": 0.0} if variant == "l2_repel" else {})
        z = tokens(1, 20, 8, shift=1.0).requires_grad_(True)
        before = dispersion_loss(z, **options)
        before.sum().backward()
        after = dispersion_loss((z - 0.1 * z.grad / z.grad.abs().max()).detach(), **options)
        assert after.item() < before.item()


class TestMoments:
    def activations(self, condensation, n=512, f=64):
        """Tokens with a common direction of growing strength and a spectrum that decays, as in a model in training."""
        spectrum = torch.arange(1, f + 1, dtype=torch.float64) ** -0.5
        z = tokens(2, n, f, seed=3, shift=0.0) * spectrum
        common = torch.zeros(f, dtype=torch.float64)
        common[0] = condensation
        return z + common

    def cloud(self, shape, n, f, width=0.2):
        """Shapes that embeddings pass through: tokens with no common direction, within cones, and a few outside of them."""
        z = tokens(2, n, f, seed=5, shift=0.0) / math.sqrt(f)
        first, second, third = torch.eye(f, dtype=torch.float64)[:3]
        if shape == "random":
            return z
        near = first + width * z
        if shape == "two cones":
            near[:, 1::3] = second + width * z[:, 1::3]
        elif shape == "two close cones":
            near[:, 1::3] = 0.8 * first + 0.6 * second + width * z[:, 1::3]
        elif shape == "cone and others":  # almost none of which are among the tokens of the fit
            near[:, 1 :: n // 5] = z[:, 1 :: n // 5]
        elif shape == "cone and short others":
            near[:, 1 :: n // 5] = 0.1 * z[:, 1 :: n // 5]
        elif shape == "cone and opposite":
            near[:, 7] = width * z[:, 7] - first
        elif shape == "all between":
            near += torch.linspace(0, 2, n, dtype=torch.float64)[:, None] * third
        return near

    def compared(self, z, **options):
        """Cosine, ratio of the norms and relative error of the moments' gradient to exact's, each of one sequence; values."""
        grads, values = [], []
        for estimator in ("exact", "moments"):
            one = z.clone().requires_grad_(True)
            value = dispersion_loss(one, estimator=estimator, **options)
            value.sum().backward()
            grads.append(one.grad.flatten(1))
            values.append(value.detach())
        cosine = torch.nn.functional.cosine_similarity(*grads, dim=1)
        exact = grads[0].norm(dim=1)
        return cosine, grads[1].norm(dim=1) / exact, (grads[1] - grads[0]).norm(dim=1) / exact, values

    @pytest.mark.parametrize("condensation", [0.0, 0.5, 2.0, 8.0, 50.0])
    def test_close_to_exact(self, condensation):
        cosine, ratio, _, values = self.compared(self.activations(condensation).float())
        assert (cosine >= 0.998).all()
        assert ((ratio - 1).abs() <= 0.02).all()
        assert (values[0] - values[1]).abs().max() <= 5e-3

    @pytest.mark.parametrize("width", [1.0, 0.2, 0.05])
    @pytest.mark.parametrize(
        "shape",
        [
            *("random", "one cone", "two cones", "two close cones", "cone and others", "cone and short others"),
            *("cone and opposite", "all between"),
        ],
    )
    def test_close_to_exact_while_embeddings_collapse(self, shape, width):
        """With one quadratic for all tokens, the gradient of a cone and others was 1.9 times as long as it should be."""
        z = self.cloud(shape, 512, 64, width).float()
        cosine, ratio, error, values = self.compared(z)
        assert (cosine >= 0.998).all()
        assert ((ratio - 1).abs() <= 0.02).all()
        assert (values[0] - values[1]).abs().max() <= 0.01
        found = []
        DispersionLoss(estimator="moments")([z], fit_errors=found)
        # The logged error tells, but for what tokens that no other is compared with do to a narrow cone.
        assert (error <= found[0] + 0.04).all()

    def test_fit_leaves_out_the_diagonal(self):
        """With N < 2 FIT_TOKENS every token is compared with all, so that the mean of w, and with it the value, is exact.

        The cosines of spread tokens lie around 0, far from the diagonal's 1: a fit that included it would change the value by
        0.03 and the gradient by 17 % at this τ.
        """
        z = tokens(2, 60, 256, shift=0.0)
        value, grad, expected, expected_grad = both("angular", z, estimator="moments", tau=0.2)
        assert (value - expected).abs().max() <= 1e-5
        assert relative(grad, expected_grad) <= 0.02

    def test_exact_where_w_is_quadratic(self):
        """With a quadratic w the fits and the collapsed sums are exact."""
        from titan_disp.dispersion.moments import Quadratic, fit, quadratic_sum_

        u = torch.nn.functional.normalize(tokens(2, 300, 10), dim=-1).requires_grad_(True)
        a = (0.3, -0.7, 1.1)

        def pair(c):
            return a[0] + a[1] * c + a[2] * c**2, a[1] + 2 * a[2] * c

        sampled = sample(u.detach(), 300, None)
        assert sampled.z.shape == (2, 75, 10)  # one of four
        scale = torch.ones(2, 300, 1, dtype=torch.float64)
        quadratic, sums = fit(u.detach(), scale, sampled.z, sampled, pair, None, u.dtype)
        assert (sums[:, 0] <= 1e-8 * sums[:, 1]).all()  # the ridge
        for found, expected in zip(quadratic, (a[0], a[1], 2 * a[2]), strict=True):
            torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-3, atol=1e-3)
        w, _ = pair(u @ u.transpose(1, 2))
        expected = w[:, ~torch.eye(300, dtype=torch.bool)].sum(1)
        expected.sum().backward()
        one_for_all = Quadratic(*(torch.full((2, 1, 1), x, dtype=torch.float64) for x in (a[0], a[1], 2 * a[2])))
        value, grad = quadratic_sum_(u.detach().clone(), one_for_all, 300, None, u.dtype)
        torch.testing.assert_close(value, expected.detach())
        torch.testing.assert_close(grad, u.grad)

    def test_fit_error_is_reported(self):
        """Per layer and sequence; against numpy's own least squares of every token, where all are compared with all."""
        layers = [tokens(2, 60, 16, seed) for seed in range(3)]
        errors = []
        DispersionLoss(estimator="moments", tau=0.5)(layers, fit_errors=errors)
        for layer, found in zip(layers, errors, strict=True):
            for z, error in zip(layer.numpy(), found.tolist(), strict=True):
                length = np.linalg.norm(z, axis=-1, keepdims=True) + 1e-2
                u = z / length
                residuals, slopes = [], []
                for i in range(60):
                    others = np.delete(u, i, axis=0)
                    c = others @ u[i]
                    angle = np.arccos(c.clip(-0.75, 0.75))
                    slope = np.exp(-angle / (0.5 * np.pi)) / (0.5 * np.pi * np.sin(angle))
                    # What is left of a token without its part along u_i.
                    across = np.linalg.norm(others - np.outer(c, u[i]) / (u[i] @ u[i]), axis=-1) * np.linalg.norm(u[i])
                    residual = slope - np.polyval(np.polyfit(c, slope, 1, w=np.sqrt(across)), c)
                    residuals.append(across * residual / length[i])
                    slopes.append(across * slope / length[i])
                assert error == pytest.approx(
                    np.linalg.norm(residuals) / np.linalg.norm(slopes), rel=1e-4
                )  # ridge, floor

    def test_finite_where_the_fitted_sum_is_negative(self):
        """Tokens are compared with some that lie in a narrow cone, where a line through w is below 0 for the others."""
        z = tokens(1, 256, 16, shift=0.0)
        (fitted,) = sample(z, 256, None).rows
        z[:, fitted] *= 0.01
        z[:, fitted, 0] += 1.0
        value = dispersion_loss(z.requires_grad_(True), estimator="moments", tau=0.05)
        value.sum().backward()
        smallest = torch.finfo(z.dtype).tiny
        assert value.item() == pytest.approx(math.log(smallest))
        assert z.grad.isfinite().all()


class TestSampled:
    def test_is_exact_of_the_drawn_tokens(self):
        z = tokens(2, 50, 8)
        for variant, options in EVERY_VARIANT:
            one = z.clone().requires_grad_(True)
            value = dispersion_loss(one, variant=variant, estimator="sampled", max_tokens=10, seed=4, step=7, **options)
            value.sum().backward()
            chosen = drawing_order(50, 4, 7, 0)[:10]
            two = z[:, chosen].clone().requires_grad_(True)
            expected = oracle(variant, two, **options)
            expected.sum().backward()
            torch.testing.assert_close(value.detach(), expected.detach())
            torch.testing.assert_close(one.grad[:, chosen], two.grad)
            rest = torch.ones(50, dtype=torch.bool)
            rest[chosen] = False
            assert not one.grad[:, rest].any()

    def test_drawn_from_seed_step_and_layer(self):
        drawn = {(s, t, layer): order(4096, s, t, layer) for s in (0, 1) for t in (0, 1) for layer in (0, 1)}
        assert len({tuple(positions.tolist()) for positions in drawn.values()}) == 8
        for of, positions in drawn.items():
            assert torch.equal(positions.sort().values, torch.arange(4096))
            assert torch.equal(positions, drawing_order(4096, *of))
        assert set().union(*(order(10, 0, step, 0)[:4].tolist() for step in range(50))) == set(range(10))
        assert order(4096, 11, 3, 2)[:5].tolist() == [1391, 2457, 224, 474, 350]  # or a resumed run would draw others

    def test_all_tokens_where_there_are_no_more(self):
        z = tokens(1, 20, 8)
        assert torch.equal(dispersion_loss(z, estimator="sampled", max_tokens=20), dispersion_loss(z))


def check_sharded(ranks):
    """Values and gradients of every allowed combination equal one process's, where so many ranks share a sequence.

    On four ranks, two that share one hold other sequences than the other two, so that nothing may pass between these pairs.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("data", "sequence"))
    rank = mesh.get_local_rank("sequence")
    # 256 tokens: the moments' fit then takes the same ones on every mesh.
    for variant, estimator, more in EVERY_LOSS:
        for features in (8, 300):  # decorrelation's linear and its pairwise form
            z = tokens(2, 256, features, seed=mesh.get_local_rank("data")) / math.sqrt(features)
            options = {"variant": variant, "estimator": estimator, **more, **drawn(estimator, 40)}
            whole = z.clone().requires_grad_(True)
            expected = dispersion_loss(whole, **options)
            (expected * torch.tensor([1.0, 3.0])).sum().backward()
            own = torch.arange(256).chunk(ranks)[rank]
            local = z[:, own].clone().requires_grad_(True)
            value = dispersion_loss(local, group=mesh["sequence"], **options)
            (value * torch.tensor([1.0, 3.0])).sum().backward()
            torch.testing.assert_close(value, expected, msg=lambda m, o=options: f"{o}: {m}")
            torch.testing.assert_close(local.grad, whole.grad[:, own], msg=lambda m, o=options: f"{o}: {m}")


@pytest.mark.parametrize("ranks", [2, 4])
def test_sharded(ranks):
    spawn(4, check_sharded, ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "angle"}, "variant is 'angle', expected one of angular, decorrelation"),
        ({"estimator": "fast"}, "estimator is 'fast', expected one of exact, moments, sampled"),
        (
            {"variant": "l2_repel", "estimator": "moments"},
            "'l2_repel' does not support: expected one of exact, sampled$",
        ),
        ({"variant": "decorrelation", "estimator": "moments"}, "grows only linearly with the tokens"),
        ({"max_tokens": 1}, "max_tokens is 1, expected at least 2"),
        ({"variant": "l2_repel", "norm_coeff": -1.0}, "norm_coeff is -1.0, expected a number"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DispersionLoss(**options)


@pytest.mark.parametrize("option", sorted({option for kind in VARIANTS.values() for option in options_of(kind)}))
def test_an_option_that_the_variant_does_not_use_is_refused(option):
    default = getattr(DispersionLoss(), option)
    value = not default if isinstance(default, bool) else default / 2
    users = [variant for variant, kind in VARIANTS.items() if option in options_of(kind)]
    for variant in VARIANTS:
        if variant in users:
            assert getattr(DispersionLoss(variant, **{option: value})._variant, option) == value
            continue
        message = (
            f"{option} is {value}, but variant {variant!r} does not use it: leave it at {default} (it is an option of"
        )
        with pytest.raises(ValueError, match=re.escape(f"{message} {', '.join(users)})")):
            DispersionLoss(variant, **{option: value})


def test_every_variant_is_in_the_table():
    """A file in the folder that ``VARIANTS`` does not list would be an unknown name, and nothing more."""
    folder = Path(inspect.getfile(Variant)).parent
    listed = {Path(inspect.getfile(kind)).name for kind in VARIANTS.values()}
    for file in sorted({path.name for path in folder.glob("*.py")} - {"__init__.py", "base.py"}):
        assert file in listed, f"add a line for {file} to VARIANTS in titan_disp/dispersion/variants/__init__.py"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_documented(variant):
    """With its options, which a user would otherwise have to guess."""
    page = (ROOT / "docs" / "loss.md").read_text()
    rows = re.findall(rf"^\| `{variant}` \| .+ \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 1, f"add a row for {variant!r} to the table of variants in docs/loss.md: name, formula, options"
    options = options_of(VARIANTS[variant])
    assert sorted(re.findall(r"`(\w+)`", rows[0])) == sorted(options), f"docs/loss.md: the options of {variant!r}"
    assert ('estimator="moments"' in rows[0]) == ("moments" in VARIANTS[variant].estimators)


def test_a_fifth_variant_is_a_class_and_a_line_in_the_table(monkeypatch):
    """The mean of p c² over the pairs, by every estimator: these know no variant's name."""

    @dataclasses.dataclass(frozen=True)
    class Fifth(CosineVariant):
        name = "fifth"
        estimators = ("exact", "moments", "sampled")

        tau: float  # p

        @property
        def pair(self):
            return lambda c: (self.tau * c**2, 2 * self.tau * c)

        def units(self, z):
            return Normalized(z, 1e-6)

    monkeypatch.setitem(VARIANTS, "fifth", Fifth)
    z = tokens(2, 30, 5)
    for estimator, chosen in (
        ("exact", range(30)),
        ("moments", range(30)),
        ("sampled", drawing_order(30, 0, 0, 0)[:9]),
    ):
        u = torch.nn.functional.normalize(z[:, list(chosen)], dim=-1)
        c = (u @ u.transpose(1, 2))[:, ~torch.eye(len(chosen), dtype=torch.bool)]
        found = dispersion_loss(z, variant="fifth", estimator=estimator, tau=3.0, **drawn(estimator, 9))
        torch.testing.assert_close(found, 3 * c.square().mean(1), rtol=1e-4, atol=0)  # ε, and the fit's ridge
    with pytest.raises(ValueError, match="clamp is 0.1, but variant 'fifth' does not use it"):
        DispersionLoss("fifth", clamp=0.1)


def test_max_tokens_is_refused_without_sampling():
    assert DispersionLoss(estimator="sampled", max_tokens=10).max_tokens == 10
    for estimator in ("exact", "moments"):
        message = f"max_tokens is 10, but estimator '{estimator}' does not use it: leave it at 256 .*sampled"
        with pytest.raises(ValueError, match=message):
            DispersionLoss(estimator=estimator, max_tokens=10)


def test_schedule():
    constant = CoeffSchedule(0.1, total_steps=100)
    assert {constant(s) for s in range(100)} == {0.1}
    warm = CoeffSchedule(0.1, warmup_steps=10, total_steps=100)
    assert [round(warm(s), 3) for s in (0, 4, 9, 10, 99)] == [0.01, 0.05, 0.1, 0.1, 0.1]
    linear = CoeffSchedule(1.0, 0, "linear", 0.0, 11)
    assert [linear(s) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])
    cosine = CoeffSchedule(1.0, 10, "cosine", 0.2, 111)
    assert [cosine(s) for s in (10, 60, 110)] == pytest.approx([1.0, 0.6, 0.2])
    assert cosine(35) == pytest.approx(0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert linear(50) == 0.0  # beyond the end
    assert CoeffSchedule(1.0, 0, "linear", 0.5, 2)(1) == 0.5
    assert CoeffSchedule(1.0, 3, "linear", 0.5, 3)(2) == 1.0  # nothing but warm-up
    early = CoeffSchedule(1.0, 2, "linear", 0.2, total_steps=20, decay_steps=4)
    assert [early(s) for s in (0, 1, 2, 4, 6, 7, 19)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2, 0.2, 0.2])
    for bad in (
        {"coeff": -1.0},
        {"coeff": 1.0, "warmup_steps": 5},
        {"coeff": 1.0, "decay": "step"},
        {"coeff": 1.0, "decay_steps": 2},
        {"coeff": 1.0, "decay": "linear", "warmup_steps": 1, "decay_steps": 3},
    ):
        with pytest.raises(ValueError, match="expected"):
            CoeffSchedule(**bad, total_steps=3)


def test_loss_of_a_config():
    """No option of [dispersion] gets lost on the way, nor the seed of the positions."""
    assert build_dispersion_loss(load_config([])) == DispersionLoss()
    assert get_args(get_type_hints(Dispersion)["estimator"]) == ESTIMATORS
    for options in (
        {"variant": "l2_repel", "estimator": "sampled", "tau": 0.3, "norm_coeff": 0.4, "max_tokens": 7},
        {"variant": "l2_repel", "include_diagonal": False},
        {"variant": "orthogonalization", "clamp": 0.1, "norm_eps": 0.02},
    ):
        config = load_config(["--debug.seed", "11"])
        for name, value in options.items():
            assert hasattr(config.dispersion, name)
            setattr(config.dispersion, name, value)
        assert build_dispersion_loss(config) == DispersionLoss(**options, seed=11)


def test_schedule_of_a_config():
    """λ of every step, against the formulas written out: 2 steps of warm-up and 9 in all, so that step 8 is the last."""
    config = load_config(
        [
            *("--training.steps", "9", "--dispersion.coeff", "0.4", "--dispersion.warmup_steps", "2"),
            *("--dispersion.final_coeff", "0.1"),
        ]
    )
    after_warmup = {
        "constant": lambda step: 0.4,
        "linear": lambda step: 0.4 - 0.3 * (step - 2) / 6,
        "cosine": lambda step: 0.1 + 0.3 * (1 + math.cos(math.pi * (step - 2) / 6)) / 2,
    }
    for decay, expected in after_warmup.items():
        config.dispersion.decay = decay
        schedule = build_coeff_schedule(config)
        assert [schedule(step) for step in range(9)] == pytest.approx([0.2, 0.4, *map(expected, range(2, 9))])
    config.dispersion.decay_steps = 3  # from 0.4 to 0.1, a cosine
    found = [build_coeff_schedule(config)(step) for step in range(9)]
    assert found == pytest.approx([0.2, 0.4, 0.4, 0.325, 0.175, 0.1, 0.1, 0.1, 0.1])


def moments_during_training(sample, folder):
    """Gradients of moments against exact, on all layers' activations, at several moments of a run without dispersion."""
    from pathlib import Path

    from tests.mesh import build

    trainer = build(
        sample,
        Path(folder) / "run",
        *("--dispersion.no-enabled", "--training.seq_len", "256", "--training.steps", "40", "--optimizer.lr", "4e-3"),
        *("--training.max_norm", "1.0", "--lr_scheduler.warmup_steps", "5", "--stream.prefetch", "0"),
    )
    batches = trainer.batch_generator(trainer.dataloader)
    inputs = next(batches)[0]["input"]
    model = trainer.model_parts[0]
    condensed = []
    for step in range(41):
        if step <= 15 or step == 40:
            with torch.no_grad():
                _, layers = model(inputs, return_activations=range(7))
            for z in layers:
                grads = []
                for estimator in ("exact", "moments"):
                    one = z.float().clone().requires_grad_(True)
                    dispersion_loss(one, estimator=estimator).sum().backward()
                    grads.append(one.grad.flatten())
                cosine = torch.nn.functional.cosine_similarity(*grads, dim=0)
                ratio = grads[1].norm() / grads[0].norm()
                assert cosine >= 0.999, (step, cosine)
                assert 0.97 <= ratio <= 1.03, (step, ratio)
                fit_errors = []
                DispersionLoss(estimator="moments")([z.float()], fit_errors=fit_errors)
                error = (grads[1] - grads[0]).norm() / grads[0].norm()
                assert error <= fit_errors[0].max() + 0.01, (step, error)
            u = torch.nn.functional.normalize(layers[-1].float(), dim=-1)
            condensed.append((u @ u.transpose(1, 2)).mean().item())
        trainer.step += 1
        trainer.train_step(batches)
    # The runs' embeddings pass through what the fit must bear: nearly isotropic at first, then a narrow cone.
    assert min(condensed) < 0.2
    assert max(condensed) > 0.8
    trainer.close()


@pytest.mark.slow
def test_moments_on_a_model_in_training(sample, tmp_path):
    spawn(1, moments_during_training, str(sample), str(tmp_path))
