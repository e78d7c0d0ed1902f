"""Files of the hub as they are read: by how many requests, and through which faults of
the server.
"""

import os
import random
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fake_hub import COMMIT, serving
from tests.streams import parquet, write_texts
from titan_disp import retry
from titan_disp.data import storage
from titan_disp.data.documents import Documents
from titan_disp.data.formats import text_of
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions
from titan_disp.data.storage import RemoteFile
from titan_disp.errors import DataError

SIZE = 500_000
MIB = 1 << 20


@pytest.fixture
def hub(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    with serving(
        tmp_path / "data", "some/data", monkeypatch, tmp_path / "cache"
    ) as hub:
        yield hub


def on_hub(hub, name):
    size = (hub.datasets["some/data"] / name).stat().st_size
    return DataFile(name, f"hf://datasets/some/data@{COMMIT}/{name}", size)


def random_file(hub, size=SIZE):
    content = np.random.default_rng(size).bytes(size)
    (hub.datasets["some/data"] / "random.bin").write_bytes(content)
    file = on_hub(hub, "random.bin")
    return content, RemoteFile(file, StreamOptions(retry_seconds=60.0))


def read_all(file):
    return b"".join(iter(lambda: file.read(7777), b""))


def begins(hub):
    return [int(asked.removeprefix("bytes=")[:-1]) for _, asked in hub.ranges]


def test_seeks(hub):
    """Small gaps are read through, as between the columns of a Parquet file; others are
    asked for anew, when they are read.
    """
    content, file = random_file(hub, 12 * MIB)
    for place in (0, 3 * MIB, 6 * MIB, 11 * MIB, 11 * MIB + 50, 10):
        file.seek(12 * MIB)
        file.seek(place)
        assert file.tell() == place
        assert (file.read(20), file.read(0)) == (content[place : place + 20], b"")
        assert len(file._held._piece.obj) <= 1 << 16  # what an open file holds
    assert begins(hub) == [0, 11 * MIB, 10]


@pytest.mark.parametrize("fault", ["cut", "short", "stall"])
def test_an_answer_that_ends_early_is_continued(hub, monkeypatch, fault):
    if fault == "stall":
        monkeypatch.setattr(storage, "REQUEST_SECONDS", 0.3)
    setattr(hub, fault, 150_000)
    content, file = random_file(hub)
    assert read_all(file) == content
    asked = begins(hub)
    # A machine that is busy may take as long to answer as a time-out.
    assert (sorted(set(asked)) if fault == "stall" else asked) == [
        0,
        150_000,
        300_000,
        450_000,
    ]


@pytest.mark.parametrize("suffix", ["json.gz", "json.zst", "parquet", "json"])
def test_a_file_is_known_by_its_beginning_however_little_comes_at_once(
    hub, monkeypatch, suffix
):
    """A single byte of gzip's two would be no gzip, and the file damaged."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.0001)
    path = write_texts(hub.datasets["some/data"] / f"a.{suffix}", ["7"])
    hub.short = 1 if suffix != "parquet" else 100
    assert numbers_of(Documents(on_hub(hub, path.name), StreamOptions())) == [7]


def test_a_server_that_knows_no_ranges(hub):
    """It sends whole files: the beginning is read and dropped, and nothing is taken for
    what it is not.
    """
    hub.ignore_range = True
    content, file = random_file(hub)
    file.seek(300_000)
    assert read_all(file) == content[300_000:]
    assert begins(hub) == [300_000]
    hub.cut = 400_000  # so that it can never get further
    file = RemoteFile(DataFile("", file._name, SIZE), StreamOptions(retry_seconds=0.05))
    file.seek(390_000)
    data = b""
    while len(data) < 10_000:  # a read returns what has come
        data += file.read(10_000 - len(data))
    assert data == content[390_000:400_000]
    with pytest.raises(Exception, match="without sending complete message body"):
        read_all(file)


def test_another_file_than_listed_is_not_read(hub):
    random_file(hub)
    for ignored in (False, True):
        hub.ignore_range = ignored
        file = RemoteFile(
            replace(on_hub(hub, "random.bin"), size=SIZE + 1),
            StreamOptions(retry_seconds=0.05),
        )
        with pytest.raises(
            OSError,
            match=rf"asked for bytes 0- of {SIZE + 1}, the hub answered 20[06], .*{SIZE}",
        ):
            file.read(1)


def limited(left, seconds):
    policy = '"fixed window";"resolvers";q=3000;w=300'
    return 429, {
        "RateLimit": f'"resolvers";r={left};t={seconds}',
        "RateLimit-Policy": policy,
    }


def test_the_hubs_own_pauses(hub, monkeypatch):
    """RateLimit where it is the reason, Retry-After, else growing pauses; each spread,
    so that ranks do not ask together.
    """
    pauses = [
        (limited(0, 48), (48.0, 60.0)),
        ((503, {"Retry-After": "2"}), (2.0, 3.0)),
        # requests are left: something else is the reason
        (limited(77, 48), (2.0, 6.0)),
        ((500, {"Retry-After": "soon"}), (4.0, 12.0)),
        ((503, {"Retry-After": "Sun, 09 Sep 2001 01:47:20 GMT"}), (40.0, 50.0)),
        ((503, {"Retry-After": "Sun, 09 Sep 2001 01:40:00 GMT"}), (0.0, 1.0)),
    ]
    asked = []
    waited = []
    monkeypatch.setattr(
        retry,
        "uniform",
        lambda shortest, longest: asked.append((shortest, longest)) or shortest,
    )
    monkeypatch.setattr(retry, "sleep", waited.append)
    monkeypatch.setattr(retry, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(retry.time, "time", lambda: 1e9)  # on the same day, at 01:46:40
    hub.faults["resolve"] = [refusal for refusal, _ in pauses]
    content, file = random_file(hub)
    file._retry_seconds = 60.0
    assert read_all(file) == content
    assert asked == [pause for _, pause in pauses]
    assert waited == [shortest for (shortest, _) in asked]


def test_what_is_not_tried_again(hub):
    random_file(hub)
    documents = Documents(
        replace(on_hub(hub, "random.bin"), name="random.json"), StreamOptions()
    )
    for answer, message in (
        (limited(0, 200), r"within 60 s \(stream.retry_seconds\): .*429 Too Many"),
        (
            (503, {"Retry-After": "200"}),
            r"within 60 s \(stream.retry_seconds\): .*503 Service",
        ),
        ((401, {}), r"cannot read hf://.*random.bin: .*401"),
        (
            (404, {"X-Error-Code": "EntryNotFound"}),
            r"cannot read hf://.*random.bin: .*404",
        ),
    ):
        hub.faults["resolve"] = [answer] * 9
        hub.ranges.clear()
        with pytest.raises(DataError, match=message):
            documents.read()
        assert len(hub.ranges) == 1


def test_a_server_that_is_too_slow(hub, monkeypatch):
    """Ten bytes every 10 ms never run into the time-out without a byte.

    The read is tried again, until it is too long. On this test's clock, each takes as
    long as the time-out.
    """
    hub.trickle = 0.01
    content, file = random_file(hub, 10_000)
    file._retry_seconds = 2.5 * storage.REQUEST_SECONDS
    assert file.read(10) == content[:10]
    clock = SimpleNamespace(monotonic=count(0, storage.REQUEST_SECONDS).__next__)
    monkeypatch.setattr(storage, "time", clock)
    with pytest.raises(
        OSError, match="bytes per second for 30 s, expected at least 4096"
    ):
        read_all(file)
    assert len(hub.ranges) == 3


def test_a_proxy_that_packs_what_it_passes_on(hub):
    """It sends whole files by gzip: they are unpacked, also from the middle on after a
    broken connection.
    """
    content = "".join(f"{i} " for i in range(9000)).encode()
    (hub.datasets["some/data"] / "text.bin").write_bytes(content)
    hub.packed = True
    hub.cut = 8000
    file = RemoteFile(on_hub(hub, "text.bin"), StreamOptions(retry_seconds=0.05))
    file.seek(7000)
    # it can never get further
    with pytest.raises(Exception, match="incomplete|without sending"):
        read_all(file)
    hub.cut = 0
    at = file.tell()
    assert 7000 <= at < len(content)
    assert read_all(file) == content[at:]


def test_pauses_of_ranks_with_the_same_seed_differ():
    """DataLoader seeds ``random`` in the prefetch workers of all ranks alike."""
    drawn = []
    for _ in range(2):
        random.seed(0)
        drawn.append(retry.uniform(0, 1))
    assert drawn[0] != drawn[1]


def test_many_files_are_open_at_once(hub):
    content, file = random_file(hub, 10_000)
    files = [
        RemoteFile(DataFile("", file._name, 10_000), StreamOptions(retry_seconds=1.0))
        for _ in range(110)
    ]
    for part in (content[:10], content[10:20]):
        assert {one.read(10) for one in files} == {part}
    assert len(hub.ranges) == 110


def test_a_forked_worker_has_connections_of_its_own(hub):
    before = storage._client()
    child = os.fork()
    if child == 0:
        os._exit(0 if storage._client() is not before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert storage._client() is before


def numbers_of(documents):
    return [int(text_of(raw).split()[0]) for raw in iter(documents.read, None)]


@pytest.mark.parametrize(("kind", "requests"), [("json.gz", 1), ("parquet", 2)])
def test_requests_for_a_file(hub, kind, requests):
    """Of 200 documents of 100,000 characters: twice as many as their stored bytes in
    gzip.
    """
    generator = np.random.default_rng(0)
    path = hub.datasets["some/data"] / f"train.{kind}"
    texts = [f"{number} {generator.bytes(50_000).hex()}" for number in range(200)]
    write_texts(path, texts)
    if kind == "parquet":
        path.write_bytes(
            parquet(
                20,
                id=[t[:50] * 20 for t in texts],
                text=texts,
                url=[t[-999:] for t in texts],
            )
        )
    for begin in (0, 100):
        hub.ranges.clear()
        assert numbers_of(
            Documents(on_hub(hub, path.name), StreamOptions(), begin)
        ) == [*range(begin, 200)]
        assert len(hub.ranges) == requests, hub.ranges
