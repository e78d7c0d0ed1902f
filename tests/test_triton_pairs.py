"""When the Triton kernel of pairs is used, and that it compiles for a GPU.

tests/triton_cases.py compares its numbers with float64.
"""

import gc
import math
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.oracle import tokens
from tests.triton_cases import PAIRS, forget_examples, no_record  # noqa: F401
from titan_disp.dispersion import dispersion_loss, kernels, triton_pairs
from titan_disp.dispersion.triton_pairs import in_triton

ROOT = Path(__file__).parents[1]


def test_under_the_interpreter():
    """In another process, since Triton chooses at its import whether to interpret."""
    env = os.environ | {"TRITON_INTERPRET": "1", "TITAN_DISP_TRITON": "1"}
    tests = ("tests/triton_cases.py", "tests/test_pairwise.py::test_never_nan")
    variants = "angular or uniformity or orthogonalization"
    chosen = f"triton_cases or ({variants}) and exact and (float32 or bfloat16)"
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", chosen)
    done = subprocess.run(
        [sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def chosen(monkeypatch):
    """Let a CPU have the choice of a GPU, and the kernel an error."""

    def choose(choice="1", error=0.0):
        monkeypatch.setattr(triton_pairs, "CHOICE", choice)
        example = mock.Mock(side_effect=[error], return_value=error)
        monkeypatch.setattr(triton_pairs, "_error_of_example", example)
        return example

    return choose


def takes(pair=PAIRS["angular"], dtype=torch.bfloat16, device="cuda"):
    x = SimpleNamespace(device=torch.device(device), dtype=dtype)
    return triton_pairs.takes(x, pair)


def test_bf16_tokens_on_a_gpu_use_the_kernel(chosen):
    """Of a pair function that has one. The example is computed once."""
    example = chosen(choice="")
    assert takes()
    assert takes()
    assert example.call_count == 1
    assert kernels.path()["kernels"] == {"angular_tile": "compiled"}
    assert not takes(dtype=torch.float32)
    assert not takes(dtype=torch.float64)
    assert not takes(device="cpu")
    assert not takes(device="meta")
    assert not takes(pair=lambda c: (c, c))


def test_the_environment_chooses(chosen):
    chosen(choice="1")
    assert takes(dtype=torch.float32, device="cpu")
    forget_examples()
    kernels._functions.clear()
    chosen(choice="0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not takes()
    assert kernels.path()["kernels"] == {
        "angular_tile": "not used: TITAN_DISP_TRITON is 0"
    }


def test_tokens_without_numbers_decide_nothing(chosen):
    """Of tracers, or on the meta device: whether the kernel is used is found out with
    the first tokens that have numbers.
    """
    example = chosen(choice="1")
    pair = PAIRS["angular"]
    assert not takes(device="meta")
    with FakeTensorMode():
        fake = torch.empty(1, 2, 3, device="cuda", dtype=torch.bfloat16)
        assert not triton_pairs.takes(fake, pair)
    assert not triton_pairs.takes(fake, pair)
    answers = []

    def traced(x):
        answers.append(triton_pairs.takes(x, pair))
        return x + 1

    make_fx(traced, tracing_mode="fake")(torch.ones(1, 2, 3))
    exported = torch.nn.Module()
    exported.forward = traced
    torch.export.export(exported, (torch.ones(1, 2, 3),), strict=False)
    assert answers
    assert not any(answers)
    assert example.call_count == 0
    assert kernels.path()["kernels"] == {}
    assert triton_pairs.takes(torch.ones(1, 2, 3), pair)


def test_pair_functions_are_not_kept(monkeypatch):
    """Of a variant that makes a new one for each loss."""
    monkeypatch.setattr(triton_pairs, "_error_of_example", lambda *_: 0.0)
    pairs = weakref.WeakSet()
    for _ in range(300):
        pair = in_triton("uniformity_tile", 1.0)(lambda c: (c, c))
        pairs.add(pair)
        assert takes(pair)
    gc.collect()
    assert len(pairs) < 150


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (0.3, "its relative error is 3.0e-01"),
        (math.nan, "its relative error is nan"),
        (RuntimeError("no ptxas\nin PATH"), "RuntimeError: no ptxas"),
    ],
)
def test_a_kernel_that_fails_is_not_used(chosen, error, reason):
    """The reason is recorded, and warned of once."""
    chosen(error=error)
    message = f"the Triton kernel angular_tile is not used, .* runs slower: {reason}"
    with pytest.warns(UserWarning, match=message) as warned:
        taken = [takes(), takes()]
    assert taken == [False, False]
    assert len(warned) == 1
    assert kernels.path()["kernels"] == {"angular_tile": f"not used: {reason}"}


def test_without_triton_the_loss_is_the_same(monkeypatch):
    monkeypatch.setattr(triton_pairs, "CHOICE", "1")
    z = tokens(2, 20, 8)
    expected = dispersion_loss(z.double())
    monkeypatch.setitem(sys.modules, triton_pairs.KERNELS, None)
    with pytest.warns(UserWarning, match="is not used, .*ModuleNotFoundError"):
        loss = dispersion_loss(z)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)


def test_no_memory_for_the_example_is_an_error(chosen):
    chosen(error=torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        takes()


class H100:
    """A driver of Triton without a device, for which it compiles."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 1000  # Triton keeps what it has compiled for each device.

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """Return the function that compiles the kernel for a span of an H100."""
    triton = pytest.importorskip("triton")
    from titan_disp.dispersion import triton_kernels

    results = []
    span_kernel = triton_kernels.span_kernel

    class Compiled:
        def __class_getitem__(cls, grid):
            return lambda **arguments: results.append(
                span_kernel.warmup(grid=grid, **arguments)
            )

    monkeypatch.setattr(triton_kernels, "span_kernel", Compiled)
    monkeypatch.setattr(triton.runtime.driver, "_active", H100())

    def compile_span(pair, marks=None):
        rows = triton_pairs.Tokens(
            x=torch.empty(2, 256, 128, dtype=torch.bfloat16),
            scale=torch.empty(2, 256, 1),
            marks=marks,
        )
        triton_pairs.span_sums(rows, rows, PAIRS[pair], mirrored=True)
        return results.pop()

    return compile_span


ONES = torch.ones(2, 256, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("pair", "marks"),
    [
        ("angular", None),
        ("angular", ONES),
        ("angular", ONES.long()),
        ("orthogonalization", None),
        ("uniformity", None),
    ],
)
def test_it_compiles_for_an_h100(compiled, pair, marks):
    """Products are on tensor cores, and two programs fit into an SM."""
    kernel = compiled(pair, marks)
    assert "wgmma" in kernel.asm["ptx"]
    assert ".maxnreg 128" in kernel.asm["ptx"]
    assert kernel.metadata.num_warps == 8
    assert kernel.metadata.shared <= 113 * 1024


def test_offsets_have_64_bits(compiled):
    """No product of two numbers that depend on tokens has 32: q may have more than 2³¹
    elements.
    """
    products = re.findall("arith.muli .* : (.*)", compiled("angular").asm["ttir"])
    of_tiles = [kind for kind in products if kind.startswith("tensor")]
    assert of_tiles
    assert all("i64" in kind for kind in of_tiles)
