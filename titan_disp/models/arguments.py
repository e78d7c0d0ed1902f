"""A model's arguments: their base class, its flavors, what ``model.overrides`` changes,
and which layers are dispersed.

``model.overrides`` sets fields of type int, float and bool of any dataclass of
arguments. The dataclass may exclude some in a class attribute ``not_overridable``,
which gives the reason for each.
"""

import copy
import dataclasses
import math
from collections import UserDict
from dataclasses import dataclass
from typing import Any, TypeVar, get_type_hints

import torch
from torch import nn
from torchtitan.protocols.model import BaseModelArgs

from titan_disp.config.types import JobConfig
from titan_disp.errors import TYPE_NAMES, ConfigError, did_you_mean, fits
from titan_disp.tables import OVERRIDES, Written, parse_overrides, shown

NOT_OVERRIDABLE = {"max_seq_len": "it is training.seq_len"}
_KINDS = {
    bool: TYPE_NAMES[bool],
    int: f"{TYPE_NAMES[int]} ≥ 1",
    float: f"{TYPE_NAMES[float]} > 0",
}
Args = TypeVar("Args", bound="DispModelArgs")


@dataclass(frozen=True)
class Initial:
    """A parameter's normal distribution, cut off at ``mean`` ± ``cut``; the constant
    ``mean`` if ``std`` is 0.
    """

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


