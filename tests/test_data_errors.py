"""Bad inputs, one by one: each message says what was found, what was expected, and what to change.

A case with three parts is refused before training, by the checks that every ``titan-disp`` command runs. The messages
of a run that continues (about skipped documents and damaged files) say what was found.
"""

import bz2
import gzip
import io
import json
import os
import zipfile
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow
import pytest

from tests.streams import batches, ids_as, llm_c, parquet, records_of, stored, streams_of, write_texts
from titan_disp.cluster.plan import missing_inputs
from titan_disp.config.checks import check_inputs
from titan_disp.config.load import load_config
from titan_disp.data import sources
from titan_disp.data.documents import Documents
from titan_disp.data.files import check_data
from titan_disp.data.formats import BadDocument, text_of
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.sources import DataSet, list_and_check
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import _ValidationSet, held_out_sequences
from titan_disp.errors import ConfigError
from titan_disp.lab.digest import digest
from titan_disp.lab.inspection.texts import read_texts

EOS, VOCABULARY = 7, 5000
DOCUMENT = b'{"text": "a document", "url": "u"}\n'
HTML = b"<!DOCTYPE html>\n<html><body>503</body></html>\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1234\n"
PRETTY = json.dumps([{"url": "u", "text": "a"}, {"url": "u", "text": "b"}], indent=1).encode()
JSON_NAMES = ".json.gz, .jsonl.gz, .json, .jsonl, .json.zst, .jsonl.zst"
EXPECTED_NAMES = f"{JSON_NAMES}, .parquet, .txt, .txt.gz, .txt.zst, .npy, .bin"


def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("data.pkl", b"x")
    return file.getvalue()


@dataclass
class Case:
    name: str
    files: Any  # of the folder, or a function that makes it
    parts: tuple[str, ...]  # what was found, what was expected, what to change
    path: str | None = ""  # below the folder; None for no dataset_path
    dataset: str = "text"
    options: dict[str, Any] = field(default_factory=dict)  # of Format


RANDOM = np.random.default_rng(0).integers(10, VOCABULARY, 400)
LARGE = np.random.default_rng(0).integers(10, 60_000, 400)
FIELD = "set stream.text_field to the field of the text"
A_LINE = "expected one document per line"

