"""Files of object stores: the same rows as from a local folder, through the faults of a
stand-in for S3.
"""

import shutil
from collections import Counter
from unittest.mock import Mock
from urllib.parse import parse_qs, unquote

import numpy as np
import pytest

from tests.fake_hub import FakeHub
from tests.streams import config, loader, read_all, write_texts
from titan_disp import retry
from titan_disp.data import storage, stores
from titan_disp.data.documents import Documents
from titan_disp.data.index import with_index
from titan_disp.data.listing import list_files
from titan_disp.data.options import Format, StreamOptions
from titan_disp.errors import ConfigError, DataError
from titan_disp.lab.digest import digest

pytest.importorskip("s3fs", reason="pip install s3fs")
OPTIONS = StreamOptions(retry_seconds=60.0, format=Format(eos_id=0))
TEXTS = [f"{i} {'text ' * (i % 90)}" for i in range(400)]
URL = "s3://bucket/a.jsonl"


class FakeStore(FakeHub):
    """Serves a folder as the bucket ``bucket``.

    Requests are of the kinds list, info and content.
    """

    def __init__(self, root):
        super().__init__(root, "")
        self.root = root
        self.asked = Counter()
        # ("cut", bytes), ("short", bytes) or ("stall", bytes) of the next answers with
        # content
        self.broken = []

    def answer(self, request, body):
        path, _, query = request.path.partition("?")
        prefix = parse_qs(query).get("prefix", [""])[0]
        name = unquote(path.removeprefix("/bucket")[1:])
        kind = "list" if not name else "content" if body else "info"
        self.asked[kind] += 1
        if self.faulty(request, kind, body):
            return None
        if kind == "list":
            entries = [
                self.entry(self.root, file)
                for file in self.files(self.root)
                if file.startswith(prefix)
            ]
            form = '<Contents><Key>{path}</Key><Size>{size}</Size><ETag>"{lfs[oid]}"</ETag></Contents>'
            text = "".join(form.format(**entry) for entry in entries)
            return self.send(
                request,
                200,
                f"<ListBucketResult>{text}</ListBucketResult>".encode(),
                {},
                body,
            )
        if name not in self.files(self.root):
            return self.send(request, 404, b"", {}, body)
        self.cut = self.short = self.stall = 0
        if kind == "content" and self.broken:
            setattr(self, *self.broken.pop(0))
        return self.content(request, self.root, "", name, body)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """One store, because botocore takes half a second to make a client."""
    store = FakeStore(tmp_path_factory.mktemp("store") / "bucket")
    keys = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            **keys,
            "AWS_ENDPOINT_URL": store.url,
            "AWS_MAX_ATTEMPTS": "1",
        }.items():
            patch.setenv(name, value)
        patch.setattr(retry, "FIRST_PAUSE", 0.01)
        stores._store.cache_clear()
        yield store
        stores._store.cache_clear()
    store.close()


@pytest.fixture
def store(served):
    served.faults = {}
    served.broken = []
    served.ignore_range = False
    shutil.rmtree(served.root, ignore_errors=True)
    return served


def one_file(store):
    write_texts(store.root / "a.jsonl", TEXTS)
    (file,) = list_files("text", URL)
    store.asked.clear()
    return file


def test_every_format_and_place(store, monkeypatch):
    monkeypatch.setattr(storage, "BLOCK", 1000)
    tokens = [
        " ".join(map(str, row))
        for row in np.random.default_rng(0).integers(1, 9, (400, 30))
    ]
    for suffix in ("jsonl", "json.gz", "json.zst", "parquet"):
        write_texts(store.root / "texts" / f"sub.{suffix}" / f"a.{suffix}", TEXTS)
    write_texts(store.root / "texts" / ".hidden.jsonl", TEXTS)
    for name in ("train.bin", "val.npy"):
        write_texts(store.root / "ids" / name, tokens)
    (store.root / "b.txt").write_text("a whole text")
    for place in (
        "texts/",
        "texts/**/*.jsonl",
        "texts/sub.*/a.*",
        "texts/sub.parquet/a.parquet",
        "ids",
        "ids/val.npy",
        "b.txt",
    ):
        local = list_files("text", f"{store.root}/{place}")
        remote = list_files("text", f"s3://bucket/{place}")
        assert [(file.name, file.size) for file in remote] == [
            (file.name, file.size) for file in local
        ]
        for here, there in zip(local, remote, strict=True):
            for start in (0, 150):
                expected = read_all(Documents(here, OPTIONS, start))
                np.testing.assert_equal(
                    read_all(Documents(there, OPTIONS, start)), expected
                )
    assert [file.name for file in list_files("text_validation", "s3://bucket/ids")] == [
        "val.npy"
    ]
    (store.root / "ids" / "train.idx").write_text("")
    with pytest.raises(ConfigError, match="Megatron"):
        list_files("text", "s3://bucket/ids/*.bin")


