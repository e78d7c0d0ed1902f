"""Formats beside JSON lines, Parquet and plain UTF-8 text: tables, Arrow, other
encodings, and names in upper case.
"""

import csv
import io
import json
import time

import numpy as np
import pyarrow
import pytest

from tests.streams import json_lines, read_all, records_of
from titan_disp.data.documents import Documents
from titan_disp.data.findings import check_content
from titan_disp.data.formats import (
    LOOKED_AT,
    BadDocument,
    Garbage,
    encoding_of,
    text_of,
)
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.options import Format, StreamOptions
from titan_disp.errors import ConfigError

TEXTS = ["one", 'two, "quoted"', "three\nlines\n", "naïve – ﬁne", "last"]
COLUMNS = {"url": list("abcde"), "text": TEXTS}
FRENCH = "Voilà l’été\xa0: « ça coûte cher », dit-elle. Œuvre d'un être aimé\xa0en\xa0mai.\n\nFin."


def table(delimiter):
    file = io.StringIO()
    rows = csv.writer(file, delimiter=delimiter)
    rows.writerow(COLUMNS)
    rows.writerows(zip(*COLUMNS.values(), strict=True))
    return file.getvalue().encode()


def arrow(write):
    file = io.BytesIO()
    content = pyarrow.table(COLUMNS)
    with write(file, content.schema) as writer:
        writer.write_table(content, max_chunksize=2)
    return file.getvalue()


def read(folder, **options):
    """The texts, or what is wrong with them, of the only file of a folder."""
    how = StreamOptions(max_document_bytes=1 << 16, format=Format(**options))
    (file,) = check_content(list_files("text", str(folder)), how, "training")
    return read_all(Documents(file, how))


WRITTEN = {
    "a.csv": table(","),
    "a.tsv": table("\t"),
    "b.CSV": b"\xef\xbb\xbf" + table(","),
    "a.arrow": arrow(pyarrow.ipc.new_stream),
    "b.arrow": arrow(pyarrow.ipc.new_file),
    "a.ndjson": json_lines(TEXTS),
    "a.JSONL": json_lines(TEXTS),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_documents_of_every_format(name, tmp_path):
    (tmp_path / name).write_bytes(WRITTEN[name])
    # which datasets writes beside its Arrow files
    (tmp_path / "dataset_info.json").write_text('{\n "description": ""\n}')
    (file,) = list_files("text", str(tmp_path))
    assert (file.name, file.url) == (name.lower(), str(tmp_path / name))
    assert [*map(text_of, read(tmp_path))] == TEXTS


def test_a_wrong_length_in_an_arrow_file_is_damage(tmp_path):
    """pyarrow would end the process."""
    ends = np.array([0, 3, 16], np.int32)  # of the first two texts
    wrong = np.array([0, 1 << 30, 16], np.int32)
    content = arrow(pyarrow.ipc.new_stream)
    assert content.count(ends.tobytes()) == 1
    (tmp_path / "a.arrow").write_bytes(content.replace(ends.tobytes(), wrong.tobytes()))
    (damage,) = read(tmp_path)
    assert damage.startswith("damaged: ArrowInvalid")


@pytest.mark.parametrize("name", ["a.bin", "a.BIN"])
def test_ids_may_begin_as_a_text_in_utf_16(name, tmp_path):
    """Any bytes may begin a file of ids, whatever the case of its suffix."""
    np.array([0xFEFF, 5, 2], np.uint16).tofile(tmp_path / name)
    (ids,) = read(tmp_path, eos_id=2, vocab_size=1 << 16)
    assert ids.tolist() == [0xFEFF, 5, 2]


def test_tables_beside_documents_are_about_them(tmp_path):
    for name, content in {"a.csv": table(","), "b.txt": b"b", "c.txt": b"c"}.items():
        (tmp_path / name).write_bytes(content)
    assert [file.name for file in list_files("text", str(tmp_path))] == [
        "b.txt",
        "c.txt",
    ]


def test_a_table_with_damaged_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"url,text\na,one\nbcd\nc,caf\xe9\nd,two\n")
    path = tmp_path / "a.csv"
    one, short, invalid, two = records_of(path)
    assert (one, two) == ("one", "two")
    # and not that each line is a document
    assert short.startswith("the row has too few columns; expected one for every")
    with pytest.raises(Garbage, match="invalid UTF-8: .* at character 3"):
        text_of(invalid)


def test_a_short_row_of_a_table_has_a_size(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'url,text\nabc\n""\n')
    file = DataFile(path.name, str(path), path.stat().st_size)
    documents = Documents(file, StreamOptions())
    assert [documents.read().size, documents.read().size] == [4, 1]


@pytest.mark.parametrize(
    ("name", "header", "advice"),
    [
        ("a.csv", "id;text", "separate the columns by commas"),
        ("a.csv", "id\ttext", "separate the columns by commas"),
        ("a.tsv", "id,text", "separate the columns by tabs"),
        ("a.csv", "id,body", "set stream.text_field"),
        ("a.csv", "body", "set stream.text_field"),
    ],
)
def test_other_separators_are_named(name, header, advice, tmp_path):
    (tmp_path / name).write_text(f"{header}\nsome words\n")
    with pytest.raises(ConfigError, match=advice):
        read(tmp_path)


