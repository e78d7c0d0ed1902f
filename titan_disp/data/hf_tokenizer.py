"""This module writes and checks an export's tokenizer, which is copied from a Hugging
Face tokenizer or converted from a SentencePiece model.

transformers' converters of SentencePiece models give other ids than SentencePiece for
spaces, for user-defined symbols, and for text that spells a control symbol. Here, as in
SentencePiece, the normalizer runs over the whole text before anything splits the text.
``tokenizers`` would split text at added tokens first, and then add the dummy prefix to
each piece and strip spaces around it. User-defined symbols are therefore not added
tokens here: a pre-tokenizer splits them off.
"""

import functools
import itertools
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from sentencepiece import SentencePieceNormalizer, sentencepiece_model_pb2
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from titan_disp.data.tokenizer import AnyTokenizer, TextTokenizer, find_tokenizer
from titan_disp.errors import ConfigError, reported

SPACE = "▁"
protobuf: Any = sentencepiece_model_pb2  # generated code without types
Piece = protobuf.ModelProto.SentencePiece


def read_model(file: str | Path) -> Any:
    """Return a SentencePiece model as protobuf's ModelProto.

    Raises ConfigError if ``tokenizers`` cannot express the model.
    """
    model = protobuf.ModelProto.FromString(Path(file).read_bytes())
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    model_type = protobuf.TrainerSpec.ModelType.Name(trainer.model_type)
    symbols = _pieces(model, Piece.USER_DEFINED)
    features = {
        f"model type {model_type}": model_type not in ("UNIGRAM", "BPE"),
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "escape_whitespaces = false": not normalizer.escape_whitespaces,
        "a denormalizer": model.denormalizer_spec.precompiled_charsmap,
        "user-defined symbols with spaces": " " in "".join(symbols),
        "unused pieces": _pieces(model, Piece.UNUSED),
    }
    unsupported = [name for name, is_used in features.items() if is_used]
    if unsupported:
        raise ConfigError(
            f"the SentencePiece model {str(file)!r} has {', '.join(unsupported)}, "
            "which a Hugging Face tokenizer cannot express; name a Hugging Face "
            "tokenizer with the same ids by --tokenizer DIR"
        )
    return model


def _is_unigram(model: Any) -> bool:
    """Return whether a model is unigram; otherwise, it is BPE."""
    return model.trainer_spec.model_type == protobuf.TrainerSpec.UNIGRAM


