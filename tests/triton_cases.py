"""The numbers of the Triton kernel of pairs, against float64.

tests/test_triton_pairs.py runs these tests under Triton's interpreter. On a GPU:

    TITAN_DISP_TRITON=1 TESTS_ON_GPU=1 python -m pytest tests/triton_cases.py
"""

import math
from types import SimpleNamespace

import pytest
import torch

from tests.oracle import loss_and_gradient, oracle, tokens, within
from titan_disp.dispersion import dispersion_loss, kernels, pairwise, triton_pairs
from titan_disp.dispersion.masks import Marks, apart
from titan_disp.dispersion.pairwise import Shard
from titan_disp.dispersion.variants.others import uniformity_pair
from titan_disp.dispersion.variants.paper import angular_pair, orthogonalization_pair
from titan_disp.dispersion.vectors import Normalized

# A CPU cannot add bf16 products in float32, and warns.
pytestmark = pytest.mark.filterwarnings("ignore:torch.b.*mm cannot return")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAIRS = {
    "angular": angular_pair(0.7, 0.25),
    "steep": angular_pair(0.05, 0.0),
    "orthogonalization": orthogonalization_pair(0.25),
    "uniformity": uniformity_pair(0.7),
}
# Of S and W. The interpreter rounds q towards 0, by up to 2⁻⁸; a GPU to the nearest.
TOLERANCE = {torch.float32: (1e-5, 3e-5), torch.bfloat16: (1e-5, 2**-7)}
DTYPES = [*TOLERANCE]


def forget_examples():
    triton_pairs._is_usable.cache_clear()


