"""This module loads the tokenizer in ``model.hf_assets_path``: a Hugging Face tokenizer
or a SentencePiece model.
"""

import itertools
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
from sentencepiece import SentencePieceProcessor
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from titan_disp.errors import ConfigError, DataError, did_you_mean, reported

_GPT2_EOS = "<|endoftext|>"
_HUGGING_FACE_FILES = ("tokenizer.json", "vocab.json", "vocab.txt")
NONE = "none"  # the stream.separator with which no token separates the documents
NO_SEPARATOR = -1  # the tokenizer's eos_id in this case


class SentencePieceTokenizer(BaseTokenizer):
    """A SentencePiece model with the interface of TorchTitan's tokenizers.

    ``bos_id`` and ``eos_id`` are None if the model has no such token.
    """

    def __init__(self, model_file: str | Path) -> None:
        super().__init__()
        self.processor = SentencePieceProcessor(model_file=str(model_file))
        bos_id = self.processor.bos_id()
        eos_id = self.processor.eos_id()
        self.bos_id = bos_id if bos_id >= 0 else None
        self.eos_id = eos_id if eos_id >= 0 else None

    def encode(
        self, text: str, add_bos: bool = False, add_eos: bool = False
    ) -> list[int]:
        """Return the ids of a text, with BOS and EOS as far as the model has them."""
        ids = self.plain(text)
        if add_bos:
            ids = [*_present(self.bos_id), *ids]
        if add_eos:
            ids = [*ids, *_present(self.eos_id)]
        return ids

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS and EOS."""
        return self.processor.encode(text)

    def decode(self, token_ids: list[int]) -> str:
        return self.processor.decode(token_ids)

    def get_vocab_size(self) -> int:
        return self.processor.get_piece_size()

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token, or None if the model has no such token."""
        # the id of <unk> if there is no such token
        token_id = self.processor.piece_to_id(token)
        return token_id if self.id_to_token(token_id) == token else None

    def id_to_token(self, token_id: int) -> str:
        return self.processor.id_to_piece(token_id)

    def added_tokens(self) -> list[str]:
        """Return the tokens that text never becomes: control symbols and <unk>."""
        processor = self.processor
        return [
            processor.id_to_piece(i)
            for i in range(processor.get_piece_size())
            if processor.is_control(i) or processor.is_unknown(i)
        ]

    def end_with(self, separator: str) -> None:
        """Let documents end with the token ``separator`` instead of the model's EOS."""
        self.eos_id = self.token_to_id(separator)


