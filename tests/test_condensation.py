import numpy as np
import pytest
import torch
from scipy import stats

from titan_disp.condensation.measure import Accumulator
from titan_disp.condensation.record import BINS, EDGES, Condensation, load_steps


def measured(*layers: torch.Tensor) -> Condensation:
    accumulator = Accumulator(len(layers))
    for i, z in enumerate(layers):
        accumulator.add(i, z)
    return accumulator.result(layers[0].shape[1])


@pytest.mark.parametrize(("n", "f"), [(17, 5), (16, 40), (1500, 3)])
def test_against_the_plain_formulas(n, f):
    generator = torch.Generator().manual_seed(n)
    layers = [torch.randn(3, n, f, generator=generator) + shift for shift in (0.0, 0.4, 2.0)]
    found = measured(*layers)
    for i, z in enumerate(layers):
        u = z.double().numpy() / np.linalg.norm(z.double().numpy(), axis=-1, keepdims=True)
        c = u @ u.transpose(0, 2, 1)
        different = ~np.eye(n, dtype=bool)
        singular = np.linalg.svd(u, compute_uv=False)
        entropy = stats.entropy(singular / singular.sum(-1, keepdims=True), axis=-1)
        # Sums in another order: float64 rounding, far below the 1e-5 that a reader could see.
        np.testing.assert_allclose(found.mean_cosine[i], c.mean(), rtol=1e-10)
        np.testing.assert_allclose(found.std_cosine[i], c.std(), rtol=1e-9)
        np.testing.assert_allclose(
            found.angular_distance[i], 0.5 - (np.arccos(c.clip(-1, 1)) / np.pi)[:, different].mean(), atol=1e-9
        )
        np.testing.assert_allclose(found.effective_rank[i], np.exp(entropy).mean(), rtol=1e-6)
        histogram = np.histogram(c.clip(-1, 1), EDGES)[0] / c.size
        # A cosine on an edge may round to either side: the diagonal is in the last bin in both.
        np.testing.assert_allclose(found.histogram[i], histogram, atol=5e-5)
        assert found.histogram[i].sum() == pytest.approx(1)
    depth = range(len(layers))
    assert found.spearman == stats.spearmanr(depth, found.mean_cosine).statistic
    assert found.kendall == stats.kendalltau(depth, found.mean_cosine).statistic
    assert (found.tokens, found.sequences) == (n, 3)


def test_extremes():
    one = torch.ones(1, 8, 4)
    found = measured(one, torch.cat([one, -one], 1)[:, 4:12], torch.eye(8)[None], torch.zeros(1, 8, 8))
    np.testing.assert_allclose(found.mean_cosine, [1, 0, 1 / 8, 0], atol=1e-12)
    np.testing.assert_allclose(found.angular_distance[:3], [0.5, 0.5 - 4 / 7, 0], atol=1e-8)
    np.testing.assert_allclose(found.effective_rank[:3], [1, 1, 8], rtol=1e-6)
    assert found.histogram[0, -1] == 1
    assert found.histogram[1, 0] == found.histogram[1, -1] == 0.5
    assert all(np.isfinite(v).all() for v in (found.histogram, found.effective_rank))


def test_effective_rank_of_two_directions():
    """300 tokens of 200 features: what rounding adds to the Gram matrix is not taken for 198 directions more."""
    one, other = torch.linalg.qr(torch.randn(200, 2, generator=torch.Generator().manual_seed(0)).double()).Q.T
    found = measured(torch.stack([one, other]).repeat(150, 1)[None])
    np.testing.assert_allclose(found.effective_rank, [2], rtol=1e-9)


def test_rounding_never_leaves_the_range_of_a_cosine():
    """Tokens equal and opposite to each other, whose cosines round to 1 + 2e-16 in some pairs: arccos would be NaN."""
    one = torch.randn(1, 200, 7, generator=torch.Generator().manual_seed(0))
    found = measured(torch.cat([one, one, -one], 1), *(token.expand(1, 50, 7) for token in one[0]))
    for values in (found.angular_distance, found.std_cosine):
        assert np.isfinite(values).all()
    np.testing.assert_allclose(found.std_cosine[1:], 0, atol=1e-7)
    np.testing.assert_allclose(found.angular_distance[1:], 0.5, atol=1e-7)
    assert found.histogram[:, [0, -1]].sum() > 0


def test_directions_of_tiny_tokens_count():
    """Only a token of zeros has no direction."""
    z = torch.randn(1, 20, 6, generator=torch.Generator().manual_seed(0)).double()
    np.testing.assert_allclose(measured(z * 1e-30).mean_cosine, measured(z).mean_cosine, rtol=1e-12)


def test_sums_are_on_the_models_device():
    assert Accumulator(3, "meta").sums.is_meta


def test_sums_of_ranks_add_up():
    z = torch.randn(4, 9, 6, generator=torch.Generator().manual_seed(0))
    parts = [Accumulator(1), Accumulator(1)]
    parts[0].add(0, z[:1])
    parts[1].add(0, z[1:])
    parts[0].sums += parts[1].sums
    np.testing.assert_allclose(parts[0].result(9).mean_cosine, measured(z).mean_cosine, rtol=1e-12)


def test_flat_over_depth_is_undefined_not_zero():
    found = measured(torch.ones(1, 4, 4), torch.ones(1, 4, 4))
    assert np.isnan(found.spearman)
    assert found.to_json()["kendall"] is None


def test_saved_and_loaded(tmp_path):
    found = measured(torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0)))
    found.save(tmp_path / "new" / "step-5.npz")
    loaded = load_steps(tmp_path / "new")[5]
    assert loaded.to_json() == found.to_json()
    np.testing.assert_array_equal(loaded.histogram, found.histogram)
    assert found.histogram.shape == (1, BINS)
