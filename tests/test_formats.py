"""The formats of files: JSON lines, Parquet, plain text, token ids.

Each is compared with a plain reading of the same bytes.
"""

import codecs
import io
import json
import tracemalloc

import numpy as np
import pyarrow
import pyarrow.json
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.streams import (
    VALIDATION_FILE,
    config,
    ids_as,
    parquet,
    records_of,
    stored,
    texts_of,
)
from titan_disp.data import formats, token_ids
from titan_disp.data.documents import Documents
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.loader import open_stream
from titan_disp.data.options import Format, StreamOptions, stream_options
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.data.validation import first_sequences
from titan_disp.errors import DataError

EOS = 7
VOCABULARY = 5000


class TestTextField:
    def test_of_json(self, tmp_path):
        path = tmp_path / "a.jsonl"
        path.write_text(
            json.dumps({"body": "a", "meta": {"lang": {"text": "b"}}, "x.y": "c"})
            + "\n"
        )
        assert [
            texts_of(path, field) for field in ("body", "meta.lang.text", "x.y")
        ] == [["a"], ["b"], ["c"]]

    def test_of_parquet(self, tmp_path):
        """A field whose own name contains the dot comes first, wherever it is.

        A struct that is null has no text.
        """
        column = [f"b {i}" for i in range(700)]
        coded = [f"c {i % 5}" for i in range(700)]
        columns = {
            "meta": pyarrow.array(
                [
                    {"n": i, "lang": {"text": text}, "x": "in it"}
                    for i, text in enumerate(column)
                ]
            ),
            "coded": pyarrow.array(coded).dictionary_encode(),
            "large": pyarrow.array(column, pyarrow.large_string()),
            "view": pyarrow.array(column, pyarrow.string_view()),
            "x.y": column,
            "meta.x": coded,
        }
        path = tmp_path / "a.parquet"
        path.write_bytes(parquet(300, **columns))
        for field in ("meta.lang.text", "large", "view", "x.y"):
            assert texts_of(path, field) == column
        for field in ("coded", "meta.x"):
            assert texts_of(path, field, start=650) == coded[650:]
        path.write_bytes(parquet(meta=pyarrow.array([{"text": "in it"}, None])))
        assert records_of(path, text_field="meta.text") == ["in it", "text is null"]

    def test_options_of_a_config(self, sample):
        job = config(
            sample, "--stream.retry_seconds", "60", "--comm.train_timeout_seconds", "50"
        )
        # a rank that tries for longer looks like one that hangs
        assert stream_options(job).retry_seconds == 30
        job.stream.text_field = "body"
        job.stream.text_split = "blank_lines"
        job.stream.token_dtype = "uint32"
        tokenizer = load_tokenizer(sample / "tokenizer")
        assert stream_options(job, tokenizer=tokenizer).format == Format(
            "body", "blank_lines", "uint32", 1, 2048
        )


TEXT = "\n  \none\n two \n\n\nthree\r\nfour\r\n\r\n\t\r\nfive é\n \nsix"


@pytest.mark.parametrize(("length", "count"), [(8000, 3000), (400_000, 60)])
def test_an_open_parquet_file_holds_little_of_it(tmp_path, length, count):
    text = np.random.default_rng(0).bytes(length * 6).hex()
    path = tmp_path / "a.parquet"
    table = pyarrow.table(
        {"text": [f"{i} {text[i % 10 * length :][:length]}" for i in range(count)]}
    )
    pyarrow.parquet.write_table(
        table, path, compression="none", use_dictionary=False, write_batch_size=4
    )
    del table
    tracemalloc.start()
    before = pyarrow.total_allocated_bytes()
    held = 0
    documents = Documents(
        DataFile(path.name, str(path), path.stat().st_size), StreamOptions()
    )
    for number in range(count):
        assert documents.read().startswith(f"{number} ")
        held = max(held, pyarrow.total_allocated_bytes() - before)
        assert (
            number or documents.bytes_read < 8 << 20 < 24_000_000 < path.stat().st_size
        )
    # What Python's file has handed to pyarrow
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (held < 12 << 20, peak < 8 << 20) == (True, True)


