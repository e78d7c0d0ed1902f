"""SentencePiece, Hugging Face and gigatoken: the same ids, no special tokens from text,
and unusable tokenizers.
"""

import json
import shutil

import pytest
import transformers
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, pre_tokenizers, processors

from tests.command_line import DEMO
from tests.pages import loaded
from tests.streams import VALIDATION_FILE, texts_of
from titan_disp.checks import tokenizer_of
from titan_disp.data.fingerprint import data_changes, fingerprint
from titan_disp.data.listing import list_files
from titan_disp.data.options import StreamOptions
from titan_disp.data.tokenizer import (
    encoder,
    fast_encoder,
    find_tokenizer,
    load_tokenizer,
)
from titan_disp.errors import ConfigError, DataError
from titan_disp.lab.sample import train_tokenizer

LONG = "a word or two " * 500


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("template", [False, True])
def test_encoder_agrees_with_torchtitans_tokenizer(
    hf_tokenizer, tmp_path, bos, template
):
    """Also where the files were saved after a fine-tuning, and say that texts are to be
    cut and padded.
    """
    pytest.importorskip("gigatoken")
    tokenizer = Tokenizer.from_file(str(hf_tokenizer / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    if template:
        ids = [
            (token, tokenizer.token_to_id(token)) for token in ("<s>", "<|endoftext|>")
        ]
        single = "<s> $A <|endoftext|>" if bos else "$A <|endoftext|>"
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=ids
        )
    plain = tokenizer.encode(LONG, add_special_tokens=False).ids
    tokenizer.enable_truncation(512)
    tokenizer.enable_padding(
        pad_id=7, **({"length": 4096} if template else {"pad_to_multiple_of": 64})
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>"} | ({"bos_token": "<s>"} if bos else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = load_tokenizer(tmp_path)
    encode = encoder(loaded)
    fast = fast_encoder(loaded, str(tmp_path), encode)
    for text in (
        "Return a list of lines,\n\n    keepends: bool  — naïve 中",
        LONG,
        "",
        "plain",
    ):
        assert (
            fast(text).tolist()
            == encode(text)
            == loaded.encode(text, add_bos=True, add_eos=True)
        )
    assert encode(LONG) == [*([loaded.bos_id] * bos), *plain, loaded.eos_id]
    assert loaded.plain(LONG) == plain


def test_fast_tokenizer_is_not_trusted(sample, hf_tokenizer, monkeypatch):
    gigatoken = pytest.importorskip("gigatoken")
    # gigatoken puts SentencePiece's dummy prefix after user-defined symbols too, one of
    # which is the sample's "\n".
    spm = load_tokenizer(sample / "tokenizer")
    with pytest.raises(
        ConfigError,
        match=r"other ids than .* \(it supports SentencePiece .*\): set stream.fast_tok",
    ):
        fast_encoder(spm, str(sample / "tokenizer"), encoder(spm))

    class Wrong(gigatoken.Tokenizer):
        unknown = "\u4e2d"

        def encode(self, text):
            return super().encode(text.replace(self.unknown, ""))

    monkeypatch.setattr(gigatoken, "Tokenizer", Wrong)
    loaded = load_tokenizer(hf_tokenizer)
    with pytest.raises(ConfigError, match="other ids"):
        fast_encoder(loaded, str(hf_tokenizer), encoder(loaded))
    Wrong.unknown = "dispersion"
    monkeypatch.setattr("titan_disp.data.tokenizer.CHECK_EVERY", 3)
    fast = fast_encoder(loaded, str(hf_tokenizer), encoder(loaded))
    for text in ("dispersion", "condensation"):
        fast(text)
    with pytest.raises(DataError, match="set stream.fast_tokenizer = false"):
        fast("dispersion")


NAMES = ["</s>", "<unk>", "<|endoftext|>", "<|im_end|>", "<think>"]


@pytest.mark.parametrize("kind", ["sentencepiece", "hugging face", "of Qwen's kind"])
def test_text_makes_no_special_tokens(sample, hf_tokenizer, tmp_path, kind):
    """Ids are those of the library alone, which here knows no special tokens."""
    pytest.importorskip("gigatoken")
    if kind == "sentencepiece":
        model = train_tokenizer(
            texts_of(sample / VALIDATION_FILE), 2048, user_defined_symbols=()
        )
        (tmp_path / "plain.model").write_bytes(model)
        plain = SentencePieceProcessor(model_proto=model).encode
    else:
        made = Tokenizer.from_file(f"{hf_tokenizer}/tokenizer.json")
        config = {"eos_token": "<|endoftext|>"}
        if kind == "of Qwen's kind":  # with an added word that is not special
            made.add_tokens([AddedToken("<think>", normalized=False)])
            made.add_special_tokens(["<|im_end|>"])
            added = json.loads(made.to_str())["added_tokens"]
            config["added_tokens_decoder"] = {token.pop("id"): token for token in added}
        content = json.loads(made.to_str())
        (tmp_path / "tokenizer.json").write_text(made.to_str())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        words = [token for token in content["added_tokens"] if not token["special"]]
        without = Tokenizer.from_str(json.dumps(content | {"added_tokens": words}))
        plain = lambda text: without.encode(text).ids  # noqa: E731
    loaded = load_tokenizer(tmp_path)
    encode = encoder(loaded)
    eos = loaded.eos_id
    fast = fast_encoder(loaded, str(tmp_path), encode)
    for text in [
        *NAMES,
        *(f"a {name}b{name} {name}" for name in NAMES),
        "".join(NAMES * 3),
    ]:
        ids = encode(text)
        assert ids == [*plain(text), eos]
        assert fast(text).tolist() == ids
        assert loaded.plain(text) == ids[:-1]
        assert loaded.decode(ids[:-1]) == text
    assert all(
        fast(text).tolist() == encode(text)
        for text in texts_of(sample / VALIDATION_FILE)
    )
    if loaded.get_vocab_size() == 2050:  # of Qwen's kind
        written = transformers.AutoTokenizer.from_pretrained(tmp_path)
        for text in ("a <think> b", "a <|im_end|> b"):
            assert (
                written(text, split_special_tokens=True).input_ids == encode(text)[:-1]
            )


def test_an_eos_that_the_tokenizer_adds_comes_once(hf_tokenizer, tmp_path):
    """As T5's, whose tokenizer_config.json names none here."""
    made = Tokenizer.from_file(f"{hf_tokenizer}/tokenizer.json")
    made.add_special_tokens(["</s>"])
    eos = made.token_to_id("</s>")
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", eos)]
    )
    made.save(f"{tmp_path}/tokenizer.json")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert encoder(load_tokenizer(tmp_path))("one two").count(eos) == 1
    (tmp_path / "config.json").unlink()
    # of plan and submit, too
    with pytest.raises(ConfigError, match="the tokenizer has no EOS token"):
        tokenizer_of(
            loaded(
                DEMO,
                "--model.hf_assets_path",
                str(tmp_path),
                "--model.overrides",
                "vocab_size=9999",
            )
        )


def test_the_eos_of_config_json_is_in_the_fingerprint(sample, hf_tokenizer, tmp_path):
    """GPT-2's tokenizer_config.json names no token, so that config.json decides what
    ends a document.
    """
    files = list_files("c4", str(sample))
    options = StreamOptions(seq_len=8)
    tokenizer = Tokenizer.from_file(str(hf_tokenizer / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|one|>", "<|other|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = {}
    for eos in (2048, 2049):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert load_tokenizer(tmp_path).eos_id == eos
        found[eos] = fingerprint(files, str(tmp_path), options, 4)
    assert data_changes(found[2048], found[2049]) == [
        "eos_token_id: 2048 then, 2049 now"
    ]
    older = {k: v for k, v in found[2048].items() if k != "stream.separator"}
    assert data_changes(older, found[2048]) == []
    # tokenizer_config.json decides, and is in the tokenizer's hash
    for token in ("<|one|>", "<|other|>"):
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": token})
        )
        found[token] = fingerprint(files, str(tmp_path), options, 4)
        assert found[token]["eos_token_id"] is None
    (tmp_path / "merges.txt").write_text("a b")  # of a vocab.json
    found["merges"] = fingerprint(files, str(tmp_path), options, 4)
    for other in ("<|one|>", "merges"):
        assert [
            text.split(":")[0]
            for text in data_changes(found["<|other|>"], found[other])
        ] == ["tokenizer"]


def test_which_file_is_the_tokenizer(hf_tokenizer, tmp_path):
    for name, message in (
        ("a.model", "cannot load the tokenizer"),
        ("b.model", r"holds a\.model, b\.model"),
    ):
        (tmp_path / name).write_bytes(b"nonsense")
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(
        (hf_tokenizer / "tokenizer.json").read_bytes()
    )
    assert find_tokenizer(tmp_path).name == "tokenizer.json"


def test_merges_that_begin_with_a_number_sign(tmp_path):
    """GPT-2's vocab.json and merges.txt, whose merges TorchTitan takes for comments."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("#", "#"), ("##", "##"), ("Ġ", "a"), ("#", "!")]
    words = [*alphabet, *("".join(pair) for pair in merges), "<|endoftext|>"]
    vocabulary = {word: i for i, word in enumerate(words)}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges)]
    (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n")
    eos = vocabulary["<|endoftext|>"]
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": eos}))
    loaded = load_tokenizer(tmp_path)
    for text, expected in (
        ("## a", ["##", "Ġa"]),
        ("####!", ["####", "!"]),
        ("#!", ["#!"]),
        ("<|endoftext|>", [*"<|endoftext|>"]),
    ):
        ids = [vocabulary[word] for word in expected]
        assert encoder(loaded)(text) == [*ids, eos]
        theirs = transformers.GPT2Tokenizer(vocabulary, merges)
        assert theirs(text, split_special_tokens=True).input_ids == ids
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer"}'
    )
    with pytest.raises(ConfigError, match="of Qwen2Tokenizer, .* tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("key", ["eos_token", "bos_token"])
def test_a_token_that_the_tokenizer_lacks(hf_tokenizer, tmp_path, key):
    """TorchTitan would add it, with an id that the model has never seen."""
    shutil.copy(hf_tokenizer / "tokenizer.json", tmp_path)
    config = {"eos_token": "<|endoftext|>", key: "<|endoftxt|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError,
        match=rf"names the {key} '<\|endoftxt\|>', .* mean <\|endoftext\|>\?",
    ):
        load_tokenizer(tmp_path)
    # some files list added tokens only there
    config["added_tokens_decoder"] = {"2048": {"content": "<|endoftxt|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).get_vocab_size() == 2049


def test_a_tiktoken_file_is_named(tmp_path):
    """Meta's own releases of Llama 3 have one of this name."""
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\nIw== 2\n")
    with pytest.raises(ConfigError, match=r"is a file of tiktoken.*hf download"):
        load_tokenizer(tmp_path)
