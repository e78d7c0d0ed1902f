"""Validation runs on the first sequences of the validation split. These sequences are
the same in every run and on any mesh.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.tools.logging import logger

from titan_disp.config.types import JobConfig
from titan_disp.data.assignment import Assignment, one_share
from titan_disp.data.cursor import check_documents
from titan_disp.data.findings import check_content
from titan_disp.data.listing import DataFile, list_files, on_rank_0
from titan_disp.data.options import stream_options
from titan_disp.data.position import Field
from titan_disp.data.sources import held_out_sets
from titan_disp.data.stream import Batch, RankStreams, as_batch, empty_rows
from titan_disp.data.tokenizer import encoder
from titan_disp.errors import ConfigError, RefusedError, counted


def validation_sequences(job_config: JobConfig, dp_world_size: int) -> int:
    """Return the number of validation sequences over all ranks, a multiple of the
    sequences of one validation step.
    """
    v = job_config.validation
    wanted = job_config.stream.validation_sequences
    step = v.local_batch_size * dp_world_size
    if not wanted:
        if v.steps < 1:
            raise ConfigError(
                f"validation.steps is {v.steps}; set it to 1 or more, or set "
                "stream.validation_sequences"
            )
        return v.steps * step
    if v.steps != -1 and v.steps * step < wanted:
        raise ConfigError(
            f"validation.steps is {v.steps}, which would end after {v.steps * step} "
            f"of the stream.validation_sequences {wanted}: set only one of the two "
            "keys (validation.steps = -1 is no limit)"
        )
    if wanted < 1 or wanted % step:
        raise ConfigError(
            f"stream.validation_sequences is {wanted}, expected a multiple of "
            f"validation.local_batch_size {v.local_batch_size} × "
            f"{counted(dp_world_size, 'data-parallel rank')} = {step}"
        )
    return wanted


def first_sequences(
    files: list[DataFile],
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    seq_len: int,
    count: int,
    asked: str,
) -> list[np.ndarray]:
    """Return the first ``count`` sequences of a split, which is read as one stream. The
    arrays are ``empty_rows`` of int32.

    Raises RefusedError if the split has fewer sequences, because repeating some would
    give them more weight. ``asked`` says, for the message, how to ask for fewer.
    """
    options = replace(stream_options(job_config, seq_len, tokenizer), shuffle_window=0)
    files = check_content(files, options, "validation")
    begin = np.zeros((1, len(Field)), dtype=np.int64)
    assignment = Assignment(files, one_share(1), seed=0)
    with closing(
        RankStreams(files, range(1), begin, assignment, encoder(tokenizer), options)
    ) as streams:
        slot = streams.slots[0]
        arrays = empty_rows(count, options, np.int32)
        for done, row in enumerate(zip(*arrays, strict=True)):
            slot.fill(*row)
            if slot.position[Field.EPOCH] > 0:
                raise RefusedError(
                    f"the validation split ({counted(len(files), 'file')}, "
                    f"{files[0].url} to {files[-1].url}) holds "
                    f"{counted(done, 'sequence')} of {seq_len} tokens (seq_len), expected "
                    f"{count}: {asked}, or take more text"
                )
    check_documents(
        slot.position[Field.SKIPPED],
        slot.position[Field.DOCUMENTS],
        options.max_skipped_fraction,
    )
    return arrays


def held_out_sequences(
    job_config: JobConfig, tokenizer: BaseTokenizer, count: int
) -> list[Tensor] | None:
    """Return the first sequences of the validation split, the same on every rank and in
    every run: token ids [count, training.seq_len + 1] int64, and their segments
    (``Slot.fill``) if ``StreamOptions.segments`` is set. Return None if there is no
    validation split. This is a collective call.

    The split is the first one of ``held_out_sets`` that exists.
    """
    if not (splits := held_out_sets(job_config)):
        return None

    # On rank 0, because hundreds of ranks would ask the hub for the same documents.
    def read() -> list[np.ndarray] | None:
        for data in splits:
            try:
                files = data.files()
            except ConfigError as error:
                logger.warning(f"no validation split: {error}")
                continue
            asked = f"set condensation.sequences to less than {count}, or condensation.interval = 0"
            return first_sequences(
                files,
                tokenizer,
                job_config,
                seq_len=job_config.training.seq_len,
                count=count,
                asked=asked,
            )
        return None

    arrays = on_rank_0(read)
    if arrays is None:
        return None
    return [torch.from_numpy(rows).long() for rows in arrays]


class _ValidationSet:
    """This rank's validation batches. Their sequences are read once, before training."""

    def __init__(
        self,
        job_config: JobConfig,
        tokenizer: BaseTokenizer,
        dp_world_size: int,
        dp_rank: int,
    ) -> None:
        v = job_config.validation
        files = on_rank_0(list_files, v.dataset, v.dataset_path, "validation")
        count = validation_sequences(job_config, dp_world_size)
        step = v.local_batch_size * dp_world_size
        asked = (
            f"set stream.validation_sequences to a smaller multiple of {step} "
            f"(validation.local_batch_size {v.local_batch_size} × {dp_world_size} "
            "data-parallel ranks), or lower validation.steps"
        )
        read = partial(
            first_sequences,
            files,
            tokenizer,
            job_config,
            seq_len=v.seq_len,
            count=count,
            asked=asked,
        )
        shape = (-1, dp_world_size, v.local_batch_size, v.seq_len + 1)
        # on rank 0, as in held_out_sequences
        self._arrays = [
            torch.from_numpy(rows).view(shape)[:, dp_rank].clone()
            for rows in on_rank_0(read)
        ]

    def __iter__(self) -> Iterator[Batch]:
        for tokens, *segments in zip(*self._arrays, strict=True):
            yield as_batch(tokens.long(), *segments)


class StreamValidator(Validator):
    """Runs TorchTitan's validation loop on our data.

    The parent's ``__init__``, which would build TorchTitan's loader, is not called.
    """

    # Returns the context in which to validate at a step. titan_disp.train sets it, to
    # announce and time the validation.
    around: Callable[[int], AbstractContextManager[Any]] = nullcontext

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        **attributes: Any,
    ) -> None:
        """``attributes`` are the parent's other arguments, which it keeps as attributes of
        the same names.
        """
        BaseValidator.__init__(self, job_config)
        self.__dict__.update(attributes)
        self.tokenizer = tokenizer
        self.validation_dataloader = _ValidationSet(
            job_config, tokenizer, dp_world_size, dp_rank
        )

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Validate, and log the loss and the throughput of validation.

        TorchTitan has the same counters of tokens and time for training and validation.
        The values of training are put aside during validation.
        """
        metrics = self.metrics_processor
        tokens = metrics.ntokens_since_last_log
        seconds = time.perf_counter() - metrics.time_last_log
        metrics.ntokens_since_last_log = 0
        metrics.time_last_log = time.perf_counter()
        with self.around(step):
            super().validate(model_parts, step)
        metrics.ntokens_since_last_log = tokens
        metrics.time_last_log = time.perf_counter() - seconds


def build_validator(**kwargs: Any) -> StreamValidator:
    """Build the validator, as TorchTitan's ``build_validator_fn``.

    Arguments for pipeline parallelism are dropped.
    """
    no_pipeline = dict.fromkeys(
        ("pp_schedule", "pp_has_first_stage", "pp_has_last_stage")
    )
    return StreamValidator(**kwargs | no_pipeline)
