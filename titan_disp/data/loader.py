"""The stream as TorchTitan's dataloader: prefetch, position in the checkpoint, metrics.

Sequences of global batch t come in the same slots whatever the number of ranks or the accumulation: a rank owns contiguous
slots and yields their sequences round by round, cut into microbatches.
"""

import hashlib
import json
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, IterableDataset
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from titan_disp import dcp
from titan_disp.batch import slot_count
from titan_disp.data.assignment import Assignment
from titan_disp.data.cursor import Field
from titan_disp.data.fast_tokenizer import fast_encoder
from titan_disp.data.files import DataFile, list_files, on_rank_0
from titan_disp.data.stream import RankStreams, StreamOptions
from titan_disp.data.tokenizer import find_tokenizer
from titan_disp.errors import CheckpointError, ConfigError, DataError

Batch = tuple[dict[str, Tensor], Tensor]
_GROUP = 32  # microbatches that travel from the prefetch worker at once, at most …
_GROUP_TOKENS = 1 << 16  # … and their tokens, where one microbatch has not more
_WATCH_SECONDS = 2.0  # between looks of the worker whether its rank is alive
_FEW = 10  # damaged files, with which a small data set may still live
LARGEST = ("epoch", "seconds_waited")  # counters that are the largest of the ranks', not their sum


def encoder(tokenizer: BaseTokenizer) -> Callable[[str], list[int]]:
    """text → token ids, ending in EOS (and beginning with BOS where the tokenizer has one, as TorchTitan does)."""
    if tokenizer.eos_id is None:
        raise ConfigError(
            "the tokenizer has no EOS token, which must separate documents: name one in tokenizer_config.json"
        )
    # The stream has threads of its own, so many as were asked for; the tokenizer's would be one for every core of the node.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if isinstance(tokenizer, HuggingFaceTokenizer):
        # Without offsets, which nobody here needs: a third faster than Tokenizer.encode.
        fast = tokenizer.tokenizer.encode_batch_fast
        begin = [tokenizer.bos_id] if tokenizer.bos_id is not None and not tokenizer.hf_adds_bos else []
        end = [] if tokenizer.hf_adds_eos else [tokenizer.eos_id]
        return lambda text: [*begin, *fast([text])[0].ids, *end]
    return lambda text: tokenizer.encode(text, add_bos=True, add_eos=True)


def tokenizer_hash(folder: str) -> str:
    """sha256 of the tokenizer's files."""
    file = find_tokenizer(folder)
    digest = hashlib.sha256(file.read_bytes())
    for name in ("tokenizer_config.json", "merges.txt"):
        other = Path(folder) / name
        if file.suffix != ".model" and other.is_file():
            digest.update(other.read_bytes())
    return digest.hexdigest()


