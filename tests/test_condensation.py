"""Measures of condensation against plain formulas and the authors' own package; their
files, tables and division among ranks.
"""

import dataclasses
import json
import math
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.distributed.device_mesh import init_device_mesh

from tests.distributed import spawn
from tests.oracle import Largest, tokens
from titan_disp.condensation import measure
from titan_disp.condensation.measure import (
    Accumulator,
    AveragedCosines,
    Covariance,
    cross_entropies,
)
from titan_disp.condensation.record import (
    BINS,
    EDGES,
    Measurement,
    load_steps,
    over_training,
)
from titan_disp.errors import ConfigError


def measured(*layers: torch.Tensor) -> Measurement:
    accumulator = Accumulator(len(layers))
    for i, z in enumerate(layers):
        accumulator.add(i, z)
    return accumulator.result(layers[0].shape[1])


def condensed(*mean_cosine: float) -> Measurement:
    mean = np.array(mean_cosine)
    return Measurement(
        mean, 2 * mean, 3 * mean, 4 * mean, np.zeros((len(mean), BINS)), 1, 1
    )


@pytest.mark.parametrize(("n", "f"), [(17, 5), (16, 40), (1100, 3)])
def test_against_the_plain_formulas(n, f):
    layers = [
        tokens(3, n, f, seed, mean) for seed, mean in enumerate((0.0, 0.4, 2.0, 1.0))
    ]
    found = measured(*layers)
    for i, z in enumerate(layers):
        u = z.double().numpy() / np.linalg.norm(
            z.double().numpy(), axis=-1, keepdims=True
        )
        c = u @ u.transpose(0, 2, 1)
        different = ~np.eye(n, dtype=bool)
        singular = np.linalg.svd(u, compute_uv=False)
        entropy = stats.entropy(singular / singular.sum(-1, keepdims=True), axis=-1)
        np.testing.assert_allclose(found.mean_cosine[i], c.mean(), rtol=1e-10)
        np.testing.assert_allclose(found.std_cosine[i], c.std(), rtol=1e-9)
        distance = np.arccos(c.clip(-1, 1)) / np.pi  # the paper's D
        np.testing.assert_allclose(
            found.mean_angle[i], distance[:, different].mean(), atol=1e-9
        )
        np.testing.assert_allclose(
            found.effective_rank[i], np.exp(entropy).mean(), rtol=1e-6
        )
        histogram = np.histogram(c.clip(-1, 1), EDGES)[0] / c.size
        # one on an edge may round to either side
        np.testing.assert_allclose(found.histogram[i], histogram, atol=5e-5)
        assert found.histogram[i].sum() == pytest.approx(1)
    before = found.mean_cosine[:-1]
    assert (
        found.over_depth["before_norm"].spearman
        == stats.spearmanr(range(len(before)), before).statistic
    )
    assert (
        found.over_depth["before_norm"].kendall
        == stats.kendalltau(range(len(before)), before).statistic
    )
    assert (found.tokens, found.sequences) == (n, 3)


def test_extremes():
    one = torch.ones(1, 8, 4)
    found = measured(
        one,
        torch.cat([one, -one], 1)[:, 4:12],
        torch.eye(8)[None],
        torch.zeros(1, 8, 8),
    )
    np.testing.assert_allclose(found.mean_cosine, [1, 0, 1 / 8, 0], atol=1e-12)
    np.testing.assert_allclose(found.mean_angle[:3], [0, 4 / 7, 0.5], atol=1e-8)
    np.testing.assert_allclose(found.effective_rank, [1, 1, 8, 1], rtol=1e-6)
    assert (found.histogram[0, -1], found.histogram[1, 0], found.histogram[1, -1]) == (
        1,
        0.5,
        0.5,
    )
    # Only a token of zeros has no direction.
    z = tokens(1, 20, 6).double()
    np.testing.assert_allclose(
        measured(z * 1e-30).mean_cosine, measured(z).mean_cosine, rtol=1e-12
    )
    assert Accumulator(3, "meta").sums.is_meta  # on the model's device
    # Tokens equal and opposite to each other, whose cosines round to 1 + 2e-16 in some
    # pairs: arccos would be NaN.
    one = tokens(1, 200, 7, mean=0.0)
    found = measured(
        torch.cat([one, one, -one], 1), *(token.expand(1, 50, 7) for token in one[0])
    )
    for values in (found.mean_angle, found.std_cosine):
        assert np.isfinite(values).all()
        np.testing.assert_allclose(values[1:], 0, atol=1e-7)
    assert found.histogram[:, [0, -1]].sum() > 0