def test_a_table_in_another_encoding_is_refused(tmp_path):
    rows = "".join(f"{i},ça et là {i}\n" for i in range(30))
    (tmp_path / "a.csv").write_bytes(f"url,text\n{rows}".encode("cp1252"))
    with pytest.raises(ConfigError, match="invalid UTF-8: .*expected UTF-8: convert"):
        read(tmp_path)


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("break_", [" ", "\n"])
@pytest.mark.parametrize("size", [70_000, 500_000])
def test_a_long_text_of_a_table_is_skipped_as_a_whole(quote, break_, size, tmp_path):
    if break_ == "\n" and not quote:
        return
    long = f"word{break_}" * (size // 5)
    (tmp_path / "a.csv").write_text(f"text\none\n{quote}{long}{quote}\ntwo\n")
    one, skipped, two = records_of(tmp_path / "a.csv", max_bytes=1 << 16)
    assert (one, two) == ("one", "two")
    assert "more than stream.max_document_mb allows" in skipped


@pytest.mark.parametrize("content", ["text\rone\rtwo\r", 'text\n"' + "a\n" * 300_000])
def test_what_is_no_csv_says_so(content, tmp_path):
    csv.field_size_limit(1 << 17)
    (tmp_path / "a.csv").write_text(content, newline="")
    (damage,) = records_of(tmp_path / "a.csv", max_bytes=1 << 16)
    assert damage.startswith("damaged: no row of a table can be read from line")
    assert "quotation mark" in damage


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "a"}]},
        {"text": ["a", "b"]},
        {"conversations": [{"from": "human", "value": "a"}]},
    ],
)
def test_what_is_no_single_text_gets_the_right_advice(record, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    with pytest.raises(ConfigError) as error:
        read(tmp_path)
    assert "join lists, and the messages of a chat" in str(error.value)
    assert "set stream.text_field" not in str(error.value)


ENCODED = {
    "utf-8": "",
    "utf-8-sig": "",
    "utf-16": "utf-16",
    "utf-16-le": "utf-16-le",
    "utf-16-be": "utf-16-be",
    # Its byte-order mark begins with that of UTF-16.
    "utf-32": "utf-32",
    "cp1252": "cp1252",
}


@pytest.mark.parametrize("encoding", ENCODED)
@pytest.mark.parametrize("split", ["file", "blank_lines"])
def test_western_encodings_are_converted(encoding, split, tmp_path):
    content = FRENCH.encode(encoding)
    assert encoding_of(content) == ENCODED[encoding]
    (tmp_path / "a.txt").write_bytes(content)
    expected = [FRENCH]
    if split == "blank_lines":
        expected = FRENCH.split("\n\n")
    assert read(tmp_path, text_split=split) == expected


@pytest.mark.parametrize("encoding", ["utf-16", "cp1252"])
def test_a_converted_text_takes_time_in_proportion_to_its_length(encoding, tmp_path):
    def seconds(lines):
        path = tmp_path / "a.txt"
        path.write_bytes(("Ça y est.\n\n" * lines).encode(encoding))
        file = DataFile(path.name, str(path), path.stat().st_size, encoding=encoding)
        how = StreamOptions(format=Format(text_split="blank_lines"))
        began = time.process_time()
        assert len(read_all(Documents(file, how))) == lines
        return time.process_time() - began

    assert seconds(160_000) < 20 * seconds(20_000)  # 8 times as many


def test_a_single_odd_sign_does_not_hide_the_encoding():
    text = "Elle vint à Orléans. " * 100 + "Voir l§a."
    assert encoding_of(text.encode("cp1252")) == "cp1252"


@pytest.mark.parametrize("encoding", ["utf-8", "cp1252"])
@pytest.mark.parametrize("ascii_size", [LOOKED_AT - 1, LOOKED_AT, 3 * LOOKED_AT + 1])
def test_the_first_accent_may_come_late(encoding, ascii_size, tmp_path):
    text = "a" * ascii_size + FRENCH
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    how = StreamOptions()
    (file,) = check_content(list_files("text", str(tmp_path)), how, "training")
    assert file.encoding == ENCODED[encoding]
    assert read_all(Documents(file, how)) == [text]


def test_what_cannot_be_told_is_not_converted():
    for text, encoding in (
        ("Zażółć gęślą jaźń, śpiący żółw", "iso8859-2"),
        ("Příliš žluťoučký kůň úpěl ďábelské ódy", "cp1250"),
        ("Съешь же ещё этих мягких булок", "cp1251"),
        ("いろはにほへと ちりぬるを", "shift-jis"),
    ):
        assert encoding_of(text.encode(encoding)) == ""
    assert encoding_of(bytes(range(256))) == encoding_of(bytes(999)) == ""
    assert encoding_of(b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\x00") == ""
    # UTF-8 that is cut within a letter
    assert encoding_of("été".encode()[:-1]) == ""


def test_nulls_are_like_empty_texts(tmp_path):
    lines = '{"meta": {"text": null}}\n{"meta.text": null}\n{"meta": {"text": ""}}\n'
    (tmp_path / "a.jsonl").write_text(lines)
    reasons = set()
    for record in read(tmp_path, text_field="meta.text"):
        with pytest.raises(BadDocument) as error:
            text_of(record, "meta.text")
        reasons.add(type(error.value).__name__)
    assert reasons == {"Empty"}
