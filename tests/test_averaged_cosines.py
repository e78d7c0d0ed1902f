"""The paper's heatmap: cosine matrices averaged over sequences first, against numpy and against the authors' own package."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.oracle import tokens
from titan_disp.condensation.measure import Accumulator, AveragedCosines
from titan_disp.condensation.record import EDGES

N = 40


def test_against_the_plain_formula():
    """Tokens at one position are alike in all sequences, so that averaged cosines are spread as well."""
    layers = [tokens(1, N, 8, seed, 0.0) + tokens(6, N, 8, 2 + seed, 0.0) for seed in (0, 1)]
    layers[1] *= 1e-25  # whose squares are no float32 numbers
    averaged, pooled = AveragedCosines(), Accumulator(2)
    for layer, z in enumerate(layers):
        for some in (z[:4], z[4:]):
            averaged.add(layer, some)
        pooled.add(layer, z)
    histograms, of_pairs = averaged.histogram(), pooled.result(N)
    for layer, z in enumerate(layers):
        u = z.double().numpy() / np.linalg.norm(z.double().numpy(), axis=-1, keepdims=True)
        expected = (u @ u.transpose(0, 2, 1)).mean(0)
        np.testing.assert_allclose(averaged.matrix(layer), expected, atol=1e-6)  # float32 products
        np.testing.assert_array_equal(histograms[layer], np.histogram(expected.clip(-1, 1), EDGES)[0] / N**2)
    # The mean is that of all pairs, the spread is not: sequences differ.
    centers = (EDGES[1:] + EDGES[:-1]) / 2
    for histogram, mean, std in zip(histograms, of_pairs.mean_cosine, of_pairs.std_cosine, strict=True):
        assert histogram @ centers == pytest.approx(mean, abs=1 / 128)
        assert np.sqrt(histogram @ centers**2 - (histogram @ centers) ** 2) < 0.9 * std


def test_zero_equal_opposite_and_infinite_tokens():
    z = torch.ones(2, 5, 3)
    z[:, 0] = 0
    averaged = AveragedCosines()
    averaged.add(0, z)
    averaged.add(1, torch.full((1, 5, 3), torch.inf))
    averaged.add(2, z[:1, [1, 2]] * torch.tensor([[1.0], [-1.0]]))
    assert averaged.matrix(0)[0].tolist() == [0] * 5
    assert averaged.matrix(0)[1:, 1:] == pytest.approx(np.ones((4, 4)))
    histogram, not_finite, opposite = averaged.histogram()
    assert (histogram[64], histogram[127], histogram.sum()) == (9 / 25, 16 / 25, 1)
    assert not_finite.dtype == histogram.dtype
    assert np.isnan(not_finite).all()
    assert (opposite[0], opposite[127]) == (0.5, 0.5)


# What the authors' embedding-condensation 2.0 made of ``hidden_states`` of three texts: [layers][6][6] averaged cosines.
RECORDED = Path(__file__).with_name("authors_cosines.json")


def hidden_states(text):
    """[1, 6, 5] of four layers, by a formula that any machine computes alike; tokens come closer with depth."""
    n, f = torch.arange(1.0, 7)[:, None], torch.arange(1.0, 6)
    return [(torch.sin(n * f * (0.7 + 0.1 * layer) + text) + 0.5 * layer)[None] for layer in range(4)]


class HiddenStates(torch.nn.Module):
    """A model of these, whose texts have their number as their first token."""

    def __init__(self):
        super().__init__()
        self.on_cpu = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, **_):
        return SimpleNamespace(hidden_states=hidden_states(int(input_ids[0, 0])))


def test_recorded_numbers_of_the_authors_package():
    """ρ and τ are scipy's of the means over all pairs, as the package has none."""
    recorded = np.array(json.loads(RECORDED.read_text()))
    averaged, pooled = AveragedCosines(), Accumulator(4)
    for layer, z in ((layer, z) for text in range(3) for layer, z in enumerate(hidden_states(text))):
        averaged.add(layer, z)
        pooled.add(layer, z)
    np.testing.assert_allclose([averaged.matrix(layer) for layer in range(4)], recorded, atol=1e-5)
    found, means = pooled.result(6), recorded.mean((1, 2))
    hidden = np.delete(means, 2)  # as if the third layer were the last block, which hidden states leave out
    np.testing.assert_allclose(found.mean_cosine, means, atol=1e-5)
    np.testing.assert_array_equal(averaged.histogram(), [np.histogram(one, EDGES)[0] / 36 for one in recorded])
    assert found.over_depth["after_norm"].spearman == pytest.approx(stats.spearmanr(hidden, range(3)).statistic)
    assert found.over_depth["after_norm"].kendall == pytest.approx(stats.kendalltau(hidden, range(3)).statistic)


@pytest.fixture
def package(monkeypatch):
    """``make test-authors`` installs it. It is no dependency: its licence is non-commercial, and its transformers is older."""
    nltk = pytest.importorskip("nltk", reason="make test-authors")
    monkeypatch.setattr(nltk, "download", lambda *_: None)  # of data that are only used to sample texts
    return pytest.importorskip("embedding_condensation", reason="make test-authors")


def test_what_was_recorded_is_the_packages(package):
    found = package.measure_embedding_condensation(
        HiddenStates(),
        lambda text, **_: {"input_ids": torch.tensor([[int(text)]])},
        texts=["0", "1", "2"],
        repetitions=3,
        **{"max_length": 1, "plot": False, "save_path": None, "show_progress": False},
    )
    np.testing.assert_allclose(found.cossim_by_layer, json.loads(RECORDED.read_text()), atol=1e-6)