class TestPlainText:
    @pytest.mark.parametrize("suffix", ["txt", "txt.gz", "txt.zst"])
    @pytest.mark.parametrize("end", ["", "\n", "\r\n\r\n"])
    @pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
    def test_a_file_or_its_blocks(self, tmp_path, suffix, end, mark):
        path = tmp_path / f"a.{suffix}"
        path.write_bytes(stored(mark + (TEXT + end).encode(), suffix))
        assert texts_of(path) == [TEXT + end]
        blocks = ["one\n two ", "three\r\nfour", "five é", "six"]
        for start in range(5):
            assert (
                texts_of(path, text_split="blank_lines", start=start) == blocks[start:]
            )

    def test_a_longer_one_is_passed_over_and_does_not_fill_memory(self, tmp_path):
        for name, split, first, last, end in (
            ("a.txt", "file", b"", b"", b"\n"),
            ("a.txt", "blank_lines", b"one\n\n", b"\ntwo", b"\n"),
            ("a.txt", "blank_lines", b"one\n\n", b"\n\ntwo", b"x"),
            ("a.json", "file", b'{"text": "one"}\n', b'\n{"text": "two"}', b"x"),
        ):
            (tmp_path / name).write_bytes(first + (b"x" * 999 + end) * 20_000 + last)
            tracemalloc.start()
            found = records_of(tmp_path / name, 1 << 20, text_split=split)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 8 << 20
            if first:
                assert [formats.text_of(found.pop(i)) for i in (0, -1)] == [
                    "one",
                    "two",
                ]
                assert found[0].startswith("20,000,00")
            assert ["more than stream.max_document_mb" in said for said in found] == [
                True
            ]

    @pytest.mark.parametrize("suffix", ["json", "jsonl.gz"])
    def test_blank_lines_of_json_lines_are_no_documents(self, tmp_path, suffix):
        content = b'\n \r\n{"text": "a"}\r\n\r\n{"text": "b"}\n' + b"\n" * 20
        (tmp_path / f"a.{suffix}").write_bytes(stored(content, suffix))
        assert texts_of(tmp_path / f"a.{suffix}") == ["a", "b"]
        assert texts_of(tmp_path / f"a.{suffix}", start=1) == ["b"]


def documents_by_hand(ids, eos, longest):
    found = []
    run = []
    for i in ids:
        if len(run) == longest:
            found.append(run)
            run = []
            if i == eos:
                continue
        run.append(i)
        if i == eos:
            if len(run) > 1:
                found.append(run)
            run = []
    return found + ([run] if run else [])


def ids_of(path, **options):
    return [
        r if isinstance(r, str) else r.tolist() for r in records_of(path, **options)
    ]


