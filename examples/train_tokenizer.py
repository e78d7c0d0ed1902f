"""Train a tokenizer on your own text: byte-level BPE, the kind that GPT-2 has, as a folder for model.hf_assets_path.

python examples/train_tokenizer.py /data/corpus assets/own_tokenizer 16384

The first argument is a folder, file or glob of documents, read as with training.dataset = "text". The last one is the
size of the vocabulary, which the model's has to be as well: model.overrides = {vocab_size = 16384}. The first 200 M
characters are used.
"""

import json
import sys
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from titan_disp.data.documents import Documents
from titan_disp.data.files import list_files
from titan_disp.data.records import BadDocument, text_of

EOS = "<|endoftext|>"  # separates documents
CHARACTERS = 200_000_000
LONGEST = 64 << 20  # bytes of a document


def documents(source: str) -> Iterator[str]:
    """Yield the texts of a folder, file or glob. Documents that cannot be used are skipped, as in a run."""
    for file in list_files("text", source):
        reader = Documents(file, LONGEST)
        while (record := reader.read()) is not None:
            try:
                yield text_of(record)
            except BadDocument as error:
                print(f"{file.url}: a document is skipped: {error}", file=sys.stderr)


def first(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Yield texts until they have this many characters in total."""
    read = 0

    def count(text: str) -> bool:
        nonlocal read
        read += len(text)
        return read - len(text) < characters

    return takewhile(count, texts)


def main(source: str, dest: Path, vocab_size: int) -> None:
    """Train the tokenizer, and write tokenizer.json and tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all bytes, so that no text is unknown
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[EOS], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(first(documents(source), CHARACTERS), trainer)
    dest.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(dest / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (dest / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{dest}: {tokenizer.get_vocab_size():,} tokens")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
