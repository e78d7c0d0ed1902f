"""These are the options of the stream.

Every step of the road of a batch takes them as one object.
"""

import os
from dataclasses import dataclass

from torchtitan.components.tokenizer import BaseTokenizer

from titan_disp.config.types import JobConfig
from titan_disp.files import cores


@dataclass(frozen=True)
class Format:
    """Describe how documents are found in files: see [stream].

    Without a tokenizer, ``eos_id`` and ``vocab_size`` have these values.

    Attributes:
        eos_id: of the token that ends a document, or ``tokenizer.NO_SEPARATOR``.
    """

    text_field: str = "text"
    text_split: str = "file"
    token_dtype: str = "uint16"
    eos_id: int | None = None
    vocab_size: int = 1 << 32
    separator: str = ""


@dataclass(frozen=True)
class StreamOptions:
    """Describe how documents become sequences: see [stream] for the keys that have the
    same names.
    """

    seq_len: int = 2048  # tokens of a sequence, without the last label
    seed: int = 0
    # documents of a slot that are shuffled together; 0 or 1 for none
    shuffle_window: int = 0
    index: str = ""  # of the data: a folder, or "memory"
    left_out: tuple[str, ...] = ()  # names of files
    run_folder: str = ""  # where a start writes what it has found, ``findings``
    on_bad_data: str = "skip"  # or "fail"
    max_skipped_fraction: float = 0.01
    max_document_bytes: int = 16 << 20
    retry_seconds: float = 60.0
    # that the queues of a pass may hold, beside the slots' shuffling windows
    queue_bytes: int = 32 << 20
    # Microbatches that the worker prepares ahead; 0 reads in the training process
    prefetch: int = 0
    tokenizer_threads: int = 1
    fast_tokenizer: bool = False
    # Whether every token comes with the number of its document in the sequence
    segments: bool = False
    format: Format = Format()


def stream_options(
    job_config: JobConfig,
    seq_len: int | None = None,
    tokenizer: BaseTokenizer | None = None,
) -> StreamOptions:
    """Take the stream's options from [stream] and [training].

    Without a tokenizer, token ids on disk cannot be read.
    """
    stream = job_config.stream
    dispersion = job_config.dispersion
    same = (
        "seed",
        "shuffle_window",
        "index",
        "on_bad_data",
        "max_skipped_fraction",
        "prefetch",
        "fast_tokenizer",
    )
    ids = (
        {}
        if tokenizer is None
        else {"eos_id": tokenizer.eos_id, "vocab_size": tokenizer.get_vocab_size()}
    )
    return StreamOptions(
        **{name: getattr(stream, name) for name in same},
        seq_len=seq_len or job_config.training.seq_len,
        max_document_bytes=int(stream.max_document_mb * 2**20),
        # If a rank tried again for longer than the other ranks wait for it, it would
        # look like a hang.
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
    """Return the cores that this process may use, divided among the node's ranks: from
    1 to 4, enough for any GPU.
    """
    return max(1, min(4, cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
