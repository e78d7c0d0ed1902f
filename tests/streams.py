"""What the tests of the data share: corpora to write, streams and loaders to read them,
and results computed by hand.
"""

import gzip
import hashlib
import io
import json
from fractions import Fraction
from itertools import islice

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
from sentencepiece import SentencePieceProcessor

from tests.command_line import DEMO
from tests.pages import changed, loaded
from titan_disp.data.assignment import Assignment, one_share
from titan_disp.data.documents import Documents
from titan_disp.data.formats import BadDocument, DamagedFile, text_of
from titan_disp.data.listing import DataFile, list_files
from titan_disp.data.loader import StreamLoader
from titan_disp.data.options import Format, StreamOptions
from titan_disp.data.position import Field
from titan_disp.data.stream import RankStreams
from titan_disp.data.tokenizer import load_tokenizer

EOS = 0
SEED = 14  # of the order of the documents
VALIDATION_FILE = "en/c4-validation.00000-of-00001.json.gz"  # in the sample corpus


def encode(text):
    """Make tokens that say which document they come from: one per word, the document's
    number; then EOS.
    """
    return [int(word) for word in text.split()] + [EOS]


def words_of(number, words=lambda i: 1 + i % 5):
    return " ".join([str(number)] * words(number))


def stored(content, name):
    if name.endswith(".gz"):
        return gzip.compress(content, 1, mtime=0)
    return (
        pyarrow.compress(content, "zstd", asbytes=True)
        if name.endswith(".zst")
        else content
    )


