"""What a GPU runs, as far as a CPU can tell: bf16 products, fused epilogues by
Inductor, and no waiting of the host.
"""

import contextlib
import functools
import gc
import warnings
import weakref
from unittest import mock

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.oracle import (
    EVERY_ESTIMATOR,
    OPTIONS,
    angular,
    drawn,
    loss_and_gradient,
    tokens,
)
from titan_disp.dispersion import (
    DispersionLoss,
    dispersion_loss,
    kernels,
    layers,
    moments,
    pairwise,
    vectors,
)
from titan_disp.dispersion.variants import VARIANTS, base
from titan_disp.dispersion.variants.paper import angular_pair
from titan_disp.dispersion.vectors import Gradient


@pytest.fixture(autouse=True)
def no_record(monkeypatch):
    """What these tests compute is no part of what the process says that it computes."""
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(kernels, "_products", set())


@pytest.fixture
def bf16_products(monkeypatch):
    """The choice that a GPU makes.

    The CPU forms these products in float32, as on a GPU that cannot return float32.
    """
    for module in (kernels, pairwise, vectors, moments, base):
        monkeypatch.setattr(module, "operand_dtype", lambda x: x.dtype)


@pytest.mark.parametrize("mean", [0.0, 0.3, 3.0])
def test_bf16_products(bf16_products, mean):
    """Cosines rounded to bf16 (2^-9): the slope of w, 1/(πτ√(1 − c²)) < ½, carries that
    to the loss; of r, to the gradient.
    """
    z = tokens(2, 300, 64, mean=mean).bfloat16()
    options = {"tau": 1.0, "clamp": 0.25, "norm_eps": 1e-2}
    expected, expected_grad = loss_and_gradient(angular, z.double(), **options)
    loss, grad = loss_and_gradient(dispersion_loss, z, **options)
    assert (loss - expected).abs().max() < 1e-3
    assert (
        torch.nn.functional.cosine_similarity(
            grad.flatten(), expected_grad.flatten(), dim=0
        )
        > 0.9999
    )
    assert abs(grad.norm() / expected_grad.norm() - 1) < 2**-8
    moments_loss, moments_grad = loss_and_gradient(
        dispersion_loss, z, estimator="moments", **options
    )
    assert (moments_loss - expected).abs().max() < 5e-3
    assert (
        torch.nn.functional.cosine_similarity(
            moments_grad.flatten(), expected_grad.flatten(), dim=0
        )
        > 0.99
    )


@pytest.mark.parametrize(("variant", "estimator"), EVERY_ESTIMATOR)
def test_under_amp_products_are_bf16(bf16_products, monkeypatch, variant, estimator):
    """One GPU without FSDP2: float32 activations give what bf16 ones do, unless
    products are float32.
    """
    z = tokens(2, 160, 24)
    options = {"variant": variant, "estimator": estimator, **drawn(estimator, 50)}
    in_bf16 = VARIANTS[variant].bf16_products
    plain = loss_and_gradient(dispersion_loss, z, **options)
    expected = loss_and_gradient(
        dispersion_loss, z.bfloat16() if in_bf16 else z, **options
    )
    monkeypatch.setattr("titan_disp.dispersion.loss.bf16_autocast", lambda device: True)
    loss, grad = loss_and_gradient(dispersion_loss, z, **options)
    assert torch.equal(loss, expected[0])
    assert torch.equal(loss, plain[0]) != in_bf16
    # The gradient is float32 here, as z is; of bf16 activations it is saved in bf16.
    torch.testing.assert_close(
        grad, expected[1], rtol=2**-7, atol=2**-8 * grad.abs().max().item()
    )


@pytest.mark.parametrize(
    ("variant", "diagonal", "padding"),
    [
        (v, True, False)
        for v, kind in VARIANTS.items()
        if issubclass(kind, base.CosineVariant)
    ]
    + [("angular", False, False), ("angular", True, True)],
)
def test_epilogue_compiles_to_one_kernel(variant, diagonal, padding):
    pair = DispersionLoss(variant, **OPTIONS.get(variant, [{}])[0])._variant.pair
    u = torch.nn.functional.normalize(tokens(2, 96, 32), dim=-1)
    scale = torch.rand(2, 96, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    padded = scale > 1.2
    arguments = (pair, scale, scale.transpose(1, 2), diagonal, torch.bfloat16)
    arguments += ((padded, padded.transpose(1, 2)),) if padding else ()
    eager = pairwise.epilogue_of(pair)
    products = u @ u.transpose(1, 2)
    expected = eager(products.clone(), *arguments)
    torch._dynamo.reset()
    found, (code,) = run_and_get_code(
        torch.compile(eager.__wrapped__), products.clone(), *arguments
    )
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-3)
    torch.testing.assert_close(found[1], expected[1], rtol=2**-7, atol=1e-5)  # bf16
    assert code.count("void  kernel(") == 1


