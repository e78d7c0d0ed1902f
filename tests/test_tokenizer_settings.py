"""What a tokenizer's files say beside the vocabulary: settings that would change a text, and what gigatoken lacks."""

import re

import pytest
from tokenizers import Tokenizer

from tests.streams import VALIDATION_FILE, config, json_lines, texts_of
from titan_disp.data.hf_tokenizer import plain_encoder
from titan_disp.data.tokenizer import encoder, fast_encoder, load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab.digest import digest
from titan_disp.lab.sample import train_tokenizer

TEXT = "a word or two " * 500


@pytest.mark.parametrize("setting", ["truncation", "padding", "padding to a multiple", "both"])
def test_texts_are_neither_cut_nor_padded(sample, hf_tokenizer, tmp_path, setting):
    """Files that were saved after a fine-tuning have these settings. transformers switches them off for every call, too."""
    tokenizer = Tokenizer.from_file(str(hf_tokenizer / "tokenizer.json"))
    if setting in ("truncation", "both"):
        tokenizer.enable_truncation(512)
    if setting in ("padding", "both"):
        tokenizer.enable_padding(length=4096, pad_id=7)
    if setting == "padding to a multiple":
        tokenizer.enable_padding(pad_to_multiple_of=64, pad_id=7)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_bytes((hf_tokenizer / "tokenizer_config.json").read_bytes())
    plain, loaded = load_tokenizer(hf_tokenizer), load_tokenizer(tmp_path)
    expected = encoder(plain)(TEXT)
    assert len(expected) > 1500
    assert encoder(loaded)(TEXT) == loaded.encode(TEXT, add_bos=True, add_eos=True) == expected
    assert plain_encoder(loaded)(TEXT) == expected[:-1]
    assert fast_encoder(loaded, str(tmp_path), encoder(loaded))(TEXT).tolist() == expected
    (tmp_path / "a.json").write_bytes(json_lines([TEXT, *texts_of(min((sample / "en").glob("c4-train*")))[:50]]))
    found = []
    for folder in (hf_tokenizer, tmp_path) if setting == "both" else ():  # the whole way to the batches
        job = config(sample, "--training.dataset", "text", "--training.global_batch_size", "8")
        job.training.dataset_path, job.model.hf_assets_path = str(tmp_path / "a.json"), str(folder)
        found.append(digest(job, 6, [(0, 1)]).hashes)
    assert found[:1] == found[1:]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "what this model has: user-defined symbols ('\\n'): set stream.fast_tokenizer = false"),
        ({"user_defined_symbols": ()}, None),
    ],
)
def test_why_gigatoken_is_refused(sample, tmp_path, options, reason):
    """The speed that the README names needs a tokenizer without the sample's piece of a line break."""
    (tmp_path / "a.model").write_bytes(train_tokenizer(texts_of(sample / VALIDATION_FILE), 2048, **options))
    loaded = load_tokenizer(tmp_path)
    if reason is None:
        fast_encoder(loaded, str(tmp_path), encoder(loaded))
        return
    with pytest.raises(ConfigError, match=re.escape(reason)):
        fast_encoder(loaded, str(tmp_path), encoder(loaded))