class TextTokenizer(HuggingFaceTokenizer):
    """TorchTitan's Hugging Face tokenizer, changed so that text never becomes a special
    token, as with SentencePiece.

    EOS within a document would end the document, and any author of a corpus could write
    control tokens. TorchTitan treats all tokens that tokenizer_config.json adds as
    special. Here, as in transformers, tokens that the file marks as not special (Qwen's
    <think>) are words. Settings that cut or pad every text are switched off, too.
    """

    tokenizer: Tokenizer
    bos_id: int | None
    bos_token: str | None
    eos_token: str | None

    def __init__(self, folder: str | Path) -> None:
        super().__init__(str(folder))
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        if self.eos_id is None:
            self._find_eos(Path(folder) / "config.json")

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.tokenizer.encode_special_tokens = True  # the library does not pickle it

    def _load_tokenizer_from_path(self, tokenizer_path: str) -> Tokenizer:
        """Return the tokenizer in a folder. GPT-2's vocab.json and merges.txt are loaded
        as in transformers, and other files as in TorchTitan.

        TorchTitan treats merges that begin with # as comments. Raises ConfigError if
        vocab.json is of a class that splits text in another way than GPT-2's.
        """
        folder = Path(tokenizer_path)
        merges = folder / "merges.txt"
        vocabulary = find_tokenizer(folder)
        if vocabulary.name != "vocab.json" or not merges.is_file():
            return super()._load_tokenizer_from_path(tokenizer_path)
        config = self._load_config(str(folder / "tokenizer_config.json")) or {}
        their_class = config.get("tokenizer_class", "GPT2Tokenizer")
        if their_class not in ("GPT2Tokenizer", "GPT2TokenizerFast"):
            raise ConfigError(
                f"{str(vocabulary)!r} is of {their_class}, which splits text in "
                "another way than GPT-2's: add its tokenizer.json to the folder"
            )
        loaded = ByteLevelBPETokenizer.from_file(str(vocabulary), str(merges))
        if loaded.token_to_id(_GPT2_EOS) is not None:
            loaded.add_special_tokens([_GPT2_EOS])
        return Tokenizer.from_str(loaded.to_str())

    def _infer_special_tokens(self) -> None:
        """Set BOS and EOS as TorchTitan does, and treat added tokens that are not
        special as words.

        Raises ConfigError if tokenizer_config.json names a BOS or EOS that the tokenizer
        does not have.
        """
        config = self.config or {}
        # whether each token that the file adds is special; None if the file does not say
        added = {}
        for token in config.get("added_tokens_decoder", {}).values():
            if isinstance(token, dict):
                added[token["content"]] = token.get("special")
        for key in ("bos_token", "eos_token"):
            token = self._get_token_from_config(config, key)
            if token not in (None, *added) and self.token_to_id(token) is None:
                raise ConfigError(
                    f"tokenizer_config.json in {self.tokenizer_path!r} names the {key} "
                    f"{token!r}, which the tokenizer does not have"
                    + did_you_mean(token, self.added_tokens())
                )
        super()._infer_special_tokens()
        if False in added.values():
            content = json.loads(self.tokenizer.to_str())
            for token in content["added_tokens"]:
                token["special"] &= added.get(token["content"]) is not False
            self.tokenizer = Tokenizer.from_str(json.dumps(content))

    def _find_eos(self, model: Path) -> None:
        """Set EOS if the tokenizer has one that TorchTitan does not find.

        TorchTitan treats a token that is both BOS and EOS, such as GPT-2's
        <|endoftext|>, as BOS only. Here it is EOS only, so that one token separates
        two documents. If tokenizer_config.json names no token (GPT-2 on the hub), the id
        in config.json (``model``) is used.
        """
        eos = self._get_token_from_config(self.config or {}, "eos_token")
        added = self.tokenizer.get_added_tokens_decoder()
        if eos is not None and eos == self.bos_token and not self.hf_adds_bos:
            self.bos_token = None
            self.bos_id = None
            self.end_with(eos)
        elif self.bos_id is None and model.is_file():
            eos_id = json.loads(model.read_text()).get("eos_token_id")
            # If it is a list, as in Llama 3's file, not all its tokens end documents.
            token = added.get(eos_id) if isinstance(eos_id, int) else None
            if token is not None and token.special:
                self.end_with(token.content)

    def end_with(self, separator: str) -> None:
        """Let documents end with the token ``separator`` instead of TorchTitan's EOS."""
        self.eos_token = separator
        self.eos_id = self.tokenizer.token_to_id(separator)
        self._infer_should_add_bos_eos()  # its result depends on EOS

    def plain(self, text: str) -> list[int]:
        """Return the ids of a text, without BOS and EOS."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def added_tokens(self) -> list[str]:
        """Return the tokens that the file adds to the model's: special tokens, and words
        such as Qwen's <think>.
        """
        decoder = self.tokenizer.get_added_tokens_decoder()
        return [token.content for token in decoder.values()]

    def words(self) -> list[str]:
        """Return the added tokens that are not special. Text that spells such a token
        becomes this token.
        """
        decoder = self.tokenizer.get_added_tokens_decoder()
        return [token.content for token in decoder.values() if not token.special]


# a file of tiktoken begins with its first token, in base64
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* 0\n")
AnyTokenizer = SentencePieceTokenizer | TextTokenizer


def _present(token_id: int | None) -> list[int]:
    """Return a list with the id of BOS or EOS, or an empty list if there is no such
    token.
    """
    if token_id is None or token_id == NO_SEPARATOR:
        return []
    return [token_id]


# Repositories on the hub, by the beginnings of their models' names. The last one stands
# for all others.
_REPOSITORIES = {
    "Qwen": "Qwen/{}",
    "gpt2": "openai-community/{}",
    "Llama": "meta-llama/{}",
    "SmolLM": "HuggingFaceTB/{}",
    "TinyLlama": "TinyLlama/{}",
    "": "OWNER/NAME",
}
_EXPECTED = "a folder with a Hugging Face tokenizer (tokenizer.json) or a SentencePiece model (*.model)"


def find_tokenizer(folder: str | Path) -> Path:
    """Return the path of the tokenizer's file in a folder: the file of a Hugging Face
    tokenizer, or else the only SentencePiece model.

    Raises ConfigError if there is no such file, or if there are several models.
    """
    folder = Path(folder)
    if not folder.is_dir():
        sample = "DIR"
        if folder.name == "tokenizer":
            sample = str(folder.parent)
        beginning = next(filter(folder.name.startswith, _REPOSITORIES))
        repository = _REPOSITORIES[beginning].format(folder.name)
        raise ConfigError(
            f"model.hf_assets_path is {str(folder)!r}, which is not a folder; "
            f"expected {_EXPECTED}. To get a model's tokenizer: hf download {repository} "
            f"--include 'tokenizer*' --local-dir {folder}. To get the sample "
            f"corpus's tokenizer: titan-disp sample-data {sample}, then set {sample}/tokenizer"
        )
    for name in _HUGGING_FACE_FILES:
        if (folder / name).is_file():
            return folder / name
    models = sorted(folder.glob("*.model"))
    if len(models) != 1:
        names = ", ".join(model.name for model in models) or "no tokenizer file"
        raise ConfigError(
            f"model.hf_assets_path {str(folder)!r} holds {names}; expected {_EXPECTED}"
        )
    return models[0]


def load_tokenizer(folder: str | Path, separator: str = "") -> AnyTokenizer:
    """Return the tokenizer of a folder.

    The tokenizer treats text that spells a special token (</s>) as text. Its EOS is the
    token ``separator`` (stream.separator), or its own EOS if ``separator`` is empty. If
    ``separator`` is "none", eos_id is ``NO_SEPARATOR``. Raises ConfigError if there is
    no such tokenizer or token.
    """
    file = find_tokenizer(folder)
    is_sentencepiece = file.suffix == ".model"
    if is_sentencepiece and _TIKTOKEN.match(file.read_bytes()):
        raise ConfigError(
            f"{str(file)!r} is a file of tiktoken, as in Meta's own releases of Llama "
            "3; expected tokenizer.json of the release on the hub: hf download "
            f"meta-llama/… --include 'tokenizer*' --local-dir {folder}"
        )
    tokenizer: AnyTokenizer
    # The libraries raise errors of several types.
    with reported(f"cannot load the tokenizer {str(file)!r}", Exception):
        if is_sentencepiece:
            tokenizer = SentencePieceTokenizer(file)
        else:
            tokenizer = TextTokenizer(folder)
    if separator == NONE:
        tokenizer.eos_id = NO_SEPARATOR
    elif separator:
        _check_separator(tokenizer, separator, folder)
        tokenizer.end_with(separator)
    return tokenizer


def tokenizer_of_export(folder: str | Path, separator: str) -> AnyTokenizer:
    """Return a run's tokenizer with the EOS that the run's model has learned:
    ``separator``, or the tokenizer's own EOS if ``separator`` is "none".
    """
    return load_tokenizer(folder, "" if separator == NONE else separator)


def _check_separator(
    tokenizer: AnyTokenizer, separator: str, folder: str | Path
) -> None:
    """Raise ConfigError unless ``separator`` is a token that can end documents."""
    subject = f"stream.separator is {separator!r}, which"
    separator_id = tokenizer.token_to_id(separator)
    if separator_id is None:
        names = tokenizer.added_tokens()
        raise ConfigError(
            f"{subject} is not a token of the tokenizer in {str(folder)!r}"
            + did_you_mean(separator, names, f"; expected one such as {names[:5]}")
        )
    if separator_id in tokenizer.plain(separator):
        raise ConfigError(
            f"{subject} text can spell, so that it would end documents in their middle: "
            "expected a special token"
        )


def check_fits(
    tokens: int, folder: str | Path, vocab_size: int, model: str, advice: str
) -> None:
    """Raise ConfigError if a tokenizer with ``tokens`` tokens can give ids that the
    model's embedding does not have.
    """
    if tokens > vocab_size:
        raise ConfigError(
            f"the tokenizer in {str(folder)!r} has {tokens} tokens, but {model} has a "
            f"vocabulary of {vocab_size}: {advice}"
        )


def encoder(tokenizer: BaseTokenizer) -> Callable[[str], list[int]]:
    """Return a function from a text to token ids, with BOS (if there is one) and EOS
    as TorchTitan adds them.

    Raises ConfigError if the tokenizer has no EOS.
    """
    if tokenizer.eos_id is None:
        raise ConfigError(
            "the tokenizer has no EOS token, which must separate documents: set "
            "stream.separator to the token that does"
        )
    # The stream has its own threads. The tokenizer would start another thread for every
    # core of the node.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return lambda text: tokenizer.encode(text, add_bos=True, add_eos=True)
    # This computes no offsets, and is a third faster than Tokenizer.encode.
    fast = tokenizer.tokenizer.encode_batch_fast
    begin = _present(tokenizer.bos_id)
    end = _present(tokenizer.eos_id)
    if tokenizer.hf_adds_bos:
        begin = []
    if tokenizer.hf_adds_eos:
        end = []
    return lambda text: [*begin, *fast([text])[0].ids, *end]


class Encoder:
    """The function that turns a stream's texts into token ids, in several threads:
    ``encoder``, or ``fast_encoder`` with stream.fast_tokenizer.
    """

    def __init__(self, tokenizer: BaseTokenizer, folder: str, fast: bool) -> None:
        self._parts = (tokenizer, folder, fast)
        self._encode: Callable[[str], list[int] | np.ndarray] = encoder(tokenizer)
        if fast:
            self._encode = fast_encoder(tokenizer, folder, self._encode)

    def __call__(self, text: str) -> list[int] | np.ndarray:
        return self._encode(text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the constructor's arguments, because the libraries' functions cannot
        be pickled.
        """
        return Encoder, self._parts


