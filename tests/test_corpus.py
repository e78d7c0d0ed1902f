"""Corpora that are written here: from a folder of documentation, and the sample of
``titan-disp sample-data``.
"""

import gzip
import json
import re
from pydoc_data import topics

import pytest

from benchmarks.corpus import (
    Document,
    Options,
    is_prose,
    main,
    runs_of_words,
    seen_in,
    split,
    without_duplicates,
)
from benchmarks.corpus_text import documents_of
from tests.command_line import typed
from titan_disp.data.listing import list_files
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError
from titan_disp.lab import sample as module
from titan_disp.lab.sample import is_complete, write_sample

HTML = """<html><head><title>T</title><style>p {}</style></head><body><div class="navheader"><p>Prev<table><tr><td>Up
</table></div><h1>Visibility <i>Map</i></h1><p>Each  heap
relation<br/>has one &amp; only one.</p><pre>SELECT 1
  FROM  t;</pre><a id="x"/><script>var x;</script><ul><li>first<li>second</ul></body></html>"""
PLAIN_HTML = "Visibility Map\n\nEach heap relation\nhas one & only one.\n\nSELECT 1\n  FROM  t;\n\nfirst\n\nsecond"
MAN = '.TH NAME 3\n.SH "THE NAME"\n\\fBfoo\\fR \\- does \\*(L"it\\*(R"\n.IP "\\-v" 4\nsays more'
POD = "=head1 NAME\nfoo - B<bold I<and> C<< $x->y >>> L<the page|perlre>\n=begin html\n<b>no</b>\n=end html"
RST = ".. _label:\n\n=====\nTitle\n=====\nSee :ref:`the page <label>`::\n\n  int x;\n\n.. note:: Mind\n   the gap."


def test_markup_is_taken_away():
    for name, source, text in (
        ("a.html", HTML, PLAIN_HTML),
        ("man3/a.3", MAN, 'THE NAME\n\nfoo - does "it"\n\n-v\nsays more'),
        ("a.pod", POD, "NAME\nfoo - bold and $x->y the page"),
        ("a.rst", RST, "Title\nSee the page:\n\n  int x;\n\nMind\n   the gap."),
        ("a.txt", "caf\u0065\u0301 \r\n\n\n\n\tx\x00", None),
        ("a.txt", "caf\u0065\u0301 \r\n\n\n\n\tx\x07\n", "caf\u00e9\n\n        x"),
        ("a.png", "x", None),
    ):
        for suffix, content in (
            ("", source.encode()),
            (".gz", gzip.compress(source.encode())),
        ):
            assert [t for _, t in documents_of(f"/{name}{suffix}", content)] == (
                [] if text is None else [text]
            )


def words(*numbers):
    letters = str.maketrans("0123456789", "abcdefghij")
    return " ".join(f"word{n}".translate(letters) for n in numbers)


def test_duplicates_whatever_the_order():
    # Three quarters of it are in the other
    whole = words(*range(2000))
    half = words(*range(1200), *range(5000, 5400))
    third = words(*range(600), *range(7000, 8200))
    documents = [
        Document("a", str(i), text)
        for i, text in enumerate((third, half, whole, whole, "short"))
    ]
    kept, left_out = without_duplicates(documents)
    assert {document.text for document in kept} == {whole, third}
    assert left_out == {
        "equal to another": 1,
        "near duplicates": 1,
        "short, not English or mostly no words": 1,
    }
    again, _ = without_duplicates(documents[::-1])
    assert again == kept == sorted(kept, key=lambda document: document.sha256)
    # About one run in eight is compared; which one does not depend on where it stands.
    assert 150 < len(runs_of_words(whole)) < 350
    assert runs_of_words(words(*range(100, 200))) <= runs_of_words(whole)
    assert seen_in(runs_of_words(whole), [Document("a", "x", third)]) == pytest.approx(
        1 / 3, abs=0.1
    )


def test_prose_and_too_few_documents():
    text = "An English sentence with some words in it. " * 10
    assert is_prose(text)
    assert not any(
        map(
            is_prose,
            (text[:100], "0x1234 5678 | " * 40, "Предложение на другом языке. " * 20),
        )
    )
    documents = [Document("a", str(i), str(i)) for i in range(11)]
    with pytest.raises(SystemExit, match="hold 11 documents, expected at least 12"):
        split(documents, 3)
    parts = split([*documents, Document("a", "x", "x")], 3)
    assert [len(parts[name]) for name in ("development", "test", "train")] == [3, 3, 6]


def records_of(files):
    return [
        json.loads(line)
        for file in sorted(files)
        for line in gzip.open(file, "rt", encoding="utf-8")
    ]