def _pieces(model: Any, *types: int) -> list[str]:
    """Return the texts of a model's pieces of these types, by their ids."""
    return [piece.piece for piece in model.pieces if piece.type in types]


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return the merges of a BPE model, best first.

    SentencePiece merges the neighbours whose concatenation is the piece of the highest
    score, leftmost first. In SentencePiece, all ways to split a piece have the same
    rank, but here, they need different ranks. The way with the longest left part comes
    first, because "leftmost first" has this result for a run of one character.
    """
    scores = {p.piece: p.score for p in model.pieces if p.type == Piece.NORMAL}
    ranked = []
    for piece, score in scores.items():
        for cut in range(1, len(piece)):
            pair = (piece[:cut], piece[cut:])
            if scores.keys() >= {*pair}:
                ranked.append((-score, -cut, pair))
    return [pair for *_, pair in sorted(ranked)]


def _scores(model: Any) -> list[tuple[str, float]]:
    """Return the pieces of a unigram model and their scores.

    Text that spells a control symbol or a byte (``<0x41>``) must not become that piece.
    Such pieces score so low that ordinary pieces, at worst one per character, score
    better. ``_cuts`` handles characters that are not pieces.
    """
    never = min(p.score for p in model.pieces) * 100 - 100
    spelled = (Piece.NORMAL, Piece.USER_DEFINED)
    return [(p.piece, p.score if p.type in spelled else never) for p in model.pieces]


def _model(model: Any) -> models.Model:
    """Return the model of ``tokenizers`` that splits a text into pieces as a
    SentencePiece model does, without special tokens.
    """
    fallback = model.trainer_spec.byte_fallback
    unknown = model.trainer_spec.unk_id
    if _is_unigram(model):
        return models.Unigram(_scores(model), unk_id=unknown, byte_fallback=fallback)
    return models.BPE(
        {piece.piece: i for i, piece in enumerate(model.pieces)},
        _merges(model),
        unk_token=model.pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=fallback,
        # No merges build a user-defined symbol of several characters. It is split off
        # as a whole, and must stay whole.
        ignore_merges=_has_long_symbols(model),
    )


def _has_long_symbols(model: Any) -> bool:
    """Return whether a user-defined symbol has several characters."""
    return any(len(symbol) > 1 for symbol in _pieces(model, Piece.USER_DEFINED))


def _pre_tokenizer(model: Any) -> pre_tokenizers.PreTokenizer:
    """Return the steps that split a text before it becomes pieces."""
    symbols = sorted(_pieces(model, Piece.USER_DEFINED), key=len, reverse=True)
    patterns = {
        "isolated": [re.escape(symbol) for symbol in symbols],
        "merged_with_previous": list(_cuts(model)),
    }
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(alternatives)), behaviour)
            for behaviour, alternatives in patterns.items()
            if alternatives
        ]
    )


def _cuts(model: Any) -> Iterator[str]:
    """Yield patterns that end where a text is cut. The cuts prevent a text that spells
    a control symbol or a byte from becoming that piece.
    """
    characters = set(_pieces(model, Piece.NORMAL))
    for name in _pieces(model, Piece.CONTROL, Piece.UNKNOWN, Piece.BYTE):
        if _is_unigram(model):
            # A character that is no piece scores even less than the symbol
            # (``_scores``). A cut beside such characters changes nothing else, because
            # a run of such characters is one unknown token.
            for i in range(1, len(name)):
                if (name[i - 1] in characters) != (name[i] in characters):
                    yield f"{re.escape(name[:i])}(?={re.escape(name[i:])})"
                    break
        elif _has_long_symbols(model):
            # ``ignore_merges`` also takes a whole text between two symbols as a piece.
            yield rf"\A{re.escape(name[0])}(?={re.escape(name[1:])}\z)"


@functools.cache
def _normalization(spec: bytes) -> dict[str, str]:
    """Return the replacements of a serialized NormalizerSpec of SentencePiece, by the
    texts that they replace. At each place, SentencePiece replaces the longest text.
    """
    normalizer = protobuf.NormalizerSpec.FromString(spec)
    if not normalizer.precompiled_charsmap:
        return {}
    model = protobuf.ModelProto(normalizer_spec=normalizer).SerializeToString()
    return dict(SentencePieceNormalizer(model_proto=model).Decompile())


def _junctions(texts: Iterable[str]) -> str:
    """Return a pattern for the places between two characters, except places inside one
    of ``texts``.

    For each text, ``texts`` must also contain its beginnings of two or more characters.
    """
    # the first characters of texts, by the texts' last character and then their middle
    beginnings: dict[str, dict[str, str]] = defaultdict(lambda: defaultdict(str))
    for text in sorted(texts):
        beginnings[text[-1]][text[1:-1]] += text[0]
    # the last characters of texts, by a pattern of what may precede these characters
    ends: dict[str, str] = defaultdict(str)
    for end, firsts in beginnings.items():
        before = [f"[{re.escape(firsts[m])}]{re.escape(m)}" for m in firsts]
        ends["|".join(before)] += end
    junctions = [rf"(?![{re.escape(''.join(beginnings))}])"]
    for preceding, end in ends.items():
        junctions.append(f"(?=[{re.escape(end)}])(?<!{preceding})")
    return "|".join(junctions)


# Noncharacters that are put between the characters of a text while it is normalized.
_APART = "\ufdd0"
_ALONE = "\ufdd1"
_STAND_IN = 0x10F000  # the first private character that stands for a text
_MOST_EXCEPTIONS = 100  # each exception costs a pass over every text


@functools.cache
def _mapping(serialized: bytes) -> tuple[normalizers.Normalizer, dict[str, str]]:
    """Return (normalizer, exceptions): a normalizer that works as a serialized
    NormalizerSpec of SentencePiece, and the correct replacement of each text for which
    the normalizer is wrong.

    ``Precompiled`` looks up whole graphemes, such as a letter with its marks. If a
    grapheme begins with texts of the map, ``Precompiled`` replaces the shortest of
    these texts and drops the rest of the grapheme. Therefore all characters are
    separated first. Then NFC composes the characters, but only within the texts of
    the map, because SentencePiece neither composes other texts nor reorders marks.
    (``tokenizers`` fails if something is put before the first character.)
    """
    replacements = _normalization(serialized)
    composed = [text for text in replacements if len(text) > 1]
    junctions = rf"(?!\A)(?=[^\x00-\x7f])(?:{_junctions(composed)})"
    charsmap = protobuf.NormalizerSpec.FromString(serialized).precompiled_charsmap
    steps: list[normalizers.Normalizer] = [
        normalizers.Replace(Regex(junctions), _APART),
        normalizers.Replace(Regex(r"(?!\A)(?=[^\x20-\x7e])"), _ALONE),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(_ALONE, ""),
    ]
    if "\N{ANGSTROM SIGN}" in replacements:  # as in all maps that come with NFKC
        steps.append(normalizers.NFC())
    steps.append(normalizers.Replace(_APART, ""))
    normalizer = normalizers.Sequence(steps)
    results = normalizer.normalize_str(".".join(composed)).split(".")
    exceptions = {}
    for text, result in zip(composed, results, strict=True):
        if result != replacements[text]:
            exceptions[text] = replacements[text]
    return normalizer, exceptions


def _mapped(model: Any) -> list[normalizers.Normalizer]:
    """Return the steps that work as a model's normalization map.

    Raises ConfigError if ``tokenizers`` has no such steps.
    """
    spec = model.normalizer_spec
    if not spec.precompiled_charsmap:
        return []
    normalizer, exceptions = _mapping(spec.SerializeToString())
    if len(exceptions) > _MOST_EXCEPTIONS:
        raise ConfigError(
            f"the SentencePiece model normalizes text by {spec.name}, which a Hugging "
            "Face tokenizer cannot express; name a Hugging Face tokenizer with the "
            "same ids by --tokenizer DIR"
        )
    # SentencePiece does not normalize user-defined symbols.
    symbols = _pieces(model, Piece.USER_DEFINED)
    results = exceptions | {symbol: symbol for symbol in symbols}
    before: list[normalizers.Normalizer] = []
    after: list[normalizers.Normalizer] = []
    for i, text in enumerate(sorted(results, key=len, reverse=True)):
        if normalizer.normalize_str(text) != results[text]:
            stand_in = chr(_STAND_IN + i)
            before.append(normalizers.Replace(text, stand_in))
            after.append(normalizers.Replace(stand_in, results[text]))
    return [*before, normalizer, *after]


def _normalizer(model: Any) -> normalizers.Normalizer:
    """Return the steps that normalize a text before it is split."""
    spec = model.normalizer_spec
    steps = _mapped(model)
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    steps.append(normalizers.Replace(" ", SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: Any) -> decoders.Decoder:
    """Return the steps that turn pieces into a text."""
    spec = model.normalizer_spec
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix or spec.remove_extra_whitespaces:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def convert(file: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Return a SentencePiece model as a Hugging Face tokenizer, and its special tokens
    by their names in tokenizer_config.json (bos_token, …).

    If the model has BOS, the tokenizer begins every text with BOS, as training does.
    Raises ConfigError if ``tokenizers`` cannot express the model.
    """
    model = read_model(file)
    tokenizer = tokenizers.Tokenizer(_model(model))
    tokenizer.normalizer = _normalizer(model)
    tokenizer.decoder = _decoder(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(model)
    tokenizer.add_special_tokens(
        [
            AddedToken(piece, normalized=False, special=True)
            for piece in _pieces(model, Piece.CONTROL, Piece.UNKNOWN)
        ]
    )
    # SentencePiece never turns text that spells a control symbol into that symbol.
    tokenizer.encode_special_tokens = True
    special = {}
    for name in ("unk", "bos", "eos", "pad"):
        token_id = getattr(model.trainer_spec, f"{name}_id")
        if token_id >= 0:
            special[f"{name}_token"] = model.pieces[token_id].piece
    if "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, model.trainer_spec.bos_id)],
        )
    return tokenizer, special


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
"""Texts on which tokenizers differ.

The texts contain no special tokens, which libraries treat differently.
"""


