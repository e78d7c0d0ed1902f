"""Weights in Hugging Face's format, of every model: TorchTitan's adapter made safe, and the check of a folder before a load."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.tools.logging import logger

from titan_disp.errors import ConfigError
from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.model import DispModel

INDEX = "model.safetensors.index.json"


class HfAdapter(StateDictAdapter):
    """TorchTitan's adapter, whose plan of output files (``model.safetensors.index.json`` in the assets folder) follows the model.

    Index files of the hub may list ``lm_head.weight``, which a tied model does not save: TorchTitan 0.2.2 would write an
    ``lm_head`` without type and values, and no reader opens that file. An index that lacks a weight of this model would fail the
    save at the end of training.

    Attributes:
        model_cls: the model.
        transformers_class: its name in transformers, such as "Qwen3ForCausalLM".
        defaults: of transformers, for keys of ``architecture`` that a config.json may leave out.
    """

    model_cls: type[DispModel]
    transformers_class: str
    defaults: dict[str, Any]
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
                f"{INDEX} in {hf_assets_path!r} is of another model (it lacks {missing[0]!r}): checkpoint.last_save_in_hf "
                "will write one file"
            )
            self.fqn_to_index_mapping = None
        else:
            self.fqn_to_index_mapping = {name: listed[name] for name in names}

    def architecture(self) -> dict[str, Any]:
        """What config.json says of the network itself: the same keys are written by an export and compared by an import."""
        raise NotImplementedError

    def extras(self) -> dict[str, Any]:
        """What else an export writes into config.json, which an import need not find."""
        return {}

    def stated(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json with the keys of ``architecture``, however it spells them."""
        return self.defaults | config

    def canonical(self, name: str) -> str:
        """The name that ``to_hf`` gives to the weight that a file calls ``name``."""
        return name

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight of the model under Hugging Face's name; a tied embedding once."""
        with torch.device("meta"):
            model = self.model_cls(self.model_args)
        plain = type(self)(self.model_args, None)
        return {name: tuple(w.shape) for name, w in plain.to_hf(model.state_dict()).items()}


def check_hf_folder(folder: str | Path, adapter: HfAdapter) -> None:
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
        config = adapter.stated(json.loads((folder / "config.json").read_text()))
    except OSError as error:
        raise ConfigError(f"{where}: config.json: {error.strerror}; expected {what}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: config.json is not valid JSON: {error}") from error
    differ = [
        f"{key} {config.get(key)!r} there, {expected!r} in the flavor"
        for key, expected in adapter.architecture().items()
        if config.get(key) != expected
    ]
    if differ:
        raise ConfigError(
            f"{where} is another network than model.flavor's: {'; '.join(differ)}. Set model.flavor to that of the weights"
        )
    _check_weights(folder, adapter, where)


def _check_weights(folder: Path, adapter: HfAdapter, where: str) -> None:
    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118
                    found[adapter.canonical(name)] = tuple(weights.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{where}: {file.name} is damaged: {error}. Download it again") from error
    wanted = adapter.weight_shapes()
    if missing := sorted(wanted.keys() - found.keys()):
        raise ConfigError(
            f"{where} lacks {len(missing)} of the {len(wanted)} weights, {missing[0]!r} first: is the download complete?"
        )
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ConfigError(f"{where} has {name} of shape {found[name]}, expected {shape} for model.flavor")
