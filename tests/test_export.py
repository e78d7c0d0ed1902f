"""Models that are exported, or saved for transformers in training, give the same
numbers and the same text there.
"""

import json
import logging
import random
import resource
import shutil
import signal
from unittest import mock

import pytest
import sentencepiece
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.command_line import typed
from tests.saved_run import SEQ_LEN, random_model, save_run
from titan_disp.config.command_options import ExportOptions, GenerateOptions
from titan_disp.data.hf_tokenizer import (
    PROBES,
    check_same_ids,
    convert,
    map_probes,
    write_tokenizer,
)
from titan_disp.data.tokenizer import SentencePieceTokenizer, load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export, local_documents
from titan_disp.lab.export.generate import generate
from titan_disp.lab.export.saved import find_saved, load_model
from titan_disp.models.hf import check_hf_folder
from titan_disp.models.qwen3 import Qwen3HfAdapter, flavors
from titan_disp.models.registry import model_args

TOKENS = torch.arange(2 * SEQ_LEN).view(2, SEQ_LEN) * 17 % 2048


@pytest.fixture(scope="module")
def texts(sample):
    return list(local_documents(str(sample)))


@pytest.fixture(scope="module")
def model():
    return random_model()


@pytest.fixture(scope="module")
def run(tmp_path_factory, model, sample):
    folder = tmp_path_factory.mktemp("runs") / "run"
    return save_run(
        folder, model, sample / "tokenizer", "--training.dataset_path", str(sample)
    )


@torch.no_grad()
def loaded_logits(folder, tied=True):
    """Compute the exported model's logits.

    All weights come from the file, and tied weights are the same object.
    """
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values()), info
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    return theirs(TOKENS).logits


@torch.no_grad()
def test_logits_tokenizer_and_card(run, model, sample, texts, tmp_path):
    dest = tmp_path / "out" / "small-model"
    assert export(ExportOptions(run, dest)).step == 30
    torch.testing.assert_close(loaded_logits(dest), model(TOKENS), atol=1e-4, rtol=0)
    adapter = Qwen3HfAdapter(model.model_args, None)
    assert (
        load_file(dest / "model.safetensors").keys() == adapter.weight_shapes().keys()
    )
    assert (dest / "model.safetensors").stat().st_mode == (
        dest / "config.json"
    ).stat().st_mode
    config = json.loads((dest / "config.json").read_text())
    assert (
        config["rope_theta"],
        config["rms_norm_eps"],
        config["max_position_embeddings"],
    ) == (1000000, 1e-6, SEQ_LEN)
    assert (config["bos_token_id"], config["eos_token_id"]) == (None, 1)

    tokenizer = transformers.AutoTokenizer.from_pretrained(dest)
    trained = SentencePieceTokenizer(sample / "tokenizer/sample.model")
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (trained.eos_id, None)
    for text in [*PROBES, "</s><unk>", "<unk>", *texts]:
        assert tokenizer(text).input_ids == trained.encode(text), text
        assert tokenizer.decode(trained.encode(text)) == trained.decode(
            trained.encode(text)
        )

    card = (dest / "README.md").read_text()
    for fact in ("# small-model", "30 of 300", "30,720", "7.0000 at step 20", "-0.2000 at step 20", "427,008", "2602.00217",
                 "torch 2.99", "7 ranks", "coeff = 0.1", f"file named `{sample.name}`"):  # fmt: skip
        assert fact in card, fact
    for absent in ("held-out", f"{sample}/"):  # the run measured nothing
        assert absent not in card


