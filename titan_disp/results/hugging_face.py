"""Causal language models of Hugging Face folders, whole or not at all."""

from pathlib import Path
from typing import Any

from titan_disp.errors import ConfigError


def load_causal_lm(
    folder: str | Path, dtype: str = "float32", device_map: str | None = None, trust_remote_code: bool = False
) -> Any:
    """``AutoModelForCausalLM`` of a local folder, in eval mode.

    Args:
        dtype: of the weights: "float32", "bfloat16", "float16", or "auto", as they were saved.
        device_map: "auto" spreads the blocks over all GPUs (accelerate); None: on the CPU.
        trust_remote_code: whether Python files of the folder may run, where transformers does not know the model by itself.

    Raises:
        ConfigError: weights that cannot be read, or are missing, which transformers would make up.
    """
    from transformers import AutoModelForCausalLM  # seconds

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            torch_dtype=dtype,
            device_map=device_map,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # OSError, ValueError, RuntimeError, and safetensors' own
        raise ConfigError(f"transformers cannot load the model {str(folder)!r}: {error}") from error
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ConfigError(
            f"{str(folder)!r} holds no whole causal language model: {len(missing)} weights are missing, {missing[0]!r} first"
        )
    return model.eval()


def longest_sequence(config: Any) -> int | None:
    """Tokens of the longest sequence that a transformers model should be given; None: its config does not say.

    Its positions; of an exported GPT-2 with more rows in its table of positions than training's sequences had tokens, the latter.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    return positions if positions is None else min(positions, getattr(config, "trained_seq_len", positions))