# fmt: off
CASES = [
    # What the config names.
    Case("no such data set", {}, ("'pile'", "expected c4 or c4_validation", "text or text_validation"), dataset="pile"),
    Case("no path", {}, ("training.dataset is 'text'", "folder, file or glob", "set training.dataset_path"), None),
    Case("no such path", {}, ("/x', which does not exist", "expected a folder, file or glob", "titan-disp sample"), "x"),
    Case("empty folder", {}, ("no train data, because it has no files", "such as *.json.gz", "titan-disp sample-data")),
    Case("other formats only", {"a.csv": b"x", "b.jsonl.bz2": b"x"}, ("1 *.bz2, 1 *.csv", "expected", EXPECTED_NAMES[:9])),
    Case("other suffix", {"a.csv": b"x"}, ("a.csv'", f"ends in {EXPECTED_NAMES}", "convert or rename"), "a.csv"),
    Case("upper case", {"a.JSONL": DOCUMENT}, ("a.JSONL'", f"ends in {EXPECTED_NAMES}", "convert or rename"), "a.JSONL"),
    Case("glob of nothing", {}, ("matches no file;", "expected files named *.json.gz", "name others"), "*.jsonl"),
    Case("glob of others", {"a.csv": b"x"}, ("no file, but 1 *.csv", "files named *.json.gz", "or convert them"), "*"),
    Case("no file", lambda folder: os.mkfifo(folder / "a.jsonl"),
         ("is not a regular file", "expected files of documents", "Name the files, or remove it")),
    Case("no validation split", {"train.jsonl": DOCUMENT},
         ("holds no validation data, but 1 *.jsonl", "with validation in their names", "expected files such as"),
         dataset="text_validation"),
    Case("texts and token ids", {"a.jsonl": DOCUMENT, "b.bin": ids_as(RANDOM)},
         ("1 file of token ids, such as", "expected only one of the two", "*.jsonl'")),
    # What a file is.
    Case("gzip as JSON", {"a.json": gzip.compress(DOCUMENT)}, ("gzip-compressed", "which its name does not say", "*.gz")),
    Case("zstd as JSON", {"a.jsonl": stored(DOCUMENT, ".zst")}, ("zstd-compressed", "its name does not say", "name it *.zst")),
    Case("bzip2 as JSON", {"a.json": bz2.compress(DOCUMENT)}, ("bzip2-compressed", "its name does not say", "unpack it")),
    Case("Parquet as JSON", {"a.json": parquet(text=["a"])}, ("it is Parquet", "its name does not say", "*.parquet")),
    Case("JSON as gzip", {"a.json.gz": DOCUMENT}, ("it is not gz", "though its name says so", "rename it to what it is")),
    Case("JSON as Parquet", {"a.parquet": DOCUMENT}, ("it is not parquet", "its name says so", "rename it to what it is")),
    Case("text as gzip", {"a.txt.gz": b"x" * 99}, ("it is not gz", "though its name says so", "rename it to what it is")),
    Case("HTML as JSON", {"a.json": HTML}, ("it is an HTML page", "instead of a file", "download the file again")),
    Case("HTML as Parquet", {"a.parquet": HTML}, ("an HTML page", "instead of a file", "download the file again")),
    Case("LFS pointer", {"a.json.gz": POINTER}, ("a Git LFS pointer", "instead of the data", "git lfs pull")),
    Case("LFS pointer of ids", {"a.bin": POINTER}, ("a Git LFS pointer", "instead of the data", "git lfs pull")),
    Case("weights as ids", {"a.bin": archive()}, ("it is a zip archive", "torch.save", "unpack or convert it")),
    Case("UTF-16", {"a.json": DOCUMENT.decode().encode("utf-16")}, ("UTF-16 text", "its name does not say", "iconv")),
    # What JSON says.
    Case("array", {"a.json": b'[{"text": "a"}, {"text": "b"}]\n'}, ("it is a JSON array", A_LINE, "jq -c '.[]' FILE")),
    Case("array over lines", {"a.json": PRETTY}, ("document 0: malformed JSON", "beginning of a JSON array", "jq -c '.[]'")),
    Case("object over lines", {"a.json": b'{\n "text": "a"\n}\n'}, ("JSON over several lines", A_LINE, "`jq -c . FILE >")),
    Case("CSV as JSON", {"a.json": b"text,url\na,b\n"}, ("document 0: malformed JSON", "Expecting value", A_LINE)),
    Case("numbers", {"a.json": b"1\n2\n"}, ("because it is a number", "expected a JSON object", 'no field "text"')),
    Case("other field", {"a.json": b'{"url": "u", "content": "a", "meta": {"lang": "en"}}\n'},
         ('no field "text"', "only url, content, meta.lang", FIELD)),
    Case("no fields", {"a.json": b"{}\n{}\n"}, ('no field "text"', "only an empty object", FIELD)),
    Case("a number as text", {"a.json": b'{"text": 3, "url": "u"}\n'},
         ('"text" is a number', "expected a text; the fields are text, url", FIELD)),
    Case("a list as text", {"a.json": b'{"text": ["a"]}\n'}, ('"text" is an array', "expected a text", FIELD)),
    Case("no such nested field", {"a.json": b'{"meta": {"text": "a"}}\n'},
         ('no field "meta.body"', "only meta.text", FIELD), options={"text_field": "meta.body"}),
    Case("nothing nested", {"a.json": b'{"meta": "a"}\n'}, ('no field "meta.body"', "only meta;", FIELD),
         options={"text_field": "meta.body"}),
    # What Parquet says.
    Case("no such column", {"a.parquet": parquet(id=[1], body=["a"])},
         ('no column "text"', "only id (int64), body (string)", "set stream.text_field")),
    Case("a column of numbers", {"a.parquet": parquet(text=[1, 2])},
         ('column "text" is int64', "expected string", "set stream.text_field")),
    Case("a column of bytes", {"a.parquet": parquet(text=[b"a"])}, ("is binary", "expected string", "write it as a string")),
    Case("no such nested column", {"a.parquet": parquet(meta=[{"n": 1, "text": "a"}])},
         ('no column "meta.body"', "only meta.n (int64), meta.text (string)", "set stream.text_field"),
         options={"text_field": "meta.body"}),
    # What text says.
    Case("a long text", {"a.txt": b"x" * 70_000},
         ("one document of 70,000 bytes", "stream.max_document_mb", 'set stream.text_split = "blank_lines"')),
    Case("no UTF-8", {"a.txt": b"caf\xe9"},
         ("document 0: invalid UTF-8: unexpected end of data at byte 3", "; expected UTF-8: ", "convert it (iconv), or leave")),
    # What token ids say.
    Case("Megatron-LM", {"a.bin": ids_as(RANDOM), "a.idx": b"MMIDIDX"},
         ("is Megatron-LM's, because its index 'a.idx'", "expected ids in which EOS ends", "write such ids")),
    Case("uint32 as uint16", {"a.bin": ids_as(RANDOM, dtype="<u4")},
         ("every second id is at most 0", "as in uint32", 'set stream.token_dtype = "uint32"')),
    Case("uint16 as uint32", {"a.bin": ids_as(RANDOM)},
         ("is read as uint32 and holds the id", "the tokenizer has 5,000 ids", 'set stream.token_dtype = "uint16"'),
         options={"token_dtype": "uint32"}),
    Case("another tokenizer", {"a.npy": ids_as(LARGE, "numpy")},
         ("uint16 and holds the id 59,", "the tokenizer has 5,000 ids: use", "the tokenizer that wrote them")),
    Case("another tokenizer, or another type", {"a.bin": ids_as(LARGE)},
         ("the tokenizer has 5,000 ids: set", 'token_dtype = "uint32" if they are of that type, or', "use the tokenizer that")),
    Case("EOS of no uint16", {"a.bin": ids_as(RANDOM)},
         ("is read as uint16", "EOS, 70000, does not fit in this type", 'set stream.token_dtype = "uint32"'),
         options={"eos_id": 70_000, "vocab_size": 80_000}),
    Case("int64", {"a.npy": ids_as(RANDOM, "numpy", "<i8")}, ("holds int64", "uint16 or uint32", "numpy.save(FILE")),
    Case("big-endian", {"a.npy": ids_as(RANDOM, "numpy", ">u2")}, ("(byte order '>')", "little-endian", "numpy.save(FILE")),
    Case("rows", {"a.npy": ids_as(RANDOM.reshape(4, -1), "numpy")}, ("(4, 100)", "one dimension", "reshape(-1)")),
    Case("no .npy header", {"a.npy": b"\x93NUMPY\x09\x00" + ids_as(RANDOM)},
         ("header has version 9.0", "expected 1.0 or 2.0", "numpy.save")),
    Case("llm.c's evaluation", {"a.bin": llm_c(20240522, 1, 3, ids_as([1, 2, 3]))},
         ("magic 20240522 and version 1", "expected a file of training data", "Leave it out")),
    Case("llm.c of another version", {"a.bin": llm_c(20240520, 2, 3, ids_as([1, 2, 3]))},
         ("magic 20240520 and version 2", "magic 20240520 and version 1", "or write it as such")),
]
# fmt: on


