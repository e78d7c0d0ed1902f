"""The stream as TorchTitan's dataloader: prefetch, position in the checkpoint, metrics.

Sequences of global batch t come in the same slots whatever the number of ranks or the accumulation: a rank owns contiguous
slots and yields their sequences round by round, cut into microbatches.
"""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from titan_disp.batch import slot_count
from titan_disp.data.assignment import Assignment
from titan_disp.data.fast_tokenizer import fast_encoder
from titan_disp.data.files import DataFile, on_rank_0
from titan_disp.data.fingerprint import check_fingerprint, fingerprint
from titan_disp.data.first_look import list_and_look
from titan_disp.data.formats import Format
from titan_disp.data.limits import check_documents, check_files
from titan_disp.data.mixture import Mixture, Share
from titan_disp.data.place import Field
from titan_disp.data.progress import fraction_read, groups_of
from titan_disp.data.shuffle import memory
from titan_disp.data.sources import source_shares, training_sets
from titan_disp.data.stream import RankStreams, StreamOptions
from titan_disp.data.tokenizer import encoder
from titan_disp.data.worker import Sequences, as_it_is, worker_signals
from titan_disp.errors import ConfigError

Batch = tuple[dict[str, Tensor], Tensor]
_GROUP = 32  # microbatches that travel from the prefetch worker at once, at most …
_GROUP_TOKENS = 1 << 16  # … and their tokens, where one microbatch has not more
C4_DOCUMENT_BYTES = 2200  # of text, on average
LARGEST = ("epoch", "seconds_waited", "wait_fraction")  # counters that are the largest of the ranks', not their sum


def is_largest(name: str) -> bool:
    """Whether a counter of all ranks together is the largest one, not their sum. A source's have its name behind a slash."""
    return name.partition("/")[0] in LARGEST


def together(every: Sequence[dict[str, float]]) -> dict[str, float]:
    """The counters of all ranks as one."""
    return {name: (max if is_largest(name) else sum)(counters[name] for counters in every) for name in every[0]}


