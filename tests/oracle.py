"""The losses in plain float64 autograd over the full N×N matrix: as the authors'
released code computes its four, as papers define the others.
"""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_disp.dispersion.variants import OF_THE_PAPER, VARIANTS


def angles(z: Tensor, clamp: float, norm_eps: float) -> Tensor:
    """D of all pairs, with the slope at the bound everywhere beyond the bound: [B, N,
    F] → [B, N, N].
    """
    u = units(z, norm_eps)
    c = u @ u.transpose(1, 2)
    bounded = c.detach().clamp(clamp - 1, 1 - clamp)
    return (
        torch.acos(bounded) - (c - c.detach()) / torch.sqrt(1 - bounded**2)
    ) / math.pi


def pairs(x: Tensor, diagonal: bool = False) -> Tensor:
    """Drop the diagonal: [B, N, N] → [B, N(N−1)]."""
    return x[:, ~torch.eye(x.shape[1], dtype=torch.bool) | diagonal]


def log_mean_exp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, 1) - math.log(x.shape[1])


# Each is named as the variant: [B, N, F] float64 → [B], differentiable.


def angular(
    z: Tensor, tau: float = 1.0, clamp: float = 0.25, norm_eps: float = 1e-2
) -> Tensor:
    return log_mean_exp(pairs(-angles(z, clamp, norm_eps) / tau))


def orthogonalization(z: Tensor, clamp: float = 0.25, norm_eps: float = 1e-2) -> Tensor:
    return (0.5 - pairs(angles(z, clamp, norm_eps))).clamp_min(0).square().mean(1)


def decorrelation(z: Tensor) -> Tensor:
    """The mean of squared correlations, with unbiased σ."""
    y = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True)
    return pairs(y @ y.transpose(1, 2) / (z.shape[-1] - 1)).square().mean(1)


def l2_repel(
    z: Tensor, tau: float = 1.0, norm_coeff: float = 0.1, include_diagonal: bool = True
) -> Tensor:
    e = -(z[:, :, None] - z[:, None]).square().sum(-1) / tau
    return log_mean_exp(pairs(e, include_diagonal)) + norm_coeff * z.square().mean(
        (1, 2)
    )


def units(z: Tensor, eps: float = 0.0) -> Tensor:
    return z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) + eps)


def cosines(z: Tensor) -> Tensor:
    """Of all pairs i ≠ j: [B, N, F] → [B, N(N−1)]."""
    return pairs(units(z) @ units(z).transpose(1, 2))


def uniformity(z: Tensor, t: float = 2.0) -> Tensor:
    """By the distances of all pairs, not their cosines."""
    u = units(z)
    return log_mean_exp(-t * pairs((u[:, :, None] - u[:, None]).square().sum(-1)))


def cosine(z: Tensor) -> Tensor:
    return cosines(z).mean(1)


def simctg(z: Tensor, margin: float = 0.5) -> Tensor:
    return (margin - 1 + cosines(z)).clamp_min(0).mean(1)


def koleo(z: Tensor) -> Tensor:
    u = units(z)
    distances = torch.linalg.vector_norm(u[:, :, None] - u[:, None], dim=-1)
    itself = torch.eye(z.shape[1], dtype=torch.bool)
    return -(distances.masked_fill(itself, math.inf).amin(-1) + 1e-8).log().mean(1)


def feature_decorrelation(z: Tensor) -> Tensor:
    """The mean of squared correlations of two features over the tokens."""
    features = [torch.corrcoef(sequence.T) for sequence in z]
    return pairs(torch.stack(features)).square().mean(1)


def vicreg(
    z: Tensor, variance_coeff=25.0, covariance_coeff=1.0, gamma=1.0, eps=1e-4
) -> Tensor:
    """The two terms of VICReg that regard one branch, with the weights of its paper."""
    covariance = torch.stack([torch.cov(sequence.T) for sequence in z])
    below = (gamma - (z.var(1) + eps).sqrt()).clamp_min(0).mean(1)
    return (
        variance_coeff * below
        + covariance_coeff * pairs(covariance).square().sum(1) / z.shape[2]
    )


