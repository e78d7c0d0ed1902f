"""A corpus for experiments on a CPU, in C4's layout, from Debian's documentation packages or any folder of text.

    python -m benchmarks.corpus data/evidence                        # the packages below: 70 MB to download
    python -m benchmarks.corpus data/mine --folder /data/c4/en       # HTML, pod, rst, man pages, text, C4's own files

    OUT/en/c4-train.*.json.gz, OUT/en/c4-validation.*.json.gz    training and development text
    OUT/test/c4-validation.*.json.gz                             test text: a validation set of its own
    OUT/held_back/…                                              the same again, of packages that are kept for mid-training
    OUT/tokenizer, OUT/corpus.json, OUT/README.md                the tokenizer of OUT/en, sizes and sources

Texts are cleaned of markup (corpus_text.py). What is short, not English or mostly no words is left out, and so are duplicates:
equal texts, and, from the longest document to the shortest, each of whose runs of eight words more than half are in the
documents kept before it (a sample of one run in eight). Documents are then sorted by the hash of their text; the first are
development text, the next are test text, and the rest is for training. All of this depends on the texts alone.
"""

import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks.corpus_text import DICTIONARY, clean, dictionary_pages, documents_of
from titan_disp.data.sample import MIN_CHARACTERS, TIMESTAMP, train_tokenizer, write_shard
from titan_disp.data.tokenizer import load_tokenizer

# NAME=VERSION of Debian 12. Debian keeps one or two versions: where these are gone, name the ones that there are.
PACKAGES = (
    "linux-doc-6.1=6.1.192-2",
    "dict-gcide=0.48.5+nmu2",
    "perl-doc=5.36.0-7+deb12u4",
    "postgresql-doc-15=15.20-0+deb12u1",
    "anarchism=15.3-3",
)
HELD_BACK = ("dict-foldoc=20230119-1",)
# What a package says twice: the kernel's pages as HTML beside their sources, pods as man pages, pages in Markdown.
# Translations and device trees' bindings are no English prose.
SKIPPED = re.compile(
    r"linux-doc-[\d.]+/html/|Documentation/(translations|devicetree/bindings)/|anarchism/markdown/|/postgresql/\d+/man/|"
    r"(?<=man/)man1/perl|/doc-base/|/lintian/|/bug/|/(copyright|changelog|CREDITS|NEWS|MAINTAINERS|Makefile|Kconfig)[^/]*$"
)
TRAIN_FILES = 16
SHINGLE, SAMPLED = 8, 8  # words of a run, and one run in so many
MOST_SEEN = 0.5  # of a document's runs, in documents kept before it
LEAST_LETTERS = 0.6  # of the characters that are no white space
LEAST_ASCII = 0.95
TOKENIZER_CHARACTERS = 8_000_000  # of training text, for the tokenizer
RARE = 20  # characters that come less often are left to the byte fallback


@dataclass(frozen=True)
class Document:
    source: str  # package or folder
    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


@dataclass
class Options:
    out: tyro.conf.Positional[Path]
    """Folder to write; it must not exist, or hold a corpus of the same sources, which is kept."""
    folder: Path | None = None
    """Take this folder's texts in the place of Debian's packages, and hold none back."""
    packages: tuple[str, ...] = PACKAGES
    held_back: tuple[str, ...] = HELD_BACK
    downloads: Path = Path("data/packages")
    """Where the packages are, or are downloaded to by apt-get."""
    held_out: int = 1500
    """Documents of the development text, and as many of the test text. Of the held-back packages, a tenth of it each."""
    characters: int = 300_000_000
    """Stop reading there, at the end of a file: of a copy of C4, the first files are enough."""
    vocab_size: int = 2048


def download(package: str, folder: Path) -> Path:
    """The .deb of NAME=VERSION, from the folder or by apt-get."""
    name, _, version = package.partition("=")
    pattern = f"{name}_{version.replace(':', '%3a')}_*.deb"
    if not (found := sorted(folder.glob(pattern))):
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["apt-get", "download", package], cwd=folder, capture_output=True, text=True)
        found = sorted(folder.glob(pattern))
        if done.returncode or not found:
            offered = subprocess.run(["apt-cache", "policy", name], capture_output=True, text=True).stdout
            candidate = re.search(r"Candidate: (\S+)", offered)
            raise SystemExit(
                f"{package} cannot be downloaded: {done.stderr.strip()[-500:]}\nDebian offers {name}="
                f"{candidate.group(1) if candidate else '?'}: name it in --packages or --held-back (another corpus: numbers "
                "measured on it are not comparable), or put the file into --downloads"
            )
    return found[0]


