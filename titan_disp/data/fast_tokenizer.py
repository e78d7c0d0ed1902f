"""gigatoken replaces the libraries of Hugging Face and SentencePiece. It gives the same ids many times as fast.

gigatoken is young, so its ids are compared with those of the tokenizer's own library: for some thousand odd texts at
the start, and for one document in a thousand during the run. Its ids were found to agree for byte-level BPE (GPT-2,
Qwen), and for SentencePiece BPE with byte fallback, identity normalization, all spaces kept and no user-defined
symbols.
"""

import itertools
import json
import random
from collections.abc import Callable
from weakref import WeakSet

import numpy as np
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

from titan_disp.data.tokenizer import SentencePieceTokenizer, find_tokenizer
from titan_disp.errors import ConfigError, DataError

# In documents. The check costs about a tenth of gigatoken's own time; Hugging Face's library takes a hundred times as
# long.
CHECK_EVERY = 1000
_OFF = "set stream.fast_tokenizer = false"
_agreed: WeakSet[BaseTokenizer] = WeakSet()  # `data digest` makes a loader for every rank with the same tokenizer


def odd_texts(tokenizer: BaseTokenizer, count: int = 3000) -> list[str]:
    """Return short random texts that mix everything that tokenizers treat specially.

    These are spaces, digits, accents, emoji, control and special characters, contractions, and the names of special
    tokens.
    """
    rng = random.Random(0)
    characters = [
        chr(c) for c in (*range(1, 400), 0x300, 0x301, 0x323, 0x200D, 0x1F600, 0x1F468, 0x4E2D, 0xAC00, 0x1100)
    ]
    characters += [
        chr(c) for c in (0x1161, 0xFB01, 0x2028, 0xFEFF, 0xE000, 0x10FFFF, 0x212B, 0x1E9B, 0x0E33, 0x0915, 0x094D)
    ]
    pieces = [
        " ",
        "  ",
        "\n",
        "\n\n",
        "\r\n",
        "\t",
        "'s",
        "'LL",
        "e\u0301",
        " the",
        "The",
        "ing",
        "123456",
        "don't",
        "…",
    ]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        pieces += [token.content for token in tokenizer.tokenizer.get_added_tokens_decoder().values()][:50]
    elif isinstance(tokenizer, SentencePieceTokenizer):
        processor = tokenizer.processor
        special = (i for i in range(processor.get_piece_size()) if processor.is_control(i) or processor.is_unknown(i))
        pieces += [processor.id_to_piece(i) for i in itertools.islice(special, 50)]
    pool = [*characters, *pieces * 8]
    return ["".join(rng.choices(pool, k=rng.randint(0, 40))) for _ in range(count)]


def _without_special_tokens(content: str | bytes) -> str:
    """Remove the special tokens from a tokenizer.json, so that gigatoken treats text that spells one as text."""
    tokenizer = json.loads(content)
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if not token["special"]]
    return json.dumps(tokenizer)


def fast_encoder(
    tokenizer: BaseTokenizer, folder: str, reference: Callable[[str], list[int]]
) -> Callable[[str], np.ndarray]:
    """Return a thread-safe function from a text to its token ids, int32, with the same BOS and EOS as ``reference``.

    Args:
        tokenizer: the tokenizer in ``folder``.
        folder: ``model.hf_assets_path``.
        reference: a function from a text to its ids, by the tokenizer's own library.

    Raises:
        ConfigError: gigatoken is missing, does not support this tokenizer, or gives other ids.
        DataError: raised by the returned function: gigatoken gives other ids for a document.
    """
    file = find_tokenizer(folder)
    try:
        from gigatoken import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"stream.fast_tokenizer needs the package gigatoken: pip install 'titan-disp[fast]', or {_OFF}"
        ) from error
    try:
        if isinstance(tokenizer, HuggingFaceTokenizer):
            content = tokenizer.tokenizer.to_str()
        else:
            content = Tokenizer.from_sentencepiece(str(file))._hf_json  # gigatoken's conversion of the model
        encode = Tokenizer.from_json(_without_special_tokens(content)).encode
    except Exception as error:  # the Rust library raises types of its own
        raise ConfigError(f"gigatoken cannot read {str(file)!r} ({error}): {_OFF}") from error
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]

    def whole(text: str) -> np.ndarray:
        ids = encode(text)
        out = np.empty(len(begin) + len(ids) + 1, dtype=np.int32)
        out[: len(begin)] = begin
        out[len(begin) : -1] = ids
        out[-1] = tokenizer.eos_id
        return out

    if tokenizer not in _agreed:
        for text in odd_texts(tokenizer):
            if whole(text).tolist() != reference(text):
                raise ConfigError(f"gigatoken gives other ids than the tokenizer's own library for {text!r}: {_OFF}")
        _agreed.add(tokenizer)
    documents = itertools.count(1)

    def checked(text: str) -> np.ndarray:
        ids = whole(text)
        if next(documents) % CHECK_EVERY == 0 and ids.tolist() != reference(text):
            raise DataError(f"gigatoken gives other ids than the tokenizer's own library for {text[:200]!r} …: {_OFF}")
        return ids

    return checked