def moments_oracle(variant, z, stride, tau=1.0, options=None):
    """The loss [1] of z [1, n, F] with w ≈ a + b c + ½ d c², which is fitted for every
    token to one in ``stride`` tokens.

    Its gradient is the estimator's: the slope of the pair (i, j) is b + d c with the b
    and d of token i. The constant 1e-6 is both the ridge of the fit and the square of
    the smallest weight p; 1e-2 is ε.
    """
    n = z.shape[1]
    u = units(z[0], {"angular": 1e-2}.get(variant, 0.0))
    with torch.no_grad():
        c = u @ u.T
        if variant == "angular":
            near = c.clamp(-0.75, 0.75)
            w = torch.exp(-torch.acos(near) / (math.pi * tau))
            slope = w / (math.pi * tau * torch.sqrt(1 - near**2))
        elif variant == "uniformity":
            w = torch.exp(-2 * options["t"] * (1 - c))
            slope = 2 * options["t"] * w
        else:
            pytest.fail(
                f"add the moments of {variant!r} to moments_oracle in tests/oracle.py"
            )
        others = ~torch.eye(n, dtype=torch.bool)
        blocks = range(-(-n // stride))
        fitted = [
            min(k * stride + (k * 2654435769 % 2**32) * stride // 2**32, n - 1)
            for k in blocks
        ]
        compared = others & torch.isin(torch.arange(n), torch.tensor(fitted))
        squares = u.square().sum(-1)
        p = (
            torch.sqrt((torch.outer(squares, squares) - c**2).clamp_min(0) + 1e-6)
            * compared
        )
        p = p / p.sum(1, keepdim=True)
        mean_c = (p * c).sum(1, keepdim=True)
        mean_r = (p * slope).sum(1, keepdim=True)
        variance = (p * (c - mean_c) ** 2).sum(1, keepdim=True) + 1e-6
        d = (p * (c - mean_c) * (slope - mean_r)).sum(1, keepdim=True) / variance
        b = mean_r - d * mean_c
        rest = (w - b * c - d / 2 * c**2) * compared
        a = rest.sum(1, keepdim=True) / compared.sum(1, keepdim=True)
        mean = ((a + b * c + d / 2 * c**2) * others).sum() / (n * (n - 1))
    of_gradient = (
        2 * ((b + d * c) * others * (u @ u.T.detach())).sum() / (n * (n - 1)) / mean
    )
    return (torch.log(mean) + of_gradient - of_gradient.detach())[None]


ORACLES = {
    formula.__name__: formula
    for formula in (
        angular,
        decorrelation,
        l2_repel,
        orthogonalization,
        cosine,
        feature_decorrelation,
    )
    + (koleo, simctg, uniformity, vicreg)
}
# Options with which the tests try a variant, if not the defaults alone.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "angular": [{"tau": 0.7}],
    "l2_repel": [{"tau": 20.0}, {"tau": 5.0, "include_diagonal": False}],
    "simctg": [{"options": {"margin": 0.8}}],
    "uniformity": [{"options": {"t": 0.7}}],
    "vicreg": [
        {
            "options": {
                "variance_coeff": 2.0,
                "covariance_coeff": 0.5,
                "gamma": 1.3,
                "eps": 0.01,
            }
        }
    ],
}
# The variants of the dispersion loss's own paper, which the tests that take long try
# with every estimator.
PAPERS = [kind.name for kind in OF_THE_PAPER]
EVERY_VARIANT = [
    (variant, options) for variant in VARIANTS for options in OPTIONS.get(variant, [{}])
]
EVERY_ESTIMATOR = [
    (variant, estimator)
    for variant, kind in VARIANTS.items()
    for estimator in kind.estimators
]
EVERY_LOSS = [
    (v, e, options) for v, options in EVERY_VARIANT for e in VARIANTS[v].estimators
]


def oracle(
    variant: str, z: Tensor, options: dict[str, Any] | None = None, **keys: Any
) -> Tensor:
    """The loss of any variant: [B, N, F] of any dtype → [B] float64."""
    return ORACLES[variant](z.double(), **keys, **(options or {}))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The sum over the valid labels, in the dtype of the logits."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )


def drawn(estimator: str, tokens: int) -> dict[str, int]:
    """The options that make the sampled estimator take so many tokens."""
    return {"max_tokens": tokens} if estimator == "sampled" else {}


def drawing_order(tokens: int, seed: int, step: int, layer: int) -> Tensor:
    """All positions in the order in which the sampled estimator draws them.

    Resumed runs rely on these numbers.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_009 + layer)
    return torch.randperm(tokens, generator=generator)


def tokens(b: int, n: int, f: int, seed: int = 0, mean: float = 0.3) -> Tensor:
    return torch.randn(b, n, f, generator=torch.Generator().manual_seed(seed)) + mean


def loss_and_gradient(function, z: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """Both in float64.

    Sequences have distinct weights: a gradient that leaks from one into another would
    show.
    """
    z = z.clone().requires_grad_(True)
    loss = function(z, **options)
    (grad,) = torch.autograd.grad(
        (loss * torch.arange(1, len(loss) + 1, dtype=loss.dtype)).sum(), z
    )
    return loss.detach().double(), grad.double()


class Largest(TorchDispatchMode):
    """Records the most elements of a storage, of tensors of one dtype if it is
    given.
    """

    def __init__(self, dtype: torch.dtype | None = None):
        super().__init__()
        self.elements = 0
        self.dtype = dtype

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = [
            x
            for x in tree_leaves(result)
            if type(x) is Tensor and self.dtype in (None, x.dtype)
        ]
        self.elements = max(
            [self.elements, *(x.untyped_storage().nbytes() // x.itemsize for x in made)]
        )
        return result


def of_sequence(z, numbers, variant, options):
    same = numbers[:, None] == numbers
    itself = torch.eye(len(numbers), dtype=torch.bool)
    if torch.equal(same, itself):
        return 0 * z.sum()
    with mock.patch(
        "tests.oracle.pairs",
        lambda x, diagonal=False: x[:, same & (~itself | diagonal)],
    ):
        return oracle(variant, z[None], **options)[0]


def within(z, segments, variant, options):
    """The loss [B] of float64 tokens: the oracle's of the pairs within documents."""
    sequences = [
        (row[own >= 0], own[own >= 0]) for row, own in zip(z, segments, strict=True)
    ]
    return torch.stack(
        [of_sequence(*sequence, variant, options) for sequence in sequences]
    )
