"""Qwen3 as Hugging Face names it: config.json's keys, and TorchTitan's state dict adapter made safe for tied embeddings."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torchtitan.models.qwen3.model.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.tools.logging import logger

from titan_disp.errors import ConfigError
from titan_disp.qwen3.flavors import Qwen3DispModelArgs
from titan_disp.qwen3.model import Qwen3DispModel

INDEX = "model.safetensors.index.json"


def architecture(args: Qwen3DispModelArgs) -> dict[str, Any]:
    """What config.json says of the network itself: the same keys are written by an export and compared by an import.

    ``rope_theta`` stands at the top level, as in Qwen's own files: transformers 4.51 to 5 read it there.
    """
    return {
        "model_type": "qwen3",
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "intermediate_size": args.hidden_dim,
        "num_hidden_layers": args.n_layers,
        "num_attention_heads": args.n_heads,
        "num_key_value_heads": args.n_kv_heads,
        "head_dim": args.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": args.norm_eps,  # of queries and keys too
        "rope_theta": args.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": args.enable_weight_tying,
    }


def _stated(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with RoPE where ``architecture`` has it: transformers 5 writes ``rope_parameters`` instead."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict):
        return config
    plain = rope.get("rope_type", "default") == "default"
    return config | {"rope_theta": rope.get("rope_theta"), "rope_scaling": None if plain else rope}


def weight_shapes(args: Qwen3DispModelArgs) -> dict[str, tuple[int, ...]]:
    """Every weight of the model under Hugging Face's name; a tied embedding once."""
    with torch.device("meta"):
        model = Qwen3DispModel(args)
    return {name: tuple(w.shape) for name, w in Qwen3StateDictAdapter(args, None).to_hf(model.state_dict()).items()}


def check_hf_folder(folder: str | Path, args: Qwen3DispModelArgs) -> None:
    """Whether weights can be loaded from a Hugging Face folder (``checkpoint.initial_load_in_hf``). Reads headers only.

    Raises:
        ConfigError: no folder, no safetensors or no config.json in it, another network than the flavor's, or damaged or missing
            weights.
    """
    folder = Path(folder)
    where = f"checkpoint.initial_load_in_hf: {str(folder)!r}"
    what = "a folder with *.safetensors and config.json (checkpoint.initial_load_path, or else model.hf_assets_path)"
    if not folder.is_dir():
        raise ConfigError(f"{where} is not a folder; expected {what}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{where} holds no *.safetensors; expected {what}")
    try:
        config = _stated(json.loads((folder / "config.json").read_text()))
    except OSError as error:
        raise ConfigError(f"{where}: config.json: {error.strerror}; expected {what}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: config.json is not valid JSON: {error}") from error
    # A key that is absent has transformers' default, which is ours for the optional ones.
    optional = {"rope_scaling": None, "attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
    differ = [
        f"{key} {config.get(key, optional.get(key))!r} there, {expected!r} in the flavor"
        for key, expected in architecture(args).items()
        if config.get(key, optional.get(key)) != expected
    ]
    if differ:
        raise ConfigError(
            f"{where} is another network than model.flavor's: {'; '.join(differ)}. Set model.flavor to that of the weights"
        )
    _check_weights(folder, args, where)


def _check_weights(folder: Path, args: Qwen3DispModelArgs, where: str) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                found |= {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{where}: {file.name} is damaged: {error}. Download it again") from error
    wanted = weight_shapes(args)
    if missing := sorted(wanted.keys() - found.keys()):
        raise ConfigError(
            f"{where} lacks {len(missing)} of the {len(wanted)} weights, {missing[0]!r} first: is the download complete?"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(f"{where} has {name} of shape {found[name]}, expected {shape} for model.flavor")


class Qwen3HfAdapter(Qwen3StateDictAdapter):
    """TorchTitan's adapter, whose plan of output files (``model.safetensors.index.json`` in the assets folder) follows the model.

    Qwen's index files list ``lm_head.weight``, which a tied model does not save: TorchTitan 0.2.2 would write an ``lm_head``
    without type and values, and no reader opens that file. An index that lacks a weight of this model would fail the save at
    the end of training.
    """

    fqn_to_index_mapping: dict[Any, int] | None
    hf_assets_path: str

    def __init__(self, model_args: Qwen3DispModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        listed = self.fqn_to_index_mapping
        if not listed:
            return
        names = weight_shapes(model_args).keys()
        if missing := sorted(names - listed.keys()):
            logger.warning(
                f"{INDEX} in {hf_assets_path!r} is of another model (it lacks {missing[0]!r}): checkpoint.last_save_in_hf "
                "will write one file"
            )
            self.fqn_to_index_mapping = None
        else:
            self.fqn_to_index_mapping = {name: listed[name] for name in names}
