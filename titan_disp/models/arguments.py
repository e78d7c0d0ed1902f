"""A model's arguments: their base class, flavors, ``model.overrides``, and the choice of
dispersed layers.

``model.overrides`` can set the fields of type int, float and bool of any dataclass of
arguments. The dataclass can exclude fields by a class attribute ``not_overridable``,
which maps a field to the reason.
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
_EXPECTED = {  # the types of fields that can be set, for messages
    bool: TYPE_NAMES[bool],
    int: f"{TYPE_NAMES[int]} ≥ 1",
    float: f"{TYPE_NAMES[float]} > 0",
}
Args = TypeVar("Args", bound="DispModelArgs")


@dataclass(frozen=True)
class Initial:
    """The distribution of a parameter's initial values: normal, truncated at ``mean`` ±
    ``cut``. If ``std`` is 0, all values are ``mean``.
    """

    mean: float = 0.0
    std: float = 0.0
    cut: float = math.inf


class DispModelArgs(BaseModelArgs):
    """The base class of each model's arguments, which are a dataclass."""

    dim: int
    hidden_dim: int  # of the feed-forward network
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    max_seq_len: int  # training.seq_len
    enable_weight_tying: bool  # whether embedding and output layer share their weight
    # The indices of the activations that a forward in training returns. Without an
    # index, forward returns only logits.
    activations: tuple[int, ...]
    # The last two fields do not change the weights, so they are not part of the
    # architecture. "flex" attention takes masks of documents; the name is TorchTitan's.
    attn_type: str = "sdpa"
    restart_positions: bool = False  # whether positions begin at 0 in every document

    @property
    def max_positions(self) -> int | None:
        """The longest sequence, in tokens, that the weights allow. None means no limit,
        as with rotary embeddings.
        """
        return None

    def initial(self, name: str, shape: torch.Size) -> Initial:
        """Return the distribution of the initial values of a parameter."""
        raise NotImplementedError

    def saved_elements(self, tp: int) -> dict[str, float]:
        """Return the numbers of elements that a block holds on one rank for backward,
        per token of a CP rank's part of the sequence.

        The keys "none", "op" and "full" are modes of activation checkpointing; their
        numbers count what forward saves. The number of "gradients" counts the gradients
        of activations at the peak of a block's backward pass.

        TP shards the sequence between blocks. Inside a block, TP gathers the inputs of
        attention and feed-forward network, and shards the computation of these two over
        ``tp`` ranks.
        """
        raise NotImplementedError

    def update_from_config(self, job_config: JobConfig, **kwargs) -> None:
        """Set the fields that depend on the config. TorchTitan calls this before it
        builds the model.
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
        """Return the number of parameters (a tied embedding counts once) and the FLOPs
        per token, forward and backward.

        TorchTitan 0.2.2 subtracts a tied embedding from both numbers, although the
        output layer multiplies by this embedding. The FLOPs of dispersion are not
        counted, because MFU compares the FLOPs of the model.
        """
        # ``parameters()`` yields a shared parameter once.
        total = sum(p.numel() for p in model.parameters())
        embeddings = nn.ModuleList(model.embeddings)  # type: ignore[arg-type]
        multiplied = total - sum(p.numel() for p in embeddings.parameters())
        if self.enable_weight_tying:
            multiplied += model.output.weight.numel()  # type: ignore[union-attr, operator]
        attention = 6 * self.n_layers * self.n_heads * 2 * self.head_dim * seq_len
        return total, 6 * multiplied + attention


class Flavors(UserDict[str, Args]):
    """A model's flavors by name. Each look-up returns a copy, because TorchTitan modifies
    the registered arguments.
    """

    def __getitem__(self, name: str) -> Args:
        if name not in self.data:
            flavors = ", ".join(self) + did_you_mean(name, self)
            raise ConfigError(f"model.flavor is {name!r}, expected one of {flavors}")
        return copy.deepcopy(self.data[name])


def block_indices(layers: str | list[int], n_layers: int) -> tuple[int, ...]:
    """Return the indices of the blocks in ``dispersion.layers``, in ascending order. The
    first block is 0.

    Raises ConfigError if the value is invalid.
    """
    ranges = {
        "all": range(n_layers),
        "last": range(n_layers - 1, n_layers),
        "early_half": range(n_layers // 2),
        "late_half": range(n_layers // 2, n_layers),
    }
    if isinstance(layers, str):
        if layers not in ranges:
            raise ConfigError(
                f"dispersion.layers is {layers!r}, expected {', '.join(ranges)} or a "
                "list of block indices"
            )
        chosen = list(ranges[layers])
    else:
        chosen = sorted(layers)
    if any(type(i) is not int or not 0 <= i < n_layers for i in chosen):
        raise ConfigError(
            f"dispersion.layers is {layers}, but the model has {n_layers} blocks: "
            f"expected indices from 0 to {n_layers - 1}"
        )
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(
            f"dispersion.layers is {layers}, expected at least one block, and each "
            "block once"
        )
    return tuple(chosen)


def activation_indices(
    layers: str | list[int], final_norm: bool, n_layers: int
) -> tuple[int, ...]:
    """Return the indices of the dispersed activations, for ``DispModel.forward``.

    Raises ConfigError if ``block_indices`` does, or if ``final_norm`` is set without the
    last block.
    """
    blocks = block_indices(layers, n_layers)
    if not final_norm:
        return tuple(i + 1 for i in blocks)
    if blocks[-1] != n_layers - 1:
        raise ConfigError(
            f"dispersion.final_norm is true, but dispersion.layers {layers!r} leaves "
            f"the last block ({n_layers - 1}) out, whose output the final norm takes: "
            "add that block, or set dispersion.final_norm = false"
        )
    return (*(i + 1 for i in blocks[:-1]), n_layers + 1)


def architecture_of(args: Any) -> dict[str, Any]:
    """Return the fields that define the network, as values for JSON: all fields of type
    bool, int, float and str except max_seq_len and attn_type.

    TorchTitan's ``_enforced`` is left out, because it is a note to programmers.
    """
    values = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    return {
        name: value
        for name, value in values.items()
        if name not in ("max_seq_len", "attn_type", "_enforced")
        and isinstance(value, (bool, int, float, str))
    }


def apply_overrides(args: Any, overrides: Written) -> None:
    """Set the fields of ``args`` (a dataclass) to the values in ``model.overrides``.

    A second call changes nothing. Raises ConfigError if a key or a value is invalid.
    """
    values = parse_overrides(overrides)
    if not values:
        return
    hints = get_type_hints(type(args))
    types = {
        f.name: hints[f.name]
        for f in dataclasses.fields(args)
        if hints[f.name] in _EXPECTED
    }
    fixed = NOT_OVERRIDABLE | getattr(args, "not_overridable", {})
    for key, value in values.items():
        if key in fixed:
            raise ConfigError(
                f"{OVERRIDES}.{key} cannot be set: {fixed[key]}. Leave it out"
            )
        if key not in types:
            keys = [name for name in types if name not in fixed]
            raise ConfigError(
                f"{OVERRIDES}.{key} is not known{did_you_mean(key, keys)}; expected "
                f"{', '.join(keys)}"
            )
        type_ = types[key]
        if not fits(value, type_) or (type_ is not bool and not 0 < value < math.inf):
            raise ConfigError(
                f"{OVERRIDES}.{key} is {value!r}, expected {_EXPECTED[type_]}"
            )
        setattr(args, key, type_(value))
    _check_heads(args)


def _check_heads(args: DispModelArgs) -> None:
    if args.n_heads % args.n_kv_heads:
        raise ConfigError(
            f"{OVERRIDES}: n_heads {args.n_heads} is not a multiple of n_kv_heads "
            f"{args.n_kv_heads}: change one of them"
        )
    if not hasattr(args, "rope_theta"):  # head_dim is dim ÷ n_heads
        if args.dim % args.n_heads:
            raise ConfigError(
                f"{OVERRIDES}: dim {args.dim} is not a multiple of n_heads "
                f"{args.n_heads}: change one of them"
            )
    elif args.head_dim % 2:
        raise ConfigError(
            f"{OVERRIDES}.head_dim is {args.head_dim}, expected an even number: rotary "
            "embeddings rotate pairs"
        )


def text_of_flavor(flavor: str, overrides: Written) -> str:
    """Return a flavor's name with its overrides: "nano with hidden_dim = 16"."""
    values = parse_overrides(overrides)
    if not values:
        return flavor
    changes = ", ".join(f"{key} = {shown(value)}" for key, value in values.items())
    return f"{flavor} with {changes}"