def test_what_other_programs_need(model, sample, tmp_path, monkeypatch):
    """llama.cpp reads tokenizer.model and n_ctx, and batches need a pad token."""
    dest = tmp_path / "small"
    shutil.copytree(sample / "tokenizer", tmp_path / "tokenizer")
    run = save_run(tmp_path / "outputs" / "run", model, "tokenizer")
    # From any folder, the tokenizer's is found above the run's.
    monkeypatch.chdir("/")
    export(ExportOptions(run, dest))
    model = (sample / "tokenizer" / "sample.model").read_bytes()
    assert (dest / "tokenizer.model").read_bytes() == model
    tokenizer = transformers.AutoTokenizer.from_pretrained(dest)
    assert tokenizer.pad_token == tokenizer.eos_token
    ids = tokenizer(["a", "a longer one"], padding=True).input_ids
    assert len(set(map(len, ids))) == 1
    assert generate(GenerateOptions(dest, "The", max_new_tokens=3))
    gpt2 = random_model(flavor="nano", name="gpt2_disp")
    options = ("--model.name", "gpt2_disp")
    other = save_run(tmp_path / "gpt2", gpt2, sample / "tokenizer", *options)
    export(ExportOptions(other, tmp_path / "small-gpt2"))
    config = json.loads((tmp_path / "small-gpt2/config.json").read_text())
    assert config["n_ctx"] == config["n_positions"] != SEQ_LEN
    card = (tmp_path / "small-gpt2/README.md").read_text()
    assert f"pretrained=small-gpt2,max_length={SEQ_LEN}" in card


@torch.no_grad()
def test_untied_model_of_other_sizes(sample, tmp_path):
    """A model with model.overrides is exported, and can be imported again.

    Its output has its own matrix.
    """
    sizes = "enable_weight_tying=false,hidden_dim=48,n_layers=2,n_heads=6,head_dim=32"
    args = model_args("qwen3_disp", "nano", sizes)
    untied = random_model(overrides=sizes)
    dest = tmp_path / "out"
    run = save_run(
        tmp_path / "run", untied, sample / "tokenizer", "--model.overrides", sizes
    )
    export(ExportOptions(run, dest))
    assert (
        f"flavor nano with {sizes.replace('=', ' = ').replace(',', ', ')})"
        in (dest / "README.md").read_text()
    )
    torch.testing.assert_close(
        load_model(find_saved(run))(TOKENS), untied(TOKENS), atol=0, rtol=0
    )
    torch.testing.assert_close(
        loaded_logits(dest, tied=False), untied(TOKENS), atol=1e-4, rtol=0
    )
    check_hf_folder(dest, Qwen3HfAdapter(args, None))