# One of this many documents is checked, which takes a tenth of gigatoken's own time.
CHECK_EVERY = 1000
_OFF = "set stream.fast_tokenizer = false"
# tokenizers whose ids were compared. (`data digest` makes a loader for every rank, all
# with the same tokenizer.)
_agreed: WeakSet[BaseTokenizer] = WeakSet()
_SUPPORTED_MODELS = (
    "it supports SentencePiece models of type BPE with byte fallback, without "
    "user-defined symbols, normalization and removal of spaces"
)
_ODD_CHARACTERS = (
    "\u0300\u0301\u0323\u200d\U0001f600\U0001f468\u4e2d\uac00\u1100\u1161\ufb01"
    "\u2028\ufeff\ue000\U0010ffff\u212b\u1e9b\u0e33\u0915\u094d"
)
_ODD_PIECES = " |  |\n|\n\n|\r\n|\t|'s|'LL|e\u0301| the|The|ing|123456|don't|…"


def odd_texts(tokenizer: AnyTokenizer, count: int = 3000) -> list[str]:
    """Return ``count`` short random texts, which mix everything that tokenizers treat
    specially, including the names of special tokens.
    """
    rng = random.Random(0)
    pieces = [*_ODD_PIECES.split("|"), *tokenizer.added_tokens()[:50]]
    pool = [*map(chr, range(1, 400)), *_ODD_CHARACTERS, *pieces * 8]
    return ["".join(rng.choices(pool, k=rng.randint(0, 40))) for _ in range(count)]


