"""The dataloader of the document streams. It has the interface of TorchTitan's loader.

The loader prefetches batches, and holds positions and counters.

A rank owns contiguous slots. The loader takes one sequence of each slot in turn, and
divides the sequences into microbatches. A global batch therefore holds the same
sequences for any number of ranks and any accumulation.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.tools.logging import logger

from titan_disp.config.batch import slot_count
from titan_disp.config.types import JobConfig
from titan_disp.data.assignment import (
    Assignment,
    Share,
    far_from_weights,
    one_share,
)
from titan_disp.data.cursor import FEW, FIRST, check_documents, check_skipped
from titan_disp.data.fingerprint import FIRST_EPOCH, check_fingerprint, fingerprint
from titan_disp.data.listing import DataFile, on_rank_0
from titan_disp.data.options import StreamOptions, stream_options
from titan_disp.data.passes import Progress
from titan_disp.data.position import Field
from titan_disp.data.prefetch import Arrival, OpenStreams, Worker, arrivals
from titan_disp.data.sources import (
    data_sets,
    list_and_check,
    list_for_run,
    readings,
    source_shares,
)
from titan_disp.data.stream import Batch, Encode, RankStreams, as_batch
from titan_disp.data.tokenizer import AnyTokenizer, Encoder
from titan_disp.data.tokenizer_check import tokenizer_warnings
from titan_disp.errors import ConfigError, counted
from titan_disp.metric import Metric

details = logging.getLogger(__name__)  # not for the console: see run.console
# Over all ranks, the largest value counts for these counters, and the sum for others.
LARGEST = ("epoch", "seconds_waited", "wait_fraction")
Counters = Mapping[Metric, float]


def together(of_ranks: Sequence[Counters]) -> dict[Metric, float]:
    """Return the counters of all ranks together: their sums, or the largest values."""
    totals: dict[Metric, float] = {}
    for counter in of_ranks[0]:
        reduction = max if counter.name in LARGEST else sum
        totals[counter] = reduction(counters[counter] for counters in of_ranks)
    return totals


def log_progress(progress: Progress) -> None:
    """Log how far this rank has read up to its positions, unless it has finished."""
    if not progress.finished:
        logger.info(f"data: {progress}")


class StreamLoader(BaseDataLoader):
    """Loads the part of the data that one rank reads.

    Attributes:
        slots: the slots of this rank.
        positions: [slots of this rank, k] int64, each slot's position after the last
            sequence that was handed out. Prefetched sequences are not counted.
        groups: the shares of the sources, whose epochs are counted separately. A single
            source has no name.
        slot_counts: how many of the rank's slots belong to each source, by the source's
            name. The sources are in the order of the slots.
        mesh: the data-parallel mesh over which a checkpoint shards the positions, if
            there are several ranks.
        bytes_read: stored bytes read so far, by (epoch, file).
        on_progress: called before the first batch, while the rank reads up to its
            positions, and once at the end (``Progress.finished``).
    """

    def __init__(
        self,
        files: list[DataFile],
        tokenizer: BaseTokenizer,
        tokenizer_folder: str,
        options: StreamOptions,
        *,
        slots: int,
        local_batch_size: int,
        dp_rank: int,
        dp_world_size: int,
        shares: Sequence[Share] = (),
    ) -> None:
        """Reading starts when the loader is iterated over.

        ``files`` are the files of the split, or of all sources (``shares``).
        """
        slots_per_rank, remainder = divmod(slots, dp_world_size)
        if remainder:
            raise ConfigError(
                f"{slots} slots cannot be divided among {dp_world_size} data-parallel "
                "ranks: see stream.slots"
            )
        self.files = files
        self.options = options
        self.groups = list(shares) or one_share(slots)
        self.assignment = Assignment(files, self.groups, options.seed)
        self.tokenizer = tokenizer
        self.encode: Encode = Encoder(
            tokenizer, tokenizer_folder, options.fast_tokenizer
        )
        first_slot = dp_rank * slots_per_rank
        self.slots = range(first_slot, first_slot + slots_per_rank)
        self.local_batch_size = local_batch_size
        self.pin_memory = False
        self.fingerprint = fingerprint(
            files, tokenizer_folder, options, slots=slots, shares=shares
        )
        self.positions = torch.zeros(slots_per_rank, len(Field), dtype=torch.int64)
        self.slot_counts = {
            group.name: group.slots_among(self.slots) for group in self.groups
        }
        self.mesh: DeviceMesh | None = None
        self.seconds_waited = 0.0
        self.bytes_read: Counter[tuple[int, int]] = Counter()
        self.on_progress: Callable[[Progress], None] = log_progress
        # approximate bytes of text of each source
        self.texts = [
            sum(file.size * file.density for file in files if group.owns(file))
            for group in self.groups
        ]
        self._worker: Worker | None = None
        self._running: Generator[Batch, None, None] | None = None

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._running = self._batches()
        return self._running

    def use(self, worker: Worker) -> None:
        """Let the next iteration read in ``worker``, which has already started.

        A tokenizer that another train spec has built is not sent to the worker, because
        it may come out of pickle with other settings. The iteration then forks this
        process.
        """
        if isinstance(self.tokenizer, AnyTokenizer):
            worker.send(self._opener())
            self._worker = worker
        else:
            logger.warning(
                f"data: {type(self.tokenizer).__name__} is no tokenizer of titan-disp: "
                "the prefetch worker is forked beside NCCL or RCCL, which may need the "
                "variables of slurm/sites"
            )

    def close(self) -> None:
        """Stop the prefetch worker. The next iteration begins at ``positions``."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _batches(self) -> Generator[Batch, None, None]:
        """Yield batches from ``positions`` on, and move ``positions`` past each of them.

        Raises the ConfigError that has ended the reading, usually a DataError.
        """
        of_slots = cycle(self.positions.numpy())
        received = self._arrivals()
        try:
            while True:
                start = time.perf_counter()
                arrival = next(received)
                self.seconds_waited += time.perf_counter() - start
                if isinstance(arrival, ConfigError):
                    raise arrival
                if isinstance(arrival, Progress):
                    self.on_progress(arrival)
                    continue
                self.bytes_read.update(arrival.bytes_read)
                for arrays, positions in zip(
                    arrival.rows, arrival.positions, strict=True
                ):
                    for position, of_slot in zip(positions, of_slots, strict=False):
                        of_slot[:] = position
                    rows = [torch.from_numpy(array) for array in arrays]
                    if self.pin_memory:
                        rows = [row.pin_memory() for row in rows]
                    yield as_batch(*rows)
        finally:
            del received  # DataLoader stops its worker when its iterator is deleted

    def _opener(self) -> OpenStreams:
        """Return a function that opens the rank's streams at given positions."""
        return partial(
            RankStreams,
            self.files,
            self.slots,
            assignment=self.assignment,
            encode=self.encode,
            options=self.options,
        )

    def _arrivals(self) -> Iterator[Arrival]:
        """Return an iterator over what the prefetch worker sends, or over what this
        process reads if there is no worker.
        """
        positions = self.positions.numpy()
        worker = self._worker
        self._worker = None  # a worker can begin only once
        if worker is not None:
            return worker.begin(positions)
        open_streams = partial(self._opener(), positions=positions)
        return arrivals(open_streams, self.options, self.local_batch_size)

    def counters(self) -> dict[Metric, float]:
        """Return this rank's counters of the sequences handed out.

        Most counters count from the start of the run, or from ``restart``. stored_bytes
        and seconds_waited count from the start of this process. "epoch" is the latest
        epoch of the rank's slots. "epochs_read" is the text used or skipped, divided by
        all text, so that the sum over the ranks is the run's value. If there are
        several sources, each has its own epoch, epochs_read, documents and text_bytes.
        """
        columns = self.positions.sum(0).tolist()
        counters: dict[Metric, float] = {
            Metric("documents"): columns[Field.DOCUMENTS],
            Metric("text_bytes"): columns[Field.BYTES],
            Metric("stored_bytes"): sum(self.bytes_read.values()),
            Metric("skipped_documents"): columns[Field.SKIPPED],
            Metric("skipped_bytes"): columns[Field.SKIPPED_BYTES],
            Metric("skipped_files"): columns[Field.SKIPPED_FILES],
            Metric("epoch"): self.positions[:, Field.EPOCH].max().item(),
            Metric("seconds_waited"): self.seconds_waited,
        }
        parts = self.positions.split(list(self.slot_counts.values()))
        for group, text, positions in zip(self.groups, self.texts, parts, strict=True):
            counters |= self._source_counters(group.name, text, positions)
        return counters

    def _source_counters(
        self, source: str, text: float, positions: Tensor
    ) -> dict[Metric, float]:
        """Return the counters of a source, which has ``text`` bytes of text.

        ``positions`` [slots, k] are those of the source's slots on this rank.
        """
        columns = positions.sum(0).tolist()
        read = (
            columns[Field.BYTES]
            + columns[Field.OFFSET_BYTES]
            + columns[Field.SKIPPED_BYTES]
        )
        epoch = positions[:, Field.EPOCH].max().item() if len(positions) else 0
        counters: dict[Metric, float] = {
            Metric("epoch", source): epoch,
            Metric("epochs_read", source): read / max(text, 1),
        }
        if len(self.groups) > 1:
            counters[Metric("documents", source)] = columns[Field.DOCUMENTS]
            counters[Metric("text_bytes", source)] = columns[Field.BYTES]
        return counters

    def check_counters(self, counters: Counters) -> None:
        """Raise DataError if too much data is bad.

        The counters are those of all ranks together, so that all ranks stop, or none.
        """
        allowed = self.options.max_skipped_fraction
        first = self.fingerprint.get(FIRST_EPOCH, 0)
        files_begun = 0.0
        text_begun = 0.0
        for group, text in zip(self.groups, self.texts, strict=True):
            epochs = counters[Metric("epoch", group.name)] + 1 - first
            files_begun += epochs * sum(map(group.owns, self.files))
            text_begun += epochs * text
        documents = counters[Metric("documents")]
        check_documents(counters[Metric("skipped_documents")], documents, allowed)
        if documents >= FIRST:
            lost = counters[Metric("skipped_bytes")]
            check_skipped("bytes of text could not be used", lost, text_begun, allowed)
        # Damaged files are judged only if there are FEW or more per epoch. Otherwise,
        # one damaged file among a few would stop a run in its tenth epoch, and after
        # every resume.
        damaged = counters[Metric("skipped_files")]
        if damaged * len(self.files) >= FEW * files_begun:
            check_skipped(
                "files are damaged and end early", damaged, files_begun, allowed
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the fingerprint (JSON) and a copy of the positions. These are the
        positions of all slots, [S, k], sharded over ``mesh``, or those of this rank's
        slots if there is no mesh.
        """
        positions: Tensor = self.positions.clone()
        if self.mesh is not None:
            positions = DTensor.from_local(
                positions, self.mesh, [Shard(0)], run_check=False
            )
        return {"fingerprint": json.dumps(self.fingerprint), "positions": positions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at a checkpoint's positions, on any number of ranks.

        Raises ConfigError if the checkpoint's fingerprint differs.
        """
        if not state_dict:
            return
        saved = json.loads(state_dict["fingerprint"])
        check_fingerprint(saved, self.fingerprint)
        if FIRST_EPOCH in saved:
            self.fingerprint[FIRST_EPOCH] = saved[FIRST_EPOCH]
        positions = state_dict["positions"]
        if isinstance(positions, DTensor):
            positions = positions.to_local()
        self.positions.copy_(positions)

    def restart(self, epoch: int) -> None:
        """Begin all streams anew at an epoch that no slot has read yet."""
        self.fingerprint[FIRST_EPOCH] = epoch
        self.positions.zero_()
        self.positions[:, Field.EPOCH] = epoch


def open_stream(
    job_config: JobConfig,
    files: list[DataFile],
    tokenizer: BaseTokenizer,
    dp_world_size: int,
    dp_rank: int,
) -> StreamLoader:
    """Return one rank's loader, made from the config.

    ``files`` are the files of all ``training_sets``, in their order.
    """
    slots = slot_count(job_config, dp_world_size)
    return StreamLoader(
        files,
        tokenizer,
        job_config.model.hf_assets_path,
        stream_options(job_config, tokenizer=tokenizer),
        slots=slots,
        shares=source_shares(job_config, slots),
        local_batch_size=job_config.training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
    )


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> StreamLoader:
    """Build the loader, as TorchTitan's ``build_dataloader_fn``.

    Rank 0 lists the files. All ranks raise ConfigError.
    """
    # A dry run (run/dry.py) writes nothing.
    listing = list_for_run if job_config.comm.mode == "default" else list_and_check
    files = on_rank_0(
        listing,
        data_sets(job_config),
        stream_options(job_config, tokenizer=tokenizer),
    )
    if dp_rank == 0:
        details.info(f"data: from {files[0].url} to {files[-1].url}")
        sources = source_shares(job_config, slot_count(job_config, dp_world_size))
        if (coarse := far_from_weights(sources)) is not None:
            logger.warning(f"data: {coarse}")
    loader = open_stream(
        job_config, files, tokenizer, dp_world_size=dp_world_size, dp_rank=dp_rank
    )
    # Another train spec may build TorchTitan's own tokenizer, which lacks the methods
    # for these checks.
    if isinstance(tokenizer, AnyTokenizer):
        warnings = on_rank_0(tokenizer_warnings, tokenizer, files, loader.options)
        for warning in warnings if dp_rank == 0 else ():
            logger.warning(f"data: {warning}")
    if dp_rank == 0 and any(file.blocks is not None for file in files):
        dealt = sum(loader.assignment.dealt)
        details.info(
            f"data: {dealt} of {counted(len(files), 'file')} are read block by block "
            "(docs/data.md)"
        )
    if dp_rank == 0:
        files_of = {
            group.name: [file for file in files if group.owns(file)]
            for group in loader.groups
        }
        for cost in readings(files_of, job_config, dp_world_size):
            for warning in cost.warnings():
                logger.warning(warning)
    loader.pin_memory = job_config.training.dataloader.pin_memory
    return loader