def parquet(row_group_size=100, **columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(
        pyarrow.table(columns), file, row_group_size=row_group_size
    )
    return file.getvalue()


def json_lines(texts):
    return "".join(
        json.dumps({"text": text}, ensure_ascii=i % 2 == 0) + "\n"
        for i, text in enumerate(texts)
    ).encode()


def write_texts(path, texts, rows=100):
    """Write documents in the format of the name, and return the path.

    Texts become token ids as by ``encode``.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix in (".bin", ".npy"):
        content = ids_as(
            [i for text in texts for i in encode(text)],
            "numpy" if path.suffix == ".npy" else "raw",
        )
    elif path.suffix == ".parquet":
        content = parquet(rows, text=texts)
    else:
        content = (
            "\n\n\n".join(texts).encode() if ".txt" in path.name else json_lines(texts)
        )
    path.write_bytes(stored(content, path.name))
    return path


def write_files(folder, counts, words=lambda i: 1 + i % 5, kind="json.gz"):
    """Write files of documents, which are numbered from 1; document i is the word i,
    repeated words(i) times.
    """
    numbers = iter(range(1, 1 + sum(counts)))
    for f, count in enumerate(counts):
        write_texts(
            folder / f"{f}.{kind}", [words_of(i, words) for i in islice(numbers, count)]
        )
    return list_files("text", str(folder))


def llm_c(magic, version, count, content):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    return header.tobytes() + content


def ids_as(ids, layout="raw", dtype="<u2"):
    """Store ids as the named projects do, with numpy only."""
    ids = np.asarray(ids, dtype)
    file = io.BytesIO()
    if layout == "numpy":
        np.save(file, ids)
        return file.getvalue()
    version = (20240520, 1) if dtype == "<u2" else (20240801, 7)
    return (
        llm_c(*version, len(ids), ids.tobytes()) if layout == "llm.c" else ids.tobytes()
    )


def of_sizes(sizes):
    return [DataFile(f"f{i}", f"f{i}", size) for i, size in enumerate(sizes)]


def read_all(documents):
    """Everything that a file's reader yields, with the message of a damaged end as the
    last item.
    """
    found = []
    try:
        while (record := documents.read()) is not None:
            found.append(str(record) if isinstance(record, BadDocument) else record)
    except DamagedFile as error:
        found.append(f"damaged: {error}")
    documents.close()
    return found


def records_of(path, max_bytes=1 << 20, start=0, **options):
    how = StreamOptions(
        max_document_bytes=max_bytes, retry_seconds=0.0, format=Format(**options)
    )
    return read_all(
        Documents(DataFile(path.name, str(path), path.stat().st_size), how, start)
    )


def texts_of(path, field="text", **options):
    return [
        text_of(record, field)
        for record in records_of(path, text_field=field, **options)
    ]


def of_ranks(slots, ranks):
    own = slots // ranks
    return [range(r * own, (r + 1) * own) for r in range(ranks)]


def streams_of(
    files,
    slots,
    ranks,
    seq_len=7,
    positions=None,
    assignment=None,
    encode=encode,
    **options,
):
    assignment = assignment or Assignment(files, one_share(slots), SEED)
    positions = (
        np.zeros((slots, len(Field)), dtype=np.int64)
        if positions is None
        else positions
    )
    how = StreamOptions(seq_len=seq_len, **options)
    parts = of_ranks(slots, ranks)
    return [
        RankStreams(
            files, part, positions[part.start : part.stop], assignment, encode, how
        )
        for part in parts
    ]


def sequence(slot):
    out = np.empty(slot.streams.options.seq_len + 1, dtype=np.int64)
    slot.fill(out)
    return out


def batches(ranks, steps):
    """Return sequences [steps, slots, seq_len + 1], and the positions [slots, k] after
    them.
    """
    out = [
        np.stack([sequence(slot) for rank in ranks for slot in rank.slots.values()])
        for _ in range(steps)
    ]
    return np.stack(out), np.stack(
        [slot.position for rank in ranks for slot in rank.slots.values()]
    )


def through(make, phases):
    """Return what ``batches`` returns for a run that is stopped and resumed; ``make``
    takes a number of ranks and positions.
    """
    got = []
    positions = None
    for ranks, steps in phases:
        part, positions = batches(make(ranks, positions), steps)
        got.append(part)
    return np.concatenate(got), positions


def number_of(content):
    return int(content.split()[0]) if isinstance(content, str) else int(content[0])


def epochs_of(slots, count=2):
    """The numbers of the documents that these slots give in each of the first epochs,
    sorted.
    """
    found = [[] for _ in range(count)]
    for slot in slots:
        while (document := slot.source.next()).start[Field.EPOCH] < count:
            found[document.start[Field.EPOCH]].append(number_of(document.content))
    return [sorted(numbers) for numbers in found]


def first_epoch(ranks):
    """The numbers of the documents of all slots' first epoch, sorted, and the positions
    [slots, k] at its end.
    """
    numbers = []
    positions = []
    for slot in (slot for rank in ranks for slot in rank.slots.values()):
        numbers += [
            number_of(document.content)
            for document in iter(slot.source.next_of_epoch, None)
        ]
        positions.append(slot.source.position.values)
    return sorted(numbers), np.stack(positions)


def loader(files, sample, rank=0, ranks=1, prefetch=0, slots=8, shares=(), **options):
    folder = f"{sample}/tokenizer"
    how = StreamOptions(prefetch=prefetch, **({"seq_len": 32} | options))
    of_rank = {"local_batch_size": 2, "dp_rank": rank, "dp_world_size": ranks}
    return StreamLoader(
        files,
        load_tokenizer(folder),
        folder,
        how,
        slots=slots,
        shares=shares,
        **of_rank,
    )


def config(sample, *options):
    words = (
        "--training.dataset_path",
        sample,
        "--model.hf_assets_path",
        f"{sample}/tokenizer",
    )
    return changed(
        loaded(
            DEMO, *words, "--training.seq_len", "32", "--stream.prefetch", "0", *options
        ),
        {},
    )


def parts_by_hand(files, counts, slots, slot, epoch):
    """(bytes, [(file, index), …]) of a slot's head, whole files and tail, as
    assignment.py's docstring says.
    """
    hashes = [
        hashlib.sha256(f"{SEED}/{epoch}/{file.name}".encode()).digest()
        for file in files
    ]
    line = sorted(range(len(files)), key=lambda f: hashes[f])
    edges = [
        Fraction(sum(files[f].size for f in line[:i])) for i in range(len(line) + 1)
    ]
    cuts = [Fraction(0)]
    while len(cuts) < slots:
        share = (edges[-1] - cuts[-1]) / (slots + 1 - len(cuts))
        near = min(edges, key=lambda edge: abs(edge - cuts[-1] - share))
        cuts.append(
            near if abs(near - cuts[-1] - share) < share / 8 else cuts[-1] + share
        )
    begin, end = [*cuts, edges[-1]][slot : slot + 2]
    parts = []
    whole_before = False
    for i, f in enumerate(line):
        low, high = [
            (min(max(x, edges[i]), edges[i + 1]) - edges[i]) / files[f].size
            for x in (begin, end)
        ]
        if low == high:
            continue
        keys = [
            (k * 0x9E3779B97F4A7C15 + int.from_bytes(hashes[f][-8:], "big")) % 2**64
            for k in range(counts[f])
        ]
        part = [
            (f, k) for k, key in enumerate(keys) if low <= Fraction(key, 2**64) < high
        ]
        size = (high - low) * files[f].size
        whole = high - low == 1
        if whole and whole_before:  # all whole files together are one part
            parts[-1] = (parts[-1][0] + size, parts[-1][1] + part)
        else:
            parts.append((size, part))
        whole_before = whole
    return parts


def order_by_hand(files, counts, slots, slot, epoch, size):
    """The documents of one slot in one epoch, as (file, index), in order; ``size``
    gives the bytes of a document's text.
    """
    parts = parts_by_hand(files, counts, slots, slot, epoch)
    read = [0] * len(parts)
    taken = [0] * len(parts)
    order = []
    while left := [
        i for i, (_, documents) in enumerate(parts) if read[i] < len(documents)
    ]:
        i = min(left, key=lambda i: (taken[i] / parts[i][0], i))
        order.append(parts[i][1][read[i]])
        read[i] += 1
        taken[i] += size(*order[-1])
    return order


def first_sequences_by_hand(file, sample, count, length):
    """The first [count, length] tokens of a file, computed with gzip, json and
    sentencepiece only.
    """
    processor = SentencePieceProcessor(
        model_file=str(sample / "tokenizer" / "sample.model")
    )
    tokens = []
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        while len(tokens) < count * length:
            tokens += [
                *processor.encode(json.loads(next(lines))["text"]),
                processor.eos_id(),
            ]
    return torch.tensor(tokens[: count * length]).view(count, length)
