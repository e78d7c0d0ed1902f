"""This module writes and checks an export's tokenizer: a copied Hugging Face one or a
converted SentencePiece one.

transformers' converters of SentencePiece models give other ids for spaces, for
user-defined symbols, and for text that spells a control symbol. Here, as in
SentencePiece, the normalizer runs over the whole text before anything splits it.
``tokenizers`` would split text at added tokens first, and then add the dummy prefix to
each piece and strip spaces around it. User-defined symbols are therefore split off by a
pre-tokenizer instead of being added tokens.
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

import numpy as np
import tokenizers
from sentencepiece import sentencepiece_model_pb2
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
_TYPES = (protobuf.TrainerSpec.UNIGRAM, protobuf.TrainerSpec.BPE)


def read_model(file: str | Path) -> Any:
    """Read a SentencePiece model as protobuf's ModelProto.

    Refuse one that ``tokenizers`` cannot express.
    """
    model = protobuf.ModelProto.FromString(Path(file).read_bytes())
    trainer = model.trainer_spec
    normalizer = model.normalizer_spec
    features = {
        f"model type {protobuf.TrainerSpec.ModelType.Name(trainer.model_type)}": trainer.model_type
        not in _TYPES,
        "treat_whitespace_as_suffix": trainer.treat_whitespace_as_suffix,
        "escape_whitespaces = false": not normalizer.escape_whitespaces,
        "a denormalizer": bool(model.denormalizer_spec.precompiled_charsmap),
        "user-defined symbols with spaces": any(
            " " in s for s in _texts(model, Piece.USER_DEFINED)
        ),
        "unused pieces": any(p.type == Piece.UNUSED for p in model.pieces),
    }
    if unsupported := [name for name, used in features.items() if used]:
        raise ConfigError(
            f"the SentencePiece model {str(file)!r} has {', '.join(unsupported)}, "
            "which a Hugging Face tokenizer cannot express; name a Hugging Face "
            "tokenizer with the same ids by --tokenizer DIR"
        )
    return model


def _texts(model: Any, *types: int) -> list[str]:
    return [p.piece for p in model.pieces if p.type in types]


def _merges(model: Any) -> list[tuple[str, str]]:
    """Return the merges, best first.

    SentencePiece merges the neighbours whose concatenation is the piece of the highest
    score, leftmost first. All ways to split a piece have the same rank there, but
    different ranks here. The way with the longer left part comes first, which is what
    "leftmost first" makes of a run of one character.
    """
    scores = {p.piece: p.score for p in model.pieces if p.type == Piece.NORMAL}
    ranked = [
        (-score, -cut, piece)
        for piece, score in scores.items()
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return [(piece[:-cut], piece[-cut:]) for _, cut, piece in sorted(ranked)]


def _scores(model: Any) -> list[tuple[str, float]]:
    """Return the pieces and their scores, for unigram.

    Text that spells a control symbol or a byte (``<0x41>``) must not become it. These
    score so low that ordinary pieces, at worst one per character, score better.
    ``_cuts`` handles characters that are not pieces.
    """
    never = min(p.score for p in model.pieces) * 100 - 100
    spelled = (Piece.NORMAL, Piece.USER_DEFINED)
    return [(p.piece, p.score if p.type in spelled else never) for p in model.pieces]


def _model(model: Any) -> models.Model:
    fallback = model.trainer_spec.byte_fallback
    unknown = model.trainer_spec.unk_id
    if model.trainer_spec.model_type == protobuf.TrainerSpec.UNIGRAM:
        return models.Unigram(_scores(model), unk_id=unknown, byte_fallback=fallback)
    return models.BPE(
        {p.piece: i for i, p in enumerate(model.pieces)},
        _merges(model),
        unk_token=model.pieces[unknown].piece,
        fuse_unk=True,
        byte_fallback=fallback,
        # No merges build a user-defined symbol of several characters. It is split off
        # whole, and must be taken whole.
        ignore_merges=_has_long_symbols(model),
    )


def _has_long_symbols(model: Any) -> bool:
    return any(len(symbol) > 1 for symbol in _texts(model, Piece.USER_DEFINED))


def _pre_tokenizer(model: Any) -> pre_tokenizers.PreTokenizer:
    steps = []
    if symbols := sorted(_texts(model, Piece.USER_DEFINED), key=len, reverse=True):
        steps.append(
            pre_tokenizers.Split(Regex("|".join(map(re.escape, symbols))), "isolated")
        )
    if cuts := list(_cuts(model)):
        steps.append(
            pre_tokenizers.Split(Regex("|".join(cuts)), "merged_with_previous")
        )
    return pre_tokenizers.Sequence(steps)


def _cuts(model: Any) -> Iterator[str]:
    """Yield patterns that end where text that spells a control symbol or a byte is cut,
    so as not to become one.
    """
    known = set(_texts(model, Piece.NORMAL))
    unigram = model.trainer_spec.model_type == protobuf.TrainerSpec.UNIGRAM
    for name in _texts(model, Piece.CONTROL, Piece.UNKNOWN, Piece.BYTE):
        if not unigram:
            # then a text between two symbols is taken whole too
            if _has_long_symbols(model):
                yield rf"\A{re.escape(name[0])}(?={re.escape(name[1:])}\z)"
            continue
        # A character that is no piece scores even less than the symbol (``_scores``). A
        # cut beside such characters changes nothing else, because a run of them is one
        # unknown token.
        at = next(
            (
                i
                for i in range(1, len(name))
                if (name[i - 1] in known) != (name[i] in known)
            ),
            None,
        )
        if at is not None:
            yield f"{re.escape(name[:at])}(?={re.escape(name[at:])})"


@functools.cache
def _normalization(charsmap: bytes) -> dict[str, str]:
    """Return a model's normalization map: the texts that SentencePiece replaces, of
    which it takes the longest at each place, and what replaces them.

    ``charsmap`` holds a trie in a double array (Darts), after its size in bytes, and
    then the replacements: src/normalizer.cc and third_party/darts_clone/darts.h of
    SentencePiece.
    """
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap, "<u4", size // 4, offset=4).astype(np.int64)
    offsets = units >> 10 << ((units & 512) >> 6)
    labels = np.arange(1, 256)
    replacements = {}
    pending = [(b"", int(offsets[0]))]
    while pending:
        prefix, base = pending.pop()
        nodes = base ^ labels
        nodes = nodes[nodes < len(units)]
        for node in nodes[units[nodes] & 0x800000FF == nodes ^ base].tolist():
            text = prefix + bytes([node ^ base])
            below = node ^ int(offsets[node])
            pending.append((text, below))
            if units[node] & 256:
                begin = 4 + size + int(units[below] & 0x7FFFFFFF)
                end = charsmap.index(b"\0", begin)
                replacements[text.decode()] = charsmap[begin:end].decode()
    return replacements


def _junctions(texts: Iterable[str]) -> str:
    """Return a pattern of the places between two characters that are not within one of
    these texts.

    The beginnings of these texts, of two characters or more, must be among them.
    """
    # of the texts that end with a character: their first characters, by the middle
    beginnings: dict[str, dict[str, str]] = defaultdict(lambda: defaultdict(str))
    for text in sorted(texts):
        beginnings[text[-1]][text[1:-1]] += text[0]
    ends: dict[str, str] = defaultdict(str)  # by patterns of what may be before them
    for end, firsts in beginnings.items():
        before = [f"[{re.escape(firsts[m])}]{re.escape(m)}" for m in firsts]
        ends["|".join(before)] += end
    return "|".join(
        [
            rf"(?![{re.escape(''.join(beginnings))}])",
            *(f"(?=[{re.escape(end)}])(?<!{before})" for before, end in ends.items()),
        ]
    )


# Noncharacters that stand between characters while these are normalized.
_APART = "\ufdd0"
_ALONE = "\ufdd1"
_STAND_IN = 0x10F000  # the first of the private characters that stand in for texts
_MOST_EXCEPTIONS = 100  # each costs a pass over every text


@functools.cache
def _mapping(charsmap: bytes) -> tuple[normalizers.Normalizer, dict[str, str]]:
    """Return a normalizer of a normalization map, and what it does not replace as the
    map does.

    Precompiled looks up whole graphemes, such as a letter with its marks, and drops
    what follows the shortest text of the map in them. Every character is therefore put
    apart for it. NFC composes afterwards, but only within the texts of the map:
    SentencePiece neither composes others nor reorders marks. (tokenizers fails if
    something is put before the first character.)
    """
    replacements = _normalization(charsmap)
    composed = [text for text in replacements if len(text) > 1]
    junctions = rf"(?!\A)(?=[^\x00-\x7f])(?:{_junctions(composed)})"
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
    changed = normalizer.normalize_str(".".join(composed)).split(".")
    return normalizer, {
        text: replacements[text]
        for text, found in zip(composed, changed, strict=True)
        if found != replacements[text]
    }


def _mapped(model: Any) -> list[normalizers.Normalizer]:
    """Return the steps that replace what a model's normalization map replaces."""
    spec = model.normalizer_spec
    if not spec.precompiled_charsmap:
        return []
    normalizer, exceptions = _mapping(spec.precompiled_charsmap)
    if len(exceptions) > _MOST_EXCEPTIONS:
        raise ConfigError(
            f"the SentencePiece model normalizes text by {spec.name}, which a Hugging "
            "Face tokenizer cannot express; name a Hugging Face tokenizer with the "
            "same ids by --tokenizer DIR"
        )
    # SentencePiece does not normalize user-defined symbols.
    symbols = _texts(model, Piece.USER_DEFINED)
    results = exceptions | {symbol: symbol for symbol in symbols}
    stand_ins = {
        text: chr(_STAND_IN + i)
        for i, text in enumerate(sorted(results, key=len, reverse=True))
        if normalizer.normalize_str(text) != results[text]
    }
    return [
        *(normalizers.Replace(text, mark) for text, mark in stand_ins.items()),
        normalizer,
        *(normalizers.Replace(mark, results[text]) for text, mark in stand_ins.items()),
    ]