def test_in_place_kernels_compile_on_views():
    """They change slices of their first argument: Inductor's result is eager's."""
    g = tokens(2, 40, 24)
    z = tokens(2, 40, 24, mean=1.0).bfloat16()
    norm = torch.linalg.vector_norm(z.float(), dim=-1, keepdim=True)
    quadratic = moments.Quadratic(*torch.rand(3, 2, 40, 1)[:, :, 8:24])
    for function, arguments in (
        (
            vectors._write,
            (
                g[:, 8:24],
                (z[:, 8:24], norm[:, 8:24], 1 / norm[:, 8:24]),
                None,
                None,
                None,
            ),
        ),
        (
            moments._combine_,
            (
                tokens(2, 16, 24),
                torch.rand(2, 1, 24),
                quadratic,
                39,
                torch.rand(2, 16, 1),
            ),
        ),
        (
            moments._combine_,
            (
                tokens(2, 16, 24),
                torch.rand(2, 1, 24),
                quadratic,
                torch.tensor([[[39]], [[20]]]),
                torch.rand(2, 16, 1),
            ),
        ),
    ):
        torch._dynamo.reset()
        expected = g.clone()
        found = g.clone()
        value = function(expected[:, 8:24], *arguments)
        compiled_value = torch.compile(function.__wrapped__)(found[:, 8:24], *arguments)
        assert not torch.equal(expected, g)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(compiled_value, value, rtol=1e-5, atol=1e-5)


def test_moments_compile():
    torch._dynamo.reset()
    u = torch.nn.functional.normalize(tokens(2, 64, 24), dim=-1)
    compiled = torch.compile(moments._fit.__wrapped__)
    eager = moments._fit.__wrapped__
    c = u @ u[:, ::4].transpose(1, 2)
    ones = torch.ones(2, 64, 1)
    valid = (torch.arange(64) < torch.tensor([[40], [0]]))[..., None]
    index = torch.arange(64)[None, :, None]
    for mask in (index >= 0, valid):
        rows = moments._Rows(ones, ones, index, mask)
        columns = moments._Columns(
            *(of_rows[:, ::4].transpose(1, 2) for of_rows in (ones, index, mask))
        )
        arguments = (c, rows, columns, angular_pair(0.7, 0.25))
        torch.testing.assert_close(
            compiled(*arguments), eager(*arguments), rtol=1e-4, atol=1e-4
        )


def test_a_function_that_cannot_be_compiled_runs_as_it_is(monkeypatch):
    """It warns once, and torch.compile is not tried again."""
    compiled = mock.Mock(side_effect=RuntimeError("no C++ compiler"))
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: compiled)

    def shape(x):
        return x.shape

    fused = kernels.fused(shape)
    assert fused(torch.empty(2)) == (2,)
    assert not compiled.called  # on a CPU nothing is compiled
    assert kernels.path()["kernels"] == {"shape": "eager: on a CPU"}
    with pytest.warns(
        UserWarning,
        match=r"shape could not be compiled and runs slower: RuntimeError: no C\+\+ comp",
    ):
        assert fused(torch.empty(3, device="meta")) == (3,)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fused(torch.empty(4, device="meta")) == (4,)
    assert compiled.call_count == 1
    assert kernels.path()["kernels"] == {
        "shape": "eager: RuntimeError: no C++ compiler"
    }


def test_the_limit_of_recompilations_is_each_variants_own_and_noticed(monkeypatch):
    """Without fullgraph, Dynamo would run the function as it is, and say so in its own
    log only.
    """
    torch._dynamo.reset()
    monkeypatch.setattr(
        torch, "compile", functools.partial(torch.compile, backend="eager")
    )
    fused = kernels.fused(lambda x: x * 2)
    c, scale = (torch.empty(1, 8, n, device="meta") for n in (8, 1))
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for tau in (0.5, 0.6, 0.7):
                pair = angular_pair(tau, 0.25)
                epilogue = pairwise.epilogue_of(pair)
                scales = (scale, scale.transpose(1, 2))
                epilogue(c.clone(), pair, *scales, True, torch.float32)
            fused(torch.empty(3, device="meta"))
        with pytest.warns(
            UserWarning,
            match="could not be compiled and runs slower: FailOnRecompileLimitHit",
        ):
            assert fused(torch.empty(4, device="meta")).shape == (4,)


def test_a_pair_function_that_nobody_holds_is_forgotten():
    """With its compiled code: a variant may make a new one for each call."""
    torch._dynamo.reset()

    def call_new_pair():
        def pair(c):
            return c * slope, torch.full_like(c, slope)

        slope = 2.0
        scale = torch.ones(1, 8, 1)
        epilogue = pairwise.epilogue_of(pair)
        compiled = torch.compile(epilogue.__wrapped__, backend="eager", fullgraph=True)
        arguments = (pair, scale, scale.transpose(1, 2), True, torch.float32)
        compiled(torch.ones(1, 8, 8), *arguments)
        return weakref.ref(pair), weakref.ref(epilogue)

    references = call_new_pair()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


