"""Bad inputs, one by one: each message says what was found, and what to change."""

import bz2
import gzip
import json
import os
import re
from dataclasses import replace

import numpy as np
import pyarrow
import pytest

from tests.streams import (
    batches,
    config,
    ids_as,
    llm_c,
    parquet,
    records_of,
    stored,
    streams_of,
    write_texts,
)
from titan_disp.checks import check_inputs, listed_inputs
from titan_disp.data import findings
from titan_disp.data.assignment import Assignment, one_share
from titan_disp.data.documents import Documents
from titan_disp.data.formats import NAMES, BadDocument, text_of
from titan_disp.data.listing import list_files
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.sources import DataSet, list_and_check, list_for_run
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import _ValidationSet, held_out_sequences
from titan_disp.errors import ConfigError, DataError, Problems
from titan_disp.lab.digest import digest
from titan_disp.lab.inspection.texts import read_texts

EOS = 7
VOCABULARY = 5000
DOCUMENT = b'{"text": "a document", "url": "u"}\n'
HTML = b"<!DOCTYPE html>\n<html><body>503</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n"
PRETTY = json.dumps(
    [{"url": "u", "text": "a"}, {"url": "u", "text": "b"}], indent=1
).encode()
RANDOM = np.random.default_rng(0).integers(10, VOCABULARY, 400)
LARGE = np.random.default_rng(0).integers(10, 60_000, 400)
FIELD = "set stream.text_field to the field of the text"
TEXT = Format(eos_id=EOS, vocab_size=VOCABULARY)
# A format in place of a name is that of a file "a.json" or "a.bin".
BODY = replace(TEXT, text_field="meta.body")
UINT32 = replace(TEXT, token_dtype="uint32")
LARGE_EOS = replace(TEXT, eos_id=70_000, vocab_size=80_000)