def package_documents(deb: Path, package: str) -> Iterator[Document]:
    """All texts of a package that are documentation in English."""
    name = package.partition("=")[0]
    content = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(deb)], capture_output=True, check=True).stdout
    dictionary: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if not member.isfile() or SKIPPED.search(member.name):
                continue
            file = archive.extractfile(member)
            assert file is not None
            if member.name.endswith(DICTIONARY):
                dictionary[member.name.removeprefix("./")] = file.read()
            else:
                for path, text in documents_of(member.name.removeprefix("./"), file.read()):
                    yield Document(name, path, text)
    yield from _dictionaries(name, dictionary)


def _dictionaries(source: str, files: dict[str, bytes]) -> Iterator[Document]:
    for path in sorted(path for path in files if path.endswith(DICTIONARY[0])):
        index = files[path.removesuffix(DICTIONARY[0]) + DICTIONARY[1]].decode()
        for word, text in dictionary_pages(zlib.decompress(files[path], wbits=31), index):
            yield Document(source, f"{path}#{word}", clean(text))


def folder_documents(folder: Path, characters: int) -> Iterator[Document]:
    """Of all files of a format that is known, in the order of their paths, until there are so many characters."""
    dictionary: dict[str, bytes] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".")):
        if characters <= 0:
            return
        name = path.relative_to(folder).as_posix()
        if name.endswith(DICTIONARY):
            dictionary[name] = path.read_bytes()
            continue
        for found, text in documents_of(f"/{name}", path.read_bytes()):
            characters -= len(text)
            yield Document(folder.name, found.lstrip("/"), text)
    yield from _dictionaries(folder.name, dictionary)


def is_prose(text: str) -> bool:
    """Long enough, English as far as its letters tell, and mostly words."""
    if len(text) < MIN_CHARACTERS:
        return False
    solid = re.sub(r"\s+", "", text)
    ascii_part = sum(map(len, re.findall(r"[\x00-\x7f]+", solid))) / len(solid)
    letters = sum(map(len, re.findall(r"[^\W\d_]+", solid))) / len(solid)
    return ascii_part >= LEAST_ASCII and letters >= LEAST_LETTERS


def runs_of_words(text: str) -> set[int]:
    """Hashes of one in ``SAMPLED`` of its runs of ``SHINGLE`` words; which ones depends on the words alone."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    hashes = (zlib.crc32(" ".join(words[i : i + SHINGLE]).encode()) for i in range(len(words) - SHINGLE + 1))
    return {value for value in hashes if value % SAMPLED == 0}


def without_duplicates(documents: Iterable[Document]) -> tuple[list[Document], Counter[str]]:
    """What is kept, sorted by hash, and how many were left out for which reason. The order of ``documents`` does not count."""
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
    for _, document in sorted(by_hash.items(), key=lambda item: (-len(item[1].text), item[0])):
        runs = runs_of_words(document.text)
        if len(runs & seen) > MOST_SEEN * len(runs):
            left_out["near duplicates"] += 1
            continue
        seen |= runs
        kept.append(document)
    return sorted(kept, key=lambda document: document.sha256), left_out


def split(documents: Sequence[Document], held_out: int) -> dict[str, list[Document]]:
    """Documents sorted by hash: the first for development, the next for the test, the others for training."""
    if len(documents) < 4 * held_out:
        raise SystemExit(
            f"the sources hold {len(documents)} documents, expected at least {4 * held_out} for a development and a test text "
            f"of {held_out} each: add sources, or set --held-out lower"
        )
    return {
        "development": list(documents[:held_out]),
        "test": list(documents[held_out : 2 * held_out]),
        "train": list(documents[2 * held_out :]),
    }


def seen_in(train: set[int], documents: Iterable[Document]) -> float:
    """The part of a held-out text's runs of words that training text, whose runs are given, has too."""
    runs = [run for document in documents for run in runs_of_words(document.text)]
    return sum(run in train for run in runs) / max(1, len(runs))


def tokenizer_texts(documents: Iterable[Document]) -> list[str]:
    """Training text without rare characters, which would take the place of words in a small vocabulary."""
    texts, characters = list[str](), 0
    for document in documents:
        texts.append(document.text)
        characters += len(document.text)
        if characters >= TOKENIZER_CHARACTERS:
            break
    counts = Counter[str]()
    for text in texts:
        counts.update(text)
    rare = str.maketrans(dict.fromkeys((c for c, count in counts.items() if count < RARE), None))
    return [text.translate(rare) for text in texts]


def _write_split(splits: dict[str, list[Document]], folder: Path) -> None:
    (folder / "en").mkdir(parents=True)
    (folder / "test").mkdir()

    def records(documents: Iterable[Document]) -> Iterator[dict[str, str]]:
        for d in documents:
            yield {"text": d.text, "timestamp": TIMESTAMP, "url": f"{d.source}:{d.name}"}

    for i in range(TRAIN_FILES):
        name = f"c4-train.{i:05d}-of-{TRAIN_FILES:05d}.json.gz"
        write_shard(folder / "en" / name, records(splits["train"][i::TRAIN_FILES]))
    for place, name in (("en", "development"), ("test", "test")):
        write_shard(folder / place / "c4-validation.00000-of-00001.json.gz", records(splits[name]))