def written(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def reading(how):
    return StreamOptions(seq_len=8, max_document_bytes=1 << 16, format=how)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_before_training(tmp_path, case):
    case.files(tmp_path) if callable(case.files) else written(tmp_path, case.files)
    options = reading(Format(**({"eos_id": EOS, "vocab_size": VOCABULARY} | case.options)))
    path = None if case.path is None else str(tmp_path / case.path)
    with pytest.raises(ConfigError) as error:
        list_and_check([DataSet(case.dataset, path, "training")], options)
    message = str(error.value)
    for part in (*case.parts, str(tmp_path) if case.files else ""):
        assert part in message, (part, message)
    assert message.count("; expected") <= 1
    assert len(message) < 700


def documents_in(folder):
    return [DataSet("text", str(folder), "training")]


SOUND = [
    ("one bad document", {"a.json": b"garbage\n" + DOCUMENT}),
    ("a few bad documents, then none", {"a.json": b'{"url": 1}\n' * 19 + DOCUMENT}),
    ("empty ones first", {"a.json": b'{"text": " "}\n' * 30}),
    ("an empty one among bad ones", {"a.json": b"garbage\n" * 3 + b'{"text": " "}\n' + b"garbage\n" * 30}),
    ("cut off", {"a.json.gz": gzip.compress(DOCUMENT * 10_000)[:60]}),
    ("an empty file", {"a.json": DOCUMENT, "b.json": b"", "c.json": DOCUMENT}),
    ("an odd number of bytes", {"a.bin": ids_as(RANDOM) + b"\x00"}),
    ("HTML as text", {"a.txt": HTML}),
    ("a long block", {"a.txt": b"x" * 70_000}),
    ("the longest text that is allowed", {"a.txt": b"x" * (1 << 16)}),
    ("ids that begin as gzip", {"a.bin": b"\x1f\x8b\x08\x00" + ids_as(RANDOM)}),
    ("a byte-order mark", {"a.json": b"\xef\xbb\xbf" + DOCUMENT}),
    ("texts that begin as bzip2 and Parquet", {"a.txt": b"BZh4 is a name", "b.txt": b"PAR1 of 3"}),
    ("zstd by pzstd", {"a.json.zst": b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + stored(DOCUMENT, ".zst")}),
]


@pytest.mark.parametrize(("name", "files"), SOUND, ids=[name for name, _ in SOUND])
def test_left_to_the_run(tmp_path, name, files):
    split = "blank_lines" if name == "a long block" else "file"
    options = reading(Format(text_split=split, eos_id=EOS, vocab_size=40_000))
    listed = list_and_check(documents_in(written(tmp_path, files)), options)
    assert len(listed) == len(files)
    if name in ("texts that begin as bzip2 and Parquet", "zstd by pzstd"):
        assert all(isinstance(Documents(file, options).read(), (str, bytes)) for file in listed)


def test_few_files_are_looked_at(tmp_path, monkeypatch):
    written(tmp_path, {f"{i:03d}.json": DOCUMENT for i in range(100)})
    looked = []
    monkeypatch.setattr(sources, "_cause", lambda file, *_: looked.append(file.name))
    files = list_and_check(documents_in(tmp_path), StreamOptions(seq_len=8))
    assert looked == ["000.json", "050.json", "099.json"]
    hub = [replace(file, url=f"hf://datasets/a/b@c/{file.name}") for file in files]
    sources.check_content(hub, StreamOptions(seq_len=8), "training")
    assert len(looked) == 3


# Documents that a run skips, and what its log says.
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"[" * 100_000, "malformed JSON: maximum recursion"),
        (b'{"text": null}', 'no field "text", only text'),
        (json.dumps(dict.fromkeys("abcdefghijkl")).encode(), "only a, b, c, d, e, f, g, h, i, j, k, l; set stream."),
        (json.dumps(dict.fromkeys("abcdefghijklm")).encode(), "i, j, k, l, …; set stream.text_field to the field of"),
        (b'{"text": true}', 'field "text" is true or false, expected a text'),
        (b'{"text": {"a": "b"}}', 'field "text" is an object, expected a text; the fields are text.a'),
        (b"null", 'no field "text", because it is null; expected a JSON object'),
        (b'"text"', "because it is a text; expected a JSON object"),
        (b'{"text": "  "}', "empty text"),
        (b'{"text": "\xff\xfe"}', "invalid UTF-8: invalid start byte at byte 10"),
        (b'{"text": "ab\\ud800"}', "invalid Unicode: surrogates not allowed at character 2"),
        ('{"text": "a"}'.encode("utf-16-be"), "malformed JSON: Expecting value"),
        (b"\x00" * 4096 + DOCUMENT, "malformed JSON: Expecting value: line 1 column 1"),
    ],
)
def test_bad_documents(line, reason):
    with pytest.raises(BadDocument) as error:
        text_of(line)
    assert reason in str(error.value)