@pytest.fixture(autouse=True)
def no_record(monkeypatch):
    monkeypatch.setattr(kernels, "_functions", {})
    monkeypatch.setattr(kernels, "_products", set())
    forget_examples()
    yield
    forget_examples()


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 tokens, blocks of 40, which is no multiple, and bf16 products, as on
    a GPU.
    """
    small = {"TILE": 16, "STEP": 16, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
    monkeypatch.setattr(triton_pairs, "TILE_SHAPES", dict.fromkeys(DTYPES, small))
    for module, function in ((pairwise, "tile_size"), (triton_pairs, "rows_at_once")):
        monkeypatch.setattr(module, function, lambda tokens, *_: min(tokens, 40))
    monkeypatch.setattr(pairwise, "operand_dtype", lambda x: x.dtype)
    monkeypatch.setattr(Shard, "wide", True)


def all_pairs(x, pair, marks=None):
    """S and W of one shard, in float64, with the scales of float32."""
    scale = 1 / (x.float().norm(dim=-1, keepdim=True) + 1e-2)
    if x.dtype == torch.float64:
        scale = scale.double()
    units = SimpleNamespace(x=x, scale=scale)
    s, w = pairwise.all_pairs(Shard(units, marks, pair), pair)
    return s.double(), w.double()


def assert_agrees(x, pair, marks=None):
    s, w = all_pairs(x, pair, marks)
    name = triton_pairs._tile_functions[pair].name
    assert kernels.path()["kernels"][name] == "compiled"
    expected_s, expected_w = all_pairs(x.double(), pair, marks)
    if marks is not None:  # of padding, nobody reads W
        is_token = marks.tokens > (-1 if marks.tokens.dtype != torch.bool else 0)
        w = w * is_token
        expected_w = expected_w * is_token
    s_tolerance, w_tolerance = TOLERANCE[x.dtype]
    assert (s - expected_s).norm() <= s_tolerance * expected_s.norm()
    assert (w - expected_w).norm() <= w_tolerance * expected_w.norm()


TWO_TOKENS = (1, 2, 3)
WITHIN_A_TILE = (2, 13, 5)
ONE_SPAN = (2, 39, 17)
# of 40, 40 and 21 rows
THREE_SPANS = (2, 101, 24)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(small_tiles, dtype):
    for shape in (TWO_TOKENS, WITHIN_A_TILE, ONE_SPAN, THREE_SPANS):
        assert_agrees(tokens(*shape).to(DEVICE, dtype), PAIRS["angular"])


@pytest.mark.parametrize("pair", PAIRS)
def test_pair_functions(small_tiles, pair):
    """Where cosines are from −1 to 1."""
    x = tokens(*ONE_SPAN, mean=0.0).to(DEVICE)
    x[:, :20] = tokens(1, 1, 17) * (1 + 0.3 * x[:, :20])
    x[:, 10:15] = -x[:, 20:25]
    assert_agrees(x, PAIRS[pair])


def test_views(small_tiles):
    """Strides of all kinds."""
    z = tokens(3, 40, 20).to(DEVICE)
    for x in (z[:, 3:30, 4:18], z.transpose(0, 1), z.transpose(1, 2), z[:, ::2]):
        assert_agrees(x, PAIRS["angular"])


@pytest.mark.parametrize("case", ["identical", "opposite", "zero"])
def test_degenerate_tokens(small_tiles, case):
    x = tokens(2, 20, 24).to(DEVICE)
    if case == "identical":
        x = x[:, :1].repeat(1, 20, 1)
    elif case == "opposite":
        x[:, 1::2] = -x[:, ::2]
    else:
        x[:, 7] = 0.0
    # At κ = 0.25: the slope at cosines of 1 is not resolved in float32 for a κ of 0.
    assert_agrees(x, PAIRS["angular"])
    assert_agrees(x, PAIRS["uniformity"])


@pytest.mark.parametrize("pair", ["angular", "orthogonalization", "uniformity"])
def test_a_fault_of_a_token_is_not_hidden(small_tiles, pair):
    x = tokens(2, 40, 24).to(DEVICE)
    x[0, 33, 3] = math.nan
    s, w = all_pairs(x, PAIRS[pair])
    assert s.isnan().tolist() == [True, False]
    assert w[0].isnan().all()
    assert w[1].isfinite().all()


def padding():
    valid = torch.arange(101) < torch.tensor([[101], [41]])
    valid[0, 20:30] = False
    return valid


def segments():
    position = torch.arange(101)
    numbers = torch.stack([position // 31, position // 70])
    numbers[1, 90:] = -1
    return numbers


def with_marks(tokens, marks, where):
    x = tokens[:, where]
    scale = 1 / x.norm(dim=-1, keepdim=True)
    return triton_pairs.Tokens(x, scale, None if marks is None else marks[:, where])


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("marks", [None, padding()[..., None], segments()[..., None]])
def test_a_span(small_tiles, marks, mirrored):
    """Of 37 rows and 81 columns; the columns of a span that is not mirrored begin
    elsewhere.
    """
    x = tokens(*THREE_SPANS).to(DEVICE)
    if marks is not None:
        marks = marks.to(DEVICE)
    first = 0 if mirrored else 20
    rows = with_marks(x, marks, slice(37))
    cols = with_marks(x, marks, slice(first, first + 81))
    pair = PAIRS["uniformity"]
    sums, q = triton_pairs.span_sums(rows, cols, pair, mirrored=mirrored)

    is_pair = torch.ones(2, 37, 81, dtype=torch.bool, device=DEVICE)
    if marks is not None:
        is_pair &= ~apart(rows.marks, cols.marks.mT)
    times = torch.ones(81, device=DEVICE)
    if mirrored:
        is_pair &= ~torch.eye(37, 81, dtype=torch.bool, device=DEVICE)
        times[37:] = 2.0
    scale = (rows.scale * cols.scale.mT).double()
    w, r = pair((rows.x.double() @ cols.x.double().mT) * scale)
    torch.testing.assert_close(
        sums.double(), (w * is_pair * times).sum((1, 2)), rtol=1e-5, atol=0
    )
    exact_q = 2 * r * scale * is_pair
    torch.testing.assert_close(q.double(), exact_q, rtol=1e-4, atol=1e-9)


RANGES = torch.tensor([[[0, 3]], [[0, 1]]])


@pytest.mark.parametrize(
    "marks", [Marks(padding()[..., None]), Marks(segments()[..., None], RANGES)]
)
def test_marks(small_tiles, marks):
    """Padding, and segments."""
    is_token = marks.tokens > (-1 if marks.tokens.dtype != torch.bool else 0)
    x = torch.where(is_token, tokens(*THREE_SPANS), 0.0).to(DEVICE)
    on_device = Marks(marks.tokens.to(DEVICE), marks.ranges)
    assert_agrees(x, PAIRS["angular"], on_device)


def test_pairs_with_another_shard(small_tiles):
    x = tokens(2, 50, 24).to(DEVICE)
    other = tokens(2, 30, 24, seed=1).to(DEVICE)
    results = []
    for dtype in (torch.float32, torch.float64):
        shards = [
            Shard(Normalized(z.to(dtype), norm_eps=0.0), pair=PAIRS["angular"])
            for z in (x, other)
        ]
        w = torch.zeros_like(shards[0].x)
        s = pairwise.add_pairs_with(*shards, w, PAIRS["angular"])
        results.append((s.double(), w.double()))
    for result, expected in zip(*results, strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["angular", "orthogonalization", "uniformity"])
def test_the_loss(small_tiles, variant):
    z = tokens(2, 53, 24).to(DEVICE)
    value, grad = loss_and_gradient(dispersion_loss, z, variant=variant)
    expected, expected_grad = loss_and_gradient(
        lambda x: oracle(variant, x), z.double().cpu()
    )
    torch.testing.assert_close(value.cpu(), expected, rtol=0, atol=4e-6)
    assert (grad.cpu() - expected_grad).norm() <= 3e-5 * expected_grad.norm()
    assert f"{variant}_tile" in kernels.path()["kernels"]


def test_the_loss_within_documents(small_tiles):
    z = tokens(*THREE_SPANS).to(DEVICE)
    value, grad = loss_and_gradient(dispersion_loss, z, segments=segments().to(DEVICE))
    expected, expected_grad = loss_and_gradient(
        lambda x: within(x, segments(), "angular", {}), z.double().cpu()
    )
    torch.testing.assert_close(value.cpu(), expected, rtol=0, atol=4e-6)
    assert (grad.cpu() - expected_grad).norm() <= 3e-5 * expected_grad.norm()


def test_in_a_compiled_function(small_tiles):
    """Dynamo traces the epilogue in place of the kernel."""
    z = tokens(2, 20, 24).to(DEVICE)
    expected = loss_and_gradient(dispersion_loss, z)
    kernels._functions.clear()
    torch._dynamo.reset()
    compiled = torch.compile(lambda z: dispersion_loss(2 * z), backend="eager")
    value, grad = loss_and_gradient(compiled, z / 2)
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(grad / 2, expected[1])
    assert "angular_tile" not in kernels.path()["kernels"]


def test_a_function_that_computes_something_else_is_not_used(small_tiles):
    """The example compares the pair function with the kernel's."""

    @triton_pairs.in_triton("uniformity_tile", 3.0)
    def pair(c):
        w = c.sub_(1.0).mul_(2.0).exp_()
        return w, 2.0 * w

    x = tokens(1, 20, 24).to(DEVICE)
    with pytest.warns(UserWarning, match="uniformity_tile is not used, .* error is"):
        assert not triton_pairs.takes(x, pair)


