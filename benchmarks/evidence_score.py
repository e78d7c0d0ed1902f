"""Score a run of the experiment: numbers on held-out text and about training, as
docs/evidence_design.md defines them.

cross_entropy   of the next token in nats: the mean over all tokens of one window of
each held-out document accuracy        the fraction of these tokens that the model ranks
first last_word       the fraction of held-out paragraphs whose last word greedy
decoding predicts from the words before it mean_cosine     by layer, over the windows
that are as long as training's sequences
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.integrate import trapezoid
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from titan_disp.condensation.measure import Accumulator
from titan_disp.data.documents import Documents
from titan_disp.data.formats import text_of
from titan_disp.data.listing import list_files
from titan_disp.data.options import StreamOptions
from titan_disp.models.qwen3 import Qwen3DispModel
from titan_disp.run.reader import read_condensation, read_events, read_metrics

PLATEAU = 6.0  # nats: a run below this has left its initial plateau
IGNORED = -100  # the label of positions that do not count
BATCH = 16
PASSAGES = 600
LEAST_WORDS = 20  # words before the last one
MEASURED = 64  # number of windows whose condensation is measured


@dataclass(frozen=True)
class HeldOut:
    """Held-out text as token ids."""

    windows: list[list[int]]  # up to N + 1 ids of each document
    sources: list[str]  # the sources of the same documents
    # ids before the last word, and ids of that word
    passages: list[tuple[list[int], list[int]]]


def read_documents(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (source, text) of a validation set that benchmarks/corpus.py has
    written.
    """
    for file in list_files("c4_validation", str(folder), "validation"):
        with closing(
            Documents(file, StreamOptions(max_document_bytes=1 << 30))
        ) as reader:
            while (record := reader.read()) is not None:
                assert isinstance(record, bytes)
                yield json.loads(record)["url"].partition(":")[0], text_of(record)


def window(
    text: str, encode: Callable[[str], list[int]], eos: int, length: int
) -> list[int]:
    """Return ``length`` + 1 ids of a document with EOS at its end, or all; its text
    decides at which position they begin.
    """
    ids = [*encode(text), eos]
    places = len(ids) - length
    if places <= 1:
        return ids
    start = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16) % places
    return ids[start : start + length + 1]


def passage(
    text: str, encode: Callable[[str], list[int]], length: int
) -> tuple[list[int], list[int]] | None:
    """Return the text before the last word, and this word, of the first long paragraph
    that ends in a word and a full stop.

    As in LAMBADA, the model must guess the word from the paragraph. Nobody has checked
    that a person could.
    """
    for paragraph in text.split("\n\n"):
        found = re.search(r" ([A-Za-z]{3,})\.$", paragraph.rstrip())
        if found is None or len(paragraph.split()) <= LEAST_WORDS:
            continue
        before = encode(paragraph[: found.start()])
        ids = encode(paragraph[: found.end(1)])
        if ids[: len(before)] == before and before and len(ids) > len(before):
            return before[-(length - (len(ids) - len(before))) :], ids[len(before) :]
    return None


def held_out(
    folder: Path, encode: Callable[[str], list[int]], eos: int, length: int
) -> HeldOut:
    documents = list(read_documents(folder))
    passages = (passage(text, encode, length) for _, text in documents)
    return HeldOut(
        [window(text, encode, eos, length) for _, text in documents],
        [source for source, _ in documents],
        [found for found in passages if found is not None][:PASSAGES],
    )