class DispModelArgs(BaseModelArgs):
    """The arguments of a model are a dataclass that extends this class."""

    dim: int
    hidden_dim: int  # of the feed-forward
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int  # training.seq_len
    enable_weight_tying: bool  # of the embedding to the output layer
    # that a training forward returns, by index; empty: only logits
    activations: tuple[int, ...]
    # Neither is part of the architecture: the same weights fit.
    # as TorchTitan's models call it; "flex" takes masks of documents
    attn_type: str = "sdpa"
    restart_positions: bool = False  # whether positions begin at 0 in every document

    @property
    def max_positions(self) -> int | None:
        """The length of the longest sequence that the weights allow; None: any, as with
        rotary embeddings.
        """
        return None

    def initial(self, name: str, shape: torch.Size) -> Initial:
        raise NotImplementedError

    def saved_elements(self, tp: int) -> dict[str, float]:
        """Return the number of elements that a block saves for backward, per token of a
        CP rank's part.

        Between blocks, TP shards the sequence. It gathers the inputs of attention and
        feed-forward, and shards what they compute over ``tp`` ranks. The keys are modes
        of activation checkpointing: "none", "op" and "full". "gradients" are those of
        the activations at the peak of a block's backward pass.
        """
        raise NotImplementedError

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        """Set what the config decides, before TorchTitan builds the model of the chosen
        flavor.
        """
        apply_overrides(self, job_config.model.overrides)
        super().update_from_config(job_config, **kwargs)
        self.max_seq_len = job_config.training.seq_len
        dispersion = job_config.dispersion
        stream = job_config.stream
        self.attn_type = "flex" if stream.document_mask else "sdpa"
        self.restart_positions = stream.restart_positions
        if dispersion.enabled:
            self.activations = activation_indices(
                dispersion.layers, dispersion.final_norm, self.n_layers
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Return the parameter count (a tied embedding counts once) and the FLOPs per
        token, forward and backward.

        TorchTitan 0.2.2 subtracts a tied embedding from both, although it does multiply
        as the output layer. Dispersion is not counted, because MFU is about the model.
        """
        # Shared parameters appear once
        total = sum(p.numel() for p in model.parameters())
        embeddings = nn.ModuleList(model.embeddings)  # type: ignore[arg-type]
        looked_up = sum(p.numel() for p in embeddings.parameters())
        tied = model.output.weight.numel() if self.enable_weight_tying else 0  # type: ignore[union-attr, operator]
        attention = 6 * self.n_layers * self.n_heads * 2 * self.head_dim * seq_len
        return total, 6 * (total - looked_up + tied) + attention


class Flavors(UserDict[str, Args]):
    """Map names to copies of arguments, because TorchTitan modifies even registered
    ones.
    """

    def __getitem__(self, name: str) -> Args:
        if name not in self.data:
            known = ", ".join(self) + did_you_mean(name, self)
            raise ConfigError(f"model.flavor is {name!r}, expected one of {known}")
        return copy.deepcopy(self.data[name])


def block_indices(layers: str | list[int], n_layers: int) -> tuple[int, ...]:
    """Return the blocks that ``dispersion.layers`` names, in ascending order, from 0,
    or raise ConfigError.
    """
    named = {
        "all": range(n_layers),
        "last": range(n_layers - 1, n_layers),
        "early_half": range(n_layers // 2),
        "late_half": range(n_layers // 2, n_layers),
    }
    if isinstance(layers, str) and layers not in named:
        known = ", ".join(named)
        raise ConfigError(
            f"dispersion.layers is {layers!r}, expected {known} or a list of block "
            "indices"
        )
    chosen = sorted(named[layers] if isinstance(layers, str) else layers)
    if any(type(i) is not int or not 0 <= i < n_layers for i in chosen):
        raise ConfigError(
            f"dispersion.layers is {layers}, but the model has {n_layers} blocks: "
            f"expected indices from 0 to {n_layers - 1}"
        )
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(
            f"dispersion.layers is {layers}, expected at least one block and none of "
            "them twice"
        )
    return tuple(chosen)


def activation_indices(
    layers: str | list[int], final_norm: bool, n_layers: int
) -> tuple[int, ...]:
    """Return the activations that ``dispersion.layers`` and ``final_norm`` name, as
    ``DispModel.forward`` takes them.

    Raise ConfigError as ``block_indices`` does, and for ``final_norm`` without the last
    block.
    """
    blocks = block_indices(layers, n_layers)
    if not final_norm:
        return tuple(i + 1 for i in blocks)
    if blocks[-1] != n_layers - 1:
        raise ConfigError(
            f"dispersion.final_norm is true, but dispersion.layers {layers!r} leaves "
            f"the last block ({n_layers - 1}) out, and the final norm follows it: add "
            "that block, or set dispersion.final_norm = false"
        )
    return (*(i + 1 for i in blocks[:-1]), n_layers + 1)


def architecture_of(args: Any) -> dict[str, Any]:
    """Return the fields that define the network, ready for JSON: all plain ones except
    max_seq_len and attn_type.

    ``_enforced`` is a sentence of TorchTitan's about its dataclass.
    """
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    return {
        name: value
        for name, value in values.items()
        if name not in ("max_seq_len", "attn_type", "_enforced")
        and isinstance(value, (bool, int, float, str))
    }


def apply_overrides(args: Any, overrides: Written) -> None:
    """Set fields of a dataclass of arguments in place, or raise ConfigError.

    A second call changes nothing.
    """
    found = parse_overrides(overrides)
    if not found:
        return
    hints = get_type_hints(type(args))
    kinds = {
        f.name: hints[f.name]
        for f in dataclasses.fields(args)
        if hints[f.name] in _KINDS
    }
    fixed = NOT_OVERRIDABLE | getattr(args, "not_overridable", {})
    for key, value in found.items():
        if key in fixed:
            raise ConfigError(
                f"{OVERRIDES}.{key} cannot be set: {fixed[key]}. Leave it out"
            )
        if key not in kinds:
            known = [name for name in kinds if name not in fixed]
            raise ConfigError(
                f"{OVERRIDES}.{key} is not known{did_you_mean(key, known)}; expected "
                f"{', '.join(known)}"
            )
        kind = kinds[key]
        if not fits(value, kind) or (kind is not bool and not 0 < value < math.inf):
            raise ConfigError(
                f"{OVERRIDES}.{key} is {value!r}, expected {_KINDS[kind]}"
            )
        setattr(args, key, kind(value))
    _check_heads(args)


def _check_heads(args: DispModelArgs) -> None:
    if args.n_heads % args.n_kv_heads:
        raise ConfigError(
            f"{OVERRIDES}: n_heads {args.n_heads} is not a multiple of n_kv_heads "
            f"{args.n_kv_heads}: set both so that it is"
        )
    if not hasattr(args, "rope_theta"):  # head_dim is dim ÷ n_heads
        if args.dim % args.n_heads:
            raise ConfigError(
                f"{OVERRIDES}: dim {args.dim} is not a multiple of n_heads "
                f"{args.n_heads}: set both so that it is"
            )
    elif args.head_dim % 2:
        raise ConfigError(
            f"{OVERRIDES}.head_dim is {args.head_dim}, expected an even number: rotary "
            "embeddings rotate pairs"
        )


def named(flavor: str, overrides: Written) -> str:
    """Return a flavor's name with its overrides, for people: "nano with hidden_dim =
    16".
    """
    pairs = parse_overrides(overrides).items()
    changes = ", ".join(f"{key} = {shown(value)}" for key, value in pairs)
    return f"{flavor} with {changes}" if changes else flavor
