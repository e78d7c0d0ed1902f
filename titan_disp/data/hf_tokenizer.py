"""This module writes and checks an export's tokenizer: a copied Hugging Face one or a
converted SentencePiece one.

transformers' converters of SentencePiece models give other ids for spaces, for
user-defined symbols, and for text that spells a control symbol. Here, as in
SentencePiece, the normalizer runs over the whole text before anything splits it.
``tokenizers`` would split text at added tokens first, and then add the dummy prefix to
each piece and strip spaces around it. User-defined symbols are therefore split off by a
pre-tokenizer instead of being added tokens.
"""

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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


def _normalizer(model: Any) -> normalizers.Normalizer:
    spec = model.normalizer_spec
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        charsmap = normalizers.Precompiled(spec.precompiled_charsmap)
        change = charsmap.normalize_str
        # SentencePiece does not normalize user-defined symbols. Noncharacters stand in
        # for those that the map changes.
        hidden = {
            symbol: chr(0x10FFFF - i)
            for i, symbol in enumerate(
                sorted(_texts(model, Piece.USER_DEFINED), key=len, reverse=True)
            )
            if change(symbol) != symbol
        }
        steps += [normalizers.Replace(symbol, mark) for symbol, mark in hidden.items()]
        # Precompiled looks up grapheme clusters: "\r\n" is one, and so is a letter with
        # two marks.
        if (
            change("e\N{COMBINING ACUTE ACCENT}")
            == "\N{LATIN SMALL LETTER E WITH ACUTE}"
        ):
            steps.append(normalizers.NFC())
        steps.append(normalizers.Replace("\r\n", change("\r") + change("\n")))
        steps.append(charsmap)
        steps += [normalizers.Replace(mark, symbol) for symbol, mark in hidden.items()]
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
        at = next(
            i for i, (a, b) in enumerate(itertools.zip_longest(expected, got)) if a != b
        )
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
        itertools.chain(PROBES, documents),
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
    if other_eos or "tokenizer_class" not in stated:
        _write_config(dest, stated, seq_len)


def _write_config(dest: Path, stated: dict[str, Any], seq_len: int) -> None:
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        # transformers 4 would add token_type_ids
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": seq_len,
    } | stated
    (dest / "tokenizer_config.json").write_text(
        json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    )
