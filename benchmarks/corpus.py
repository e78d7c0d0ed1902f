"""Write a corpus for experiments on a CPU, in C4's layout, from Debian's documentation
packages or any folder of text.

    python -m benchmarks.corpus data/evidence                        # the packages below: 70 MB to download
    python -m benchmarks.corpus data/mine --folder /data/c4/en       # HTML, pod, rst, man pages, text, C4's own files

    OUT/en/c4-train.*.json.gz, OUT/en/c4-validation.*.json.gz    training and development text
    OUT/test/c4-validation.*.json.gz                             test text, as a separate validation set
    OUT/held_back/…                                              the same files for packages that are reserved for mid-training
    OUT/tokenizer, OUT/corpus.json, OUT/README.md                the tokenizer of OUT/en, sizes and sources

Markup is removed (corpus_text.py). Texts are left out if they are short, not English, or
mostly not words. Duplicates are left out too: equal texts, and near duplicates. A
document is a near duplicate if more than half of its runs of eight words are in longer
documents. (One run in eight is sampled.) Documents are then sorted by the hash of their
text: the first are development text, the next are test text, and the rest is training
text.
"""

import hashlib
import io
import json
import math
import re
import subprocess
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import tyro

from benchmarks.corpus_text import DICTIONARY, clean, dictionary_pages, documents_of
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.files import atomic_folder, progress
from titan_disp.lab.sample import (
    MIN_CHARACTERS,
    TIMESTAMP,
    train_tokenizer,
    write_split,
)
from titan_disp.templates import templates

# The parts of the corpus
MAIN = "main"
HELD_BACK = "held_back"
# NAME=VERSION in the last point release of Debian 12, which stays in the archive. (Security
# updates are replaced within weeks.)
PACKAGES = {
    MAIN: (
        "linux-doc-6.1=6.1.176-1",
        "dict-gcide=0.48.5+nmu2",
        "perl-doc=5.36.0-7+deb12u3",
        "postgresql-doc-15=15.18-0+deb12u1",
        "anarchism=15.3-3",
    ),
    HELD_BACK: ("dict-foldoc=20230119-1",),
}
# Files that repeat other files of a package: the kernel's pages in HTML, whose sources are
# in the package too, pods as man pages, and Markdown. Translations and device tree bindings
# are not English prose.
SKIPPED = re.compile(
    r"linux-doc-[\d.]+/html/|Documentation/(translations|devicetree/bindings)/|anarchism/markdown/|/postgresql/\d+/man/|"
    r"(?<=man/)man1/perl|/doc-base/|/lintian/|/bug/|/(copyright|changelog|CREDITS|NEWS|MAINTAINERS|Makefile|Kconfig)[^/]*$"
)
TRAIN_FILES = 16
SHINGLE = 8  # words in a run
SAMPLED = 8  # one in so many runs is sampled
# A document is kept if at most this fraction of its runs is in longer documents.
MOST_SEEN = 0.5
# Fractions of the characters that are not white space
LEAST_LETTERS = 0.6
LEAST_ASCII = 0.95
TOKENIZER_CHARACTERS = 8_000_000  # characters of training text for the tokenizer
RARE = 20  # the tokenizer encodes characters that occur less often as bytes


@dataclass(frozen=True)
class Document:
    """A text and its origin."""

    source: str  # package or folder
    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass
class Options:
    out: tyro.conf.Positional[Path]
    """Folder to write.

    It must be empty or not exist. A complete corpus of the same sources is kept.
    """
    folder: Path | None = None
    """Use this folder's texts instead of Debian's packages, without a held-back part."""
    downloads: Path = Path("data/packages")
    """Folder of the packages. apt-get downloads missing packages to this folder."""
    held_out: int = 1500
    """Number of documents of the development text, and of the test text.

    The held-back part has a tenth of it.
    """
    characters: int = 300_000_000
    """Stop reading --folder after this number of characters. (The first files of a copy
    of C4 are enough.)
    """
    vocab_size: int = 2048


def download(package: str, folder: Path) -> Path:
    """Return the .deb file of NAME=VERSION, from the folder or from apt-get.

    Raises SystemExit if apt-get cannot download this version.
    """
    name, _, version = package.partition("=")
    pattern = f"{name}_{version.replace(':', '%3a')}_*.deb"
    message = ""
    if not list(folder.glob(pattern)):
        folder.mkdir(parents=True, exist_ok=True)
        command = ["apt-get", "download", package]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        message = done.stderr.strip()[-500:]
    if debs := sorted(folder.glob(pattern)):
        return debs[0]
    raise SystemExit(
        f"{package} cannot be downloaded: {message}\n"
        "Run apt-get update first, as the list of versions may be old. If the version "
        f"is gone, put the file {pattern} into {folder}: numbers that were measured "
        "with another version are not comparable"
    )