def map_probes(file: str | Path) -> Iterator[str]:
    """Yield texts that contain everything that a SentencePiece model's map replaces,
    always followed by a combining mark.
    """
    spec = read_model(file).normalizer_spec.SerializeToString()
    texts = [f"{text}\N{COMBINING ACUTE ACCENT}" for text in _normalization(spec)]
    for begin in range(0, len(texts), 500):
        yield " ".join(texts[begin : begin + 500])


def check_same_ids(
    ours: Callable[[str], list[int]],
    theirs: Callable[[str], list[int]],
    texts: Iterable[str],
) -> None:
    """Raise ConfigError if two tokenizers give different ids for a text."""
    for text in texts:
        expected = ours(text)
        ids = theirs(text)
        if expected == ids:
            continue
        at = len(os.path.commonprefix([expected, ids]))
        beginning = text[:200] + "…" * (len(text) > 200)
        raise ConfigError(
            f"the exported tokenizer gives other ids than the run's for {beginning!r}: "
            f"{ids[at : at + 8]} instead of {expected[at : at + 8]} from token {at} "
            "on. Name a tokenizer with the same ids: titan-disp export … --tokenizer DIR"
        )


_GENERIC = "PreTrainedTokenizerFast"  # the class that follows tokenizer.json


def write_tokenizer(
    source: Path,
    tokenizer: AnyTokenizer,
    dest: Path,
    seq_len: int,
    documents: Iterable[str] = (),
) -> None:
    """Write a tokenizer for ``AutoTokenizer.from_pretrained``, and check that it gives
    the ids of training, also for ``documents``.

    ``dest`` already holds config.json, which decides the tokenizer's class. Raises
    ConfigError if the tokenizer in the folder ``source`` cannot be converted, or if the
    written tokenizer gives other ids.
    """
    file = find_tokenizer(source)
    texts = [*PROBES, *documents]
    if isinstance(tokenizer, TextTokenizer):
        _copy(source, tokenizer, dest, seq_len)
        texts.append(" ".join(tokenizer.words()))
        try:
            _check_written(dest, tokenizer.plain, texts)
        except ConfigError:
            config = _stated(dest)
            if config.get("tokenizer_class") == _GENERIC:
                raise
            # The class may change what tokenizer.json says, as LlamaTokenizer does.
            _write_config(dest, config | {"tokenizer_class": _GENERIC}, seq_len)
            _check_written(dest, tokenizer.plain, texts)
        return
    converted, special = convert(file)
    if tokenizer.eos_id is not None:
        special["eos_token"] = tokenizer.id_to_token(tokenizer.eos_id)
    # to_str instead of save(), which reports a full disk by a bare Exception.
    (dest / "tokenizer.json").write_text(converted.to_str(pretty=True))
    shutil.copyfile(file, dest / "tokenizer.model")  # which llama.cpp reads
    # split_special_tokens: SentencePiece never turns text that spells a control symbol
    # into that symbol.
    settings = {"split_special_tokens": True, "clean_up_tokenization_spaces": False}
    _write_config(dest, special | settings, seq_len)
    # Segmentations of a run of one character can be equally probable. Rounding decides
    # their order, and SentencePiece computes in float32, but tokenizers in float64.
    is_unigram = isinstance(converted.model, models.Unigram)
    _check_written(
        dest,
        tokenizer.plain,
        itertools.chain(texts, map_probes(file)),
        arranged=sorted if is_unigram else list,
    )


