"""This module runs the data loaders of N ranks in one process, without a model, and
hashes every global batch.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from titan_disp.checks import check_batch, check_slots
from titan_disp.config.batch import global_batch_size, slot_count
from titan_disp.config.command_options import DigestOptions
from titan_disp.config.load import load_config
from titan_disp.config.types import JobConfig
from titan_disp.data.loader import StreamLoader, open_stream, together
from titan_disp.data.options import stream_options
from titan_disp.data.position import Field
from titan_disp.data.sources import list_and_check, stored_bytes, training_sets
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError, counted
from titan_disp.metric import Metric


@dataclass
class Digest:
    """The hashes of the loaders' batches, and the cost of reading the batches.

    Attributes:
        hashes: sha256 of each global batch (little-endian int64 [batch, seq_len + 1],
            rows ordered by round, then by slot).
        bytes_read: stored bytes that each rank has read. The ranks after a resume are
            listed after the earlier ranks.
        files_read: number of files that each of these ranks has opened.
        read_amplification: see ``epoch_amplification``.
        counters: counters of all ranks together, see ``StreamLoader.counters``.
    """

    hashes: list[str] = field(default_factory=list)
    bytes_read: list[int] = field(default_factory=list)
    files_read: list[int] = field(default_factory=list)
    read_amplification: float = 1.0
    counters: dict[Metric, float] = field(default_factory=dict)


def data_digest(options: DigestOptions) -> str:
    """Return the digest of a config's batches as lines of text, or as JSON."""
    phases = options.phases
    result = digest(load_config(options.argv), options.steps, phases)
    if options.json:
        return json.dumps(asdict(result))
    lines = [f"{step:6}  {sha256}" for step, sha256 in enumerate(result.hashes, 1)]
    ranks = _names_of_ranks(phases)
    for rank, files, size in zip(
        ranks, result.files_read, result.bytes_read, strict=True
    ):
        lines.append(f"{rank}: {counted(files, 'file')}, {size:,} bytes")
    lines.append(f"read amplification {result.read_amplification:.3f}")
    counters = (f"{name}: {value:,g}" for name, value in result.counters.items())
    lines.append("  ".join(counters))
    return "\n".join(lines)


def _names_of_ranks(phases: Sequence[tuple[int, int]]) -> list[str]:
    names = []
    for begin, ranks in phases:
        after = ""
        if begin:
            after = f" after step {begin}"
        names += [f"rank {rank}{after}" for rank in range(ranks)]
    return names


def global_batch(
    iterators: Sequence[Any], job_config: JobConfig, batch: int, slots: int
) -> torch.Tensor:
    """Return the next global batch of the loaders of all ranks: int64 [batch,
    seq_len + 1], rows ordered by round, then by slot.

    With ``stream.document_mask``, each row is [inputs, segments, last token], of
    2 · seq_len + 1 numbers.
    """
    ranks = len(iterators)
    microbatches = batch // ranks // job_config.training.local_batch_size
    names = ["input"]
    if job_config.stream.document_mask:
        names.append("segments")
    of_ranks: list[torch.Tensor] = []
    for iterator in iterators:
        rows = []
        for _ in range(microbatches):
            inputs, labels = next(iterator)
            rows.append(torch.cat([*map(inputs.get, names), labels[:, -1:]], dim=1))
        of_ranks.append(torch.cat(rows).view(batch // slots, slots // ranks, -1))
    return torch.cat(of_ranks, dim=1).view(batch, -1)


def digest(
    job_config: JobConfig, steps: int, phases: Sequence[tuple[int, int]]
) -> Digest:
    """Return the hashes of ``steps`` global batches, and the cost of reading the
    batches.

    ``phases`` has a pair (steps before the phase, data-parallel ranks) for each phase.
    From one phase to the next, the positions pass through ``state_dict`` and
    ``load_state_dict``, as in a resume from a checkpoint.

    Raises ConfigError if the batch cannot be divided among the ranks, or the data is
    bad.
    """
    t = job_config.training
    if t.global_batch_size < 1 and len({ranks for _, ranks in phases}) > 1:
        raise ConfigError(
            f"training.global_batch_size is {t.global_batch_size}, so that the global "
            "batch would change with the number of ranks: set it to a number of "
            "sequences to use --resume-ranks"
        )
    tokenizer = load_tokenizer(
        job_config.model.hf_assets_path, job_config.stream.separator
    )
    files = list_and_check(
        training_sets(job_config), stream_options(job_config, tokenizer=tokenizer)
    )
    result = Digest()
    state: dict[str, Any] = {}
    ends = [*(begin for begin, _ in phases[1:]), steps]
    for (begin, ranks), end in zip(phases, ends, strict=True):
        _check_ranks(job_config, ranks)
        loaders = [
            open_stream(job_config, files, tokenizer, dp_world_size=ranks, dp_rank=rank)
            for rank in range(ranks)
        ]
        _resume(loaders, state)
        result.hashes += _hashes(loaders, job_config, end - begin)
        state = _state_of_all(loaders)
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


def _check_ranks(job_config: JobConfig, ranks: int) -> None:
    """Raise ConfigError if the batch and the slots cannot be divided among the ranks."""
    if ranks < 1:
        raise ConfigError(f"--ranks or --resume-ranks is {ranks}, expected at least 1")
    p = job_config.parallelism
    world_size = ranks * p.context_parallel_degree * p.tensor_parallel_degree
    check_batch(job_config, world_size)
    check_slots(job_config, world_size)


def _resume(loaders: Sequence[StreamLoader], state: dict[str, Any]) -> None:
    """Load into each loader the positions of its slots, if there is a state."""
    if not state:
        return
    for loader in loaders:
        slots = slice(loader.slots.start, loader.slots.stop)
        loader.load_state_dict(state | {"positions": state["positions"][slots]})


def _state_of_all(loaders: Sequence[StreamLoader]) -> dict[str, Any]:
    """Return the state of a checkpoint: the fingerprint, and the positions of all slots."""
    states = [loader.state_dict() for loader in loaders]
    positions = torch.cat([state["positions"] for state in states])
    return states[0] | {"positions": positions}


def _hashes(
    loaders: Sequence[StreamLoader], job_config: JobConfig, steps: int
) -> Iterator[str]:
    """Yield the sha256 of each of the next global batches of the loaders."""
    batch = global_batch_size(job_config, len(loaders))
    slots = slot_count(job_config, len(loaders))
    iterators = [iter(loader) for loader in loaders]
    for _ in range(steps):
        rows = global_batch(iterators, job_config, batch, slots)
        yield hashlib.sha256(rows.numpy().tobytes()).hexdigest()


def epoch_amplification(loaders: Sequence[StreamLoader]) -> float:
    """Return the stored bytes that all ranks together read in the first epoch, divided
    by the bytes of all files.

    The ratio is measured if every slot is past the first epoch. Otherwise, it is
    computed from the assignment of files, because buffers read ahead: a measurement in
    the middle of small files would mean nothing.
    """
    files = loaders[0].files
    bytes_read: float = 0
    if all((loader.positions[:, Field.EPOCH] > 0).all() for loader in loaders):
        bytes_read = sum(map(_bytes_of_first_epoch, loaders))
    else:
        for loader in loaders:
            bytes_read += stored_bytes(files, loader.assignment, loader.slots)
    return bytes_read / max(1, sum(file.size for file in files))


def _bytes_of_first_epoch(loader: StreamLoader) -> int:
    return sum(count for (epoch, _), count in loader.bytes_read.items() if epoch == 0)
