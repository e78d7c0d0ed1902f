"""What the arguments and flavors of all models have in common."""

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.protocols.model import BaseModelArgs

from titan_disp.errors import ConfigError
from titan_disp.overrides import apply_overrides


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
    """What ``dispersion.layers`` and ``dispersion.final_norm`` disperse, as ``DispModel.forward`` takes it.

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


@dataclass(frozen=True)
class Initial:
    """How a parameter begins: normal around ``mean``, cut off at ``mean`` ± ``cut``; all ``mean`` where ``std`` is 0."""

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


class DispModelArgs(BaseModelArgs):
    """What the rest of titan-disp asks of a model's arguments, which are a dataclass that extends this.

    Attributes:
        hidden_dim: width of the feed-forward.
        max_seq_len: tokens of a training sequence.
        enable_weight_tying: whether embedding and output are one parameter.
        activations: which ones a training forward returns, as ``DispModel.forward`` takes them; empty: plain logits.
    """

    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int
    enable_weight_tying: bool
    activations: tuple[int, ...]

    @property
    def max_positions(self) -> int | None:
        """Tokens of the longest sequence that the weights allow; None: any number, as with rotary embeddings."""
        return None

    def initial(self, name: str, shape: torch.Size) -> Initial:
        """How the parameter of this canonical name begins."""
        raise NotImplementedError

    def saved_elements(self, tp: int) -> dict[str, float]:
        """Elements that a block saves for backward, per token of a CP rank's part, by mode of activation checkpointing ("none",
        "op", "full").

        Between blocks TP shards the sequence; it gathers the inputs of attention and feed-forward, and shards what is inside.
        """
        raise NotImplementedError

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        """TorchTitan's hook between the flavor and the model."""
        apply_overrides(self, job_config.model.overrides)  # type: ignore[attr-defined]
        super().update_from_config(job_config, **kwargs)
        self.max_seq_len = job_config.training.seq_len
        dispersion = job_config.dispersion  # type: ignore[attr-defined]
        if dispersion.enabled:
            self.activations = activation_indices(dispersion.layers, dispersion.final_norm, self.n_layers)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """True parameter count (a tied embedding once) and model FLOPs per token, forward and backward.

        TorchTitan 0.2.2 subtracts the embedding twice for tied models: from the count, and from the FLOPs, where the
        tied matrix does multiply as the output layer. The attention term is TorchTitan's. Dispersion is not counted:
        MFU is about the model.
        """
        total = sum(p.numel() for p in model.parameters())  # shared parameters appear once
        looked_up = sum(p.numel() for table in model.embeddings for p in table.parameters())  # type: ignore[union-attr]
        tied = model.output.weight.numel() if self.enable_weight_tying else 0  # type: ignore[union-attr, operator]
        attention = 6 * self.n_layers * self.n_heads * 2 * self.head_dim * seq_len
        return total, 6 * (total - looked_up + tied) + attention


Args = TypeVar("Args", bound=DispModelArgs)


class Flavors(Mapping[str, Args], Generic[Args]):
    """Hands out copies: TorchTitan writes into the arguments it takes from a spec, also into registered ones."""

    def __init__(self, flavors: dict[str, Args]) -> None:
        self._flavors = flavors

    def __getitem__(self, name: str) -> Args:
        if name not in self._flavors:
            raise ConfigError(f"model.flavor is {name!r}, expected one of {', '.join(self._flavors)}")
        return copy.deepcopy(self._flavors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._flavors)

    def __len__(self) -> int:
        return len(self._flavors)