def test_shards_and_dtype(run, model, tmp_path):
    export(ExportOptions(f"{run}/30", tmp_path / "bf16", "bfloat16", "300KB"))
    index = json.loads((tmp_path / "bf16" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    loaded_logits(tmp_path / "bf16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "bf16", dtype=torch.bfloat16
    )
    assert torch.equal(theirs.model.norm.weight, model.norm.weight.bfloat16())


@pytest.mark.parametrize("given", [False, True])
def test_hugging_face_tokenizer_is_copied(model, hf_tokenizer, tmp_path, given):
    """transformers must not use Qwen's pre-tokenizer.

    On request it reads "<|endoftext|>" as text, as training does.
    """
    (tmp_path / "train.jsonl").write_text('{"body": "a<|endoftext|>b", "text": 1}\n')
    data = (
        "--training.dataset_path",
        str(tmp_path / "train.jsonl"),
        "--stream.text_field",
        "body",
    )
    # of no step 2026
    run = save_run(
        tmp_path / "2026", model, tmp_path / "nowhere" if given else hf_tokenizer, *data
    )
    export(
        ExportOptions(run, tmp_path / "out", tokenizer=hf_tokenizer if given else None)
    )
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (
        hf_tokenizer / "tokenizer.json"
    ).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    eos = json.loads((tmp_path / "out/generation_config.json").read_text())[
        "eos_token_id"
    ]
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", eos)
    for split in (True, False):
        assert (
            eos in tokenizer("a<|endoftext|>b", split_special_tokens=split).input_ids
        ) == (not split)


def test_nothing_is_left_of_a_failed_export(run, tmp_path):
    """A limit on the size of files has room for the tokenizer, not for the weights."""
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/file").touch()
    for target, dest, options, told in (
        (run, "taken", {}, "already exists"),
        (run, "x", {"tokenizer": tmp_path / "nowhere"}, "does not exist here"),
        (run, "x", {"max_shard_size": "huge"}, "--max-shard-size is 'huge'"),
    ):
        with pytest.raises(ConfigError, match=told):
            export(ExportOptions(target, tmp_path / dest, **options))
    (tmp_path / ".x.partial").mkdir()  # left by an export that was killed
    (tmp_path / ".x.partial/model-00007-of-00009.safetensors").touch()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(ConfigError, match="cannot write .*File too large"):
            export(ExportOptions(run, tmp_path / "x"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_not_finite_weights(model, sample, tmp_path):
    broken = random_model()
    with torch.no_grad():
        broken.norm.weight[3] = 1e6
    run = save_run(tmp_path / "run", broken, sample / "tokenizer")
    with pytest.raises(
        ConfigError, match=r"model\.norm\.weight is not finite in float16"
    ):
        export(ExportOptions(run, tmp_path / "x", "float16"))


MODELS = {
    "bpe": {"model_type": "bpe"},  # nmt_nfkc, unknown characters
    "bpe of Llama's kind": {
        **{"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity", "bos_id": 1, "eos_id": 2},
        **{"remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "split_digits": True},
    },
    "bpe with symbols": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["\n", "<|sep|>", "\t", "▁▁"]},
    "bpe without prefix": {"model_type": "bpe", "byte_fallback": True, "add_dummy_prefix": False, "split_by_whitespace": False},
    "unigram": {"model_type": "unigram", "vocab_size": 500},
    "unigram with bytes": {
        **{"model_type": "unigram", "vocab_size": 800, "byte_fallback": True, "normalization_rule_name": "identity"},
        **{"remove_extra_whitespaces": False, "user_defined_symbols": ["\n", "<|sep|>"], "bos_id": 1, "eos_id": 2, "pad_id": 3},
    },
}  # fmt: skip


def train_sentencepiece(file, lines, **options):
    how = {
        "vocab_size": 900,
        "num_threads": 1,
        "minloglevel": 2,
        "bos_id": -1,
        "eos_id": 1,
        "unk_id": 0,
        "pad_id": -1,
    }
    with open(file, "wb") as writer:
        train = sentencepiece.SentencePieceTrainer.train
        train(sentence_iterator=iter(lines), model_writer=writer, **how | options)
    return file


@pytest.fixture(scope="module")
def files(tmp_path_factory, texts):
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    return {
        name: train_sentencepiece(
            tmp_path_factory.mktemp("sentencepiece") / "m.model", lines, **options
        )
        for name, options in MODELS.items()
    }


UNICODE = [*range(1, 0xD800), *range(0xE000, 0x110000)]
PARTS = [
    *"abcdefgh    .,\n\n\t-=_(AB01",
    "the ",
    "    ",
    "\n\n",
    "<|sep|>",
    "<0x41>",
    "é",
    "e\u0302\u0301",
    "日",
    "😀",
]
PARTS += ["\xa0", "\r\n", "▁", "\u200b", "½", "ﬁ", "import ", "\x00"]


@pytest.mark.parametrize("name", MODELS)
def test_sentencepiece_on_odd_texts(files, name):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(files[name]))
    converted, _ = convert(files[name])
    rng = random.Random(0)
    texts = ["".join(rng.choices(PARTS, k=rng.randrange(50))) for _ in range(500)]
    # Then both agree on all of Unicode
    if MODELS[name].get("normalization_rule_name") == "identity":
        texts += ["".join(map(chr, rng.choices(UNICODE, k=30))) for _ in range(200)]
    for text in [
        *PROBES,
        "</s>",
        "a</s> <s><unk>b",
        "<0x0A>",
        "\n</s>\n<0x0A><|sep|>",
        *texts,
    ]:
        got = converted.encode(text, add_special_tokens=False).ids
        assert got == processor.encode(text), text
        if processor.unk_id() not in got and "▁" not in text:
            assert converted.decode(got) == processor.decode(got), text


def test_normalization_maps(files, texts, tmp_path):
    """Everything that a map replaces, before a mark; and what it does not compose."""
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(files["bpe with symbols"])
    )
    converted, _ = convert(files["bpe with symbols"])
    probes = list(map_probes(files["bpe with symbols"]))
    assert sum(probe.count(" ") + 1 for probe in probes) > 200_000
    odd = "H\u0301 \u017f\u0323 \u1e9b\u0323 \u212b\u0301 \ufb03\u0301 e\u0301\u0323"
    marks = (
        "\xea\u0301 e\u0302\u0301 a\u0327\u0301 \u0301 a\U0001f3fb \u1100\u1161\u11a8"
    )
    for text in [odd, marks, *odd.split(), *marks.split(), *probes[::20]]:
        got = converted.encode(text, add_special_tokens=False).ids
        assert got == processor.encode(text), ascii(text)
    folding = train_sentencepiece(
        tmp_path / "m.model",
        texts,
        model_type="bpe",
        normalization_rule_name="nmt_nfkc_cf",
    )
    with pytest.raises(ConfigError, match="normalizes text by nmt_nfkc_cf, .*--token"):
        convert(folding)


def test_a_class_that_gives_other_ids_is_replaced(files, tmp_path):
    """transformers' LlamaTokenizer makes steps of its own, whatever tokenizer.json
    says.
    """
    for name in ("source", "out"):
        (tmp_path / name).mkdir()
    converted, special = convert(files["bpe of Llama's kind"])
    converted.save(str(tmp_path / "source/tokenizer.json"))
    (tmp_path / "source/tokenizer_config.json").write_text(
        json.dumps(special | {"tokenizer_class": "LlamaTokenizer"})
    )
    (tmp_path / "out/config.json").write_text('{"model_type": "qwen3"}')
    trained = load_tokenizer(tmp_path / "source")
    write_tokenizer(tmp_path / "source", trained, tmp_path / "out", 64)
    written = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert written("   a", add_special_tokens=False).input_ids == trained.plain("   a")
    assert written.eos_token == "</s>"


@pytest.mark.parametrize("name", ["bpe of Llama's kind", "unigram with bytes"])
def test_bos_begins_a_text_as_in_training(files, model, sample, tmp_path, name):
    run = save_run(
        tmp_path / "run",
        model,
        files[name].parent,
        "--training.dataset_path",
        str(sample),
    )
    export(ExportOptions(run, tmp_path / "out"))
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    trained = SentencePieceTokenizer(files[name])
    assert exported("a word").input_ids == trained.encode("a word", add_bos=True)
    assert exported(
        "</s> is text", add_special_tokens=False
    ).input_ids == trained.encode("</s> is text")
    assert (exported.bos_token, exported.eos_token) == ("<s>", "</s>")


def test_what_cannot_be_converted_is_refused(texts, tmp_path):
    file = train_sentencepiece(
        tmp_path / "words.model", texts, model_type="word", vocab_size=100
    )
    with pytest.raises(
        ConfigError, match=r"has model type WORD, which .* cannot express.*--tokenizer"
    ):
        convert(file)
    with pytest.raises(
        ConfigError, match=r"for 'cd': \[9\] instead of \[1, 2\] from token 0 on"
    ):
        check_same_ids(
            lambda text: [1, 2],
            lambda text: [1, 2] if text == "ab" else [9],
            ["ab", "cd"],
        )


def test_files_are_those_of_an_index_unless_it_lacks_a_weight(tmp_path):
    """One that the model lacks is left out, as the output matrix of a tied model."""
    names = Qwen3HfAdapter(flavors["nano"], None).weight_shapes().keys()
    for listed, files in (
        (names - {"model.norm.weight"}, None),
        (names | {"lm_head.weight"}, dict.fromkeys(names, 1)),
    ):
        index = {
            "weight_map": dict.fromkeys(listed, "model-00001-of-00002.safetensors")
        }
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert (
            Qwen3HfAdapter(flavors["nano"], str(tmp_path)).fqn_to_index_mapping == files
        )


def test_a_checkpoint_in_hugging_face_format_that_is_not_whole(model, sample, tmp_path):
    run = save_run(tmp_path / "run", model, sample / "tokenizer")
    out = tmp_path / "out"
    export(ExportOptions(run, out, max_shard_size="400KB"))
    shutil.rmtree(run / "checkpoint" / "step-30")
    out.rename(step := run / "checkpoint" / "step-30")
    assert find_saved(run).in_hf_format
    *_, last = sorted(step.glob("*.safetensors"))
    last.unlink()
    with pytest.raises(ConfigError, match="lacks .* of the .* weights"):
        export(ExportOptions(run, out))
    assert not out.exists()


PROMPT = "The function returns"


@torch.no_grad()
def test_greedy_is_the_models_own_choice(run, model, sample):
    """Generation with the key-value cache equals generation from the whole sequence at
    every token.
    """
    tokenizer = load_tokenizer(sample / "tokenizer")
    ids = tokenizer.encode(PROMPT)
    for _ in range(12):
        ids.append(model(torch.tensor([ids]))[0, -1].argmax().item())
    assert generate(
        GenerateOptions(run, PROMPT, 12, temperature=0)
    ) == tokenizer.decode(ids)


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
    """It does not say how tokens are chosen. transformers, which warns once in a
    process, has nothing to warn about.
    """
    export(ExportOptions(run, folder := tmp_path / "hf"))
    logger = logging.getLogger("transformers")
    handler = mock.Mock(level=logging.WARNING)
    type(logger).warning_once.cache_clear()
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    said = []
    for target in (run, f"{run}/30", folder):
        assert (
            typed(
                monkeypatch,
                "generate",
                target,
                PROMPT,
                "--max-new-tokens",
                "9",
                "--seed",
                "4",
            )
            == 0
        )
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith(PROMPT)
    assert not handler.handle.called
    ways = [
        GenerateOptions(folder, PROMPT, 30, temperature=t, top_k=0) for t in (0, 1.0)
    ]
    before = [generate(way) for way in ways]
    config = {"repetition_penalty": 1.3, "top_p": 0.05, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert [generate(way) for way in ways] == before


def test_length_ends_with_the_sequence_of_training(run, monkeypatch):
    # Begins after an EOS, like a document in training
    assert generate(GenerateOptions(run, "", 5, temperature=0))
    words = "the " * (SEQ_LEN - 4)
    monkeypatch.setattr(
        SentencePieceTokenizer, "decode", lambda self, ids: str(len(ids))
    )
    assert int(generate(GenerateOptions(run, words, 1, temperature=0))) < SEQ_LEN
    assert int(generate(GenerateOptions(run, words, 100, temperature=0))) == SEQ_LEN
    with pytest.raises(
        ConfigError, match=r"the prompt has \d+ tokens, expected fewer than the 64"
    ):
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


def test_what_generate_refuses(run, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for target, options, message in (
        *(
            (run, {key: -1}, f"{key.replace('_', '-')} is -1, expected at least")
            for key in ("temperature", "top_k")
        ),
        (run, {"max_new_tokens": 0}, "max-new-tokens is 0, expected at least"),
        (tmp_path / "nowhere", {}, "does not exist; expected a run's job.dump_folder"),
        (tmp_path, {}, "transformers cannot load the model"),
    ):
        with pytest.raises(ConfigError, match=message):
            generate(GenerateOptions(target, PROMPT, **options))