@pytest.mark.parametrize("wrong", ["mirrored", "mask", "segments"])
def test_the_example_covers_every_use(small_tiles, monkeypatch, wrong):
    """A kernel that fails for one of them is not used."""
    span_sums = triton_pairs.span_sums

    def doubled(rows, cols, pair, mirrored):
        sums, q = span_sums(rows, cols, pair, mirrored)
        case = "mirrored"
        if not mirrored:
            case = "mask" if rows.marks.dtype == torch.bool else "segments"
        return (2 * sums if case == wrong else sums), q

    monkeypatch.setattr(triton_pairs, "span_sums", doubled)
    x = tokens(1, 20, 24).to(DEVICE)
    with pytest.warns(UserWarning, match="its relative error is 1.0e[+]00"):
        assert not triton_pairs.takes(x, PAIRS["angular"])


def test_a_function_of_another_module(small_tiles, monkeypatch, tmp_path):
    source = """
import triton
import triton.language as tl

@triton.jit
def exponential_tile(c, factor):
    return tl.exp(factor * c), factor * tl.exp(factor * c)
"""
    (tmp_path / "my_tiles.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    @triton_pairs.in_triton("my_tiles:exponential_tile", 3.0)
    def pair(c):
        w = torch.exp(3.0 * c)
        return w, 3.0 * w

    assert_agrees(tokens(*ONE_SPAN).to(DEVICE), pair)


@pytest.mark.skipif(DEVICE == "cpu", reason="large, and the interpreter is slow")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(8, 1664, 192), (1, 4099, 1000)])
def test_tiles_of_a_gpu(shape, dtype):
    """Blocks of 6.5 tiles, and of 11; the same sums every time."""
    x = tokens(*shape).to(DEVICE, dtype)
    assert_agrees(x, PAIRS["angular"])
    first = all_pairs(x, PAIRS["angular"])
    for _ in range(3):
        assert all(map(torch.equal, first, all_pairs(x, PAIRS["angular"])))
