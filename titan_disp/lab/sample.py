"""A sample corpus from Python's own documentation, and a tokenizer for it.

The files have the layout and the fields of allenai/c4 on the hub, so that the same code
reads C4 and the sample.
"""

import ast
import gzip
import hashlib
import inspect
import io
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from pydoc_data import topics
from typing import Any

import sentencepiece

from titan_disp.errors import ConfigError
from titan_disp.files import atomic_folder, progress

TRAIN_FILES = 8
VALIDATION_SHARE = 32  # one document in 32 is validation data
MIN_CHARACTERS = 200
# The documents have no date. A constant keeps the files the same on every run.
TIMESTAMP = "2019-04-25T12:57:54Z"
_WITHOUT_PROSE = {
    "site-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "__pycache__",
}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

CARD = """---
configs:
- config_name: en
  data_files:
  - split: train
    path: en/c4-train.*.json.gz
  - split: validation
    path: en/c4-validation.*.json.gz
---
Documentation of the Python language and standard library, in the shape of allenai/c4. Written by `titan-disp sample-data`.
"""


def prose() -> Iterator[tuple[str, str]]:
    """Yield (url, text) pairs: the topics of the language reference, then the docstrings
    of the standard library.
    """
    for name, text in sorted(topics.topics.items()):
        yield f"python:topics/{name}", text
    library = Path(sysconfig.get_path("stdlib"))
    for file in progress(
        "reading documentation", "file", items=sorted(library.rglob("*.py"))
    ):
        relative = file.relative_to(library)
        if not _WITHOUT_PROSE.isdisjoint(relative.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue  # a few library files are templates
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
                name = getattr(node, "name", "")
                place = f"{name}:{getattr(node, 'lineno', 0)}"
                yield f"python:stdlib/{relative.as_posix()}#{place}", docstring


def documents() -> list[dict[str, str]]:
    """Return C4 records of all texts with at least ``MIN_CHARACTERS``, without
    duplicates, sorted by their hashes.
    """
    records: dict[str, dict[str, str]] = {}
    for url, text in prose():
        text = inspect.cleandoc(text)
        if len(text) >= MIN_CHARACTERS:
            key = hashlib.sha256(text.encode()).hexdigest()
            records.setdefault(key, {"text": text, "timestamp": TIMESTAMP, "url": url})
    return [records[key] for key in sorted(records)]


def write_shard(path: Path, records: Iterable[dict[str, str]]) -> None:
    """Write records to a gzip file of JSON lines. Equal records give equal bytes."""
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
    ):
        for record in records:
            file.write((json.dumps(record) + "\n").encode())


def shard_name(split: str, shard: int, files: int) -> str:
    """Return the name of a file of a split, as in allenai/c4."""
    return f"c4-{split}.{shard:05d}-of-{files:05d}.json.gz"


def write_split(
    folder: Path, split: str, records: Sequence[dict[str, str]], files: int = 1
) -> None:
    """Write the files of a split, named as in allenai/c4: train or validation.

    Record i is in file i mod ``files``. The folder is created if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        write_shard(folder / shard_name(split, i, files), records[i::files])


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    user_defined_symbols: Iterable[str] = ("\n",),
    **options: Any,
) -> bytes:
    """Train a SentencePiece model (BPE with byte fallback), and return it as bytes.

    ``options`` are further options of ``SentencePieceTrainer.train``. Raises
    RuntimeError or ValueError if SentencePiece refuses ``vocab_size``.
    """
    model = io.BytesIO()
    # Texts and model are passed in memory, because a model trained on files contains
    # their paths. With one thread, the model is reproducible.
    lines = chain.from_iterable(text.splitlines() for text in texts)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=filter(str.strip, lines),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        user_defined_symbols=list(user_defined_symbols),
        pad_id=-1,
        bos_id=-1,
        eos_id=1,
        unk_id=0,
        num_threads=1,
        minloglevel=2,
        **{"character_coverage": 1.0} | options,
    )
    return model.getvalue()


def is_complete(folder: Path) -> bool:
    """Return whether ``write_sample`` has finished in this folder.

    ``write_sample`` writes the card last.
    """
    card = folder / "README.md"
    return card.is_file() and card.read_text() == CARD


def write_sample(folder: str | Path, vocab_size: int = 2048) -> dict[str, int]:
    """Write the corpus to ``folder/en/*.json.gz`` and its tokenizer to
    ``folder/tokenizer/sample.model``, and return counts.

    The counts are "train" and "validation" documents, and "characters". A complete
    sample is left as it is. Raises ConfigError if the folder has other files, or if
    SentencePiece refuses ``vocab_size``.
    """
    folder = Path(folder)
    complete = is_complete(folder)
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not complete and not is_new:
        raise ConfigError(
            f"{folder} exists and is not a sample corpus: choose another folder or "
            "remove it"
        )
    records = documents()
    validation = records[::VALIDATION_SHARE]
    train = [r for i, r in enumerate(records) if i % VALIDATION_SHARE]
    if not complete:
        with atomic_folder(folder) as partial:
            write_split(partial / "en", "train", train, TRAIN_FILES)
            write_split(partial / "en", "validation", validation)
            (partial / "tokenizer").mkdir()
            try:
                model = train_tokenizer((r["text"] for r in train), vocab_size)
            except (RuntimeError, ValueError) as error:
                limit = "a few hundred to some thousands"
                if least := re.search(r" vs (\d+)", str(error)):
                    limit = f"at least {least[1]}"
                elif most := re.search(r"value <= (\d+)", str(error)):
                    limit = f"at most {most[1]}"
                raise ConfigError(
                    f"--vocab-size is {vocab_size}, expected {limit}: leave it out "
                    "for 2048"
                ) from error
            (partial / "tokenizer" / "sample.model").write_bytes(model)
            (partial / "README.md").write_text(CARD)
    return {
        "train": len(train),
        "validation": len(validation),
        "characters": sum(len(r["text"]) for r in records),
    }
