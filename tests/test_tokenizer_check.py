"""Which token ends documents, files of token ids without it, and what a tokenizer
loses.
"""

import json
import logging

import numpy as np
import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer

from tests.saved_run import random_model, save_run
from tests.streams import config
from titan_disp.checks import check_inputs
from titan_disp.cluster.plan import Machine, make_plan
from titan_disp.config.command_options import ExportOptions
from titan_disp.data.listing import list_files
from titan_disp.data.loader import build_dataloader, open_stream
from titan_disp.data.options import stream_options
from titan_disp.data.tokenizer import encoder, load_tokenizer, tokenizer_of_export
from titan_disp.data.tokenizer_check import tokenizer_warnings
from titan_disp.errors import ConfigError
from titan_disp.lab.export.export import export

TEXT = "<|endoftext|>"
TURN = "<|im_end|>"


@pytest.fixture(scope="module")
def chat(hf_tokenizer, tmp_path_factory):
    """The folder of a tokenizer whose EOS ends a turn, as of Qwen3-0.6B."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = Tokenizer.from_file(f"{hf_tokenizer}/tokenizer.json")
    tokenizer.add_special_tokens([TURN])
    tokenizer.save(f"{folder}/tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": TURN}))
    return folder


def test_the_separator_ends_documents(chat):
    """It is the tokenizer's EOS by default, and any other special token by its text."""
    plain = load_tokenizer(chat).plain("a text")
    assert encoder(load_tokenizer(chat))("a text") == [*plain, 2048]
    assert encoder(load_tokenizer(chat, TEXT))("a text") == [*plain, 0]
    assert encoder(load_tokenizer(chat, "none"))("a text") == plain
    # text that spells it stays text
    assert 0 not in load_tokenizer(chat, TEXT).plain(f"a {TEXT} text")


def test_the_separator_of_a_sentencepiece_model(sample, tmp_path):
    lines = iter(["a text of words", "and of other words"] * 50)
    with open(tmp_path / "m.model", "wb") as writer:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=writer,
            vocab_size=20,
            hard_vocab_limit=False,
            control_symbols=["<end>"],
            minloglevel=2,
        )
    plain = load_tokenizer(tmp_path).plain("a text")
    assert encoder(load_tokenizer(tmp_path))("a text") == [1, *plain, 2]
    assert encoder(load_tokenizer(tmp_path, "<end>"))("a text") == [1, *plain, 3]
    assert encoder(load_tokenizer(tmp_path, "none"))("a text") == [1, *plain]
    with pytest.raises(ConfigError, match="'<stop>', which is not a token"):
        load_tokenizer(tmp_path, "<stop>")


@pytest.mark.parametrize(
    ("separator", "message"),
    [
        ("<|endoftxt|>", r"is not a token .* \(did you mean <\|endoftext\|>\?\)"),
        (" the", "is not a token of the tokenizer"),
        ("the", "which text can spell, .*: expected a special token"),
    ],
)
def test_what_cannot_separate(chat, separator, message):
    with pytest.raises(
        ConfigError, match=f"stream.separator is '{separator.replace('|', '.')}', "
    ) as raised:
        load_tokenizer(chat, separator)
    raised.match(message)


def job_of(sample, chat, *options):
    return config(
        sample,
        "--model.hf_assets_path",
        str(chat),
        "--model.overrides",
        "vocab_size=2049",
        *options,
    )


def test_an_eos_of_a_chat_is_named_at_a_start_and_in_the_plan(sample, chat, caplog):
    warning = (
        f"documents end with the tokenizer's EOS, '{TURN}', which ends a turn of a "
        f"chat. The tokenizer also has '{TEXT}', with which models are usually "
        f'pre-trained: set stream.separator = "{TEXT}", or "{TURN}" to keep it'
    )
    for separator, expected in (("", True), (TEXT, False), (TURN, False)):
        job = job_of(sample, chat, "--stream.separator", separator)
        assert (warning in make_plan(job, Machine(1, 1)).warnings) == expected
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            build_dataloader(1, 0, load_tokenizer(chat, separator), job)
        assert (f"data: {warning}" in caplog.messages) == expected


def write_ids(path, chat, separator, documents=1333):
    """Write documents of 100 ids, all of which end with the separator."""
    rng = np.random.default_rng(0)
    ids = rng.integers(300, 2000, (documents, 100))
    if separator is not None:
        ids[:, -1] = load_tokenizer(chat, separator).eos_id
    path.mkdir(exist_ok=True)
    ids.astype("<u2").tofile(path / "a.bin")
    return str(path)


