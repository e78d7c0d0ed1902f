"""``titan-disp data index`` indexes a run's data, and counts repeated documents."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from titan_disp.config.types import JobConfig
from titan_disp.data.findings import check_content, encoding_of
from titan_disp.data.index import FOLDER, IN_MEMORY, FileIndex, current, index_file
from titan_disp.data.listing import DataFile
from titan_disp.data.options import StreamOptions, stream_options
from titan_disp.data.sources import DataSet, held_out_sets, training_sets
from titan_disp.data.tokenizer import load_tokenizer
from titan_disp.errors import ConfigError, counted
from titan_disp.files import in_parallel, make_writable, progress

# With fewer bytes, starting processes takes longer than the processes save.
_WORTH = 1 << 31


def index_data(job_config: JobConfig, out: Path | None, workers: int) -> Iterator[str]:
    """Yield lines about a run's local training and held-out data after indexing them.

    Raises ConfigError if data is missing or on the hub, or if ``out`` is None and the
    training data is not one folder.
    """
    sets = training_sets(job_config)
    listed = [data_set.check() for data_set in sets]
    held_out = _held_out(job_config)
    all_files = [*chain.from_iterable(listed), *held_out]
    if not all(listed) or any(file.remote for file in all_files):
        raise ConfigError(
            "data in a store or on the hub cannot be indexed: to copy data from the "
            "hub, use titan-disp data fetch"
        )
    options = stream_options(job_config)
    if any(file.holds_ids for file in all_files):
        tokenizer = load_tokenizer(
            job_config.model.hf_assets_path, job_config.stream.separator
        )
        options = stream_options(job_config, tokenizer=tokenizer)
    training = []
    for data_set, files in zip(sets, listed, strict=True):
        training += check_content(files, options, data_set.key)
    held_out = [replace(file, encoding=encoding_of(file, options)) for file in held_out]
    if out is not None:
        folder = out
    elif options.index and options.index != IN_MEMORY:
        folder = Path(options.index)
    else:
        folder = _folder_in_data(sets)
    indexes = write_index([*training, *held_out], folder, options, workers)
    yield from lines(
        training=[indexes[file.url] for file in training],
        held_out=[indexes[file.url] for file in held_out],
    )
    for url, index in indexes.items():
        if index.damage:
            yield f"{url} is damaged: {index.damage}"
    yield f"stream.index = {str(folder)!r}"


def _held_out(job_config: JobConfig) -> list[DataFile]:
    """Return the held-out files. Without validation, missing files are left out."""
    files = []
    for data_set in held_out_sets(job_config):
        try:
            files += data_set.check()
        except ConfigError:
            if job_config.validation.enable:
                raise
    return files


def _folder_in_data(sets: Sequence[DataSet]) -> Path:
    """Return the folder for the index in the folder of the training data.

    Raises ConfigError if the training data is not one folder.
    """
    path = sets[0].path
    if len(sets) > 1 or path is None or not os.path.isdir(path):
        raise ConfigError(
            "the training data is not one folder: say with --out where to write the "
            "index"
        )
    return Path(path, FOLDER)


def write_index(
    files: Sequence[DataFile], folder: Path, options: StreamOptions, workers: int
) -> dict[str, FileIndex]:
    """Index local files in ``workers`` processes, the largest files first.

    Return the index of each file, by its path. With little data, one thread is used.
    """
    make_writable(folder, "the folder of the index (stream.index or --out)")
    total = sum(file.size for file in files)
    pool: Executor = ThreadPoolExecutor(1)
    if workers > 1 and total > _WORTH < sum(
        f.size for f in files if isinstance(current(folder, options, f), str)
    ):
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    indexes = {}
    ordered = sorted(files, key=lambda file: -file.size)
    index_in_folder = partial(index_file, folder, options)
    with pool, progress("indexing", "B", total=total) as bar:
        for file, index in in_parallel(pool, index_in_folder, ordered):
            indexes[file.url] = index
            bar.update(file.size)
    return indexes


def _hashes(indexes: Sequence[FileIndex]) -> np.ndarray:
    """Return the hashes of all documents as uint64, 0 for documents without text."""
    return np.concatenate([np.zeros(0, np.uint64), *(i.hashes for i in indexes)])


def lines(
    training: Sequence[FileIndex], held_out: Sequence[FileIndex]
) -> Iterator[str]:
    """Yield lines that count documents and exact duplicates, by their hashes, in
    training and held-out data.
    """
    hashes = _hashes(training)
    held = _hashes(held_out)
    usable = hashes[hashes > 0]
    held = held[held > 0]
    different = np.unique(usable)
    text = sum(index.text for index in training)
    files = counted(len(training), "file")
    yield f"{len(hashes):,} documents, {text:,} bytes of text, in {files}"
    parts = {
        "have no text, or cannot be used": len(hashes) - len(usable),
        "repeat an earlier document exactly": len(usable) - len(different),
    }
    yield from (
        f"{count:,} of them ({count / max(len(hashes), 1):.2%}) {what}"
        for what, count in parts.items()
    )
    if len(held):
        yield f"{np.isin(held, different).sum():,} of {len(held):,} held-out documents are in the training data, too"