@pytest.mark.parametrize("strength", [1.0, 1e-3, 1e-5])
def test_effective_rank_of_two_directions(strength):
    """What rounding adds to the Gram matrix is no direction more, and a much weaker
    second direction is no rounding.
    """
    one, other = torch.linalg.qr(
        torch.randn(200, 2, generator=torch.Generator().manual_seed(0)).double()
    ).Q.T
    z = torch.stack([one, one + strength * other]).repeat(150, 1)[None]
    singular = np.linalg.svd(
        torch.nn.functional.normalize(z[0], dim=-1).numpy(), compute_uv=False
    )[:2]
    expected = np.exp(stats.entropy(singular / singular.sum()))
    np.testing.assert_allclose(measured(z).effective_rank, [expected], rtol=1e-9)


def test_undefined_numbers_are_null_in_json():
    z = tokens(1, 8, 4)
    bad = z.clone()
    bad[0, 3, 2] = torch.inf  # as after an overflow in one token
    found = measured(z, z, bad, z, z)
    assert np.isnan(found.histogram[2]).all()
    np.testing.assert_array_equal(
        found.histogram[[0, 1, 3]], measured(z, z, z, z, z).histogram[[0, 1, 3]]
    )
    assert (
        str(found.over_depth["before_norm"]) == "ρ – τ – (not all cosines are finite)"
    )
    assert (
        dataclasses.replace(found, cross_entropy=math.inf).to_json()["cross_entropy"]
        is None
    )
    written = json.dumps(found.to_json(), allow_nan=False)
    assert json.loads(written)["mean_cosine"][2] is None
    *_, last = over_training(
        {0: measured(z, z, z, z, z).to_json(), 10: json.loads(written)}
    )
    assert last.split() == ["10", "–", "nan", f"{found.mean_cosine[3]:.2f}"]


def test_depth():
    """ρ and τ by hand: of 0.1, 0.3, 0.2, or of 0.1, 0.3, 0.4 with the norm, or without
    the 0.1.
    """
    found = condensed(0.1, 0.3, 0.2, 0.4)
    assert found.mean_cosine[found.last_block] == 0.2
    assert found.to_json()["layers"] == [
        "embedding",
        "block 0",
        "block 1",
        "final norm",
    ]
    flat = condensed(0.101, 0.104, 0.11, 0.3)
    steep = condensed(0.101, 0.104, 0.112, 0.3)
    equal = condensed(0.1, 0.1, 0.1, 0.3)
    for one, place, (spearman, kendall, span) in (
        (found, "before_norm", (0.5, 1 / 3, 0.2)),
        (found, "after_norm", (1, 1, 0.3)),
        (
            dataclasses.replace(condensed(0.1, 0.3, 0.2, 0.4, 0.0), logits=True),
            "after_norm",
            (1, 1, 0.3),
        ),
        (found, "blocks_before_norm", (-1, -1, 0.1)),
        (found, "blocks_after_norm", (1, 1, 0.1)),
        (flat, "before_norm", (1, 1, 0.009)),
        (equal, "before_norm", (None, None, 0.0)),
        (steep, "before_norm", (1, 1, 0.011)),
    ):
        assert one.to_json()[place] == pytest.approx(
            {"spearman": spearman, "kendall": kendall, "range": span}
        )
    assert (
        str(equal.over_depth["before_norm"])
        == "ρ – τ – (the mean cosines of all layers are equal)"
    )
    # As in the paper, whatever the scale
    assert str(flat.over_depth["before_norm"]) == "ρ 1.00 τ 1.00 (range 0.009)"
    assert str(steep.over_depth["before_norm"]) == "ρ 1.00 τ 1.00 (range 0.011)"