class StreamLoader(BaseDataLoader):
    """One rank's part of the stream.

    Attributes:
        positions: [own slots, k] int64, of the sequences handed out, not of those prefetched.
        groups: of slots, whose epochs are counted apart.
        mesh: the data-parallel mesh, or None on one data-parallel rank; the positions are sharded over it in a checkpoint.
        seconds_waited: time that the consumer waited for data, since the start.
        bytes_read: stored bytes read so far, by (epoch, file).
        densities: bytes of text in a stored byte, of each group.
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
        prefetch: int,
        pin_memory: bool = False,
        shares: Sequence[Share] = (),
    ) -> None:
        """Args:
        files: of the split, or of all sources. tokenizer_folder: for the fingerprint. slots: S.
        shares: of the sources, where there are several.
        """
        if slots % dp_world_size:
            raise ConfigError(
                f"{slots} slots cannot be divided among {dp_world_size} data-parallel ranks: see stream.slots"
            )
        self.files, self.options = files, options
        self.assignment = Mixture(files, shares, options.seed) if shares else Assignment(files, slots, options.seed)
        encode = encoder(tokenizer)
        self.encode = fast_encoder(tokenizer, tokenizer_folder, encode) if options.fast_tokenizer else encode
        own = slots // dp_world_size
        self.slots = range(dp_rank * own, (dp_rank + 1) * own)
        self.local_batch_size, self.prefetch, self.pin_memory = local_batch_size, prefetch, pin_memory
        self.fingerprint = fingerprint(files, tokenizer_folder, options, slots, shares)
        self.positions = torch.zeros(own, len(Field), dtype=torch.int64)
        self.groups = groups_of(files, slots, shares)
        self.mesh: DeviceMesh | None = None
        self.seconds_waited = 0.0
        self.bytes_read: Counter[tuple[int, int]] = Counter()
        self.densities = [0.0] * len(self.groups)
        self._running: Generator[Batch, None, None] | None = None

    def _make(self) -> RankStreams:
        return RankStreams(self.files, self.slots, self.positions.numpy(), self.assignment, self.encode, self.options)

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        self._running = self._batches()
        return self._running

    def close(self) -> None:
        """End the prefetch worker. Iterating again begins at ``positions``."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _batches(self) -> Generator[Batch, None, None]:
        batch = self.local_batch_size
        # Through the pipe in groups: each passage costs both processes as much as thousands of tokens.
        group = max(1, min(_GROUP, _GROUP_TOKENS // (batch * self.options.seq_len))) if self.prefetch else 1
        sequences = Sequences(self._make, batch, group)
        workers: dict[str, Any] = {}
        if self.prefetch:
            # Forked, also where another start is the default (Python 3.14): the tokenizer is there already.
            workers = {
                "num_workers": 1,
                "prefetch_factor": -(-self.prefetch // group),
                "multiprocessing_context": "fork",
            }
            workers["worker_init_fn"] = worker_signals
        batches = iter(DataLoader(sequences, batch_size=None, collate_fn=as_it_is, **workers))  # type: ignore[arg-type]
        turn, own = 0, len(self.slots)
        mine = self.positions.numpy()
        try:
            while True:
                start = time.perf_counter()
                got = next(batches)
                self.seconds_waited += time.perf_counter() - start
                if isinstance(got, ConfigError):
                    raise got
                array, positions, bytes_read, self.densities = got
                self.bytes_read.update(bytes_read)
                for first in range(0, len(array), batch):
                    for row in positions[first : first + batch]:
                        mine[turn] = row
                        turn = (turn + 1) % own
                    tokens = torch.from_numpy(array[first : first + batch])
                    if self.pin_memory:
                        tokens = tokens.pin_memory()
                    yield {"input": tokens[:, :-1]}, tokens[:, 1:]
        finally:
            del batches  # DataLoader ends its worker when its iterator goes

    def counters(self) -> dict[str, float]:
        """This rank's totals since the start of the run, of sequences handed out; stored_bytes and seconds_waited since this
        process's start.

        epochs_read is this rank's part of the mean over slots, with the fraction of the epoch that they are in: ranks add up to
        it. Of several sources, each has its own epoch and epochs_read.
        """
        columns = self.positions.sum(0).tolist()
        return {
            "documents": columns[Field.DOCUMENTS],
            "text_bytes": columns[Field.BYTES],
            "stored_bytes": sum(self.bytes_read.values()),
            "skipped_documents": columns[Field.SKIPPED],
            "skipped_files": columns[Field.SKIPPED_FILES],
            "epoch": self.positions[:, Field.EPOCH].max().item(),
            "seconds_waited": self.seconds_waited,
            **dict(self._epochs()),
        }

    def _epochs(self) -> Iterator[tuple[str, float]]:
        for group, density in zip(self.groups, self.densities, strict=True):
            own = range(max(group.slots.start, self.slots.start), min(group.slots.stop, self.slots.stop))
            latest, read, slots = 0, 0.0, len(group.slots)
            for slot in own:
                position = self.positions[slot - self.slots.start].numpy()
                epoch = int(position[Field.EPOCH])
                latest = max(latest, epoch)
                read += epoch + fraction_read(position, self.assignment.run(slot, epoch), slots, density)
            yield f"epoch{group.suffix}", latest
            yield f"epochs_read{group.suffix}", read / slots

    def check_counters(self, counters: dict[str, float]) -> None:
        """Stop a run whose data is broken, not just blemished.

        Args:
            counters: of all ranks together, so that all of them stop, or none, and the same data stops any number of them.

        Raises:
            DataError: more documents or files were skipped than ``limits`` allows.
        """
        allowed = self.options.max_skipped_fraction
        begun = sum(group.files * (counters[f"epoch{group.suffix}"] + 1) for group in self.groups)
        check_documents(counters["skipped_documents"], counters["documents"], allowed)
        check_files(counters["skipped_files"], begun, len(self.files), allowed)

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint and a copy of the positions, [S, k] over all ranks."""
        positions: Tensor = self.positions.clone()
        if self.mesh is not None:
            positions = DTensor.from_local(positions, self.mesh, [Shard(0)], run_check=False)
        return {"fingerprint": json.dumps(self.fingerprint), "positions": positions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint was taken, on any number of ranks.

        Raises:
            ConfigError: the checkpoint belongs to other data, another tokenizer, seq_len, seed, window or number of slots.
        """
        if not state_dict:
            return
        check_fingerprint(json.loads(state_dict["fingerprint"]), self.fingerprint)
        positions = state_dict["positions"]
        if isinstance(positions, DTensor):
            positions = positions.to_local()
        self.positions.copy_(positions)

    def restart(self, epoch: int) -> None:
        """Begin all streams anew at an epoch that has not been read yet."""
        self.positions.zero_()
        self.positions[:, Field.EPOCH] = epoch


def stream_options(
    job_config: JobConfig, seq_len: int | None = None, tokenizer: BaseTokenizer | None = None
) -> StreamOptions:
    """[stream] and [training] as the stream needs them; the tokenizer, without which token ids cannot be read."""
    stream = job_config.stream  # type: ignore[attr-defined]
    return StreamOptions(
        seq_len=seq_len or job_config.training.seq_len,
        seed=stream.seed,
        shuffle_window=stream.shuffle_window,
        on_bad_data=stream.on_bad_data,
        max_skipped_fraction=stream.max_skipped_fraction,
        max_document_bytes=int(stream.max_document_mb * 2**20),
        # One rank that tries longer than the others wait would look like a hang.
        retry_seconds=min(stream.retry_seconds, 0.6 * job_config.comm.train_timeout_seconds),
        tokenizer_threads=stream.tokenizer_threads or default_threads(),
        fast_tokenizer=stream.fast_tokenizer,
        format=Format(
            stream.text_field,
            stream.text_split,
            stream.token_dtype,
            eos_id=tokenizer.eos_id if tokenizer is not None else None,
            vocab_size=tokenizer.get_vocab_size() if tokenizer is not None else None,
        ),
    )


def default_threads() -> int:
    """Cores that this process may use, divided among the ranks of the node; 4 are plenty for any GPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


def open_stream(
    job_config: JobConfig,
    files: list[DataFile],
    tokenizer: BaseTokenizer,
    dp_world_size: int,
    dp_rank: int,
    pin_memory: bool = False,
) -> StreamLoader:
    """One rank's loader, as a config describes it.

    Args:
        files: of all ``training_sets``, in their order.
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
        prefetch=job_config.stream.prefetch,  # type: ignore[attr-defined]
        pin_memory=pin_memory,
    )


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> StreamLoader:
    """TorchTitan's ``build_dataloader_fn``. Files are listed on rank 0.

    Raises:
        ConfigError: on all ranks alike: no data, data that the config does not describe, no hub, slots that do not fit the ranks.
    """
    options = stream_options(job_config, tokenizer=tokenizer)
    files = on_rank_0(list_and_look, training_sets(job_config), options)
    if dp_rank == 0:
        gigabytes = sum(file.size for file in files) / 1e9
        logger.info(f"data: {len(files)} files, {gigabytes:.3g} GB, from {files[0].url} to {files[-1].url}")
        for share in source_shares(job_config, slot_count(job_config, dp_world_size)):
            logger.info(f"data: {share}")
    loader = open_stream(
        job_config, files, tokenizer, dp_world_size, dp_rank, job_config.training.dataloader.pin_memory
    )
    own, window = len(loader.slots), loader.options.shuffle_window
    if dp_rank == 0 and window > 1:
        usual, most = (memory(own, window, length) / 1e6 for length in (C4_DOCUMENT_BYTES, math.inf))
        logger.info(
            f"data: {window} documents of each slot are shuffled together (stream.shuffle_window). A rank of {own} slots holds "
            f"up to {usual:,.3g} MB for that where documents are as long as C4's, and up to {most:,.3g} MB where they are longer"
        )
    return loader
