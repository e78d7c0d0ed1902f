"""Batches for training and held-out sequences for measuring, through TorchTitan's streaming loader."""

from itertools import islice

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataset, build_text_dataloader

from titan_disp.data.shards import check_data
from titan_disp.errors import ConfigError


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> BaseDataLoader:
    """TorchTitan's loader, with errors that say what to change.

    Raises:
        ConfigError: the data cannot be found or reached.
    """
    training = job_config.training
    check_data(training.dataset, training.dataset_path)
    try:
        return build_text_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
    except (OSError, ValueError) as error:  # datasets: ConnectionError, DatasetNotFoundError, bad data files
        source = training.dataset_path or "the Hugging Face hub"
        raise ConfigError(
            f"cannot open training.dataset {training.dataset!r} from {source}: {error}. "
            "Without internet, set training.dataset_path to a local copy"
        ) from error


def held_out_sequences(job_config: JobConfig, tokenizer: BaseTokenizer, count: int) -> Tensor | None:
    """The first sequences of the validation split beside the training data: the same on every rank and in every run.

    Returns:
        [≤ count, seq_len] token ids, or None where there is no local validation split.
    """
    training = job_config.training
    if training.dataset != "c4" or training.dataset_path is None:
        return None
    try:
        check_data("c4_validation", training.dataset_path)
    except ConfigError:
        return None
    dataset = HuggingFaceTextDataset("c4_validation", training.dataset_path, tokenizer, training.seq_len)
    sequences = [inputs["input"] for inputs, _ in islice(dataset, count)]
    return torch.stack(sequences) if sequences else None
