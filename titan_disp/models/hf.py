"""TorchTitan's adapter for Hugging Face's weight format, with fixes, and a check of
folders before a load.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

from titan_disp.errors import ConfigError, reported
from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.decoder import DispModel
from titan_disp.tables import OVERRIDES, written_out

INDEX = "model.safetensors.index.json"
OUTPUT_LAYER = "lm_head.weight"


class HfAdapter(StateDictAdapter):
    """TorchTitan's adapter, whose plan of output files always fits the model.

    TorchTitan reads the plan from ``model.safetensors.index.json`` in the assets folder.
    An index on the hub may list an ``lm_head.weight`` that a tied model does not save.
    TorchTitan 0.2.2 would write this weight without values, and no reader could open
    the file. If a weight is missing from the index, the save at the end of training
    would fail.
    """

    model_cls: type[DispModel]
    transformers_class: str  # such as "Qwen3ForCausalLM"
    embedding: str  # Hugging Face's name of the token embedding
    # The defaults of transformers for keys of ``architecture`` that a config.json may
    # omit
    defaults: dict[str, Any]
    # From a key of config.json to the model's argument, which is a key of
    # model.overrides
    arguments: dict[str, str]
    model_type: str
    fqn_to_index_mapping: dict[Any, int] | None

    def __init__(self, model_args: DispModelArgs, hf_assets_path: str | None) -> None:
        super().__init__(model_args, hf_assets_path)
        self.model_args = model_args
        listed = self.fqn_to_index_mapping
        if not listed:
            return
        names = self.weight_shapes().keys()
        listed = {self.canonical(name): index for name, index in listed.items()}
        if missing := sorted(names - listed.keys()):
            logger.warning(
                f"{INDEX} in {hf_assets_path!r} belongs to another model (it lacks "
                f"{missing[0]!r}): checkpoint.last_save_in_hf will write a single file"
            )
            self.fqn_to_index_mapping = None
        else:
            self.fqn_to_index_mapping = {name: listed[name] for name in names}

    def architecture(self) -> dict[str, Any]:
        """Return the keys and values of config.json that describe the network. An export
        writes them, and an import compares them.
        """
        sizes = {
            key: getattr(self.model_args, name) for key, name in self.arguments.items()
        }
        return self.defaults | {"model_type": self.model_type} | sizes

    def extras(self) -> dict[str, Any]:
        """Return further keys and values that an export writes to config.json. An import
        ignores them.
        """
        return {}

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        """Return a config.json with all keys of ``architecture``, which files may omit or
        call by other names.
        """
        return self.defaults | config

    def canonical(self, name: str) -> str:
        """Return the name in ``to_hf`` of the weight that is called ``name`` in a file."""
        return name

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights, by their Hugging Face names.

        A tied embedding is included once.
        """
        with torch.device("meta"):
            model = self.model_cls(self.model_args)
        plain = type(self)(self.model_args, None)
        return {
            name: tuple(w.shape) for name, w in plain.to_hf(model.state_dict()).items()
        }


def check_hf_folder(folder: str | Path, adapter: HfAdapter) -> None:
    """Raise ConfigError if ``checkpoint.initial_load_in_hf`` cannot load a folder.

    The check reads config.json and the headers of the weights. If config.json ties the
    output layer, the check also reads the values of the output layer and the embedding.
    """
    folder = Path(folder)
    where = f"checkpoint.initial_load_in_hf: {str(folder)!r}"
    what = "a folder with *.safetensors and config.json (checkpoint.initial_load_path, or else model.hf_assets_path)"
    if not folder.is_dir():
        raise ConfigError(f"{where} is not a folder; expected {what}")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{where} holds no *.safetensors; expected {what}")
    try:
        text = (folder / "config.json").read_text()
    except OSError as error:
        raise ConfigError(
            f"{where}: config.json: {error.strerror}; expected {what}"
        ) from error
    with reported(f"{where}: config.json is not valid JSON", ValueError):
        config = adapter.stated(json.loads(text))
    stored = stored_weights(folder, adapter, where)
    if config.get("tie_word_embeddings") and has_own_output(stored, adapter):
        if adapter.model_args.enable_weight_tying:
            raise ConfigError(
                f"{where}: config.json ties the output layer to the embedding, but "
                f"{OUTPUT_LAYER} differs from {adapter.embedding}. To train both "
                f"matrices, add enable_weight_tying=false to {OVERRIDES}"
            )
        config["tie_word_embeddings"] = False  # as in transformers 5
    differing = {
        key: expected
        for key, expected in adapter.architecture().items()
        if config.get(key) != expected
    }
    if differing:
        differences = "; ".join(
            f"{key} is {config.get(key)!r} in config.json and {expected!r} in this model"
            for key, expected in differing.items()
        )
        overrides = {
            name: config[key]
            for key, name in adapter.arguments.items()
            if key in differing and config.get(key) is not None
        }
        advice = "Change these keys to match the weights"
        if overrides and "model_type" not in differing:
            advice += f": add {written_out(overrides)} to {OVERRIDES}"
        raise ConfigError(
            f"{where} holds another network than model.name, model.flavor and "
            f"model.overrides describe: {differences}. {advice}"
        )
    check_weights(stored, adapter, where)


def stored_weights(folder: Path, adapter: HfAdapter, where: str) -> dict[str, Any]:
    """Return the weights in a folder's files, by their canonical names.

    Each weight is a slice, which reads values only when it is indexed. Raises
    ConfigError if a header is damaged.
    """
    stored = {}
    for file in sorted(folder.glob("*.safetensors")):
        damaged = f"{where}: {file.name} is damaged (download it again)"
        with (
            reported(damaged, OSError, SafetensorError),
            safe_open(file, framework="pt") as weights,
        ):
            for name in weights.keys():  # noqa: SIM118
                stored[adapter.canonical(name)] = weights.get_slice(name)
    return stored


def has_own_output(stored: dict[str, Any], adapter: HfAdapter) -> bool:
    """Return whether the weights have an output layer that is not a copy of their
    embedding. ``stored`` is the result of ``stored_weights``.
    """
    if not {OUTPUT_LAYER, adapter.embedding} <= stored.keys():
        return False
    return not torch.equal(stored[OUTPUT_LAYER][:], stored[adapter.embedding][:])


def check_weights(stored: dict[str, Any], adapter: HfAdapter, where: str) -> None:
    """Raise ConfigError if a weight is missing or has a wrong shape. ``stored`` is the
    result of ``stored_weights``.
    """
    wanted = adapter.weight_shapes()
    if missing := sorted(wanted.keys() - stored.keys()):
        raise ConfigError(
            f"{where} lacks {len(missing)} of the {len(wanted)} weights, "
            f"such as {missing[0]!r}: is the download complete?"
        )
    for name, shape in wanted.items():
        actual = tuple(stored[name].get_shape())
        if actual != shape:
            raise ConfigError(
                f"{where} has {name} of shape {actual}, expected {shape} for "
                "model.flavor"
            )