def _normalizer(model: Any) -> normalizers.Normalizer:
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
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if (
        model.normalizer_spec.add_dummy_prefix
        or model.normalizer_spec.remove_extra_whitespaces
    ):
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)


def convert(file: str | Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Convert a SentencePiece model.

    If it has BOS, the tokenizer begins every text with it, as training does.

    It returns the tokenizer, and the names of its special tokens as in
    tokenizer_config.json (bos_token, …).
    """
    model = read_model(file)
    trainer = model.trainer_spec
    tokenizer = tokenizers.Tokenizer(_model(model))
    tokenizer.normalizer = _normalizer(model)
    tokenizer.decoder = _decoder(model)
    tokenizer.pre_tokenizer = _pre_tokenizer(model)
    special = _texts(model, Piece.CONTROL, Piece.UNKNOWN)
    tokenizer.add_special_tokens(
        [AddedToken(piece, normalized=False, special=True) for piece in special]
    )
    # SentencePiece never turns text that spells a control symbol into that symbol.
    tokenizer.encode_special_tokens = True
    names = {
        f"{name}_token": getattr(trainer, f"{name}_id")
        for name in ("unk", "bos", "eos", "pad")
    }
    if trainer.bos_id >= 0:
        bos = model.pieces[trainer.bos_id].piece
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, trainer.bos_id)],
        )
    return tokenizer, {
        name: model.pieces[i].piece for name, i in names.items() if i >= 0
    }


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

Names of special tokens are not among them: libraries treat these differently.
"""


def map_probes(file: str | Path) -> Iterator[str]:
    """Yield texts with all that a SentencePiece model's map replaces, each before a
    combining mark.
    """
    charsmap = read_model(file).normalizer_spec.precompiled_charsmap
    texts = list(_normalization(charsmap)) if charsmap else []
    for begin in range(0, len(texts), 500):
        yield " ".join(
            text + "\N{COMBINING ACUTE ACCENT}" for text in texts[begin : begin + 500]
        )


def check_same_ids(
    ours: Callable[[str], list[int]],
    theirs: Callable[[str], list[int]],
    texts: Iterable[str],
) -> None:
    """Raise ConfigError if two tokenizers give different ids for a text."""
    for text in texts:
        expected = ours(text)
        got = theirs(text)
        if expected == got:
            continue
        at = len(os.path.commonprefix([expected, got]))
        shown = text if len(text) <= 200 else text[:200] + "…"
        raise ConfigError(
            f"the exported tokenizer gives other ids than the run's for {shown!r}: "
            f"{got[at : at + 8]} instead of {expected[at : at + 8]} from token {at} "
            "on. Name one with the same ids: titan-disp export … --tokenizer DIR"
        )


def write_tokenizer(
    source: Path,
    tokenizer: AnyTokenizer,
    dest: Path,
    seq_len: int,
    documents: Iterable[str] = (),
) -> None:
    """Write what ``AutoTokenizer.from_pretrained`` needs, and check that it gives
    training's ids, for ``documents`` too.

    ``dest`` already holds config.json, which decides the tokenizer's class. ConfigError
    is raised if the tokenizer of the folder ``source`` cannot be converted, or the
    written one gives other ids.
    """
    # Takes seconds to import, and training does not need it
    from transformers import AutoTokenizer

    file = find_tokenizer(source)
    if file.suffix == ".model":
        unigram = (
            read_model(file).trainer_spec.model_type == protobuf.TrainerSpec.UNIGRAM
        )
        converted, special = convert(file)
        if tokenizer.eos_id is not None:
            special["eos_token"] = tokenizer.id_to_token(tokenizer.eos_id)
        # to_str instead of save(), which reports a full disk by a bare Exception.
        (dest / "tokenizer.json").write_text(converted.to_str(pretty=True))
        shutil.copyfile(file, dest / "tokenizer.model")  # which llama.cpp reads
        # split_special_tokens: SentencePiece never turns text that spells a control
        # symbol into that symbol.
        _write_config(
            dest,
            special
            | {"split_special_tokens": True, "clean_up_tokenization_spaces": False},
            seq_len,
        )
    else:
        unigram = False
        assert isinstance(tokenizer, TextTokenizer)
        _copy(source, tokenizer, dest, seq_len)
    # Several libraries raise their own types, as does code that a folder names.
    with reported(
        f"transformers cannot load the tokenizer in {str(source)!r}", Exception
    ):
        written = AutoTokenizer.from_pretrained(dest)
    # Segmentations of a run of one character can be equally probable. Rounding decides
    # their order: SentencePiece computes in float32, tokenizers in float64.
    arranged: Callable[[list[int]], list[int]] = sorted if unigram else list
    # By default, transformers turns text that spells special tokens into them; training
    # never does.
    as_trained = {
        "add_special_tokens": False,
        "split_special_tokens": True,
        "verbose": False,
    }
    check_same_ids(
        lambda text: arranged(tokenizer.plain(text)),
        lambda text: arranged(written(text, **as_trained).input_ids),
        itertools.chain(
            PROBES, documents, map_probes(file) if file.suffix == ".model" else ()
        ),
    )


def _copy(source: Path, tokenizer: TextTokenizer, dest: Path, seq_len: int) -> None:
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, dest / name)
    if not (dest / "tokenizer.json").is_file():
        (dest / "tokenizer.json").write_text(tokenizer.tokenizer.to_str(pretty=True))
    config = dest / "tokenizer_config.json"
    stated = json.loads(config.read_text()) if config.is_file() else {}
    eos = tokenizer.eos_token
    # training found it in config.json, or it is stream.separator
    other_eos = eos != tokenizer._get_token_from_config(stated, "eos_token")
    if other_eos:
        stated["eos_token"] = eos
    # without a class, transformers takes Qwen2Tokenizer with Qwen's pre-tokenizer
    has_pad = tokenizer._get_token_from_config(stated, "pad_token") is not None
    if other_eos or not has_pad or "tokenizer_class" not in stated:
        _write_config(dest, stated, seq_len)


def _write_config(dest: Path, stated: dict[str, Any], seq_len: int) -> None:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
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