def test_batches_are_those_of_the_local_folder(store, sample):
    shutil.copytree(sample / "en", store.root / "c4" / "en")
    hashes = []
    for path, ahead in (
        ("s3://bucket/c4", "0"),
        ("s3://bucket/c4", "3"),
        (str(sample), "0"),
    ):
        store.faults = {
            kind: [(503, {}), (429, {"Retry-After": "0"})]
            for kind in ("list", "info", "content")
        }
        job = config(
            sample, "--training.dataset_path", path, "--stream.prefetch", ahead
        )
        hashes.append(digest(job, 6, [(0, 2), (3, 1)]).hashes)
        assert any(store.faults.values()) == (path == str(sample))
    assert hashes[0] == hashes[1] == hashes[2]


@pytest.mark.parametrize("kind", ["list", "info", "content"])
def test_faults(store, kind):
    """What may pass is asked again. What the next answer would repeat is not."""
    file = one_file(store)
    read = (
        (lambda: list_files("text", URL))
        if kind == "list"
        else lambda: read_all(Documents(file, OPTIONS))
    )
    for status in (429, 500, 503):
        store.faults[kind] = [(status, {}), (status, {"Retry-After": "0"})]
        assert len(read()) == (1 if kind == "list" else len(TEXTS))
        assert store.faults[kind] == []
    for status in (401, 403, 404):
        store.faults[kind] = [(status, {})] * 99
        store.asked.clear()
        with pytest.raises(
            (ConfigError, DataError),
            match=rf"{URL}.*(Permission|FileNotFound|Unauthorized)",
        ):
            read()
        assert store.asked[kind] == 1


def test_faults_that_stay(store, monkeypatch):
    file = one_file(store)
    for kind, answer in (
        ("content", (503, {"Retry-After": "99"})),
        ("info", (500, {})),
    ):
        store.faults = {kind: [answer] * 999}
        with pytest.raises(
            DataError, match=rf"cannot read {URL} within 0.2 s \(stream.retry_seconds\)"
        ):
            Documents(file, StreamOptions(retry_seconds=0.2)).read()
    monkeypatch.setattr(stores, "LISTING_SECONDS", 0.2)
    store.faults = {"list": [(503, {})] * 999}
    with pytest.raises(
        ConfigError,
        match=f"'{URL}', which cannot be read .*; expected access by AWS_ACCESS",
    ):
        list_files("text", URL)


def test_answers_that_break(store, monkeypatch):
    file = one_file(store)
    expected = read_all(Documents(file, OPTIONS))
    monkeypatch.setattr(stores, "REQUEST_SECONDS", 1.0)
    store.broken = [("cut", 10_000), ("short", 1), ("short", 7000), ("stall", 10_000)]
    assert read_all(Documents(file, OPTIONS)) == expected
    assert store.broken == []
    monkeypatch.setattr(storage, "BLOCK", 10)
    store.ignore_range = True
    with pytest.raises(
        DataError,
        match=f"asked for 65536 bytes from 0 on, the store answered {file.size}",
    ):
        Documents(file, StreamOptions(retry_seconds=0.0)).read()


def test_a_changed_object_is_noticed(store, sample, monkeypatch):
    monkeypatch.setattr(storage, "UNCHECKED_SECONDS", 0.0)
    monkeypatch.setattr(storage, "BLOCK", 1000)
    file = one_file(store)
    documents = Documents(file, OPTIONS)
    saved = loader([file], sample).state_dict()
    documents.read()
    write_texts(store.root / "a.jsonl", TEXTS[::-1])
    with pytest.raises(
        DataError, match="checksum .*, but had .* Restore it, or start the run again"
    ):
        read_all(documents)
    (again,) = list_files("text", "s3://bucket/*.jsonl")
    with pytest.raises(
        ConfigError, match="1 file of the same size with other documents, first a.jsonl"
    ):
        loader([again], sample).load_state_dict(saved)
    # a copy is known by size
    loader(list_files("text", str(store.root)), sample).load_state_dict(saved)
    with pytest.raises(
        ConfigError, match=f"stream.index is 'memory', but {URL} is in a store"
    ):
        with_index([again], StreamOptions(index="memory"))
    (store.root / "a.jsonl").unlink()
    with pytest.raises(DataError, match="FileNotFoundError"):
        Documents(again, OPTIONS).read()


def test_what_is_refused(store, monkeypatch):
    one_file(store)
    for path, message in (
        ("s4://bucket", r"'s4://bucket', expected s3://BUCKET/FOLDER"),
        ("s3://bucket/none", "which holds no train data, because it has no files"),
        (
            "s3://bucket/*.parquet",
            r"matches no file; expected names such as \*\.json",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            list_files("text", path)
    assert [
        stores.is_folder(f"s3://bucket{end}") for end in ("", "/*.npy", "/a.npy")
    ] == [True, False, False]
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    stores._store.cache_clear()
    with pytest.raises(
        ConfigError, match="NoCredentialsError.*; expected access by AWS_ACCESS_KEY_ID"
    ):
        list_files("text", URL)
    monkeypatch.setattr(
        "fsspec.filesystem", Mock(side_effect=ImportError("Install s3fs to access S3"))
    )
    stores._store.cache_clear()
    with pytest.raises(
        ConfigError, match=r"s3:// needs a package .*: pip install s3fs"
    ):
        list_files("text", URL)
