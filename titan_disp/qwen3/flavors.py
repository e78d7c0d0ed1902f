"""Model arguments and the flavors of ``qwen3_disp``."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.model.args import Qwen3ModelArgs

from titan_disp.errors import ConfigError


def block_indices(layers: str | list[int], n_layers: int) -> tuple[int, ...]:
    """The blocks that ``dispersion.layers`` names, ascending, from 0.

    Args:
        layers: "all", "last", "early_half", "late_half", or indices in [0, n_layers).

    Raises:
        ConfigError: another word, an empty or repeated list, or an index out of range.
    """
    named = {
        "all": range(n_layers),
        "last": range(n_layers - 1, n_layers),
        "early_half": range(n_layers // 2),
        "late_half": range(n_layers // 2, n_layers),
    }
    if isinstance(layers, str):
        if layers not in named:
            raise ConfigError(
                f"dispersion.layers is {layers!r}, expected {', '.join(named)} or a list of block indices"
            )
        chosen = list(named[layers])
    else:
        chosen = sorted(layers)
    if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n_layers for i in chosen):
        raise ConfigError(
            f"dispersion.layers is {layers}, but the model has {n_layers} blocks: expected indices from 0 to {n_layers - 1}"
        )
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(f"dispersion.layers is {layers}, expected at least one block and none of them twice")
    return tuple(chosen)


def activation_indices(layers: str | list[int], final_norm: bool, n_layers: int) -> tuple[int, ...]:
    """What ``dispersion.layers`` and ``dispersion.final_norm`` disperse, as ``Qwen3DispModel.forward`` takes it.

    Raises:
        ConfigError: as ``block_indices``, or ``final_norm`` without the last block.
    """
    blocks = block_indices(layers, n_layers)
    if not final_norm:
        return tuple(i + 1 for i in blocks)
    if blocks[-1] != n_layers - 1:
        raise ConfigError(
            f"dispersion.final_norm is true, but dispersion.layers {layers!r} leaves the last block ({n_layers - 1}) out, whose "
            "output the final norm takes: add it, or set dispersion.final_norm = false"
        )
    return (*(i + 1 for i in blocks[:-1]), n_layers + 1)


@dataclass
class Qwen3DispModelArgs(Qwen3ModelArgs):
    """TorchTitan's Qwen3 arguments, and which activations a training forward returns.

    Attributes:
        activations: indices as ``Qwen3DispModel.forward`` takes them; empty: plain logits.
    """

    activations: tuple[int, ...] = ()

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        super().update_from_config(job_config, **kwargs)
        dispersion = job_config.dispersion  # type: ignore[attr-defined]
        if dispersion.enabled:
            self.activations = activation_indices(dispersion.layers, dispersion.final_norm, self.n_layers)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """True parameter count (a tied embedding once) and model FLOPs per token, forward and backward.

        TorchTitan 0.2.2 subtracts the embedding twice for tied models: from the count, and from the FLOPs, where the
        tied matrix does multiply as the output layer. The attention term is TorchTitan's. Dispersion is not counted:
        MFU is about the model.
        """
        sizes = {name: p.numel() for name, p in model.named_parameters()}  # shared parameters appear once
        lookup = 0 if self.enable_weight_tying else sizes["tok_embeddings.weight"]
        attention = 6 * self.n_layers * self.n_heads * 2 * self.head_dim * seq_len
        total = sum(sizes.values())
        return total, 6 * (total - lookup) + attention


class Flavors(Mapping[str, Qwen3DispModelArgs]):
    """Hands out copies: TorchTitan writes into the arguments it takes from a spec, also into registered ones."""

    def __init__(self, flavors: dict[str, Qwen3DispModelArgs]) -> None:
        self._flavors = flavors

    def __getitem__(self, name: str) -> Qwen3DispModelArgs:
        if name not in self._flavors:
            raise ConfigError(f"model.flavor is {name!r}, expected one of {', '.join(self._flavors)}")
        return copy.deepcopy(self._flavors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._flavors)

    def __len__(self) -> int:
        return len(self._flavors)


def _like_torchtitan(name: str, **changes: Any) -> Qwen3DispModelArgs:
    return Qwen3DispModelArgs(**(vars(copy.deepcopy(qwen3_args[name])) | changes))


# In ascending order. TorchTitan registers Qwen's published sizes: Table 1 of the Qwen3 technical report (arXiv 2505.09388)
# and config.json of Qwen/Qwen3-*, with which tests/test_model.py compares them. Tied up to 4B.
flavors = Flavors(
    {
        "nano": Qwen3DispModelArgs(  # 0.4 M parameters: for the demo and tests on a CPU
            vocab_size=2048,
            max_seq_len=4096,
            head_dim=16,
            dim=64,
            n_layers=6,
            n_heads=4,
            n_kv_heads=2,
            qk_norm=True,
            hidden_dim=192,
            rope_theta=1000000,
            enable_weight_tying=True,
        ),
        "debugmodel": _like_torchtitan("debugmodel"),
        # For a preflight of the untied ones on a CPU.
        "debugmodel_untied": _like_torchtitan("debugmodel", enable_weight_tying=False),
        "0.6B": _like_torchtitan("0.6B"),
        # What the authors' TorchTitan fork trained: FSDP made two parameters of the tied one, by accident (they say so).
        "0.6B_untied": _like_torchtitan("0.6B", enable_weight_tying=False),
        "1.7B": _like_torchtitan("1.7B"),
        "4B": _like_torchtitan("4B"),
        "8B": _like_torchtitan("8B"),
        "14B": _like_torchtitan("14B"),
        "32B": _like_torchtitan("32B"),
    }
)
