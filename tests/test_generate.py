"""titan-disp generate: greedy and sampled text of a run and of its export."""

import logging
from unittest import mock

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.command_line import typed
from tests.saved_run import SEQ_LEN, random_model, save_run
from titan_disp.config.options import ExportOptions, GenerateOptions
from titan_disp.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export
from titan_disp.lab.export.generate import generate

PROMPT = "The function returns"


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def run(tmp_path_factory, model, sample):
    return save_run(tmp_path_factory.mktemp("runs") / "run", model, sample / "tokenizer")


@torch.no_grad()
def test_greedy_is_the_models_own_choice(run, model, sample):
    """Generation with the key-value cache equals generation from the whole sequence at every token."""
    tokenizer = load_tokenizer(sample / "tokenizer")
    ids = tokenizer.encode(PROMPT)
    for _ in range(12):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert generate(GenerateOptions(run, PROMPT, 12, temperature=0)) == tokenizer.decode(ids)


def test_sampling_follows_the_seed(run):
    state = torch.get_rng_state()

    def sampled(**options):
        return generate(GenerateOptions(run, PROMPT, 12, **options))

    text = sampled(temperature=1.0, seed=1)
    assert text.startswith(PROMPT)
    assert sampled(temperature=1.0, seed=1) == text != sampled(temperature=1.0, seed=2)
    assert sampled(temperature=1.0, top_k=1) == sampled(temperature=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_an_exported_folder_says_the_same(run, tmp_path, capsys, monkeypatch):
    """transformers has nothing to warn about; it warns only once in a process."""
    export(ExportOptions(run, tmp_path / "hf"))
    transformers, handler = logging.getLogger("transformers"), mock.Mock(level=logging.WARNING)
    type(transformers).warning_once.cache_clear()
    monkeypatch.setattr(transformers, "handlers", [*transformers.handlers, handler])
    said = []
    for target in (run, f"{run}/30", tmp_path / "hf"):
        assert typed(monkeypatch, "generate", target, PROMPT, "--max-new-tokens", "9", "--seed", "4") == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith(PROMPT)
    assert not handler.handle.called


def test_length_ends_with_the_sequence_of_training(run, monkeypatch):
    assert generate(GenerateOptions(run, "", 5, temperature=0))  # begins after an EOS, like a document in training
    words = "the " * (SEQ_LEN - 4)
    monkeypatch.setattr(SentencePieceTokenizer, "decode", lambda self, ids: str(len(ids)))
    assert int(generate(GenerateOptions(run, words, 1, temperature=0))) < SEQ_LEN
    assert int(generate(GenerateOptions(run, words, 100, temperature=0))) == SEQ_LEN
    with pytest.raises(ConfigError, match=r"the prompt has \d+ tokens, expected fewer than the 64"):
        generate(GenerateOptions(run, words + words))


def test_ids_beyond_the_tokenizer_are_never_taken(tmp_path):
    """Qwen's embedding has more rows than its tokenizer has tokens."""
    small = Tokenizer(models.BPE({"a": 0, "b": 1, "<end>": 2}, []))
    small.pre_tokenizer = pre_tokenizers.Whitespace()
    small.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    run = save_run(tmp_path / "run", random_model(), tmp_path)
    text = generate(GenerateOptions(run, "a", 20, temperature=1.0, top_k=0))
    assert len(text.replace(" ", "")) > 1  # other ids decode to nothing
    assert set(text) <= set("ab ")


@pytest.mark.parametrize("options", [{"max_new_tokens": 0}, {"temperature": -1}, {"top_k": -1}])
def test_bad_numbers(run, options):
    with pytest.raises(ConfigError, match="expected at least"):
        generate(GenerateOptions(run, PROMPT, **options))


def test_no_model(tmp_path):
    with pytest.raises(ConfigError, match="does not exist; expected a run's job.dump_folder"):
        generate(GenerateOptions(tmp_path / "nowhere", PROMPT))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="transformers cannot load the model"):
        generate(GenerateOptions(tmp_path, PROMPT))