def test_a_corpus_of_a_folder(tmp_path, capsys):
    source, one, two = (tmp_path / name for name in ("source", "one", "two"))
    texts = [text for text in topics.topics.values() if len(text) > 1000][:60]
    (source / "deep").mkdir(parents=True)
    for i, text in enumerate(texts[:-10]):
        (source / f"{i:02}.txt").write_text(text)
    (source / "deep" / "page.html").write_text(
        f"<nav>skipped-menu</nav><p>{'A page of words. ' * 30}</p>"
    )
    (source / "again.txt").write_text(texts[0] + "\nOne line more.\n")
    lines = "\n".join(
        json.dumps({"text": t, "url": f"http://{i}"}) for i, t in enumerate(texts[-10:])
    )
    (source / "deep" / "c4.json.gz").write_bytes(gzip.compress(lines.encode()))
    options = {"folder": source, "held_out": 4, "vocab_size": 400}
    facts = main(Options(one, **options))
    urls = {}
    encode = load_tokenizer(one / "tokenizer").encode
    for name, dataset, path in (
        ("train", "c4", one),
        ("development", "", one),
        ("test", "", one / "test"),
    ):
        records = records_of(
            [file.url for file in list_files(dataset or "c4_validation", str(path))]
        )
        tokens = sum(len(encode(record["text"])) for record in records) + len(records)
        expected = {
            "documents": len(records),
            "characters": sum(len(r["text"]) for r in records),
            "tokens": tokens,
        }
        assert expected.items() <= facts["sizes"]["main"][name].items()
        assert all("skipped-menu" not in record["text"] for record in records)
        urls[name] = [record["url"] for record in records]
    assert [len(urls[name]) for name in ("development", "test")] == [4, 4]
    every = [url for some in urls.values() for url in some]
    assert len(set(every)) == len(every) > 8
    assert len(every) + sum(facts["left_out"]["main"].values()) == len(texts) + 2
    # one of two that say the same
    assert len({"source:again.txt", "source:00.txt"} & set(every)) == 1
    assert "source:deep/page.html" in every
    assert any(url.startswith("source:http://") for url in every)
    main(Options(two, **options))
    written = [
        {p.relative_to(path): p.read_bytes() for p in path.rglob("*.*")}
        for path in (one, two)
    ]
    assert written[0] == written[1]
    main(Options(one, **options))
    assert "is complete" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="choose another folder"):
        main(Options(one, **options | {"held_out": 3}))


def test_every_document_once_in_an_order_that_hashes_fix(tmp_path, monkeypatch):
    texts = [f"Text {i} of some words. " * 20 for i in range(90)]
    written = []
    for order in (texts, [*texts[::-1], *texts[:9], "too short"]):
        monkeypatch.setattr(
            module,
            "prose",
            lambda order=order: ((f"url:{text}", text) for text in order),
        )
        folder = tmp_path / str(len(order))
        counts = write_sample(folder, 400)
        assert sorted(
            r["text"] for r in records_of((folder / "en").glob("*.json.gz"))
        ) == sorted(texts)
        assert (counts["train"], counts["validation"]) == (87, 3)
        written.append(
            {
                path.relative_to(folder): path.read_bytes()
                for path in folder.rglob("*.*")
            }
        )
    assert written[0] == written[1]


def test_an_existing_folder_is_kept(sample, tmp_path):
    assert is_complete(sample)
    (tmp_path / "mine.txt").write_text("precious")
    for taken in (tmp_path, tmp_path / "mine.txt"):
        with pytest.raises(ConfigError, match="not a sample corpus"):
            write_sample(taken)
    assert (tmp_path / "mine.txt").read_text() == "precious"
    assert not is_complete(tmp_path)


def test_sizes_that_a_tokenizer_cannot_have(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        module,
        "prose",
        lambda: ((str(i), f"Text {i} of some words. " * 20) for i in range(90)),
    )
    for size, expected in (
        (5, "at least"),
        (1, "a few hundred"),
        (10**6, "at most"),
        (10**10, "a few hundred"),
    ):
        assert (
            typed(monkeypatch, "sample-data", tmp_path / "data", "--vocab-size", size)
            == 2
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"titan-disp: error: --vocab-size is {size}, expected {expected}"
        )
        assert not list(tmp_path.iterdir())
        if number := re.search(rf"{expected} (\d+):", line):
            assert write_sample(tmp_path / number[1], int(number[1]))
            (tmp_path / number[1]).rename(
                tmp_path.parent / f"{tmp_path.name}-{number[1]}"
            )
