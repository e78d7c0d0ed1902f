"""``titan-disp data index`` indexes a run's data, and counts documents that come
twice.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
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

_WORTH = 1 << 31  # bytes from which on processes take less time than their start


def index_data(job_config: JobConfig, out: Path | None, workers: int) -> Iterator[str]:
    """Index the local training data of a run and its held-out data, and yield lines
    about them.

    ConfigError is raised if data is missing or on the hub, or if ``out`` is None and
    there are several sources.
    """
    sets = training_sets(job_config)
    listed = [one.check() for one in sets]
    training = [file for files in listed for file in files]
    others = _held_out(job_config)
    if not all(listed) or any(file.remote for file in [*training, *others]):
        raise ConfigError(
            "data in a store or on the hub cannot be indexed: titan-disp data fetch "
            "copies from the hub"
        )
    how = stream_options(job_config)
    if any(file.holds_ids for file in [*training, *others]):
        tokenizer = load_tokenizer(
            job_config.model.hf_assets_path, job_config.stream.separator
        )
        how = stream_options(job_config, tokenizer=tokenizer)
    training = []
    for one, files in zip(sets, listed, strict=True):
        training += check_content(files, how, one.key)
    others = [replace(file, encoding=encoding_of(file, how)) for file in others]
    named = "" if how.index == IN_MEMORY else how.index
    folder = out or Path(named or _beside(sets))
    found = write_index([*training, *others], folder, how, workers)
    yield from lines(
        [found[file.url] for file in training], [found[file.url] for file in others]
    )
    yield from (
        f"{url} is damaged: {one.damage}" for url, one in found.items() if one.damage
    )
    yield f"stream.index = {str(folder)!r}"


def _held_out(job_config: JobConfig) -> list[DataFile]:
    found = []
    for one in held_out_sets(job_config):
        try:
            found += one.check()
        except ConfigError:
            if job_config.validation.enable:
                raise
    return found


def _beside(sets: Sequence[DataSet]) -> str:
    (path, *others) = [one.path for one in sets]
    if others or path is None or not os.path.isdir(path):
        raise ConfigError(
            "the training data is not one folder: say with --out where to write the "
            "index"
        )
    return os.path.join(path, FOLDER)


def write_index(
    files: Sequence[DataFile], folder: Path, options: StreamOptions, workers: int
) -> dict[str, FileIndex]:
    """Index local files in several processes, the largest first.

    Return what is known of each, by its path.
    """
    make_writable(folder, "the folder of the index (stream.index or --out)")
    total = sum(file.size for file in files)
    pool: Executor = ThreadPoolExecutor(1)
    if workers > 1 and total > _WORTH < sum(
        f.size for f in files if isinstance(current(folder, options, f), str)
    ):
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
    found = {}
    ordered = sorted(files, key=lambda file: -file.size)
    with pool, progress("indexing", "B", total=total) as bar:
        for file, one in in_parallel(
            pool, partial(index_file, folder, options), ordered
        ):
            found[file.url] = one
            bar.update(file.size)
    return found


def lines(training: Sequence[FileIndex], others: Sequence[FileIndex]) -> Iterator[str]:
    """Count documents, and exact duplicates by their hashes, in training and held-out
    data.
    """
    hashes, held = (
        np.concatenate([np.zeros(0, np.uint64), *(f.hashes for f in part)])
        for part in (training, others)
    )
    usable = hashes[hashes > 0]
    held = held[held > 0]
    different = np.unique(usable)
    text = sum(one.text for one in training)
    files = counted(len(training), "file")
    yield f"{len(hashes):,} documents, {text:,} bytes of text, in {files}"
    parts = {
        "have no text, or cannot be used": len(hashes) - len(usable),
        "repeat an earlier one exactly": len(usable) - len(different),
    }
    yield from (
        f"{count:,} of them ({count / max(len(hashes), 1):.2%}) {what}"
        for what, count in parts.items()
    )
    if len(held):
        yield f"{np.isin(held, different).sum():,} of {len(held):,} held-out documents are in the training data, too"
