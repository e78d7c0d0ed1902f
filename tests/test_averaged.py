"""The paper's heatmap: cosine matrices averaged over sequences first, against numpy and against the authors' own package."""

import numpy as np
import pytest
import torch
import transformers
from scipy import stats

from titan_disp.condensation.averaged import AveragedCosines
from titan_disp.condensation.measure import Accumulator
from titan_disp.condensation.record import EDGES, Condensation
from titan_disp.inspection.condensation import measure
from titan_disp.inspection.streaming import hugging_face_layers

N = 40


def activations(seed, sequences=6, features=8):
    """[B, N, F] whose tokens at one position are alike in all sequences, so that averaged cosines are spread as well."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, N, features, generator=generator)
    return common + torch.randn(sequences, N, features, generator=generator)


def averaged_in_numpy(z):
    z = z.double().numpy()
    u = z / np.linalg.norm(z, axis=-1, keepdims=True)
    return (u @ u.transpose(0, 2, 1)).mean(0)


def test_against_the_plain_formula():
    layers = [activations(0), 1e-25 * activations(1)]  # the second one's squares are no float32 numbers
    averaged, pooled = AveragedCosines(2), Accumulator(2)
    for layer, z in enumerate(layers):
        for some in (z[:4], z[4:]):
            averaged.add(layer, some)
        pooled.add(layer, z)
    histograms, of_pairs = averaged.histogram(), pooled.result(N)
    for layer, z in enumerate(layers):
        expected = averaged_in_numpy(z)
        np.testing.assert_allclose(averaged.matrix(layer), expected, atol=1e-6)  # float32 products
        np.testing.assert_array_equal(histograms[layer], np.histogram(expected.clip(-1, 1), EDGES)[0] / N**2)
    # The mean is that of all pairs, the spread is not: sequences differ.
    centers = (EDGES[1:] + EDGES[:-1]) / 2
    for histogram, mean, std in zip(histograms, of_pairs.mean_cosine, of_pairs.std_cosine, strict=True):
        assert histogram @ centers == pytest.approx(mean, abs=1 / 128)
        assert np.sqrt(histogram @ centers**2 - (histogram @ centers) ** 2) < 0.9 * std


def test_tokens_without_a_direction_and_equal_ones():
    z = torch.ones(2, 5, 3)
    z[:, 0] = 0
    averaged = AveragedCosines(1)
    averaged.add(0, z)
    assert averaged.matrix(0)[0].tolist() == [0] * 5
    assert averaged.matrix(0)[1:, 1:] == pytest.approx(np.ones((4, 4)))
    histogram = averaged.histogram()[0]
    assert (histogram[64], histogram[127], histogram.sum()) == (9 / 25, 16 / 25, 1)


def test_saved_and_loaded(tmp_path):
    averaged, pooled = AveragedCosines(1), Accumulator(1)
    averaged.add(0, activations(0))
    pooled.add(0, activations(0))
    found = pooled.result(N)
    found.save(tmp_path / "without.npz")
    assert Condensation.load(tmp_path / "without.npz").averaged_histogram is None
    both = Condensation(**{**vars(found), "averaged_histogram": averaged.histogram()})
    both.save(tmp_path / "with.npz")
    loaded = Condensation.load(tmp_path / "with.npz")
    np.testing.assert_array_equal(loaded.averaged_histogram, averaged.histogram())
    assert loaded.to_json() == found.to_json()


def test_both_heatmaps_are_the_packages():
    """The authors' ``embedding-condensation`` 2.0 on the same model and the same tokens.

    It is no dependency, not even of the tests: its licence is non-commercial, and it wants a transformers older than ours.
    """
    how = "to compare: pip install nltk, and pip install --no-deps embedding-condensation==2.0"
    pytest.importorskip("nltk", reason=how)
    package = pytest.importorskip("embedding_condensation", reason=how)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=300, n_positions=64, n_embd=24, n_layer=4, n_head=2, initializer_range=0.3
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 300, (9, N), generator=torch.Generator().manual_seed(1))

    def tokenizer(text, **_):
        return {"input_ids": tokens[int(text)][None]}

    texts = [str(i) for i in range(len(tokens))]
    options = {"repetitions": len(texts), "max_length": N, "plot": False, "save_path": None, "show_progress": False}
    theirs = package.measure_embedding_condensation(model, tokenizer, texts=texts, **options).cossim_by_layer

    averaged = AveragedCosines(6)
    with torch.no_grad():
        hugging_face_layers(model)(tokens, averaged.add)
    ours = [averaged.matrix(layer) for layer in (0, 1, 2, 3, 5)]  # their layers leave out the last block's output
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    found = measure("model", hugging_face_layers(model), tokens, batch_size=1)
    means = theirs.mean((1, 2), dtype=np.float64)
    np.testing.assert_allclose(np.delete(found.mean_cosine, found.last_block), means, atol=1e-5)
    histograms = np.stack([np.histogram(matrix, EDGES)[0] / N**2 for matrix in theirs])
    np.testing.assert_allclose(np.delete(found.averaged_histogram, found.last_block, 0), histograms, atol=1e-5)
    assert found.after_norm.spearman == pytest.approx(stats.spearmanr(means, range(5)).statistic)
    assert found.after_norm.kendall == pytest.approx(stats.kendalltau(means, range(5)).statistic)
