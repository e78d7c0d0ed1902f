"""The options of the stream, which every step from files to batches takes as one object."""

import os
from dataclasses import dataclass
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from titan_disp.config.types import JobConfig
from titan_disp.files import cores


@dataclass(frozen=True)
class Format:
    """How documents are found in files. Keys of [stream] have the same names.

    Attributes:
        eos_id: the id of the token that ends a document, ``tokenizer.NO_SEPARATOR``, or
            None if there is no tokenizer.
        vocab_size: the number of the tokenizer's tokens, if there is a tokenizer.
    """

    text_field: str = "text"
    text_split: str = "file"
    token_dtype: str = "uint16"
    eos_id: int | None = None
    vocab_size: int = 1 << 32
    separator: str = ""


@dataclass(frozen=True)
class StreamOptions:
    """How documents become sequences. Keys of [stream] have the same names."""

    seq_len: int = 2048  # tokens of a sequence, without the last label
    seed: int = 0
    # documents of a slot that are shuffled together; 0 or 1: they are not shuffled
    shuffle_window: int = 0
    index: str = ""  # folder of the data's index, or "memory"
    left_out: tuple[str, ...] = ()  # names of files
    run_folder: str = ""  # each start writes ``findings.RunData`` there
    on_bad_data: str = "skip"  # or "fail"
    max_skipped_fraction: float = 0.01
    max_document_bytes: int = 16 << 20
    retry_seconds: float = 60.0
    # bytes that the queues of a pass may hold, besides the slots' shuffling windows
    queue_bytes: int = 32 << 20
    # microbatches that the worker prepares ahead; 0: the training process reads the data
    prefetch: int = 0
    tokenizer_threads: int = 1
    fast_tokenizer: bool = False
    # whether every token comes with the number of its document in the sequence
    segments: bool = False
    format: Format = Format()


def stream_options(
    job_config: JobConfig,
    seq_len: int | None = None,
    tokenizer: BaseTokenizer | None = None,
) -> StreamOptions:
    """Return the stream's options, from [stream] and [training].

    Without a tokenizer, token ids on disk cannot be read.
    """
    stream = job_config.stream
    dispersion = job_config.dispersion
    names = (
        "seed",
        "shuffle_window",
        "index",
        "on_bad_data",
        "max_skipped_fraction",
        "prefetch",
        "fast_tokenizer",
    )
    ids: dict[str, Any] = {}
    if tokenizer is not None:
        ids["eos_id"] = tokenizer.eos_id
        ids["vocab_size"] = tokenizer.get_vocab_size()
    return StreamOptions(
        **{name: getattr(stream, name) for name in names},
        seq_len=seq_len or job_config.training.seq_len,
        max_document_bytes=int(stream.max_document_mb * 2**20),
        # If a rank tried again for longer than the other ranks wait, this would look
        # like a hang.
        retry_seconds=min(
            stream.retry_seconds, 0.6 * job_config.comm.train_timeout_seconds
        ),
        tokenizer_threads=stream.tokenizer_threads or default_threads(),
        left_out=tuple(stream.left_out),
        run_folder=job_config.job.dump_folder,
        segments=stream.document_mask
        or (dispersion.enabled and dispersion.within_documents),
        format=Format(
            text_field=stream.text_field,
            text_split=stream.text_split,
            token_dtype=stream.token_dtype,
            separator=stream.separator,
            **ids,
        ),
    )


def default_threads() -> int:
    """Return a number of threads, 1 to 4: the cores that this process may use, divided
    among the node's ranks. Four threads are enough for any GPU.
    """
    return max(1, min(4, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