def package_files(deb: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each file of a package, except ``SKIPPED``."""
    content = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(deb)], capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if member.isfile() and not SKIPPED.search(member.name):
                file = archive.extractfile(member)
                assert file is not None
                yield member.name.removeprefix("./"), file.read()


def folder_files(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each file in a folder, except hidden files."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield path.relative_to(folder).as_posix(), path.read_bytes()


def read(
    source: str, files: Iterable[tuple[str, bytes]], characters: float = math.inf
) -> Iterator[Document]:
    """Yield the documents of all files with a known format, and stop after the file that
    reaches this number of characters.
    """
    dictionary: dict[str, bytes] = {}
    for name, content in files:
        if characters <= 0:
            return
        if name.endswith(DICTIONARY):
            dictionary[name] = content
            continue
        for path, text in documents_of(f"/{name}", content):
            characters -= len(text)
            yield Document(source, path.lstrip("/"), text)
    for path in sorted(path for path in dictionary if path.endswith(DICTIONARY[0])):
        index = dictionary[path.removesuffix(DICTIONARY[0]) + DICTIONARY[1]].decode()
        for word, text in dictionary_pages(
            zlib.decompress(dictionary[path], wbits=31), index
        ):
            yield Document(source, f"{path}#{word}", clean(text))


def is_prose(text: str) -> bool:
    """Return whether a text is long enough, has mostly words, and may be English, as nearly
    all of its characters are ASCII.
    """
    if len(text) < MIN_CHARACTERS:
        return False
    solid = re.sub(r"\s+", "", text)
    ascii_characters = re.sub(r"[^\x00-\x7f]+", "", solid)
    letters = re.sub(r"[\W\d_]+", "", solid)
    is_ascii = len(ascii_characters) >= LEAST_ASCII * len(solid)
    return is_ascii and len(letters) >= LEAST_LETTERS * len(solid)


def runs_of_words(text: str) -> set[int]:
    """Return the hashes of a sample of a text's runs of ``SHINGLE`` words, one in
    ``SAMPLED``. Whether a run is in the sample depends only on its words.
    """
    words = re.findall(r"[a-z0-9]+", text.lower())
    hashes = (
        zlib.crc32(" ".join(words[i : i + SHINGLE]).encode())
        for i in range(len(words) - SHINGLE + 1)
    )
    return {value for value in hashes if value % SAMPLED == 0}


def without_duplicates(
    documents: Iterable[Document],
) -> tuple[list[Document], Counter[str]]:
    """Return the documents to keep, sorted by hash, and the numbers of documents left out,
    by reason. The result does not depend on the order of ``documents``.
    """
    left_out: Counter[str] = Counter()
    by_hash: dict[str, Document] = {}
    for document in documents:
        if not is_prose(document.text):
            left_out["short, not English or mostly no words"] += 1
        elif (key := document.sha256) in by_hash:
            left_out["equal to another"] += 1
            by_hash[key] = min(by_hash[key], document, key=lambda d: (d.source, d.name))
        else:
            by_hash[key] = document
    kept: list[Document] = []
    seen: set[int] = set()
    longest_first = sorted(
        by_hash.items(), key=lambda item: (-len(item[1].text), item[0])
    )
    for _, document in progress("comparing", "document", items=longest_first):
        runs = runs_of_words(document.text)
        if len(runs & seen) > MOST_SEEN * len(runs):
            left_out["near duplicates"] += 1
            continue
        seen |= runs
        kept.append(document)
    return sorted(kept, key=lambda document: document.sha256), left_out


def split(documents: Sequence[Document], held_out: int) -> dict[str, list[Document]]:
    """Return the documents by split. The first are development text, the next are test
    text, and the rest is training text.
    """
    if len(documents) < 4 * held_out:
        raise SystemExit(
            f"the sources hold {len(documents)} documents, expected at least "
            f"{4 * held_out} for a development and a test text of {held_out} each: "
            "add sources, or set --held-out lower"
        )
    return {
        "development": list(documents[:held_out]),
        "test": list(documents[held_out : 2 * held_out]),
        "train": list(documents[2 * held_out :]),
    }


def tokenizer_texts(documents: Iterable[Document]) -> list[str]:
    """Return training text without rare characters, which would take the place of words
    in a small vocabulary.
    """
    texts = list[str]()
    counts = Counter[str]()
    for document in documents:
        texts.append(document.text)
        counts.update(document.text)
        if counts.total() >= TOKENIZER_CHARACTERS:
            break
    rare = {ord(c): None for c, count in counts.items() if count < RARE}
    return [text.translate(rare) for text in texts]


def _records(documents: Iterable[Document]) -> list[dict[str, str]]:
    return [
        {"text": d.text, "timestamp": TIMESTAMP, "url": f"{d.source}:{d.name}"}
        for d in documents
    ]


def seen_in(train: set[int], documents: Iterable[Document]) -> float:
    """Return the fraction of the documents' sampled runs that are in ``train``, the runs
    of the training text.
    """
    runs = [*chain.from_iterable(runs_of_words(d.text) for d in documents)]
    return sum(run in train for run in runs) / max(1, len(runs))


def _sizes(splits: dict[str, list[Document]], encode: Any) -> dict[str, dict[str, Any]]:
    """Return the sizes of each split, as in corpus.json."""
    train = set[int]().union(*(runs_of_words(d.text) for d in splits["train"]))
    sizes: dict[str, dict[str, Any]] = {}
    for name, documents in splits.items():
        bar = progress(f"tokenizing {name}", "document", items=documents)
        sizes[name] = {
            "documents": len(documents),
            "characters": sum(len(d.text) for d in documents),
            "tokens": sum(len(encode(d.text)) + 1 for d in bar),
            "by_source": dict(sorted(Counter(d.source for d in documents).items())),
        }
        if name != "train":
            seen = round(seen_in(train, documents), 4)
            sizes[name]["runs_of_words_in_training"] = seen
    return sizes


def downloaded(
    options: Options,
) -> tuple[dict[str, str], dict[str, Iterator[Document]]]:
    """Return the sha256 of each package, and the documents of each part."""
    digests = {}
    parts = {}
    for part, packages in PACKAGES.items():
        files = {}
        for package in progress("downloading packages", "package", items=packages):
            deb = download(package, options.downloads)
            digests[package] = hashlib.sha256(deb.read_bytes()).hexdigest()
            files[package.partition("=")[0]] = deb
        parts[part] = chain.from_iterable(
            read(name, package_files(deb)) for name, deb in files.items()
        )
    return digests, parts


def build(options: Options, folder: Path) -> None:
    """Write the corpus into an empty folder.

    Raises SystemExit if a package cannot be downloaded, or there are too few documents.
    """
    if options.folder is None:
        sources, parts = downloaded(options)
    else:
        sources = {str(options.folder): "a folder"}
        files = folder_files(options.folder)
        parts = {MAIN: read(options.folder.name, files, options.characters)}
    facts: dict[str, Any] = {
        "sources": sources,
        "held_out": options.held_out,
        "left_out": {},
        "sizes": {},
    }
    # of all texts for training and measurements, and of the tokenizer
    digest = hashlib.sha256()
    # The main part comes first, and its training text makes the tokenizer of all parts.
    for part, documents in parts.items():
        place = folder
        held_out = options.held_out
        if part == HELD_BACK:
            place = folder / HELD_BACK
            held_out = options.held_out // 10
        documents = progress(f"reading {part}", "document", items=documents)
        kept, left_out = without_duplicates(documents)
        splits = split(kept, held_out)
        for document in chain.from_iterable(splits.values()):
            digest.update(document.sha256.encode())
        train = _records(splits["train"])
        write_split(place / "en", "train", train, TRAIN_FILES)
        write_split(place / "en", "validation", _records(splits["development"]))
        write_split(place / "test", "validation", _records(splits["test"]))
        if part == MAIN:
            texts = tokenizer_texts(splits["train"])
            model = train_tokenizer(texts, options.vocab_size)
            digest.update(model)
            (folder / "tokenizer").mkdir()
            (folder / "tokenizer" / "corpus.model").write_bytes(model)
            encode = load_tokenizer(folder / "tokenizer").encode
        facts["left_out"][part] = dict(left_out)
        facts["sizes"][part] = _sizes(splits, encode)
    facts["sha256"] = digest.hexdigest()
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    page = templates(__file__, number=format).get_template("corpus.md.j2")
    (folder / "README.md").write_text(page.render(facts))


def main(options: Options) -> dict[str, Any]:
    """Return the content of corpus.json, of a new corpus or of a complete one, and print the
    corpus's README.

    Raises SystemExit if the folder has other files, or a corpus of other sources or sizes.
    """
    if not (options.out / "corpus.json").is_file():
        if options.out.exists() and any(options.out.iterdir()):
            raise SystemExit(
                f"{options.out} exists and is not a corpus: choose another folder or "
                "remove it"
            )
        with atomic_folder(options.out) as partial:
            build(options, partial)
    facts = json.loads((options.out / "corpus.json").read_text())
    sources = [*chain.from_iterable(PACKAGES.values())]
    if options.folder is not None:
        sources = [str(options.folder)]
    if list(facts["sources"]) != sources or facts["held_out"] != options.held_out:
        raise SystemExit(
            f"{options.out} holds a corpus of {', '.join(facts['sources'])}: "
            "choose another folder"
        )
    print(f"{options.out} is complete\n{(options.out / 'README.md').read_text()}")
    return facts


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