def fingerprint(files: list[DataFile], tokenizer_folder: str, seq_len: int, seed: int, slots: int) -> dict[str, Any]:
    """Everything that decides which tokens come in which slot; a resume under another one would not continue the run."""
    return {
        "files": [[file.name, file.size] for file in files],
        "tokenizer": tokenizer_hash(tokenizer_folder),
        "seq_len": seq_len,
        "seed": seed,
        "slots": slots,
    }


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What differs between two fingerprints, in words."""
    found = []
    if saved.get("files") != now["files"]:
        old, new = dict(map(tuple, saved.get("files", []))), dict(map(tuple, now["files"]))
        changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        first = changed[0]
        found.append(
            f"data: {len(old)} files then, {len(new)} now, {len(changed)} differ; first {first} "
            f"({old.get(first, 'missing')} bytes then, {new.get(first, 'missing')} now)"
        )
    for key in ("tokenizer", "seq_len", "seed", "slots"):
        if saved.get(key) != now[key]:
            found.append(f"{key}: {saved.get(key)} then, {now[key]} now")
    return found


def _as_it_is(batch: Any) -> Any:
    """DataLoader would make tensors of arrays already in the worker."""
    return batch


class _Sequences(IterableDataset):
    """Runs in the prefetch worker: (tokens [n, seq_len + 1], positions [n, k], bytes read by (epoch, file)), or a ConfigError.

    n is ``batch`` times up to ``group``; less only before an error, which comes after all that was read before it.
    """

    def __init__(self, make: Any, batch: int, group: int) -> None:
        self.make, self.batch, self.group = make, batch, group

    def __iter__(self) -> Iterator[Any]:
        streams: RankStreams | None = None
        _allow_many_files()
        try:
            streams = self.make()
            slots = list(streams.slots.values())
            turn = 0
            while True:
                # Arrays travel through the worker's pipe faster than tensors, which would go through shared memory.
                # int64 already here, as the model wants it: this process has the time.
                tokens = np.empty((self.batch * self.group, streams.options.seq_len + 1), dtype=np.int64)
                positions = np.empty((len(tokens), len(Field)), dtype=np.int64)
                done, failed = 0, None
                try:
                    for row, position in zip(tokens, positions, strict=True):
                        slot = slots[turn]
                        slot.fill(row)
                        position[:] = slot.position
                        turn = (turn + 1) % len(slots)
                        done += 1
                except ConfigError as error:
                    failed = error
                whole = done - done % self.batch
                if whole:
                    yield tokens[:whole], positions[:whole], streams.bytes_read()
                if failed is not None:
                    raise failed
        except ConfigError as error:
            yield error  # raised by the consumer: a worker's traceback would bury the message
        finally:
            if streams is not None:
                streams.close()


def _allow_many_files() -> None:
    """A rank of many slots holds a file open for each: raise the soft limit (often 1024) to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _worker_signals(worker: int) -> None:
    """Ignore what asks the *rank* to stop: it will save a checkpoint first, and a dead worker would fail its next step.

    SIGTERM from the rank itself still ends the worker: multiprocessing sends it when Python exits, and then waits. So does the
    rank's death: DataLoader's own watch would wait for the pipe to be read, for ever.
    """
    for name in ("SIGUSR1", "SIGUSR2", "SIGINT"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def wait() -> None:
        while os.getppid() == parent.pid:
            heard = signal.sigtimedwait({signal.SIGTERM}, _WATCH_SECONDS)
            if heard is not None and heard.si_pid == parent.pid:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
    torch.set_num_threads(1)


class StreamLoader(BaseDataLoader):
    """One rank's part of the stream.

    Attributes:
        positions: [own slots, k] int64, of the sequences handed out, not of those prefetched.
        mesh: the data-parallel mesh, or None on one data-parallel rank; the positions are sharded over it in a checkpoint.
        seconds_waited: time that the consumer waited for data, since the start.
        bytes_read: stored bytes read so far, by (epoch, file).
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
    ) -> None:
        if slots % dp_world_size:
            raise ConfigError(
                f"{slots} slots cannot be divided among {dp_world_size} data-parallel ranks: see stream.slots"
            )
        self.files, self.options = files, options
        self.assignment = Assignment([f.name for f in files], slots, options.seed)
        encode = encoder(tokenizer)
        self.encode = fast_encoder(tokenizer, tokenizer_folder, encode) if options.fast_tokenizer else encode
        own = slots // dp_world_size
        self.slots = range(dp_rank * own, (dp_rank + 1) * own)
        self.local_batch_size, self.prefetch, self.pin_memory = local_batch_size, prefetch, pin_memory
        self.fingerprint = fingerprint(files, tokenizer_folder, options.seq_len, options.seed, slots)
        self.positions = torch.zeros(own, len(Field), dtype=torch.int64)
        self.mesh: DeviceMesh | None = None
        self.seconds_waited = 0.0
        self.bytes_read: Counter[tuple[int, int]] = Counter()
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
        sequences = _Sequences(self._make, batch, group)
        workers: dict[str, Any] = {}
        if self.prefetch:
            # Forked, also where another start is the default (Python 3.14): the tokenizer is there already.
            workers = {
                "num_workers": 1,
                "prefetch_factor": -(-self.prefetch // group),
                "multiprocessing_context": "fork",
            }
            workers["worker_init_fn"] = _worker_signals
        batches = iter(DataLoader(sequences, batch_size=None, collate_fn=_as_it_is, **workers))  # type: ignore[arg-type]
        turn, own = 0, len(self.slots)
        mine = self.positions.numpy()
        try:
            while True:
                start = time.perf_counter()
                got = next(batches)
                self.seconds_waited += time.perf_counter() - start
                if isinstance(got, ConfigError):
                    raise got
                array, positions, self.bytes_read = got
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
        """This rank's totals since the start of the run, of sequences handed out; seconds_waited since this process's start."""
        columns = self.positions.sum(0).tolist()
        return {
            "documents": columns[Field.DOCUMENTS],
            "text_bytes": columns[Field.BYTES],
            "skipped_documents": columns[Field.SKIPPED],
            "skipped_files": columns[Field.SKIPPED_FILES],
            "epoch": self.positions[:, Field.EPOCH].max().item(),
            "seconds_waited": self.seconds_waited,
        }

    def check_files(self, counters: dict[str, float]) -> None:
        """Stop a run of which many files end early. (Documents that cannot be used are counted while they are read.)

        Args:
            counters: of all ranks together.

        Raises:
            DataError: more than stream.max_skipped_fraction of the files that were begun, and _FEW at least.
        """
        skipped, begun = counters["skipped_files"], len(self.files) * (counters["epoch"] + 1)
        if skipped >= _FEW and skipped > self.options.max_skipped_fraction * begun:
            raise DataError(
                f"{skipped:.0f} of {begun:.0f} files are damaged and end early, more than stream.max_skipped_fraction "
                f"{self.options.max_skipped_fraction} allows: their names are in the logs above (of all ranks)"
            )

    def state_dict(self) -> dict[str, Any]:
        """The fingerprint and a copy of the positions, [S, k] over all ranks."""
        positions: Tensor = self.positions.clone()
        if self.mesh is not None:
            positions = DTensor.from_local(positions, self.mesh, [Shard(0)], run_check=False)
        return {"fingerprint": json.dumps(self.fingerprint), "positions": positions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a checkpoint was taken, on any number of ranks.

        Raises:
            ConfigError: the checkpoint belongs to other data, another tokenizer, seq_len, seed or number of slots.
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


def check_fingerprint(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise ConfigError where a checkpoint's data is not this run's data."""
    if not saved:
        raise ConfigError(
            "the checkpoint holds no data position of titan-disp: it was written by another loader. Set "
            'stream.on_mismatch = "restart" to go on with streams that begin anew'
        )
    if found := differences(saved, now):
        hint = ""
        if saved.get("slots") != now["slots"]:
            hint = (
                " The slots are training.global_batch_size unless stream.slots is set; global_batch_size = -1 ties them to the "
                "number of ranks, so that such a run cannot resume on another number."
            )
        raise ConfigError(
            f"the checkpoint was written with other data: {'; '.join(found)}.{hint} Restore what it was, or set "
            'stream.on_mismatch = "restart" to go on with streams that begin a new epoch'
        )


def read_data_state(checkpoint: str) -> tuple[dict[str, Any], int]:
    """The fingerprint in a checkpoint folder, and the last epoch that its streams have begun; ({}, −1) of another loader.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        metadata = dcp.read_metadata(checkpoint).state_dict_metadata
        if "dataloader.fingerprint" not in metadata:
            return {}, -1
        stored = cast(TensorStorageMetadata, metadata["dataloader.positions"])
        state: dict[str, Any] = {"fingerprint": "", "positions": torch.empty(stored.size, dtype=torch.int64)}
        dcp.load({"dataloader": state}, checkpoint, no_dist=True)
    except (OSError, UnpicklingError, CheckpointException) as error:
        raise CheckpointError(f"cannot read the data position in {checkpoint}: {error}") from error
    return json.loads(state["fingerprint"]), int(state["positions"][:, Field.EPOCH].max())


def stream_options(job_config: JobConfig, seq_len: int | None = None) -> StreamOptions:
    """[stream] and [training] as the stream needs them."""
    stream = job_config.stream  # type: ignore[attr-defined]
    return StreamOptions(
        seq_len=seq_len or job_config.training.seq_len,
        seed=stream.seed,
        on_bad_data=stream.on_bad_data,
        max_skipped_fraction=stream.max_skipped_fraction,
        max_document_bytes=int(stream.max_document_mb * 2**20),
        # One rank that tries longer than the others wait would look like a hang.
        retry_seconds=min(stream.retry_seconds, 0.6 * job_config.comm.train_timeout_seconds),
        tokenizer_threads=stream.tokenizer_threads or default_threads(),
        fast_tokenizer=stream.fast_tokenizer,
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
    """One rank's loader, as a config describes it."""
    return StreamLoader(
        files,
        tokenizer,
        job_config.model.hf_assets_path,
        stream_options(job_config),
        slots=slot_count(job_config, dp_world_size),
        local_batch_size=job_config.training.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        prefetch=job_config.stream.prefetch,  # type: ignore[attr-defined]
        pin_memory=pin_memory,
    )


def build_dataloader(dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> StreamLoader:
    """TorchTitan's ``build_dataloader_fn``. Files are listed on rank 0.

    Raises:
        ConfigError: on all ranks alike: no data, no hub, slots that do not fit the ranks.
    """
    training = job_config.training
    files = on_rank_0(list_files, training.dataset, training.dataset_path)
    if dp_rank == 0:
        gigabytes = sum(file.size for file in files) / 1e9
        logger.info(f"data: {len(files)} files, {gigabytes:.3g} GB, from {files[0].url} to {files[-1].url}")
    return open_stream(job_config, files, tokenizer, dp_world_size, dp_rank, training.dataloader.pin_memory)