def fast_encoder(
    tokenizer: AnyTokenizer, folder: str, reference: Callable[[str], list[int]]
) -> Callable[[str], np.ndarray]:
    """Return gigatoken's thread-safe function from a text to its token ids, int32, with
    BOS and EOS as in ``reference``.

    gigatoken gives the same ids many times as fast. It is young, so its ids are
    compared with those of the tokenizer's own library (``reference``), at the start and
    during the run. It supports byte-level BPE (GPT-2, Qwen), and some SentencePiece
    models (``_SUPPORTED_MODELS``).

    Raises ConfigError if gigatoken is missing, does not support this tokenizer, or gives
    other ids at the start. The returned function raises DataError if gigatoken gives
    other ids for a document.
    """
    file = find_tokenizer(folder)
    encode = _gigatoken(tokenizer, file)
    begin = _present(tokenizer.bos_id)
    end = _present(tokenizer.eos_id)
    difference = "gigatoken gives other ids than the tokenizer's own library for"

    def whole(text: str) -> np.ndarray:
        return np.concatenate(
            [begin, encode(text), end], dtype=np.int32, casting="unsafe"
        )

    if tokenizer not in _agreed:
        for text in odd_texts(tokenizer):
            if whole(text).tolist() != reference(text):
                why = f" ({_SUPPORTED_MODELS})" if file.suffix == ".model" else ""
                raise ConfigError(f"{difference} {text!r}{why}: {_OFF}")
        _agreed.add(tokenizer)
    documents = itertools.count(1)

    def checked(text: str) -> np.ndarray:
        ids = whole(text)
        if next(documents) % CHECK_EVERY == 0 and ids.tolist() != reference(text):
            raise DataError(f"{difference} {text[:200]!r} …: {_OFF}")
        return ids

    return checked


def _gigatoken(tokenizer: AnyTokenizer, file: Path) -> Callable[[str], np.ndarray]:
    """Return gigatoken's function from a text to its ids, without BOS and EOS."""
    try:
        from gigatoken import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"stream.fast_tokenizer needs a package: pip install gigatoken, or {_OFF}"
        ) from error
    try:
        if isinstance(tokenizer, TextTokenizer):
            content = tokenizer.tokenizer.to_str()
        else:
            # gigatoken's conversion of the model
            content = str(Tokenizer.from_sentencepiece(str(file))._hf_json)
        parsed = json.loads(content)
        # Without the special tokens, gigatoken treats text that spells one as text.
        parsed["added_tokens"] = [
            token for token in parsed["added_tokens"] if not token["special"]
        ]
        return Tokenizer.from_json(json.dumps(parsed)).encode
    except Exception as error:  # the Rust library raises types of its own
        raise ConfigError(
            f"gigatoken cannot read {str(file)!r} ({error}): {_OFF}"
        ) from error