# What the config names, the files of the folder, and what the message says.
NAMED = [
    (
        {"dataset": "pile"},
        {},
        "'pile'",
        "expected c4 or c4_validation",
        "text or text_validation",
    ),
    ({"path": None}, {}, "training.dataset is 'text'", "set training.dataset_path"),
    ({"path": "x"}, {}, "/x', which does not exist", "titan-disp sample"),
    (
        {},
        {},
        "no train data, because it has no files",
        "such as *.json",
        "titan-disp sample-data",
    ),
    (
        {},
        {"a.xml": b"x", "b.jsonl.bz2": b"x"},
        "1 *.bz2, 1 *.xml",
        "expected",
        "*.json",
    ),
    (
        {"path": "a.xml"},
        {"a.xml": b"x"},
        f"a name such as {NAMES}",
        "convert or rename",
    ),
    (
        {"path": "*.jsonl"},
        {},
        "matches no file;",
        "expected files named *.json",
        "name others",
    ),
    (
        {"path": "*"},
        {"a.xml": b"x"},
        "no file, but 1 *.xml",
        "files named *.json",
        "or convert them",
    ),
    ({}, {"a.jsonl": None}, "is not a regular file", "Name the files, or remove it"),
    (
        {"dataset": "text_validation"},
        {"a.jsonl": DOCUMENT},
        "no file name contains the word",
        "1 *.jsonl",
    ),
    (
        {},
        {"a.jsonl": DOCUMENT, "b.bin": ids_as(RANDOM)},
        "1 file of token ids, such as",
        "*.jsonl'",
    ),
]
# A file, and what is said of it.
FOUND = [
    (
        "a.json",
        gzip.compress(DOCUMENT),
        "gzip-compressed",
        "which its name does not say",
        "*.gz",
    ),
    ("a.jsonl", stored(DOCUMENT, ".zst"), "zstd-compressed", "name it *.zst"),
    ("a.json", bz2.compress(DOCUMENT), "bzip2-compressed", "unpack it"),
    ("a.json", parquet(text=["a"]), "it is Parquet", "name it *.parquet"),
    (
        "a.json.gz",
        DOCUMENT,
        "it is not gz",
        "though its name says so",
        "rename it to what it is",
    ),
    ("a.parquet", DOCUMENT, "it is not parquet", "rename it to what it is"),
    (
        "a.json",
        HTML,
        "it is an HTML page",
        "instead of a file",
        "download the file again",
    ),
    ("a.parquet", HTML, "an HTML page", "download the file again"),
    ("a.json.gz", POINTER, "a Git LFS pointer", "instead of the data", "git lfs pull"),
    (
        "a.bin",
        b"PK\3\4" + bytes(99),
        "it is a zip archive",
        "torch.save",
        "unpack or convert it",
    ),
    ("a.json", DOCUMENT.decode().encode("utf-16"), "UTF-16 text", "iconv"),
    (
        "a.json",
        b'[{"text": "a"}, {"text": "b"}]\n',
        "it is a JSON array",
        "jq -c '.[]' FILE",
    ),
    (
        "a.json",
        PRETTY,
        "document 0: malformed JSON",
        "beginning of a JSON array",
        "jq -c '.[]'",
    ),
    ("a.json", b'{\n "text": "a"\n}\n', "JSON over several lines", "`jq -c . FILE >"),
    (
        "a.json",
        b"text,url\na,b\n",
        "document 0: malformed JSON",
        "expected one document per line",
    ),
    (
        "a.json",
        b"1\n2\n",
        'no field "text", because the document is a number',
        "expected a JSON object",
    ),
    (
        "a.json",
        b'{"url": "u", "meta": {"lang": "en"}}\n',
        'no field "text", only url, meta.lang',
        FIELD,
    ),
    ("a.json", b"{}\n{}\n", "only an empty object", FIELD),
    (
        "a.json",
        b'{"text": 3, "url": "u"}\n',
        '"text" is a number',
        "expected a text; the fields are text, url",
        FIELD,
    ),
    ("a.json", b'{"text": ["a"]}\n', '"text" is an array', "join lists"),
    (BODY, b'{"meta": {"text": "a"}}\n', 'no field "meta.body", only meta.text', FIELD),
    (BODY, b'{"meta": "a"}\n', 'no field "meta.body", only meta;', FIELD),
    (
        "a.parquet",
        parquet(id=[1], body=["a"]),
        'no column "text", only id (int64), body (string)',
        "text_field",
    ),
    (
        "a.parquet",
        parquet(text=[1, 2]),
        'column "text" is int64',
        "expected string",
        "set stream.text_field",
    ),
    (
        "a.parquet",
        parquet(text=[b"a"]),
        "is binary",
        "expected string",
        "write it as a string",
    ),
    (
        "a.parquet",
        parquet(meta=[{"n": 1, "body": "a"}]),
        "meta.body (string)",
        "text_field",
    ),
    (
        "a.txt",
        b"x" * 70_000,
        "70,000 bytes",
        "max_document_mb",
        'set stream.text_split = "blank_lines"',
    ),
    (
        "a.txt",
        b"caf\xe9",
        "document 0: invalid UTF-8: unexpected end of data at byte 3",
        "; expected UTF-8: ",
        "iconv",
    ),
    (
        "a.bin",
        ids_as(RANDOM, dtype="<u4"),
        "every second id is at most 0",
        'set stream.token_dtype = "uint32"',
    ),
    (
        UINT32,
        ids_as(RANDOM),
        "is read as uint32 and holds the id",
        "5,000 ids",
        'set stream.token_dtype = "uint16"',
    ),
    (
        "a.npy",
        ids_as(LARGE, "numpy"),
        "holds the id 59,",
        "has 5,000 ids: use the tokenizer that wrote them",
    ),
    (
        "a.bin",
        ids_as(LARGE),
        'set stream.token_dtype = "uint32" if the ids are',
        "use the tokenizer that",
    ),
    (
        LARGE_EOS,
        ids_as(RANDOM),
        "EOS, 70000, does not fit in this type",
        'set stream.token_dtype = "uint32"',
    ),
    (
        "a.npy",
        ids_as(RANDOM, "numpy", "<i8"),
        "holds int64",
        "uint16 or uint32",
        "numpy.save(FILE",
    ),
    (
        "a.npy",
        ids_as(RANDOM, "numpy", ">u2"),
        "(byte order '>')",
        "little-endian",
        "numpy.save(FILE",
    ),
    (
        "a.npy",
        ids_as(RANDOM.reshape(4, -1), "numpy"),
        "(4, 100)",
        "one dimension",
        "reshape(-1)",
    ),
    (
        "a.npy",
        b"\x93NUMPY\x09\x00" + ids_as(RANDOM),
        "header has version 9.0",
        "expected 1.0 or 2.0",
        "numpy.save",
    ),
    (
        "a.bin",
        llm_c(20240522, 1, 3, ids_as([1, 2, 3])),
        "magic 20240522 and version 1",
        "a file of training data",
    ),
    (
        "a.bin",
        llm_c(20240520, 2, 3, ids_as([1, 2, 3])),
        "magic 20240520 and version 2",
        "or write it as such",
    ),
]


