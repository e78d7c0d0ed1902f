"""This module holds what the arguments and flavors of all models have in common."""

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
from titan_disp.model_overrides import apply_overrides


def block_indices(layers: str | list[int], n_layers: int) -> tuple[int, ...]:
    """Return the blocks that ``dispersion.layers`` names, in ascending order, from 0.

    Args:
        layers: "all", "last", "early_half", "late_half", or indices in [0, n_layers).
        n_layers: number of blocks.

    Raises:
        ConfigError: another word, an empty list, a repeated index, or an index out of range.
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
            f"dispersion.layers is {layers}, but the model has {n_layers} blocks: "
            f"expected indices from 0 to {n_layers - 1}"
        )
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(f"dispersion.layers is {layers}, expected at least one block and none of them twice")
    return tuple(chosen)


def activation_indices(layers: str | list[int], final_norm: bool, n_layers: int) -> tuple[int, ...]:
    """Return the activations to disperse, as ``DispModel.forward`` takes them.

    Args:
        layers: ``dispersion.layers``.
        final_norm: ``dispersion.final_norm``.
        n_layers: number of blocks.

    Raises:
        ConfigError: as ``block_indices``, or ``final_norm`` without the last block.
    """
    blocks = block_indices(layers, n_layers)
    if not final_norm:
        return tuple(i + 1 for i in blocks)
    if blocks[-1] != n_layers - 1:
        raise ConfigError(
            f"dispersion.final_norm is true, but dispersion.layers {layers!r} leaves the last block ({n_layers - 1}) "
            "out, and the final norm follows it: add that block, or set dispersion.final_norm = false"
        )
    return (*(i + 1 for i in blocks[:-1]), n_layers + 1)


@dataclass(frozen=True)
class Initial:
    """A parameter is initialized from a normal distribution around ``mean``, cut off at ``mean`` ± ``cut``.

    It is constant, ``mean``, if ``std`` is 0.
    """

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


class DispModelArgs(BaseModelArgs):
    """The arguments of a model are a dataclass that extends this class.

    Attributes:
        hidden_dim: width of the feed-forward.
        max_seq_len: tokens of a training sequence.
        enable_weight_tying: whether embedding and output layer are one parameter.
        activations: indices of the activations that a training forward returns (see ``DispModel.forward``); empty: only
            logits.
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
        """Return the length of the longest sequence that the weights allow; None: any, as with rotary embeddings."""
        return None

    def initial(self, name: str, shape: torch.Size) -> Initial:
        """Return how the parameter with this canonical name is initialized."""
        raise NotImplementedError

    def saved_elements(self, tp: int) -> dict[str, float]:
        """Return the number of elements that a block saves for backward, per token of a CP rank's part.

        Between blocks, TP shards the sequence. It gathers the inputs of attention and feed-forward, and shards what
        they compute.

        Args:
            tp: tensor-parallel degree.

        Returns:
            The number for each mode of activation checkpointing: "none", "op" and "full".
        """
        raise NotImplementedError

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        """Set what the config decides.

        TorchTitan calls this after it has chosen the flavor and before it builds the model.
        """
        apply_overrides(self, job_config.model.overrides)  # type: ignore[attr-defined]
        super().update_from_config(job_config, **kwargs)
        self.max_seq_len = job_config.training.seq_len
        dispersion = job_config.dispersion  # type: ignore[attr-defined]
        if dispersion.enabled:
            self.activations = activation_indices(dispersion.layers, dispersion.final_norm, self.n_layers)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the parameter count (a tied embedding counts once) and the FLOPs per token, forward and backward.

        TorchTitan 0.2.2 subtracts the embedding twice for tied models: from the count, and from the FLOPs, although the
        tied matrix does multiply as the output layer. The attention term is TorchTitan's. Dispersion is not counted,
        because MFU is about the model.
        """
        total = sum(p.numel() for p in model.parameters())  # shared parameters appear once
        looked_up = sum(p.numel() for table in model.embeddings for p in table.parameters())  # type: ignore[union-attr]
        tied = model.output.weight.numel() if self.enable_weight_tying else 0  # type: ignore[union-attr, operator]
        attention = 6 * self.n_layers * self.n_heads * 2 * self.head_dim * seq_len
        return total, 6 * (total - looked_up + tied) + attention


Args = TypeVar("Args", bound=DispModelArgs)


class Flavors(Mapping[str, Args], Generic[Args]):
    """Map names to copies of arguments.

    TorchTitan modifies the arguments that it takes, even registered ones.
    """

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