def test_means_over_thirds_of_the_blocks():
    """Seven blocks: three early ones (3i < 7), two and two."""
    found = condensed(9, 1, 2, 3, 4, 5, 6, 8, 7).by_part()
    cosines = {
        "blocks": 29 / 7,
        "early_blocks": 2,
        "middle_blocks": 4.5,
        "late_blocks": 7,
        "last_block": 8,
    }
    for name, factor in {
        "mean_cosine": 1,
        "std_cosine": 2,
        "mean_angle": 3,
        "effective_rank": 4,
    }.items():
        expected = {
            part: factor * c for part, c in (cosines | {"final_norm": 7}).items()
        }
        assert found.pop(name) == pytest.approx(expected)
    assert found == {}
    one = condensed(9, 1, 7).by_part()["mean_cosine"]
    assert one == {"blocks": 1, "early_blocks": 1, "last_block": 1, "final_norm": 7}


def covariance_of(points, dimensions=None, zeta=0.0):
    sums = Covariance()
    for part in points.split(7):
        sums.add(0, part[None])
    return sums.result(0, dimensions or points.shape[1], zeta)


def test_covariance_by_hand():
    """IsoScore*, effective rank and first component.

    Two equal variances in four dimensions have t = √2: (2 − 1)/(4 − 1).
    """
    line = torch.tensor([[1.0, 0], [3, 0], [5, 0]])
    assert covariance_of(torch.cat([torch.eye(3), -torch.eye(3)]) + 5) == pytest.approx(
        (1, 3, 1 / 3)
    )
    assert covariance_of(torch.cat([torch.eye(2), -torch.eye(2)]), 4) == pytest.approx(
        (1 / 3, 2, 1 / 2)
    )
    assert covariance_of(line) == pytest.approx((0, 1, 1))
    # λ = ¾ and ¼: t² = 1.6
    assert covariance_of(line, zeta=0.5)[0] == pytest.approx(0.6)
    assert covariance_of(torch.ones(9, 3) / 3) == pytest.approx(
        (math.nan, 1, math.nan), nan_ok=True
    )


@pytest.mark.parametrize("zeta", [0.0, 0.2])
def test_covariance_against_the_plain_formulas(zeta):
    """Rudman & Eickhoff's Algorithm 1 step by step. The tokens lie far from zero."""
    points = tokens(1, 100, 6, mean=0.0)[0] * torch.arange(1.0, 7) + 3000
    x = points.double().numpy()
    n = 6
    singular = np.linalg.svd(x - x.mean(0), compute_uv=False)
    shrinkage = np.cov(x.T).trace() / n * np.eye(n)
    eigenvalues = np.linalg.eigvalsh((1 - zeta) * np.cov(x.T) + zeta * shrinkage)
    defect = np.linalg.norm(
        np.sqrt(n) * eigenvalues / np.linalg.norm(eigenvalues) - 1
    ) / np.sqrt(2 * (n - np.sqrt(n)))
    score = (n * (n - defect**2 * (n - np.sqrt(n))) ** 2 / n**2 - 1) / (n - 1)
    expected = (
        score,
        np.exp(stats.entropy(singular)),
        singular[0] ** 2 / (singular**2).sum(),
    )
    np.testing.assert_allclose(covariance_of(points, zeta=zeta), expected, rtol=1e-9)
    package = pytest.importorskip("IsoScore.IsoScore", reason="make test-peers")
    theirs = package.IsoScore_star(x, torch.tensor(shrinkage), zeta).item()
    assert theirs == pytest.approx(score, rel=1e-6)  # float32 √n