LONG = b"".join(b'{"text": "%s"}\n' % np.random.default_rng(i).bytes(50).hex().encode() for i in range(99))
FLIPPED = b"\x00\x00\x00".join((stored(LONG, ".gz")[:20], stored(LONG, ".gz")[23:]))


# fmt: off
@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.json", b'{"text": "' + b"x" * 200 + b'"}\n', "213 bytes, more than stream.max_document_mb allows"),
        ("a.parquet", parquet(text=["x" * 200]), "200 bytes, more than stream.max_document_mb allows"),
        ("a.parquet", parquet(text=["é" * 51]), "102 bytes, more than stream.max_document_mb allows"),
        ("a.parquet", parquet(text=pyarrow.array([None], pyarrow.string())), "text is null"),
        ("a.txt", b"x" * 200, 'more than 100 bytes, more than stream.max_document_mb allows: set stream.text_split = "bl'),
        ("a.json", b"", "damaged: the file is empty"),
        ("a.json.gz", gzip.compress(DOCUMENT * 999, mtime=0)[:60], "damaged: EOFError"),
        ("a.json.gz", FLIPPED, "damaged: IsalError"),
        ("a.json.zst", stored(LONG, ".zst")[:600], "damaged: OSError"),
        ("a.json.gz", POINTER, "damaged: it is a Git LFS pointer"),
        ("a.json.gz", DOCUMENT, "damaged: it is not gz, though its name says so"),
        ("a.json", HTML, "damaged: it is an HTML page"),
        ("a.parquet", parquet(text=["a"])[:-9], "damaged: "),
    ],
)
# fmt: on
def test_bad_files(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    assert reason in records_of(tmp_path / name, 100, eos_id=EOS, vocab_size=VOCABULARY)[-1]


def test_a_row_of_parquet_that_is_no_utf8(tmp_path):
    offsets, content = np.array([0, 1, 3, 4], "<i4"), b"a\xff\xfeb"
    column = pyarrow.Array.from_buffers(pyarrow.string(), 3, [None, *map(pyarrow.py_buffer, (offsets, content))])
    (tmp_path / "a.parquet").write_bytes(parquet(text=column))
    assert records_of(tmp_path / "a.parquet") == ["a", "invalid UTF-8: invalid start byte at byte 0", "b"]


def test_a_wrong_column_stops_the_run_at_once(tmp_path):
    """Even if only one file lacks it and was not checked: the file is sound, so that skipping it would lose data."""
    for i in range(5):
        (tmp_path / f"{i}.parquet").write_bytes(parquet(**{"body" if i == 1 else "text": ["7 7"] * 40}))
    files = list_and_check(documents_in(tmp_path), StreamOptions(seq_len=8))
    expected = r'1.parquet has no column "text", only body \(string\): set stream.text_field'
    with pytest.raises(ConfigError, match=expected):
        batches(streams_of(files, 1, 1, on_bad_data="skip"), 60)


def test_validation_with_fewer_sequences_than_asked_for(sample, tmp_path):
    texts, tokenizer = [f"A sentence of some words, number {i}." for i in range(30)], load_tokenizer(sample / "tokenizer")
    write_texts(tmp_path / "validation.jsonl", texts)
    there = sum(len(tokenizer.encode(text)) + 1 for text in texts) // 17
    whole = 4 * (there // 4)
    job = load_config(["--model.hf_assets_path", f"{sample}/tokenizer", "--training.seq_len", "16"])
    v = job.validation
    v.enable, v.dataset, v.dataset_path, v.seq_len, v.local_batch_size = True, "text_validation", str(tmp_path), 16, 2
    v.steps = 100  # each takes two sequences on two ranks
    for job.stream.validation_sequences, asked in ((0, 400), (whole + 4, whole + 4)):
        said = rf"holds {there} sequences of 16 tokens, expected {asked}: set stream.validation_sequences .* of 4 \("
        for rank in (0, 1):
            with pytest.raises(ConfigError, match=said):
                _ValidationSet(job, tokenizer, 2, rank)
    for job.stream.validation_sequences in (4, whole):  # using all of them is no error
        _ValidationSet(job, tokenizer, 2, 0)
    assert len(held_out_sequences(job, tokenizer, there)[0]) == there
    with pytest.raises(ConfigError, match=rf"{there} sequences .*, expected {there + 1}: set condensation.sequences"):
        held_out_sequences(job, tokenizer, there + 1)


def test_commands_look_at_the_data(sample, tmp_path):
    written(tmp_path, {"a.json": b'{"body": "a"}\n'})
    argv = ["--training.dataset", "text", "--training.dataset_path", str(tmp_path), "--model.flavor", "nano"]
    job = load_config(["--model.name", "qwen3_disp", "--model.hf_assets_path", f"{sample}/tokenizer", *argv])
    assert len(check_data("text", str(tmp_path))) == 1
    for look in (check_inputs, lambda job: missing_inputs(job, strict=False), lambda job: digest(job, 1, [(0, 1)])):
        with pytest.raises(ConfigError, match='a.json: document 0: no field "text", only body; set stream.text_field'):
            look(job)


def test_token_ids_where_text_is_needed(tmp_path):
    written(tmp_path, {"validation.bin": ids_as(RANDOM), "plain.txt": b"plain"})
    with pytest.raises(ConfigError, match="validation.bin holds token ids, expected text: name a file of text"):
        read_texts(None, str(tmp_path / "validation.bin"), 0)
    assert read_texts(None, str(tmp_path / "plain.txt"), 0) == ["plain"]
