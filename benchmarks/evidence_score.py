"""What a run of the experiment is judged by: numbers on held-out text, and how it went. docs/evidence_design.md defines them.

cross_entropy   of the next token in nats, the mean over all tokens of one window of each held-out document
accuracy        part of these tokens that the model ranks first
last_word       part of held-out paragraphs whose last word is what greedy decoding makes of the words before it
mean_cosine     by layer, of the windows that are as long as training's sequences
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.integrate import trapezoid
from torch import Tensor
from torch.nn.functional import cross_entropy

from titan_disp.condensation.measure import Accumulator
from titan_disp.data.documents import Documents
from titan_disp.data.files import list_files
from titan_disp.data.records import text_of
from titan_disp.qwen3.model import Qwen3DispModel
from titan_disp.run.folder import read_condensation, read_events, read_metrics

PLATEAU = 6.0  # nats: below it, a run has left the plateau of its beginning
IGNORED = -100  # labels that do not count
BATCH = 16
PASSAGES = 600
LEAST_WORDS = 20  # before the last one
MEASURED = 64  # windows whose condensation is measured


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as token ids.

    Attributes:
        windows: of each document, up to N + 1 ids. sources: of the same documents.
        passages: (ids before the last word, its ids).
    """

    windows: list[list[int]]
    sources: list[str]
    passages: list[tuple[list[int], list[int]]]


def read_documents(folder: Path) -> Iterator[tuple[str, str]]:
    """(source, text) of a validation set, as benchmarks/corpus.py writes it."""
    for file in list_files("c4_validation", str(folder), "validation"):
        reader = Documents(file, max_bytes=1 << 30)
        try:
            while (record := reader.read()) is not None:
                assert isinstance(record, bytes)
                yield json.loads(record)["url"].partition(":")[0], text_of(record)
        finally:
            reader.close()


def window(text: str, encode: Callable[[str], list[int]], eos: int, length: int) -> list[int]:
    """``length`` + 1 ids of a document with EOS at its end, from a place that its text decides; all of a short one."""
    ids = [*encode(text), eos]
    places = len(ids) - length
    if places <= 1:
        return ids
    start = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) % places
    return ids[start : start + length + 1]


def passage(text: str, encode: Callable[[str], list[int]], length: int) -> tuple[list[int], list[int]] | None:
    """The first paragraph of so many words that ends in a word and a full stop: what comes before the word, and the word.

    As in LAMBADA the word is to be guessed from the paragraph; nobody has made sure that a person could.
    """
    for paragraph in text.split("\n\n"):
        found = re.search(r" ([A-Za-z]{3,})\.$", paragraph.rstrip())
        if found is None or len(paragraph.split()) <= LEAST_WORDS:
            continue
        before, ids = encode(paragraph[: found.start()]), encode(paragraph[: found.end(1)])
        if ids[: len(before)] == before and before and len(ids) > len(before):
            return before[-(length - (len(ids) - len(before))) :], ids[len(before) :]
    return None


def held_out(folder: Path, encode: Callable[[str], list[int]], eos: int, length: int) -> HeldOut:
    documents = list(read_documents(folder))
    passages = (passage(text, encode, length) for _, text in documents)
    return HeldOut(
        [window(text, encode, eos, length) for _, text in documents],
        [source for source, _ in documents],
        [found for found in passages if found is not None][:PASSAGES],
    )


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """(places, ids padded with zeros behind), rows of like length together: what is behind does not change what is before."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        ids = torch.zeros(len(places), len(rows[places[-1]]), dtype=torch.long)
        for row, place in zip(ids, places, strict=True):
            row[: len(rows[place])] = torch.tensor(rows[place])
        yield places, ids


@torch.no_grad()
def token_losses(model: Qwen3DispModel, windows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each window: the sum of its tokens' cross-entropies, how many of them the model ranks first, and their number."""
    sums, right, number = np.zeros(len(windows)), np.zeros(len(windows), int), np.zeros(len(windows), int)
    for places, ids in _batches(windows):
        logits, labels = model(ids[:, :-1]), ids[:, 1:].clone()
        for row, place in zip(labels, places, strict=True):
            row[len(windows[place]) - 1 :] = IGNORED
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        sums[places] = losses.double().sum(1).numpy()
        right[places] = (logits.argmax(-1) == labels).sum(1).numpy()
        number[places] = (labels != IGNORED).sum(1).numpy()
    return sums, right, number