def written(folder, files):
    for name, content in files.items():
        os.mkfifo(folder / name) if content is None else (folder / name).write_bytes(
            content
        )
    return folder


def reading(how):
    return StreamOptions(seq_len=8, max_document_bytes=1 << 16, format=how)


@pytest.mark.parametrize("case", [*NAMED, *FOUND], ids=lambda case: case[2])
def test_what_is_bad_has_a_message(tmp_path, case):
    given, content, *words = case
    how = given if isinstance(given, Format) else TEXT
    options = {"path": "", "dataset": "text"}
    files = {{BODY: "a.json"}.get(how, "a.bin"): content}
    if isinstance(given, dict):
        options = options | given
        files = content
    elif isinstance(given, str):
        files = {given: content}
    path = (
        options["path"]
        if options["path"] is None
        else written(tmp_path, files) / options["path"]
    )
    with pytest.raises(ConfigError) as error:
        list_and_check(documents_in(path, options["dataset"]), reading(how))
    message = str(error.value)
    assert all(
        word in message for word in [*words, *([str(tmp_path)] if files else [])]
    ), message
    assert message.count("; expected") <= 1


def documents_in(folder, dataset="text"):
    return [DataSet(dataset, folder and str(folder), "training")]


# In the last three, documents can be read.
SOUND = {
    "one bad document": {"a.json": b"garbage\n" + DOCUMENT},
    "a few bad documents, then none": {"a.json": b'{"url": 1}\n' * 19 + DOCUMENT},
    "empty ones first": {"a.json": b'{"text": " "}\n' * 30},
    "an empty one among bad ones": {
        "a.json": b"garbage\n" * 3 + b'{"text": " "}\n' + b"garbage\n" * 30
    },
    "cut off": {"a.json.gz": gzip.compress(DOCUMENT * 10_000)[:60]},
    "an empty file": {"a.json": DOCUMENT, "b.json": b"", "c.json": DOCUMENT},
    "an empty text": {"a.txt": b"", "b.txt": b"b"},
    "an odd number of bytes": {"a.bin": ids_as(RANDOM) + b"\x00"},
    "HTML as text": {"a.txt": HTML},
    "a long block": {"a.txt": b"x" * 70_000},
    "ids that begin as gzip": {"a.bin": b"\x1f\x8b\x08\x00" + ids_as(RANDOM)},
    "a byte-order mark": {"a.json": b"\xef\xbb\xbf" + DOCUMENT},
    "the longest text that is allowed": {"a.txt": b"x" * (1 << 16)},
    "texts that begin as bzip2 and Parquet": {
        "a.txt": b"BZh4 is a name",
        "b.txt": b"PAR1 of 3",
    },
    "zstd by pzstd": {
        "a.json.zst": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + stored(DOCUMENT, ".zst")
    },
}