def _check_written(
    dest: Path,
    plain: Callable[[str], list[int]],
    texts: Iterable[str],
    arranged: Callable[[list[int]], list[int]] = list,
) -> None:
    """Raise ConfigError if transformers cannot load the written tokenizer, or if its ids
    are not those of training. Before the comparison, ``arranged`` is applied to the ids
    of both tokenizers.
    """
    # Takes seconds to import, and training does not need it
    from transformers import AutoTokenizer

    # Several libraries, and code in a folder, raise errors of their own types.
    with reported("transformers cannot load the exported tokenizer", Exception):
        written = AutoTokenizer.from_pretrained(dest)
    # By default, transformers turns text that spells special tokens into these tokens.
    # Training never does so.
    as_trained = {
        "add_special_tokens": False,
        "split_special_tokens": True,
        "verbose": False,
    }
    check_same_ids(
        lambda text: arranged(plain(text)),
        lambda text: arranged(written(text, **as_trained).input_ids),
        texts,
    )


def _copy(source: Path, tokenizer: TextTokenizer, dest: Path, seq_len: int) -> None:
    """Copy a Hugging Face tokenizer, with the EOS of training."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, dest / name)
    if not (dest / "tokenizer.json").is_file():
        (dest / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(pretty=True))
    config = _stated(dest)
    eos = tokenizer.eos_token
    # EOS may come from config.json or from stream.separator
    if eos != tokenizer._get_token_from_config(config, "eos_token"):
        config["eos_token"] = eos
    _write_config(dest, config, seq_len)


def _stated(folder: Path) -> dict[str, Any]:
    """Return the content of tokenizer_config.json, or an empty dict if there is none."""
    config = folder / "tokenizer_config.json"
    return json.loads(config.read_text()) if config.is_file() else {}


def _write_config(dest: Path, stated: dict[str, Any], seq_len: int) -> None:
    """Write tokenizer_config.json, with defaults for what is not ``stated``."""
    content = {
        # without a class, transformers takes Qwen2Tokenizer with Qwen's pre-tokenizer
        "tokenizer_class": _GENERIC,
        # transformers 4 would add token_type_ids
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": seq_len,
    } | stated
    # Without a pad token, transformers refuses to pad a batch.
    if content.get("pad_token") is None and content.get("eos_token") is not None:
        content["pad_token"] = content["eos_token"]
    (dest / "tokenizer_config.json").write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    )
