"""This module makes a sample corpus of texts that every Python installation has, and a
tokenizer for it.

Layout and fields are those of allenai/c4 on the hub, so that the same code reads both.
"""

import ast
import gzip
import hashlib
import inspect
import io
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any

import sentencepiece

from titan_disp.errors import ConfigError
from titan_disp.files import atomic_folder, progress

TRAIN_FILES = 8
VALIDATION_SHARE = 32  # one document in 32
MIN_CHARACTERS = 200
# The documents have no date. A constant keeps the files the same on every run.
TIMESTAMP = "2019-04-25T12:57:54Z"
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
    """Yield (url, text) of the topics of the language reference and the docstrings of
    the standard library, in order.
    """
    for name, text in sorted(topics.topics.items()):
        yield f"python:topics/{name}", text
    library = Path(sysconfig.get_path("stdlib"))
    for file in progress(
        "reading documentation", "file", items=sorted(library.rglob("*.py"))
    ):
        relative = file.relative_to(library)
        if {
            "site-packages",
            "test",
            "tests",
            "idle_test",
            "lib2to3",
            "__pycache__",
        } & set(relative.parts):
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, OSError):
            continue  # a few library files are templates
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
                name = getattr(node, "name", "")
                yield (
                    f"python:stdlib/{relative.as_posix()}#{name}:{getattr(node, 'lineno', 0)}",
                    docstring,
                )


def documents() -> list[dict[str, str]]:
    """Make C4 records of all documents that are long enough, each text once, in an
    order that their hashes fix.
    """
    records: dict[str, dict[str, str]] = {}
    for url, text in prose():
        text = inspect.cleandoc(text)
        if len(text) >= MIN_CHARACTERS:
            key = hashlib.sha256(text.encode()).hexdigest()
            records.setdefault(key, {"text": text, "timestamp": TIMESTAMP, "url": url})
    return [records[key] for key in sorted(records)]


def write_shard(path: Path, records: Iterable[dict[str, str]]) -> None:
    """Write a compressed file of JSON lines, with the same bytes every time."""
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as file,
    ):
        for record in records:
            file.write((json.dumps(record) + "\n").encode())


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    user_defined_symbols: Iterable[str] = ("\n",),
    **others: Any,
) -> bytes:
    """Train a SentencePiece model (BPE with byte fallback), and return it as bytes.

    ``others`` are further settings.
    """
    model = io.BytesIO()
    # Texts and model are passed in memory, because a model file would name this
    # machine's paths. One thread makes the same model every time.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(
            line for text in texts for line in text.splitlines() if line.strip()
        ),
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
        **{"character_coverage": 1.0} | others,
    )
    return model.getvalue()


def is_complete(folder: Path) -> bool:
    """Return whether ``write_sample`` has finished in this folder; it writes the card
    last.
    """
    return (folder / "README.md").is_file() and (
        folder / "README.md"
    ).read_text() == CARD


def write_sample(folder: str | Path, vocab_size: int = 2048) -> dict[str, int]:
    """Write the corpus to ``folder/en/*.json.gz`` and train its tokenizer,
    ``folder/tokenizer/sample.model``.

    It returns the numbers of training documents, validation documents and characters.
    ConfigError is raised if the folder is something else than an earlier sample, which
    is kept, or if SentencePiece refuses the size.
    """
    folder = Path(folder)
    if (
        folder.exists()
        and (not folder.is_dir() or any(folder.iterdir()))
        and not is_complete(folder)
    ):
        raise ConfigError(
            f"{folder} exists and is not a sample corpus: choose another folder or "
            "remove it"
        )
    records = documents()
    validation = records[::VALIDATION_SHARE]
    train = [r for i, r in enumerate(records) if i % VALIDATION_SHARE]
    if not is_complete(folder):
        with atomic_folder(folder) as partial:
            (partial / "en").mkdir()
            for i in range(TRAIN_FILES):
                name = f"c4-train.{i:05d}-of-{TRAIN_FILES:05d}.json.gz"
                write_shard(partial / "en" / name, train[i::TRAIN_FILES])
            write_shard(
                partial / "en" / "c4-validation.00000-of-00001.json.gz", validation
            )
            (partial / "tokenizer").mkdir()
            try:
                model = train_tokenizer((r["text"] for r in train), vocab_size)
            except (RuntimeError, ValueError) as error:
                limit = "a few hundred to some thousands"
                if found := re.search(r" vs (\d+)|value <= (\d+)", str(error)):
                    limit = (
                        f"at least {found[1]}" if found[1] else f"at most {found[2]}"
                    )
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
