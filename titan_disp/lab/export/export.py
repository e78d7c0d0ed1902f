"""A saved model is exported to a Hugging Face folder that ``from_pretrained`` loads."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing, suppress

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from torchtitan.config import TORCH_DTYPE_MAP

from titan_disp.config.command_options import ExportOptions
from titan_disp.data.documents import Documents
from titan_disp.data.formats import BadDocument, DamagedFile, text_of
from titan_disp.data.listing import list_files
from titan_disp.data.options import Format, StreamOptions
from titan_disp.errors import ConfigError, reported
from titan_disp.lab.export.model_card import model_card
from titan_disp.lab.export.saved import SavedModel, find_saved, load_weights
from titan_disp.run.checkpoint import describe
from titan_disp.run.reader import read_environment
from titan_disp.text import byte_size

DOCUMENTS = 100


def local_documents(path: str | None, text_field: str = "text") -> Iterator[str]:
    """Yield up to ``DOCUMENTS`` validation documents at ``path``, or else training
    documents. If ``path`` does not exist, nothing is yielded.
    """
    if path is None or not os.path.exists(path):
        return
    for dataset in ("c4_validation", "c4"):
        # Training reports these errors. Here, any readable documents are enough.
        with suppress(DamagedFile, ConfigError):
            file = list_files(dataset, path)[0]
            with closing(
                Documents(file, StreamOptions(format=Format(text_field)))
            ) as documents:
                for _ in range(DOCUMENTS):
                    with suppress(BadDocument):
                        if (raw := documents.read()) is not None:
                            yield text_of(raw, text_field)
                return


def hf_weights(saved: SavedModel, dtype: str = "float32") -> dict[str, torch.Tensor]:
    """Return the weights by Hugging Face's names, in ``dtype`` on the CPU.

    A tied embedding is included once. Raises CheckpointError or ConfigError like
    ``load_weights``, and ConfigError if a weight is not finite in ``dtype``.
    """
    weights = saved.adapter().to_hf(load_weights(saved))
    for name in weights:
        weights[name] = weights[name].to(TORCH_DTYPE_MAP[dtype])
        if not weights[name].isfinite().all():
            raise ConfigError(
                f"{saved.name}: {name} is not finite in {dtype}: export another step "
                "or dtype"
            )
    return weights


def export(options: ExportOptions) -> SavedModel:
    """Write a Hugging Face folder with weights, config, tokenizer and model card, and
    return the exported checkpoint.

    The export is atomic. Raises ConfigError if the checkpoint or the tokenizer does not
    exist, if ``dest`` is not empty, if the disk is full, or if the tokenizer cannot be
    converted.
    """
    dest = options.dest.absolute()
    dtype = options.dtype
    tokenizer = options.tokenizer
    if dest.exists() and not (dest.is_dir() and not any(dest.iterdir())):
        raise ConfigError(
            f"{str(dest)!r} already exists; choose a new folder, or remove this one"
        )
    saved = find_saved(options.target)
    loaded = saved.tokenizer(tokenizer)
    partial = dest.with_name(f".{dest.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # left by an export that was killed
        partial.mkdir(parents=True)
        stream = saved.config["stream"]
        data = saved.config["training"]["dataset_path"]
        if stream["sources"]:
            data = stream["sources"][0]["path"]
        describe(
            dest=partial,
            adapter=saved.adapter(),
            folder=saved.tokenizer_folder(tokenizer),
            tokenizer=loaded,
            dtype=dtype,
            documents=local_documents(data, stream["text_field"]),
        )
        weights = hf_weights(saved, dtype)
        parameters = sum(w.numel() for w in weights.values())
        (partial / "README.md").write_text(
            model_card(
                saved,
                name=dest.name,
                parameters=parameters,
                dtype=dtype,
                environment=read_environment(saved.run),
            )
        )
        size = sum(weight.nbytes for weight in weights.values())
        print(f"{saved.name}: writing {byte_size(size)}", file=sys.stderr)
        with reported(f"--max-shard-size is {options.max_shard_size!r}", ValueError):
            save_torch_state_dict(
                weights, partial, max_shard_size=options.max_shard_size
            )
        # safetensors makes its files readable by the owner only.
        for file in partial.glob("*.safetensors"):
            file.chmod((partial / "config.json").stat().st_mode)
        os.rename(partial, dest)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot write {str(dest)!r}: {error}. No files were left there: make "
            "room, or choose another disk"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return saved