@pytest.mark.parametrize(
    ("missing", "added"),
    [("bmm", "float32"), ("baddbmm", "bfloat16, added in float32")],
)
def test_products_that_cannot_be_float32(bf16_products, monkeypatch, missing, added):
    """Each is probed by itself, and said; without baddbmm, bmm does both.

    With rounded products, the error was 10 %.
    """
    z = 1 + 0.01 * tokens(1, 128, 64, mean=0.0)  # cosines of 0.9999
    kernels._float32_results.cache_clear()
    there = {
        "bmm": lambda a, b: a.float() @ b.float(),
        "baddbmm": lambda out, a, b, beta=1: out.copy_(
            a.float() @ b.float() + (beta * out if beta else 0)
        ),
    }
    del there[missing]
    for kind, function in there.items():
        monkeypatch.setattr(kernels, f"_{kind}", function)
    _, expected = loss_and_gradient(
        angular, z.bfloat16().double(), clamp=1e-5, tau=1.0, norm_eps=1e-2
    )
    with pytest.warns(
        UserWarning,
        match=f"torch.{missing} cannot return bf16 products in float32 on cpu",
    ) as found:
        _, grad = loss_and_gradient(dispersion_loss, z.bfloat16(), clamp=1e-5)
    assert len(found) == 1
    assert (grad - expected).norm() / expected.norm() < 0.01
    assert {
        f"float32, as torch.{missing} cannot add bfloat16 in float32",
        added,
    } <= set(kernels.path()["products"])
    kernels._float32_results.cache_clear()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("variant", "estimator"), EVERY_ESTIMATOR)
def test_the_host_never_waits(monkeypatch, variant, estimator, padded):
    """Tensors without data, on no CPU: whatever would have to look at a value raises,
    and so does a copy to the host.
    """
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph: function)
    # Unknown to such tensors
    monkeypatch.setattr(
        torch, "autocast", lambda device, enabled: contextlib.nullcontext()
    )
    # likewise
    monkeypatch.setattr("titan_disp.dispersion.loss.bf16_autocast", lambda device: True)
    waits = "the host would wait for this copy"
    # not seen without data
    monkeypatch.setattr(torch.Tensor, "new_tensor", lambda *a, **k: pytest.fail(waits))
    loss = DispersionLoss(variant, estimator, **drawn(estimator, 16))
    monkeypatch.setattr(pairwise, "GPU_TILE", 48)  # several tiles
    z = torch.empty(3, 128, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    valid = torch.ones(3, 128, device="meta", dtype=torch.bool) if padded else None
    values = loss([z, z], step=3, valid=valid, fit_errors=[])
    values.mean().backward()
    assert (values.shape, values.device) == ((2, 3), z.device)
    assert (z.grad.shape, z.grad.dtype, z.grad.device) == (z.shape, z.dtype, z.device)


@pytest.mark.parametrize(
    ("device", "batch", "tokens", "tiles"),
    [
        ("cuda", 8, 4096, [1024] * 4),  # 1448² × 8 would fill TILE_ELEMENTS
        ("cuda", 1, 8192, [2048] * 4),
        ("cuda", 1, 5120, [1280] * 4),
        ("cuda", 128, 256, [256]),  # drawn positions
        ("cuda", 8, 5376, [896] * 6),  # 1344 divides it too, but is no multiple of 128
        # 13 × 128: no multiple of 128 but a tile too large and one too small
        ("cuda", 8, 1664, [832] * 2),
        ("cuda", 1, 4099, [1408, 1408, 1283]),  # a prime
        ("cpu", 1, 2048, [768, 768, 512]),
    ],
)
def test_tiles_are_equal(device, batch, tokens, tiles):
    """On a GPU, where a second shape of a tile is a second kernel to compile, and then
    one for all shapes.
    """
    side = pairwise.tile_size(tokens, batch, device)
    assert [min(side, tokens - i) for i in range(0, tokens, side)] == tiles


@pytest.mark.parametrize(
    ("batch", "parts"), [(1, [1]), (8, [8]), (12, [6, 6]), (17, [6, 6, 5])]
)
def test_parts_of_a_batch_are_equal(monkeypatch, batch, parts):
    """As far as they can be: another number of sequences is another shape of the
    tiles.
    """
    monkeypatch.setattr(layers, "BATCH_ELEMENTS", 8 * 3 * 2)
    seen = []
    layers.in_parts(
        torch.zeros(batch, 3, 2),
        None,
        lambda z, mask: seen.append(len(z)) or (z.sum((1, 2)), Gradient(z)),
    )
    assert seen == parts