class TestTokenIds:
    @pytest.mark.parametrize("dtype", ["<u2", "<u4"])
    @pytest.mark.parametrize("file", ["raw.bin", "raw.npy", "numpy.npy", "llm.c.bin"])
    def test_layouts(self, tmp_path, file, dtype):
        """A header takes precedence over stream.token_dtype."""
        ids = np.random.default_rng(0).integers(10, VOCABULARY, 3000)
        ids[::17] = EOS
        path = tmp_path / file
        layout = file[:-4]
        path.write_bytes(ids_as(ids, layout, dtype))
        expected = documents_by_hand(ids.tolist(), EOS, 1 << 16)
        said = "uint16" if (dtype == "<u2") == (layout == "raw") else "uint32"
        for start in (0, 1, 77, len(expected)):
            assert (
                ids_of(
                    path,
                    start=start,
                    token_dtype=said,
                    eos_id=EOS,
                    vocab_size=VOCABULARY,
                )
                == expected[start:]
            )

    @settings(max_examples=200, deadline=None)
    @given(
        ids=st.lists(
            st.sampled_from([EOS, EOS, 11, 12, 13, 14]), min_size=1, max_size=70
        ),
        block=st.sampled_from([1, 2, 3, 7, 64, 1 << 15]),
        longest=st.sampled_from([2, 3, 5, 1 << 16]),
    )
    def test_runs_over_blocks(self, ids, block, longest):
        content = ids_as(ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(token_ids, "_BLOCK", block)
            patch.setattr(token_ids, "LONGEST", longest)
            file = DataFile("a.bin", "a.bin", len(content))
            how = Format(eos_id=EOS, vocab_size=20)
            layout = token_ids.layout_of(io.BytesIO(content), file, how)
            found = [
                record.tolist()
                for _, record in token_ids.located(io.BytesIO(content), layout)
            ]
        assert found == documents_by_hand(ids, EOS, longest)

    def test_a_long_run_is_cut(self, tmp_path):
        (tmp_path / "a.bin").write_bytes(ids_as([11] * 150_000 + [EOS] + [12, EOS]))
        records = records_of(tmp_path / "a.bin", eos_id=EOS, vocab_size=20)
        assert [len(record) for record in records] == [
            65_536,
            65_536,
            150_001 - 2 * 65_536,
            2,
        ]
        assert all(record.base is None for record in records), (
            "a document holds its block in memory"
        )

    @pytest.mark.parametrize("eos", [0, EOS])
    def test_zeros_are_ids_until_there_are_very_many(self, tmp_path, eos):
        """Padding is no damage. In text, a block of zeros was never written."""
        document = [11, 12, eos]
        documents = [document] * 300
        padding = [0] * 32_768
        ids = [i for one in documents for i in one]
        path = tmp_path / "a.bin"
        path.write_bytes(ids_as([*ids, *padding, *ids]))
        found = ids_of(path, eos_id=eos, vocab_size=20)
        if eos == 0:
            assert found == documents * 2
        else:
            padded = [*padding, *document]
            assert found == [*documents, padded, *documents[1:]]
        path.write_bytes(ids_as([*ids, *padding * 4, *ids]))
        found = ids_of(path, eos_id=eos, vocab_size=20)
        assert found[:300] == documents
        assert found[-1] == (
            "damaged: 65,536 ids 0 in a row, as a disk that was full or failed leaves "
            "them: copy the file again, or, if they are padding, write it without them"
        )

    def test_damaged_ends(self, tmp_path):
        header = "its header says 60 ids of uint16, but the file holds"
        for layout, size, more, documents, rest, damage in (
            ("raw", 119, b"", 19, [[11, 12]], "its 119 bytes are not a multiple of 2"),
            ("numpy", 128 + 50, b"", 8, [[11]], f"{header} 25.0"),
            ("llm.c", 1024 + 50, b"", 8, [[11]], f"{header} 25.0"),
            ("llm.c", 1024 + 120, b"\x0b\x00", 20, [], f"{header} 61.0"),
        ):
            path = tmp_path / ("a.npy" if layout == "numpy" else "a.bin")
            path.write_bytes(ids_as([11, 12, EOS] * 20, layout)[:size] + more)
            *found, last = ids_of(path, eos_id=EOS, vocab_size=20)
            assert found == [[11, 12, EOS]] * documents + rest
            assert last.startswith(f"damaged: {damage}")

    def test_an_id_beyond_the_vocabulary(self, tmp_path):
        """In the first block, it stops the run; later, it is a bad document, because a
        flipped bit may be the cause.
        """
        ids = np.tile([11, 12, EOS], 20_000)
        how = {"eos_id": EOS, "vocab_size": 20}
        path = tmp_path / "a.bin"
        ids[50_001] = 20
        path.write_bytes(ids_as(ids))
        found = ids_of(path, **how)
        assert found.index("id 20, but the tokenizer has 20 ids") == 50_001 // 3
        assert found.count([11, 12, EOS]) == 19_999
        ids[1] = 20
        path.write_bytes(ids_as(ids))
        with pytest.raises(
            DataError,
            match="is read as uint16 and holds the id 20, but the tokenizer has 20 ids",
        ):
            records_of(path, **how)

    def test_halves_of_uint32(self, tmp_path):
        """Ids below 2¹⁶ · n have upper halves below n: these are every second id, where
        uint32 is read as uint16.
        """
        path = tmp_path / "a.bin"
        for vocab_size, most in ((65_536, 0), (65_537, 1), (200_000, 3)):
            # Fewer than 32 are too few to judge by
            for high, pairs in ((most, 31), (most + 1, 32)):
                path.write_bytes(ids_as([5000, high] * pairs))
                assert ids_of(path, eos_id=EOS, vocab_size=vocab_size) == [
                    [5000, high] * pairs
                ]
            path.write_bytes(ids_as([5000, most] * 32))
            with pytest.raises(
                DataError, match=f"every second id is at most {most}, as in uint32"
            ):
                records_of(path, eos_id=EOS, vocab_size=vocab_size)

    @pytest.mark.parametrize("fast", [False, True])
    def test_the_same_batches_as_of_the_text(
        self, sample, hf_tokenizer, tmp_path, fast
    ):
        if fast:
            pytest.importorskip("gigatoken")
        of_text = Tokenizer.from_file(f"{hf_tokenizer}/tokenizer.json")
        eos = of_text.token_to_id("<|endoftext|>")
        ids = [
            i
            for text in texts_of(sample / VALIDATION_FILE)
            for i in (*of_text.encode(text).ids, eos)
        ]
        (tmp_path / "a.bin").write_bytes(ids_as(ids))
        job = config(
            sample,
            "--model.hf_assets_path",
            str(hf_tokenizer),
            *["--stream.fast_tokenizer"] * fast,
        )
        tokenizer = load_tokenizer(hf_tokenizer)
        # the bytes of documents decide where windows end
        job.stream.slots = 1
        job.stream.shuffle_window = 0
        stored = open_stream(job, list_files("text", str(tmp_path)), tokenizer, 1, 0)
        text = open_stream(
            job, list_files("c4_validation", str(sample)), tokenizer, 1, 0
        )
        a = iter(stored)
        b = iter(text)
        assert all(
            torch.equal(next(a)[0]["input"], next(b)[0]["input"]) for _ in range(20)
        )
        documents = stored.counters()["documents"]
        assert documents == text.counters()["documents"] > 5
        end = np.flatnonzero(np.array(ids) == tokenizer.eos_id)[int(documents) - 1]
        assert stored.counters()["text_bytes"] == 2 * (end + 1)
        (found,) = first_sequences(stored.files, tokenizer, job, 16, 30, "")
        assert found.reshape(-1).tolist() == ids[: 30 * 17]