@pytest.mark.parametrize("averaged", [None, np.eye(3, BINS)])
def test_saved_and_loaded(averaged, tmp_path):
    z = tokens(2, 8, 4)
    found = dataclasses.replace(
        measured(z, z**2, z), cross_entropy=2.5, averaged_histogram=averaged
    )
    for step in (10, 5):
        found.save(tmp_path / "new" / f"step-{step}.npz")
    steps = load_steps(tmp_path / "new")
    assert list(steps) == [5, 10]
    assert steps[5].to_json() == found.to_json()
    np.testing.assert_array_equal(steps[5].histogram, found.histogram)
    np.testing.assert_array_equal(steps[5].averaged_histogram, averaged)
    # a file of an earlier version
    with np.load(tmp_path / "new" / "step-5.npz") as arrays:
        np.savez(
            tmp_path / "old.npz",
            **{name: arrays[name] for name in {*arrays.files} - {"features", "logits"}},
        )
    assert Measurement.load(tmp_path / "old.npz").to_json() == found.to_json() | {
        "features": 0
    }


def test_a_file_that_unpacks_to_gigabytes_is_not_read(tmp_path):
    """Zeros take a thousandth of their size in the archive."""
    z = tokens(2, 8, 4)
    file = tmp_path / "step-5.npz"
    huge = np.zeros((2**14, 2**10))  # 134 MB
    dataclasses.replace(measured(z, z**2, z), averaged_histogram=huge).save(file)
    assert file.stat().st_size < 1e6
    with pytest.raises(ConfigError, match="unpacks to 134,2.* bytes, expected at most"):
        Measurement.load(file)
    os.mkfifo(tmp_path / "step-6.npz")
    problems = []
    assert load_steps(tmp_path, problems) == {}
    assert "step-6.npz' is not a regular file" in problems[1]


def test_table_of_a_collapse_and_its_release():
    """Every 10 steps, the mean cosines of a block 0.3 and of the last one 0.5, but for
    0.9 and 1 at step 30.
    """
    cosines = dict.fromkeys(range(0, 310, 10), (0.04, 0.3, 0.5, 0.2)) | {
        30: (0.04, 0.9, 1.0, 0.2)
    }
    measured = {
        s: condensed(*c).to_json() | {"cross_entropy": 7 - s / 100}
        for s, c in cosines.items()
    }
    _, headings, *rows = over_training(measured)
    assert headings.split("  ")[-2:] == [
        "mean cosine of all blocks",
        "of the last block",
    ]
    cells = [row.split() for row in rows]
    assert [int(row[0]) for row in cells] == [0, 10, 20, 30, 40, 80, 150, 300]
    assert cells[0] == ["0", "7.000", "0.40", "0.50"]
    assert cells[3] == ["30", "6.700", "0.95", "1.00", "(highest)"]
    ends = {
        row.index(cell[1]) + len(cell[1]) for row, cell in zip(rows, cells, strict=True)
    }
    assert ends == {headings.index("cross-entropy") + len("cross-entropy")}, (
        "the columns are not aligned"
    )
    # Whose cross-entropy was not measured
    same = {step: condensed(0.04, 0.2, 0.6, 0.1).to_json() for step in (2, 4)}
    assert over_training({}) == over_training({5: same[2]}) == []
    few = [row.split() for row in over_training(same)[2:]]
    assert few == [["2", "–", "0.40", "0.60", "(highest)"], ["4", "–", "0.40", "0.60"]]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("ranks", [1, 2, 3, 10, 40])