@pytest.mark.parametrize("name", SOUND)
def test_left_to_the_run(tmp_path, name):
    files = SOUND[name]
    split = "blank_lines" if name == "a long block" else "file"
    options = reading(Format(text_split=split, eos_id=EOS, vocab_size=40_000))
    listed = list_and_check(documents_in(written(tmp_path, files)), options)
    assert len(listed) == len(files)
    if name in list(SOUND)[-3:]:
        assert all(
            isinstance(Documents(file, options).read(), (str, bytes)) for file in listed
        )


def test_all_files_are_looked_at_once(tmp_path, monkeypatch):
    """And by a later start only if they have changed, as the run's folder says."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    written(corpus, {f"{i:03d}.json": DOCUMENT for i in range(100)})
    looks = []
    beginning = findings._beginning

    def look(file, *options):
        looks.append(file.name)
        return beginning(file, *options)

    monkeypatch.setattr(findings, "_beginning", look)
    options = StreamOptions(seq_len=8, run_folder=str(tmp_path))
    files = list_for_run(documents_in(corpus), options)
    assert sorted(looks) == [file.name for file in files]
    list_for_run(documents_in(corpus), options)
    monkeypatch.setattr(findings, "_looks", {})
    (corpus / "050.json").write_bytes(DOCUMENT * 2)
    list_for_run(documents_in(corpus), options)
    assert looks[100:] == ["050.json"]


@pytest.mark.parametrize("count", [5, 200])
def test_a_file_with_another_column(count, tmp_path, caplog):
    """Found before the first step, wherever the file is; below 1 % of the bytes, the
    run skips it.
    """
    for i in range(count):
        name = "body" if i == 1 else "text"
        (tmp_path / f"{i:03d}.parquet").write_bytes(parquet(**{name: ["7 7"] * 40}))
    if count == 200:
        files = list_and_check(documents_in(tmp_path), StreamOptions(seq_len=8))
        assert len(files) == 200
        assert 'has no column "text", only body (string)' in caplog.text
        assert "They are skipped" in caplog.text
        return
    with pytest.raises(ConfigError) as error:
        list_and_check(documents_in(tmp_path), StreamOptions(seq_len=8))
    for words in (
        "001.parquet: it has no column",
        "1 file of 5, 20.",
        "To go on without, set stream.left_out = ['001.parquet']",
    ):
        assert words in str(error.value)


def test_the_largest_bad_file_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "7 7"}\n')
    (tmp_path / "b.jsonl").write_text('{"note": "7 7"}\n' * 9)
    (tmp_path / "c.jsonl").write_text('{"text": "7 7"}\n' * 9)
    with pytest.raises(ConfigError) as error:
        list_and_check(documents_in(tmp_path), StreamOptions(seq_len=8))
    assert 'b.jsonl: document 0: no field "text", only note' in str(error.value)
    assert "2 files of 3" in str(error.value)
    assert "stream.left_out = ['b.jsonl', 'a.jsonl']" in str(error.value)


def test_bad_documents():
    for line, reason in (
        (b"[" * 100_000, "malformed JSON: maximum recursion"),
        (
            json.dumps(dict.fromkeys("abcdefghijkl")).encode(),
            "only a, b, c, d, e, f, g, h, i, j, k, l; set stream.",
        ),
        (
            json.dumps(dict.fromkeys("abcdefghijklm")).encode(),
            "i, j, k, l, …; set stream.text_field to the field of",
        ),
        (b'{"text": true}', 'field "text" is true or false, expected a text'),
        (
            b'{"text": {"a": "b"}}',
            'field "text" is an object, expected a text; the fields are text.a',
        ),
        (
            b"null",
            'no field "text", because the document is null; expected a JSON object',
        ),
        (b'"text"', "because the document is a text; expected a JSON object"),
        (b'{"text": "  "}', "empty text"),
        (b'{"text": "\xff\xfe"}', "invalid UTF-8: invalid start byte at byte 10"),
        (
            b'{"text": "ab\\ud800"}',
            "invalid Unicode: surrogates not allowed at character 2",
        ),
        ('{"text": "a"}'.encode("utf-16-be"), "malformed JSON: Expecting value"),
    ):
        with pytest.raises(BadDocument, match=re.escape(reason)):
            text_of(line)


LONG = b"".join(
    b'{"text": "%s"}\n' % np.random.default_rng(i).bytes(50).hex().encode()
    for i in range(99)
)
FLIPPED = b"\x00\x00\x00".join((stored(LONG, ".gz")[:20], stored(LONG, ".gz")[23:]))


def test_bad_files(tmp_path):
    for name, content, reason in (
        (
            "a.json",
            b'{"text": "' + b"x" * 200 + b'"}\n',
            "213 bytes, more than stream.max_document_mb allows",
        ),
        (
            "a.parquet",
            parquet(text=["é" * 51]),
            "102 bytes, more than stream.max_document_mb allows",
        ),
        (
            "a.parquet",
            parquet(text=pyarrow.array([None], pyarrow.string())),
            "text is null",
        ),
        (
            "a.txt",
            b"x" * 200,
            "more than 100 bytes, more than stream.max_document_mb allows: set stream.text_split",
        ),
        ("a.json", b"", "damaged: the file is empty"),
        ("a.json.gz", gzip.compress(DOCUMENT * 999, mtime=0)[:60], "damaged: EOFError"),
        ("a.json.gz", FLIPPED, "damaged: IsalError"),
        ("a.json.zst", stored(LONG, ".zst")[:600], "damaged: OSError"),
        ("a.parquet", parquet(text=["a"])[:-9], "damaged: "),
    ):
        (tmp_path / name).write_bytes(content)
        assert reason in records_of(tmp_path / name, 100)[-1], reason
    (tmp_path / "a.txt").write_bytes(b"")
    assert records_of(tmp_path / "a.txt") == [""]


TEXTS = [f"{i} " + np.random.default_rng(i).bytes(100).hex() for i in range(3010)]
SPOILED = {
    "junk": lambda frame: frame + b"junk" * 100,  # after a complete frame
    "zeros and junk": lambda frame: frame + b"\x00" * 5000 + b"junk",
    "second frame": lambda frame: frame + frame[: len(frame) // 2] + b"junk",
}


@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("spoil", SPOILED)
def test_documents_before_the_damage_are_used(tmp_path, suffix, spoil):
    """In zstd all of them, although pyarrow drops what the failing read has
    decompressed; in gzip all but the last 8 KiB.
    """
    content = write_texts(tmp_path / "whole.jsonl", TEXTS).read_bytes()
    path = tmp_path / f"a.jsonl.{suffix}"
    path.write_bytes(SPOILED[spoil](stored(content, path.name)))
    *found, end = records_of(path)
    least = 3010 - (8192 // 200 if suffix == "gz" else 0)
    assert found[:least] == content.splitlines(keepends=True)[:least]
    assert end.startswith("damaged: ")


def test_parquet_files_without_rows(tmp_path):
    """They take no part of the line: a slot that got one would find nothing in epoch
    after epoch.
    """
    for name in "abcd":
        write_texts(
            tmp_path / f"{name}.parquet",
            pyarrow.array(TEXTS[:40] if name == "c" else [], pyarrow.string()),
        )
    files = list_and_check(documents_in(tmp_path), StreamOptions())
    assert [file.density > 0 for file in files] == [False, False, True, False]
    for epoch in range(5):
        assignment = Assignment(files, one_share(4), seed=0)
        runs = [assignment.run(slot, epoch) for slot in range(4)]
        assert all(any(segment.file == 2 for segment in run.segments) for run in runs)
    (tmp_path / "c.parquet").unlink()
    with pytest.raises(
        ConfigError,
        match="a.parquet has no rows, and neither have the other files: name files with text",
    ):
        list_and_check(documents_in(tmp_path), StreamOptions())


def test_a_row_of_parquet_that_is_no_utf8(tmp_path):
    offsets = np.array([0, 1, 3, 4], "<i4")
    content = b"a\xff\xfeb"
    column = pyarrow.Array.from_buffers(
        pyarrow.string(), 3, [None, *map(pyarrow.py_buffer, (offsets, content))]
    )
    (tmp_path / "a.parquet").write_bytes(parquet(text=column))
    assert records_of(tmp_path / "a.parquet") == [
        "a",
        "invalid UTF-8: invalid start byte at byte 0",
        "b",
    ]


def test_another_column_that_no_look_has_found(tmp_path):
    """As of a file on the hub, which is not looked at."""
    for i in range(5):
        name = "body" if i == 1 else "text"
        (tmp_path / f"{i}.parquet").write_bytes(parquet(**{name: ["7 7"] * 40}))
    files = list_files("text", str(tmp_path))
    _, positions = batches(streams_of(files, 1, 1, on_bad_data="skip"), 90)
    assert positions[0, Field.SKIPPED_FILES] >= 1
    expected = r'1.parquet is damaged.* has no column "text", only body \(string\)'
    with pytest.raises(DataError, match=expected):
        batches(streams_of(files, 1, 1, on_bad_data="fail"), 60)


def test_validation_with_fewer_sequences_than_asked_for(sample, tmp_path):
    texts = [f"Some words, number {i}." for i in range(40)]
    tokenizer = load_tokenizer(sample / "tokenizer")
    write_texts(tmp_path / "validation.jsonl", texts)
    there = sum(len(tokenizer.encode(text)) + 1 for text in texts) // 17
    whole = 4 * (there // 4)
    options = (
        "--validation.enable",
        "--validation.dataset",
        "text_validation",
        "--training.seq_len",
        "16",
    )
    options += (
        "--validation.seq_len",
        "16",
        "--validation.local_batch_size",
        "2",
        "--validation.steps",
        "100",
    )
    job = config(sample, *options, "--validation.dataset_path", str(tmp_path))
    # A step takes two sequences on each of two ranks.
    for job.stream.validation_sequences, asked in ((0, 400), (whole + 4, whole + 4)):
        said = rf"sequences of 16 tokens \(seq_len\), expected {asked}: set stream.validation_sequences .* of 4 \("
        for rank in (0, 1):
            with pytest.raises(ConfigError, match=said):
                _ValidationSet(job, tokenizer, 2, rank)
    job.stream.validation_sequences = whole
    _ValidationSet(job, tokenizer, 2, 0)
    assert len(held_out_sequences(job, tokenizer, there)[0]) == there
    with pytest.raises(
        ConfigError,
        match=rf"{there} sequences .*, expected {there + 1}: set condensation.sequences",
    ):
        held_out_sequences(job, tokenizer, there + 1)


def test_commands_look_at_the_data(sample, tmp_path):
    written(tmp_path, {"a.json": b'{"body": "a"}\n'})
    job = config(
        sample, "--training.dataset", "text", "--training.dataset_path", str(tmp_path)
    )
    for look in (
        check_inputs,
        lambda job: listed_inputs(job, Problems(collect=True), []),
        lambda job: digest(job, 1, [(0, 1)]),
    ):
        with pytest.raises(
            ConfigError,
            match='a.json: document 0: no field "text", only body; set stream.text_field',
        ):
            look(job)


def test_token_ids_where_text_is_needed(tmp_path):
    written(tmp_path, {"validation.bin": ids_as(RANDOM), "plain.txt": b"plain"})
    with pytest.raises(
        ConfigError,
        match="validation.bin holds token ids, expected text: name a file of text",
    ):
        read_texts(None, str(tmp_path / "validation.bin"), 0)
    assert read_texts(None, str(tmp_path / "plain.txt"), 0) == ["plain"]