def _batches(rows: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield (indices, ids padded with ``IGNORED``) for rows of similar length; padding
    changes nothing before it.
    """
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), i))
    for start in range(0, len(order), BATCH):
        places = order[start : start + BATCH]
        ids = [torch.tensor(rows[place]) for place in places]
        yield places, pad_sequence(ids, batch_first=True, padding_value=IGNORED)


@torch.no_grad()
def token_losses(
    model: Qwen3DispModel, windows: Sequence[Sequence[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return for each window the sum of its tokens' cross-entropies, how many the model
    ranks first, and their number.
    """
    sums = np.zeros(len(windows))
    right = np.zeros(len(windows), int)
    number = np.zeros(len(windows), int)
    for places, ids in _batches(windows):
        logits = model(ids[:, :-1].clamp(min=0))
        labels = ids[:, 1:]
        losses = cross_entropy(
            logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        )
        sums[places] = losses.double().sum(1).numpy()
        right[places] = (logits.argmax(-1) == labels).sum(1).numpy()
        number[places] = (labels != IGNORED).sum(1).numpy()
    return sums, right, number


@torch.no_grad()
def last_words(
    model: Qwen3DispModel, passages: Sequence[tuple[list[int], list[int]]]
) -> int:
    """Count the words that greedy decoding gets right: each of a word's tokens is
    ranked first, given those before it.
    """
    right = 0
    for places, ids in _batches([[*before, *word] for before, word in passages]):
        first = model(ids[:, :-1].clamp(min=0)).argmax(-1)
        for row, place in enumerate(places):
            before, word = passages[place]
            guessed = first[row, len(before) - 1 : len(before) + len(word) - 1]
            right += guessed.tolist() == word
    return right


@torch.no_grad()
def cosines(
    model: Qwen3DispModel, windows: Sequence[Sequence[int]], length: int
) -> list[float]:
    """Return the mean cosine by layer: embedding, blocks, final norm."""
    chosen = torch.tensor(
        [ids[:length] for ids in windows if len(ids) > length][:MEASURED]
    )
    layers = range(model.n_layers + 2)
    sums = Accumulator(len(layers))
    for batch in chosen.split(BATCH):
        for layer, z in enumerate(model(batch, return_activations=layers).activations):
            sums.add(layer, z)
    return sums.result(length).mean_cosine.round(5).tolist()


def score(model: Qwen3DispModel, text: HeldOut, length: int) -> dict[str, Any]:
    """Return the numbers of a model on held-out text.

    ``length`` is that of training's sequences.
    """
    sums, right, number = token_losses(model, text.windows)
    source = np.array(text.sources)
    return {
        "cross_entropy": round(float(sums.sum() / number.sum()), 6),
        "accuracy": round(float(right.sum() / number.sum()), 6),
        "last_word": round(
            last_words(model, text.passages) / max(1, len(text.passages)), 6
        ),
        "by_source": {
            name: round(
                float(sums[source == name].sum() / number[source == name].sum()), 5
            )
            for name in sorted(set(source))
        },
        "mean_cosine": cosines(model, text.windows, length),
        "documents": len(text.windows),
        "tokens": int(number.sum()),
        "passages": len(text.passages),
    }


def history(run: Path) -> dict[str, Any]:
    """Summarise how training went.

    Returns:
        plateau_end: the first logged step whose training cross-entropy is below
            ``PLATEAU``, or None.
        block_cosine: the mean over the blocks of the mean cosine, averaged over the
            steps (trapezoids): from 0 to 1.
        steps, cross_entropy, mean_cosine: the measurements on development text by step;
            mean_cosine is also by layer.
        seconds: the time of all starts, by what it was spent on.
    """
    rows = read_metrics(run)
    measured = read_condensation(run)
    steps = list(measured)
    blocks = [float(np.mean(found["mean_cosine"][1:-1])) for found in measured.values()]
    seconds: dict[str, float] = {}
    for event in read_events(run):
        for kind, spent in event.get("spent", {}).items():
            seconds[kind] = round(seconds.get(kind, 0.0) + spent, 1)
    return {
        "plateau_end": next(
            (step for step, row in rows.items() if row["ce"] < PLATEAU), None
        ),
        "block_cosine": round(float(trapezoid(blocks, steps) / steps[-1]), 5)
        if len(steps) > 1
        else math.nan,
        "steps": steps,
        "cross_entropy": [
            round(found["cross_entropy"], 4) for found in measured.values()
        ],
        "mean_cosine": [
            [round(c, 3) for c in found["mean_cosine"]] for found in measured.values()
        ],
        "tokens": max(row["tokens"] for row in rows.values()),
        "seconds": seconds,
    }
