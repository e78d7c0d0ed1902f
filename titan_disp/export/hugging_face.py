"""This module loads causal language models from Hugging Face folders, and rejects incomplete ones."""

from pathlib import Path
from typing import Any

from titan_disp.errors import ConfigError
from titan_disp.wording import counted


def load_causal_lm(
    folder: str | Path, dtype: str = "float32", device_map: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load ``AutoModelForCausalLM`` from a local folder, in eval mode.

    Args:
        folder: folder of the model.
        dtype: dtype of the weights: "float32", "bfloat16", "float16", or "auto" for the saved one.
        device_map: "auto" spreads the blocks over all GPUs (accelerate); None loads the model on the CPU.
        trust_remote_code: whether Python files of the folder may run if transformers does not know the model.

    Raises:
        ConfigError: Weights cannot be read or are missing. transformers would initialize missing ones randomly.
    """
    from transformers import AutoModelForCausalLM  # the import takes seconds

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # OSError, ValueError, RuntimeError or an error of safetensors
        raise ConfigError(f"transformers cannot load the model {str(folder)!r}: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{str(folder)!r} holds an incomplete causal language model: it lacks {counted(len(missing), 'weight')}, "
            f"{missing[0]!r} first"
        )
    return model.eval()


def longest_sequence(config: Any) -> int | None:
    """Return the number of tokens in the longest sequence for a transformers model, or None if its config has none.

    This is the number of its positions. An exported GPT-2 may have more positions than training's sequences had tokens;
    then it is the latter.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    return positions if positions is None else min(positions, getattr(config, "trained_seq_len", positions))
