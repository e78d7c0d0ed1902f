"""Retrieval and next-token accuracy against plain loops."""

import gzip
import json
from collections import Counter

import numpy as np
import pandas
import pytest
import torch

from benchmarks import abilities
from benchmarks.preregistered import main as print_results
from tests.saved_run import random_model, save_run
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab.inspection.targets import find_targets

DOCUMENTS = 6
HALF = 20  # tokens
WORDS = ["the", "cat", "saw", "a", "dog", "near", "its", "old", "house", "while"]


@pytest.fixture(autouse=True)
def short_halves(monkeypatch):
    monkeypatch.setattr(abilities, "HALF", HALF)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A folder of documents, two of which are too short."""
    folder = tmp_path_factory.mktemp("text")
    generator = np.random.default_rng(0)
    with gzip.open(folder / "c4-validation.00000-of-00001.json.gz", "wt") as file:
        for length in (500, 3, 500, 500, 5, 500, 500, 500):
            line = " ".join(generator.choice(WORDS, length))
            file.write(json.dumps({"text": line}) + "\n")
    return folder


def biased_model(sample, std):
    """A model that predicts the text's most frequent token in about half of all places,
    which is sometimes right.
    """
    model = random_model(std=std)
    tokenizer = load_tokenizer(str(sample / "tokenizer"))
    [(frequent, _)] = Counter(tokenizer.plain(" ".join(WORDS))).most_common(1)
    with torch.no_grad():
        model.output.weight[frequent] *= 100
    return model


@pytest.fixture(scope="module")
def sweep(sample, tmp_path_factory):
    """A sweep whose two runs, on and off, have models of different random weights."""
    folder = tmp_path_factory.mktemp("runs")
    for std, name in ((0.1, "on_seed-1"), (0.2, "off_seed-1")):
        save_run(folder / name, biased_model(sample, std), sample / "tokenizer")
        events = folder / name / "events.jsonl"
        event = {"step": 5, "time": "2026-11-29T00:00:00Z", "event": "complete"}
        events.write_text(json.dumps(event) + "\n")
    file = folder / "sweep.toml"
    file.write_text(
        f"[sweep]\nconfig = 'demo.toml'\nfolder = {json.dumps(str(folder))}\n"
        "[[points]]\nname = 'on'\n[[points]]\nname = 'off'\n"
        "[grid]\n'debug.seed, stream.seed' = [1]\n"
    )
    return file


def test_next_tokens_of_a_sweep(sample, sweep, text, tmp_path, capsys):
    out = tmp_path / "values.csv"
    abilities.main(sweep, str(text), out, DOCUMENTS)
    rows = pandas.read_csv(out)
    assert list(rows.point) == ["on"] * 3 + ["off"] * 3
    assert set(rows.seeds) == {"debug.seed=1 stream.seed=1"}
    [target] = find_targets([str(sweep.parent / "on_seed-1")], False, None).values()
    texts = abilities.read_texts(text=None, dataset=str(text), seed=0)
    halves = abilities.read_halves(texts, target.encode, DOCUMENTS)
    assert halves.shape == (2, DOCUMENTS, HALF)
    model = biased_model(sample, std=0.1)
    right = 0
    for document in range(DOCUMENTS):
        for half in (0, 1):
            ids = halves[half, document]
            with torch.no_grad():
                logits = model(ids[None])[0]
            right += sum(logits[i].argmax() == ids[i + 1] for i in range(HALF - 1))
    accuracy = float(right) / (2 * DOCUMENTS * (HALF - 1))
    assert 0 < accuracy < 0.5
    assert rows.value[0] == pytest.approx(accuracy)
    two_seeds = pandas.concat([rows, rows.assign(seeds="2")])
    two_seeds.to_csv(out, index=False)
    capsys.readouterr()
    print_results([str(out)])
    difference = rows.value[0] - rows.value[3]
    assert f"next_token_accuracy: {difference:+.4f} (95 %" in capsys.readouterr().out


def test_halves_are_consecutive(text):
    numbers = [" ".join(map(str, range(start, start + 50))) for start in (0, 1000)]
    halves = abilities.read_halves(numbers, lambda t: [*map(int, t.split())], 2)
    assert halves[:, 0].flatten().tolist() == [*range(2 * HALF)]
    assert halves[:, 1].flatten().tolist() == [*range(1000, 1000 + 2 * HALF)]


def test_too_few_documents(sweep, text, tmp_path):
    with pytest.raises(ConfigError, match="has 6 documents of 40 tokens or more, exp"):
        abilities.main(sweep, str(text), tmp_path / "values.csv", 7)


def test_a_run_that_has_not_finished(sweep, text, tmp_path, capsys):
    events = sweep.parent / "off_seed-1" / "events.jsonl"
    content = events.read_text()
    events.unlink()
    try:
        abilities.main(sweep, str(text), tmp_path / "values.csv", DOCUMENTS)
    finally:
        events.write_text(content)
    assert "off_seed-1 is left out: not started" in capsys.readouterr().out
    assert set(pandas.read_csv(tmp_path / "values.csv").point) == {"on"}


def test_retrieval_against_a_loop():
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    second = first + torch.randn(40, 5, generator=generator, dtype=torch.float64)
    hits = 0
    for i in range(40):
        cosines = [torch.cosine_similarity(first[i], other, dim=0) for other in second]
        hits += max(range(40), key=lambda j: float(cosines[j])) == i  # noqa: B023
    fraction = abilities.retrieval(torch.stack([first, second]))
    assert fraction == hits / 40
    assert 0.1 < fraction < 0.9