def test_ranks_divide_sequences_and_layers(ranks, batch_size, monkeypatch):
    """Every layer of every sequence and every label counts once, whatever the ranks; 40
    share the work of 5 in layers too.
    """
    seen = Counter()

    class Recorder:
        sums = None
        __init__ = result = lambda self, *_: None

        def add(self, layer, z):
            seen.update((layer, int(sequence[0, 0])) for sequence in z)

    def forward(tokens, labels):
        assert tokens.shape == labels.shape == (batch_size, 3)
        return measure.Forward(
            [tokens[:, :, None].double()] * 7, 10.0 ** labels[:, 0].double()
        )

    monkeypatch.setattr(measure, "Accumulator", Recorder)
    monkeypatch.setattr(measure, "replace", lambda _, cross_entropy: cross_entropy)
    sequences = torch.arange(5)[:, None].expand(5, 4)
    cross_entropy = 0.0
    most = 0
    for rank in range(ranks):
        before = seen.total()
        cross_entropy += measure.Monitor(
            sequences, batch_size, 3, measure.MeshPosition(rank, ranks)
        ).measure(forward)
        most = max(most, seen.total() - before)
    assert seen == {(layer, sequence): 1 for layer in range(7) for sequence in range(5)}
    assert cross_entropy == pytest.approx(11111 / (5 * 3))
    assert ranks != 40 or most <= batch_size  # of 35


def check_a_sharded_sequence():
    """Two ranks hold a sequence's tokens and labels in the order of load balancing; the
    other two, another sequence.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "cp"))
    sequences = torch.stack(
        [
            torch.randperm(17, generator=torch.Generator().manual_seed(seed))
            for seed in range(2)
        ]
    )
    table = tokens(17, 16, 5).double()
    parts = torch.arange(16).chunk(4)

    def forward(tokens, labels, own=slice(None)):
        z = table[tokens, torch.arange(16)] + torch.linspace(0, 2, 16)[:, None]
        return measure.Forward(
            [z[:, own], 2 * z[:, own] - 1], labels[:, own].double().sum(1)
        )

    expected = measure.Monitor(sequences, 2, 5).measure(forward)
    data = mesh.get_local_rank("data")
    cp = mesh.get_local_rank("cp")
    own = torch.cat([parts[cp], parts[3 - cp]])
    position = measure.MeshPosition(
        dp_rank=data,
        dp_degree=2,
        dp_group=mesh["data"].get_group(),
        sequence_group=mesh["cp"].get_group(),
        label_group=mesh["cp"].get_group(),
    )
    monitor = measure.Monitor(sequences, 1, 5, position)
    found = monitor.measure(
        lambda *batch: dataclasses.replace(forward(*batch, own), positions=own)
    )
    assert (found.cross_entropy, found.sequences) == (
        pytest.approx(expected.cross_entropy),
        2,
    )
    np.testing.assert_allclose(found.mean_cosine, expected.mean_cosine, rtol=1e-12)
    np.testing.assert_array_equal(found.histogram, expected.histogram)


def test_a_sharded_sequence_is_measured_in_its_order():
    spawn(4, check_a_sharded_sequence)


def test_cross_entropies_are_those_of_the_formula():
    """In float64, of 1,100 tokens in bfloat16: more than are taken at a time, and no
    multiple of it.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(2, 1100, 50, generator=generator)).bfloat16()
    labels = torch.randint(50, (2, 1100), generator=generator)
    plain = (
        logits.double().logsumexp(-1)
        - logits.double().gather(-1, labels[..., None])[..., 0]
    )
    with Largest(torch.float32) as largest:
        found = cross_entropies(logits, labels)
    assert largest.elements == 512 * 50, (
        "more logits than expected are in float32 at a time"
    )
    assert found.dtype == torch.float64
    # float32 sums of 512
    torch.testing.assert_close(found, plain.sum(1), rtol=1e-6, atol=0)