@torch.no_grad()
def last_words(model: Qwen3DispModel, passages: Sequence[tuple[list[int], list[int]]]) -> int:
    """How many words greedy decoding gets right: all tokens of each are first, given those before them."""
    right = 0
    for places, ids in _batches([[*before, *word] for before, word in passages]):
        first = model(ids[:, :-1]).argmax(-1)
        for row, place in enumerate(places):
            before, word = passages[place]
            guessed = first[row, len(before) - 1 : len(before) + len(word) - 1]
            right += guessed.tolist() == word
    return right


@torch.no_grad()
def cosines(model: Qwen3DispModel, windows: Sequence[Sequence[int]], length: int) -> list[float]:
    """Mean cosine by layer: embedding, blocks, final norm."""
    chosen = torch.tensor([ids[:length] for ids in windows if len(ids) > length][:MEASURED])
    layers = range(model.n_layers + 2)
    sums = Accumulator(len(layers))
    for batch in chosen.split(BATCH):
        for layer, z in enumerate(model(batch, return_activations=layers)[1]):
            sums.add(layer, z)
    return sums.result(length, final_norm=True).mean_cosine.round(5).tolist()


def score(model: Qwen3DispModel, text: HeldOut, length: int) -> dict[str, Any]:
    """The numbers of a model on held-out text. ``length``: of training's sequences."""
    sums, right, number = token_losses(model, text.windows)
    source = np.array(text.sources)
    return {
        "cross_entropy": round(float(sums.sum() / number.sum()), 6),
        "accuracy": round(float(right.sum() / number.sum()), 6),
        "last_word": round(last_words(model, text.passages) / max(1, len(text.passages)), 6),
        "by_source": {
            name: round(float(sums[source == name].sum() / number[source == name].sum()), 5)
            for name in sorted(set(source))
        },
        "mean_cosine": cosines(model, text.windows, length),
        "documents": len(text.windows),
        "tokens": int(number.sum()),
        "passages": len(text.passages),
    }


def history(run: Path) -> dict[str, Any]:
    """How training went.

    Returns:
        plateau_end: the first logged step whose training cross-entropy is below ``PLATEAU``; None: there is none.
        block_cosine: the mean over the blocks of the mean cosine, averaged over the steps (trapezoids): from 0 to 1.
        steps, cross_entropy, mean_cosine: what was measured on development text by step; the last one by layer.
        seconds: of all starts, by what they went into.
    """
    rows, measured = read_metrics(run), read_condensation(run)
    steps = list(measured)
    blocks = [float(np.mean(found["mean_cosine"][1:-1])) for found in measured.values()]
    seconds: dict[str, float] = {}
    for event in read_events(run):
        for kind, spent in event.get("spent", {}).items():
            seconds[kind] = round(seconds.get(kind, 0.0) + spent, 1)
    return {
        "plateau_end": next((step for step, row in rows.items() if row["ce"] < PLATEAU), None),
        "block_cosine": round(float(trapezoid(blocks, steps) / steps[-1]), 5) if len(steps) > 1 else math.nan,
        "steps": steps,
        "cross_entropy": [round(found["cross_entropy"], 4) for found in measured.values()],
        "mean_cosine": [[round(c, 3) for c in found["mean_cosine"]] for found in measured.values()],
        "tokens": max(row["tokens"] for row in rows.values()),
        "seconds": seconds,
    }
