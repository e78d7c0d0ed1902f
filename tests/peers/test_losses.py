"""The loss and the measures against packages that are not ours, on random and degenerate
inputs (make test-peers).
"""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.oracle import tokens
from titan_disp.condensation.measure import AveragedCosines
from titan_disp.dispersion import DispersionLoss

# [N, F] each. The authors' package and metric learning's know one sequence.
INPUTS = {
    "random": tokens(1, 9, 6, seed=1)[0],
    "one direction": torch.arange(1.0, 10)[:, None] * torch.ones(6),
    "identical": torch.ones(9, 6),
    "antiparallel": torch.tensor([1.0, -1.0]).repeat(5)[:9, None] * torch.ones(6),
    "far from zero": tokens(1, 9, 6, seed=2)[0] + 1e3,
    "small": tokens(1, 9, 6, seed=3)[0] * 0.1,
    "two tokens": tokens(1, 2, 6, seed=4)[0],
}


@pytest.fixture(params=INPUTS.values(), ids=INPUTS)
def z(request: pytest.FixtureRequest) -> Tensor:
    return request.param


def metric_learning():
    package = pytest.importorskip("pytorch_metric_learning", reason="make test-peers")
    from pytorch_metric_learning import distances, losses  # noqa: F401

    return package


def test_cosines_are_those_of_the_authors_package(z, monkeypatch):
    nltk = pytest.importorskip("nltk", reason="make test-peers")
    monkeypatch.setattr(nltk, "download", lambda *_: None)
    package = pytest.importorskip("embedding_condensation", reason="make test-peers")
    (expected,) = package.compute_cosine_similarities([z.numpy()])
    averaged = AveragedCosines()
    averaged.add(0, z[None])
    np.testing.assert_allclose(averaged.matrix(0), expected, atol=1e-5)


def test_the_cosine_loss_is_the_mean_of_metric_learnings_distances(z):
    package = metric_learning()
    similarity = package.distances.CosineSimilarity()(z.double())
    between_tokens = ~torch.eye(len(z), dtype=torch.bool)
    expected = similarity[between_tokens].mean()
    loss = DispersionLoss("cosine")([z.double()[None]])
    torch.testing.assert_close(loss.squeeze(), expected, rtol=1e-9, atol=1e-9)


def test_vicreg_is_metric_learnings(z):
    """With the same batch as both of its branches, they do not differ, and each counts
    once.
    """
    package = metric_learning()
    whole = z.double().requires_grad_()
    theirs = package.losses.VICRegLoss(covariance_v=0.5)
    expected = theirs(whole, ref_emb=whole.detach().clone())
    loss = DispersionLoss("vicreg")([whole[None]]).squeeze()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
