"""This module runs the data loaders of N ranks in one process, without a model, and
hashes every global batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from titan_disp.config.batch import global_batch_size, slot_count
from titan_disp.config.types import JobConfig
from titan_disp.data.loader import StreamLoader, open_stream, together
from titan_disp.data.options import stream_options
from titan_disp.data.position import Field
from titan_disp.data.sources import list_and_check, training_sets
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError, counted
from titan_disp.metric import Metric


@dataclass
class Digest:
    """Hold what the loaders handed out, and what reading it cost.

    Attributes:
        hashes: sha256 of each global batch (little-endian int64 [batch, seq_len + 1],
            rows by round and slot).
        bytes_read: stored bytes that each rank has read. After a resume, the new ranks
            follow the earlier ones.
        files_read: number of files that each of these ranks has opened.
        read_amplification: see ``epoch_amplification``.
        counters: of all ranks together, see ``StreamLoader.counters``.
    """

    hashes: list[str] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)
    files_read: list[int] = field(default_factory=list)
    read_amplification: float = 1.0
    counters: dict[Metric, float] = field(default_factory=dict)


def global_batch(
    iterators: Sequence[Any], job_config: JobConfig, batch: int, slots: int
) -> torch.Tensor:
    """Take the next global batch from the loaders of all ranks: [batch, seq_len + 1],
    rows by round and slot.

    With ``stream.document_mask``, the seq_len segments of a row come before its last
    token.
    """
    ranks = len(iterators)
    names = ["input", "segments"] if job_config.stream.document_mask else ["input"]
    own: list[torch.Tensor] = []
    for iterator in iterators:
        microbatches = [
            next(iterator)
            for _ in range(batch // ranks // job_config.training.local_batch_size)
        ]
        rows = [
            torch.cat([*(inputs[key] for key in names), labels[:, -1:]], dim=1)
            for inputs, labels in microbatches
        ]
        own.append(torch.cat(rows).view(batch // slots, slots // ranks, -1))
    return torch.cat(own, dim=1).view(batch, -1)


def digest(
    job_config: JobConfig, steps: int, phases: Sequence[tuple[int, int]]
) -> Digest:
    """Hash ``steps`` global batches.

    ``phases`` holds the (first step, data-parallel ranks) of each phase.

    Between two phases the positions go through ``state_dict`` and ``load_state_dict``,
    as through a checkpoint. Raises ConfigError if the batch cannot be divided among the
    ranks, or the data is bad.
    """
    t = job_config.training
    if t.global_batch_size < 1 and len({ranks for _, ranks in phases}) > 1:
        raise ConfigError(
            f"training.global_batch_size is {t.global_batch_size}, so that the global batch would change with the number of "
            "ranks: set it to a number of sequences to use --resume-ranks"
        )
    tokenizer = load_tokenizer(job_config.model.hf_assets_path)
    files = list_and_check(
        training_sets(job_config), stream_options(job_config, tokenizer=tokenizer)
    )
    result = Digest()
    state: dict[str, Any] | None = None
    ends = [begin for begin, _ in phases[1:]] + [steps]
    for (begin, ranks), end in zip(phases, ends, strict=True):
        if ranks < 1:
            raise ConfigError(
                f"--ranks or --resume-ranks is {ranks}, expected at least 1"
            )
        batch = global_batch_size(job_config, ranks)
        slots = slot_count(job_config, ranks)
        if batch % (ranks * t.local_batch_size) or batch % slots or slots % ranks:
            raise ConfigError(
                f"{counted(ranks, 'rank')}: the global batch {batch} must be a multiple of ranks × local_batch_size "
                f"{t.local_batch_size}, and the slots {slots} must divide it and be a multiple of the ranks"
            )
        loaders = [
            open_stream(job_config, files, tokenizer, ranks, rank)
            for rank in range(ranks)
        ]
        if state is not None:
            for loader in loaders:
                own = slice(loader.slots.start, loader.slots.stop)
                loader.load_state_dict(
                    {
                        "fingerprint": state["fingerprint"],
                        "positions": state["positions"][own],
                    }
                )
        iterators = [iter(loader) for loader in loaders]
        for _ in range(begin, end):
            rows = global_batch(iterators, job_config, batch, slots)
            result.hashes.append(hashlib.sha256(rows.numpy().tobytes()).hexdigest())
        states = [loader.state_dict() for loader in loaders]
        state = {
            "fingerprint": states[0]["fingerprint"],
            "positions": torch.cat([s["positions"] for s in states]),
        }
        for loader in loaders:
            result.bytes_read.append(sum(loader.bytes_read.values()))
            result.files_read.append(len({file for _, file in loader.bytes_read}))
        if begin == 0:
            result.read_amplification = epoch_amplification(loaders)
        result.counters = together([loader.counters() for loader in loaders])
        for loader in loaders:
            loader.close()
        loaders[0].check_counters(result.counters)
    return result


def epoch_amplification(loaders: Sequence[StreamLoader]) -> float:
    """Return the stored bytes that all ranks together read in the first epoch, divided
    by the bytes of all files.

    The ratio is measured if every slot is past the first epoch. Before that, it is
    computed from the assignment: buffers read more than was asked for, so that a number
    taken in the middle of small files would mean nothing.
    """
    files = loaders[0].files
    if all((loader.positions[:, Field.EPOCH] > 0).all() for loader in loaders):
        read = sum(
            count
            for loader in loaders
            for (epoch, _), count in loader.bytes_read.items()
            if epoch == 0
        )
    else:
        read = sum(
            files[f].size
            for loader in loaders
            for f in loader.assignment.files_of(loader.slots, 0)
        )
    return read / max(1, sum(file.size for file in files))
