"""This module writes what ``from_pretrained`` needs beside the weights: two files of config, and the tokenizer."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtitan.components.tokenizer import BaseTokenizer

from titan_disp.data.hf_tokenizer import write_tokenizer
from titan_disp.models.hf import HfAdapter
from titan_disp.run.folder import write_json


def hf_config(adapter: HfAdapter, tokenizer: BaseTokenizer, dtype: str) -> dict[str, Any]:
    """Return the content of config.json, with the BOS and EOS that training put around documents."""
    return {
        **adapter.architecture(),
        **adapter.extras(),
        "architectures": [adapter.transformers_class],
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "torch_dtype": dtype,
    }


def describe(
    dest: Path,
    adapter: HfAdapter,
    tokenizer_folder: Path,
    tokenizer: BaseTokenizer,
    dtype: str,
    documents: Iterable[str] = (),
) -> None:
    """Write config.json, generation_config.json and the tokenizer into ``dest``.

    Args:
        dest: an existing folder.
        adapter: the model's adapter; its ``model_args.max_seq_len`` is the sequence length of training.
        tokenizer_folder: the folder of ``tokenizer``.
        tokenizer: the tokenizer of training.
        dtype: dtype of the weights: float32, bfloat16 or float16.
        documents: texts for which the written tokenizer must give training's ids, besides ``hf_tokenizer.PROBES``.

    Raises:
        ConfigError: the tokenizer cannot be converted, or gives other ids.
        OSError: the folder is not writable, or the disk is full.
    """
    write_json(dest / "config.json", hf_config(adapter, tokenizer, dtype))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    write_json(dest / "generation_config.json", {k: v for k, v in ids.items() if v is not None})
    write_tokenizer(tokenizer_folder, tokenizer, dest, adapter.model_args.max_seq_len, documents)