def test_averaged_cosines_against_the_plain_formula():
    """Tokens at one position are alike in all sequences, so that averaged cosines are
    spread as well.
    """
    layers = [
        tokens(1, 40, 8, seed, 0.0) + tokens(6, 40, 8, 2 + seed, 0.0) for seed in (0, 1)
    ]
    layers[1] *= 1e-25  # whose squares are no float32 numbers
    averaged = AveragedCosines()
    pooled = Accumulator(2)
    for layer, z in enumerate(layers):
        for some in (z[:4], z[4:]):
            averaged.add(layer, some)
        pooled.add(layer, z)
    histograms = averaged.histogram()
    of_pairs = pooled.result(40)
    for layer, z in enumerate(layers):
        u = z.double().numpy() / np.linalg.norm(
            z.double().numpy(), axis=-1, keepdims=True
        )
        expected = (u @ u.transpose(0, 2, 1)).mean(0)
        # float32 products
        np.testing.assert_allclose(averaged.matrix(layer), expected, atol=1e-6)
        np.testing.assert_array_equal(
            histograms[layer], np.histogram(expected.clip(-1, 1), EDGES)[0] / 40**2
        )
    # The mean is that of all pairs, the spread is not: sequences differ.
    centers = (EDGES[1:] + EDGES[:-1]) / 2
    for histogram, mean, std in zip(
        histograms, of_pairs.mean_cosine, of_pairs.std_cosine, strict=True
    ):
        assert histogram @ centers == pytest.approx(mean, abs=1 / 128)
        assert np.sqrt(histogram @ centers**2 - (histogram @ centers) ** 2) < 0.9 * std


def test_averaged_cosines_of_zero_equal_opposite_and_infinite_tokens():
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


# What the authors' embedding-condensation 2.0 made of ``hidden_states`` of three texts:
# [layers][6][6] averaged cosines.
RECORDED = Path(__file__).with_name("authors_cosines.json")


def hidden_states(text):
    """[1, 6, 5] of four layers, by a formula that any machine computes alike; tokens
    come closer with depth.
    """
    n = torch.arange(1.0, 7)[:, None]
    f = torch.arange(1.0, 6)
    return [
        (torch.sin(n * f * (0.7 + 0.1 * layer) + text) + 0.5 * layer)[None]
        for layer in range(4)
    ]


def test_recorded_numbers_of_the_authors_package():
    """ρ and τ are scipy's of the means over all pairs, as the package has none."""
    recorded = np.array(json.loads(RECORDED.read_text()))
    averaged = AveragedCosines()
    pooled = Accumulator(4)
    for layer, z in (
        (layer, z) for text in range(3) for layer, z in enumerate(hidden_states(text))
    ):
        averaged.add(layer, z)
        pooled.add(layer, z)
    np.testing.assert_allclose(
        [averaged.matrix(layer) for layer in range(4)], recorded, atol=1e-5
    )
    found = pooled.result(6)
    means = recorded.mean((1, 2))
    # as if the third layer were the last block, which hidden states leave out
    hidden = np.delete(means, 2)
    np.testing.assert_allclose(found.mean_cosine, means, atol=1e-5)
    np.testing.assert_array_equal(
        averaged.histogram(), [np.histogram(one, EDGES)[0] / 36 for one in recorded]
    )
    assert found.over_depth["after_norm"].spearman == pytest.approx(
        stats.spearmanr(hidden, range(3)).statistic
    )
    assert found.over_depth["after_norm"].kendall == pytest.approx(
        stats.kendalltau(hidden, range(3)).statistic
    )


def test_what_was_recorded_is_the_packages(monkeypatch):
    """``make test-peers`` installs it.

    It is no dependency: its licence is non-commercial, and its transformers is older.
    """
    nltk = pytest.importorskip("nltk", reason="make test-peers")
    # of data that are only used to sample texts
    monkeypatch.setattr(nltk, "download", lambda *_: None)
    package = pytest.importorskip("embedding_condensation", reason="make test-peers")
    model = torch.nn.Linear(1, 1)  # whose texts have their number as their first token
    model.forward = lambda input_ids, **_: SimpleNamespace(
        hidden_states=hidden_states(int(input_ids[0, 0]))
    )
    found = package.measure_embedding_condensation(
        model,
        lambda text, **_: {"input_ids": torch.tensor([[int(text)]])},
        texts=["0", "1", "2"],
        repetitions=3,
        **{"max_length": 1, "plot": False, "save_path": None, "show_progress": False},
    )
    np.testing.assert_allclose(
        found.cossim_by_layer, json.loads(RECORDED.read_text()), atol=1e-6
    )