MASKED = "--stream.document_mask"


def test_token_ids_without_the_separator(sample, chat, tmp_path):
    """A warning names the tokens that may be it; what needs the ends of documents is
    refused.
    """
    path = write_ids(tmp_path / "ids", chat, TEXT)
    data = ("--training.dataset", "text", "--training.dataset_path", path)
    job = job_of(sample, chat, *data, "--stream.separator", TURN)
    (warning,) = tokenizer_warnings(
        load_tokenizer(chat, TURN),
        list_files("text", path),
        stream_options(job, tokenizer=load_tokenizer(chat, TURN)),
    )
    assert warning.startswith(
        f"{path}/a.bin: no separator of documents, 2048 '{TURN}', is among the first "
        "1,000,000 ids (the same holds for 1 file of 1). "
    )
    assert f"Ids at intervals: 0 '{TEXT}' (1,333 times, every 100 ids)" in warning
    assert warning in make_plan(job, Machine(1, 1)).warnings
    check_inputs(job)
    masked = job_of(sample, chat, *data, "--stream.separator", TURN, MASKED)
    for start in (
        check_inputs,
        lambda job: build_dataloader(1, 0, load_tokenizer(chat, TURN), job),
    ):
        with pytest.raises(ConfigError, match=r"document_mask and dispersion\.within"):
            start(masked)
    right = job_of(sample, chat, *data, "--stream.separator", TEXT, MASKED)
    check_inputs(right)
    assert not [w for w in make_plan(right, Machine(1, 1)).warnings if "ids" in w]


def test_short_files_may_be_one_document(sample, chat, tmp_path):
    """If another file has the separator."""
    path = write_ids(tmp_path, chat, TEXT, documents=5)
    tokenizer = load_tokenizer(chat, TEXT)
    options = stream_options(job_of(sample, chat), tokenizer=tokenizer)
    np.arange(300, 400).astype("<u2").tofile(tmp_path / "b.bin")
    files = list_files("text", path)
    assert not tokenizer_warnings(tokenizer, files, options)
    assert tokenizer_warnings(tokenizer, files[1:], options)
    (tmp_path / "b.bin").write_bytes(b"")  # damaged, as its reading will say
    assert not tokenizer_warnings(tokenizer, list_files("text", path)[1:], options)
    np.full(200_000, 7).astype("<u2").tofile(tmp_path / "b.bin")
    assert tokenizer_warnings(tokenizer, list_files("text", path), options)


def test_none_separates_nothing(sample, chat, tmp_path):
    """Each file of token ids is one document, and nothing is put between texts."""
    path = write_ids(tmp_path / "ids", chat, None, documents=3)
    data = ("--training.dataset", "text", "--training.dataset_path", path)
    job = job_of(
        sample, chat, *data, "--stream.separator", "none", "--stream.slots", "1"
    )
    tokenizer = load_tokenizer(chat, "none")
    check_inputs(job)
    assert not [w for w in make_plan(job, Machine(1, 1)).warnings if "ids" in w]
    stored = np.fromfile(f"{path}/a.bin", "<u2")
    loader = open_stream(job, list_files("text", path), tokenizer, 1, 0)
    rows = [batch[0]["input"] for batch, _ in zip(iter(loader), range(4), strict=False)]
    read = np.concatenate([row.numpy().reshape(-1) for row in rows])
    width = job.training.seq_len + 1  # the last is a label only
    expected = np.concatenate([stored] * 9)
    for i, row in enumerate(read.reshape(-1, width - 1)):
        begin = i * width
        assert row.tolist() == expected[begin : begin + width - 1].tolist()


def test_an_export_has_the_eos_that_the_model_learned(sample, chat, tmp_path):
    for separator, expected in ((TEXT, TEXT), ("", TURN), ("none", TURN)):
        run = save_run(
            tmp_path / f"run{separator[:3]}",
            random_model(overrides="vocab_size=2049"),
            chat,
            "--training.dataset_path",
            str(sample),
            "--stream.separator",
            separator,
            "--model.overrides",
            "vocab_size=2049",
        )
        out = tmp_path / f"out{separator[:3]}"
        export(ExportOptions(run, out))
        written = transformers.AutoTokenizer.from_pretrained(out)
        assert written.eos_token == expected
        config = json.loads((out / "config.json").read_text())
        assert config["eos_token_id"] == written.eos_token_id
        assert tokenizer_of_export(chat, separator).eos_id == written.eos_token_id
