"""Train a tokenizer on your own text: byte-level BPE, as GPT-2 has. The result is a
folder for model.hf_assets_path.

python examples/train_tokenizer.py /data/corpus assets/own_tokenizer 16384

The documents are read as with training.dataset = "text". The first 200 M characters are
used. At the end, the script prints the keys of the config that belong to the tokenizer.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_disp.data.documents import Documents
from titan_disp.data.formats import BadDocument, DamagedFile, text_of
from titan_disp.data.listing import list_files
from titan_disp.data.options import Format, StreamOptions
from titan_disp.errors import UserError

EOS = "<|endoftext|>"  # separates documents
LEAST = 257  # tokens: EOS and all bytes, so that every text can be encoded
CHARACTERS = 200_000_000
LONGEST = 64 << 20  # bytes of a document


class Corpus:
    """The texts of a folder, file or glob. Documents that cannot be used are skipped.

    Attributes:
        used: the number of documents that were used so far.
        skipped: the reason for each skipped document.
    """

    def __init__(self, source: str, text_field: str) -> None:
        self.files = list_files("text", source)
        self.text_field = text_field
        self.used = 0
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            reader = Documents(
                file,
                StreamOptions(
                    max_document_bytes=LONGEST, format=Format(self.text_field)
                ),
            )
            try:
                while (record := reader.read()) is not None:
                    try:
                        text = text_of(record, self.text_field)
                    except BadDocument as error:
                        self.skipped.append(f"{file.url}: {error}")
                    else:
                        self.used += 1
                        yield text
            except DamagedFile as error:
                self.skipped.append(f"the rest of {file.url}: {error}")
            finally:
                reader.close()


def first(texts: Corpus, characters: int) -> Iterator[str]:
    """Yield texts until they have ``characters`` characters in total."""
    read = 0

    def count(text: str) -> bool:
        nonlocal read
        read += len(text)
        return read - len(text) < characters

    return takewhile(count, texts)


def train(source: str, dest: Path, vocab_size: int, text_field: str) -> Tokenizer:
    """Return a trained tokenizer, and write it as tokenizer.json and
    tokenizer_config.json.
    """
    corpus = Corpus(source, text_field)
    dest.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(first(corpus, CHARACTERS), trainer)
    if corpus.skipped:
        print(
            f"documents that cannot be used: {len(corpus.skipped)}, the first: {corpus.skipped[0]}",
            file=sys.stderr,
        )
    if not corpus.used:
        sys.exit(
            f"{source} has no text in the field {text_field!r}: see --text-field. "
            "Nothing was written"
        )
    tokenizer.save(str(dest / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (dest / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", help="folder, file or glob of documents")
    parser.add_argument(
        "dest", type=Path, help="folder of the tokenizer, which is created"
    )
    parser.add_argument(
        "vocab_size", type=int, help=f"number of tokens, at least {LEAST}"
    )
    parser.add_argument(
        "--text-field",
        default="text",
        help="field or column of the text, like stream.text_field",
    )
    args = parser.parse_args()
    if args.vocab_size < LEAST:
        parser.error(
            f"vocab_size is {args.vocab_size}, expected at least {LEAST}: 256 bytes "
            "and EOS"
        )
    try:
        tokenizer = train(args.source, args.dest, args.vocab_size, args.text_field)
    except (UserError, OSError) as error:
        sys.exit(f"error: {error}")
    size = tokenizer.get_vocab_size()
    if size < args.vocab_size:
        print(f"The text gives {size:,} tokens instead of {args.vocab_size:,}.")
    print(f'hf_assets_path = "{args.dest}"\noverrides = {{ vocab_size = {size} }}')


if __name__ == "__main__":
    main()
