"""This module writes and checks an export's tokenizer: a copied Hugging Face one or a converted SentencePiece one."""

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from titan_disp.data.documents import Documents
from titan_disp.data.files import list_files
from titan_disp.data.formats import Format
from titan_disp.data.records import BadDocument, DamagedFile, text_of
from titan_disp.data.tokenizer import find_tokenizer
from titan_disp.errors import ConfigError

DOCUMENTS = 100

# fmt: off
COPIED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json",
)
PROBES = (
    "", " ", "   ", "\n", "\n\n\n", "\t", "a", " a", "a ", "  two  spaces   three  ", "\n the", " \n x",
    "Hello,  world!\n\tA tab\there.\n\n", "if x == 1:\n    return  {'y': 3.14e-10}\r\n", " " * 37 + "x" + " " * 21,
    "It's the dog's; they'LL don't…", "1234567890", "e\u0301 u\u0308\u0304 \u00e9", "naïve café Zürich ½ ① ﬁ ＡＢＣ",
    "日本語のテキスト。中文 한국어 ไทย", "مرحبا שלום Привет हिन्दी", "😀👍🏽 👨‍👩‍👧 🇩🇪", "‘quotes’ “double” — – …",
    "\x00\x01\x7f\x1b[0m", "zero\u200bwidth\u00a0no-break\u3000ideographic\ufeff", "\U0010ffff\ue000", "<0x0A><0x41>",
    "▁literal▁ underscore", "https://example.org/a?b=c&d=%20#e", "MixedCASE_snake-kebab.dot",
)
# fmt: on
"""Texts on which tokenizers differ. Names of special tokens are not among them: libraries treat these differently."""


def local_documents(path: str | None, text_field: str = "text") -> Iterator[str]:
    """Yield the first documents of a run's validation data, or of its training data, if they are on this disk.

    Args:
        path: ``training.dataset_path``.
        text_field: ``stream.text_field``.
    """
    for dataset in ("c4_validation", "c4"):
        try:
            file = list_files(dataset, path)[0] if path and os.path.exists(path) else None
        except ConfigError:
            continue
        if file is None:
            return
        documents = Documents(file, max_bytes=1 << 24, format=Format(text_field))
        try:
            for _ in range(DOCUMENTS):
                raw = documents.read()
                if raw is None:
                    return
                if not isinstance(raw, BadDocument):
                    yield text_of(raw, text_field)
        except (BadDocument, DamagedFile, ConfigError):  # training reports these; here, other texts are enough
            return
        finally:
            documents.close()
        return


def check_same_ids(ours: Callable[[str], list[int]], theirs: Callable[[str], list[int]], texts: Iterable[str]) -> None:
    """Compare the ids that two tokenizers give for some texts.

    Raises:
        ConfigError: they differ; the message shows the first such text.
    """
    for text in texts:
        expected, got = ours(text), theirs(text)
        if expected == got:
            continue
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(expected, got)) if a != b)
        shown = text if len(text) <= 200 else text[:200] + "…"
        raise ConfigError(
            f"the exported tokenizer gives other ids than the run's for {shown!r}: {got[at : at + 8]} instead of "
            f"{expected[at : at + 8]} from token {at} on. Name a Hugging Face tokenizer with the same ids: titan-disp "
            "export … --tokenizer DIR"
        )


def write_tokenizer(
    source: Path, tokenizer: BaseTokenizer, dest: Path, seq_len: int, documents: Iterable[str] = ()
) -> None:
    """Write what ``AutoTokenizer.from_pretrained`` needs, and check that it gives the ids of training.

    Args:
        source: the tokenizer's folder.
        tokenizer: the tokenizer in that folder.
        dest: a folder that already holds config.json, which decides the tokenizer's class.
        seq_len: the longest input, in tokens.
        documents: further texts to compare.

    Raises:
        ConfigError: the SentencePiece model cannot be converted, or the written tokenizer gives other ids.
    """
    from transformers import AutoTokenizer  # takes seconds to import, and training does not need it

    from titan_disp.data.sentencepiece_to_hf import convert, is_unigram

    file = find_tokenizer(source)
    if file.suffix == ".model":
        unigram = is_unigram(file)
        converted, special = convert(file)
        # to_str instead of save(), which reports a full disk by a bare Exception.
        (dest / "tokenizer.json").write_text(converted.to_str(pretty=True))
        # split_special_tokens: SentencePiece never turns text that spells a control symbol into that symbol.
        _write_config(dest, special | {"split_special_tokens": True, "clean_up_tokenization_spaces": False}, seq_len)
    else:
        unigram = False
        _copy(source, tokenizer, dest, seq_len)
    try:
        written = AutoTokenizer.from_pretrained(dest)
    except Exception as error:  # several libraries raise their own types, as does code that a folder names
        raise ConfigError(f"transformers cannot load the tokenizer in {str(source)!r}: {error}") from error
    encode = plain_encoder(tokenizer)
    # Segmentations of a run of one character can be equally probable. Rounding decides their order: SentencePiece
    # computes in float32, tokenizers in float64.
    arranged: Callable[[list[int]], list[int]] = sorted if unigram else list
    # By default, transformers turns text that spells special tokens into them; training never does.
    as_trained = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    check_same_ids(
        lambda text: arranged(encode(text)),
        lambda text: arranged(written(text, **as_trained).input_ids),
        itertools.chain(PROBES, documents),
    )


def plain_encoder(tokenizer: BaseTokenizer) -> Callable[[str], list[int]]:
    """Return a function from a text to its ids, without BOS and EOS."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return lambda text: tokenizer.tokenizer.encode(text, add_special_tokens=False).ids
    return lambda text: tokenizer.encode(text)


def _copy(source: Path, tokenizer: BaseTokenizer, dest: Path, seq_len: int) -> None:
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, dest / name)
    if not (dest / "tokenizer.json").is_file():
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        (dest / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(pretty=True))
    config = dest / "tokenizer_config.json"
    stated = json.loads(config.read_text()) if config.is_file() else {}
    eos = getattr(tokenizer, "eos_token", None)
    if eos is not None and not stated.get("eos_token"):  # training found it in config.json
        stated["eos_token"] = eos
    if "tokenizer_class" not in stated:  # without it, transformers takes Qwen2Tokenizer with Qwen's pre-tokenizer
        _write_config(dest, stated, seq_len)


def _write_config(dest: Path, stated: dict[str, Any], seq_len: int) -> None:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 would add token_type_ids
        "model_max_length": seq_len,
    } | stated
    (dest / "tokenizer_config.json").write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