def _sizes(splits: dict[str, list[Document]], encode: Any) -> dict[str, dict[str, Any]]:
    train: set[int] = set().union(*(runs_of_words(document.text) for document in splits["train"]))
    return {
        name: {
            "documents": len(documents),
            "characters": sum(len(d.text) for d in documents),
            "tokens": sum(len(encode(d.text)) + 1 for d in documents),  # with EOS
            "by_source": dict(sorted(Counter(d.source for d in documents).items())),
            **({} if name == "train" else {"runs_of_words_in_training": round(seen_in(train, documents), 4)}),
        }
        for name, documents in splits.items()
    }


def _card(sources: dict[str, str], facts: dict[str, Any]) -> str:
    rows = [
        f"| {part} | {name} | {size['documents']:,} | {size['characters']:,} | {size['tokens']:,} |"
        for part in facts["sizes"]
        for name, size in facts["sizes"][part].items()
    ]
    return "\n".join(
        [
            "---",
            *("configs:", "- config_name: en", "  data_files:"),
            *("  - split: train", "    path: en/c4-train.*.json.gz"),
            *("  - split: validation", "    path: en/c4-validation.*.json.gz"),
            "---",
            "Written by `python -m benchmarks.corpus`, in the shape of allenai/c4. That file says what was left out",
            "and how the text was split. `test` is a second validation set; `held_back` is for mid-training.",
            "",
            *(f"- {source}: {digest}" for source, digest in sources.items()),
            "",
            *("| part | split | documents | characters | tokens |", "|---|---|---|---|---|"),
            *rows,
            "",
        ]
    )


def build(options: Options, folder: Path) -> dict[str, Any]:
    """Write the corpus into an empty folder; sizes and sources, as corpus.json has them."""
    parts: dict[str, Iterator[Document]] = {}
    sources: dict[str, str] = {}
    if options.folder is not None:
        parts["main"] = folder_documents(options.folder, options.characters)
        sources[str(options.folder)] = "a folder"
    else:
        for part, packages in (("main", options.packages), ("held_back", options.held_back)):
            files = {package: download(package, options.downloads) for package in packages}
            sources |= {package: hashlib.sha256(deb.read_bytes()).hexdigest() for package, deb in files.items()}
            parts[part] = (document for package, deb in files.items() for document in package_documents(deb, package))
    facts: dict[str, Any] = {"sources": sources, "held_out": options.held_out, "left_out": {}, "sizes": {}}
    encode, digest = None, hashlib.sha256()
    for part, documents in parts.items():
        kept, left_out = without_duplicates(documents)
        splits = split(kept, options.held_out if part == "main" else options.held_out // 10)
        digest.update("".join(d.sha256 for documents in splits.values() for d in documents).encode())
        _write_split(splits, folder if part == "main" else folder / part)
        if encode is None:
            (folder / "tokenizer").mkdir()
            model = train_tokenizer(tokenizer_texts(splits["train"]), options.vocab_size)
            digest.update(model)
            (folder / "tokenizer" / "corpus.model").write_bytes(model)
            encode = load_tokenizer(folder / "tokenizer").encode
        facts["left_out"][part] = dict(left_out)
        facts["sizes"][part] = _sizes(splits, encode)
    facts["sha256"] = digest.hexdigest()  # of all that models are trained and measured on
    (folder / "corpus.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "README.md").write_text(_card(sources, facts))
    return facts


def main(options: Options) -> dict[str, Any]:
    if (options.out / "corpus.json").is_file():
        facts = json.loads((options.out / "corpus.json").read_text())
        wanted = [str(options.folder)] if options.folder else [*options.packages, *options.held_back]
        if list(facts["sources"]) != wanted or facts["held_out"] != options.held_out:
            raise SystemExit(f"{options.out} holds a corpus of {', '.join(facts['sources'])}: choose another folder")
        print(f"{options.out}: complete already")
    else:
        if options.out.exists() and any(options.out.iterdir()):
            raise SystemExit(f"{options.out} exists and is not a corpus: choose another folder or remove it")
        options.out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{options.out.name}-", dir=options.out.parent))
        try:
            facts = build(options, partial)
            partial.chmod(0o755)  # mkdtemp's folders are private
            if options.out.exists():
                options.out.rmdir()
            os.replace(partial, options.out)  # readers see all of it or nothing
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    for part, sizes in facts["sizes"].items():
        for name, size in sizes.items():
            print(f"{part:10} {name:12} {size['documents']:8,} documents {size['characters']:12,} characters", end="")
            print(f" {size['tokens']:11,} tokens")
    return facts


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
