"""A model's arguments: their base class, its flavors, what ``model.overrides`` changes,
and which layers are dispersed.

``model.overrides`` sets fields of type int, float and bool of any dataclass of
arguments. The dataclass may exclude some in a class attribute ``not_overridable``,
which gives the reason for each.
"""

import copy
import dataclasses
import json
import math
from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import torch
from torch import nn
from torchtitan.config import JobConfig
from torchtitan.protocols.model import BaseModelArgs
from tyro.constructors import PrimitiveConstructorSpec

from titan_disp.dispersion.registry import fits
from titan_disp.errors import ConfigError, did_you_mean

KEY = "model.overrides"
OPTIONS = "dispersion.options"
LOSSES = "dispersion.losses"
# The keys that are written as tables, or as words as in these examples.
TABLES = {KEY: "hidden_dim=16,n_layers=2", OPTIONS: "variance_coeff=1,gamma=2"}
NOT_OVERRIDABLE = {"max_seq_len": "it is training.seq_len"}
_KINDS = {bool: "true or false", int: "a whole number ≥ 1", float: "a number > 0"}
# a table, a list of "key=value", or "key=value,key=value"
Written = Mapping[str, Any] | Sequence[str] | str


def _as_one_word(key: str) -> PrimitiveConstructorSpec:
    # The values are a table in TOML, and one word on the command line, which replaces
    # the table. By itself, tyro would make an option of every key in the TOML file, and
    # accept no others.
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="KEY=VALUE,...",
        instance_from_str=lambda words: parse_overrides(words[0], key),
        is_instance=lambda value: isinstance(value, (dict, list, str)),
        str_from_instance=lambda value: [written_out(value)],
    )


Overrides = Annotated[dict[str, Any] | list[str] | str, _as_one_word(KEY)]
Options = Annotated[dict[str, Any] | list[str] | str, _as_one_word(OPTIONS)]
Losses = Annotated[
    list[dict[str, Any]],
    PrimitiveConstructorSpec(  # as the tables of Options, which tyro would take apart
        nargs=1,
        metavar="JSON",
        instance_from_str=lambda words: _tables(words[0]),
        is_instance=lambda value: isinstance(value, list),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
Args = TypeVar("Args", bound="DispModelArgs")


def _tables(word: str) -> list[dict[str, Any]]:
    try:
        found = json.loads(word)
    except ValueError as error:
        raise ConfigError(
            f'{LOSSES} is {word!r}, which is not JSON ({error}): write \'[{{"variant": "cosine"}}]\''
        ) from error
    return found if isinstance(found, list) else [found]


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
        apply_overrides(self, job_config.model.overrides)  # type: ignore[attr-defined]
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
            f"dispersion.layers is {layers!r}, expected {known} or a list of block indices"
        )
    chosen = sorted(named[layers] if isinstance(layers, str) else layers)
    if any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < n_layers
        for i in chosen
    ):
        raise ConfigError(
            f"dispersion.layers is {layers}, but the model has {n_layers} blocks: "
            f"expected indices from 0 to {n_layers - 1}"
        )
    if not chosen or len(set(chosen)) != len(chosen):
        raise ConfigError(
            f"dispersion.layers is {layers}, expected at least one block and none of them twice"
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
            f"dispersion.final_norm is true, but dispersion.layers {layers!r} leaves the last block ({n_layers - 1}) "
            "out, and the final norm follows it: add that block, or set dispersion.final_norm = false"
        )
    return (*(i + 1 for i in blocks[:-1]), n_layers + 1)


def architecture_of(args: Any) -> dict[str, Any]:
    """Return the fields that define the network, ready for JSON: all plain ones except
    max_seq_len and attn_type.

    ``_enforced`` is a sentence of TorchTitan's about its dataclass.
    """
    fields = (
        f.name
        for f in dataclasses.fields(args)
        if f.name not in ("max_seq_len", "attn_type", "_enforced")
    )
    values = {name: getattr(args, name) for name in fields}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, (bool, int, float, str))
    }


def parse_overrides(written: Written, name: str = KEY) -> dict[str, Any]:
    """Return the overrides as a dict, or raise ConfigError if they cannot be read or a
    field is given twice.

    ``name`` is the key that they are the value of.
    """
    if isinstance(written, Mapping):
        return dict(written)
    pairs = written.split(",") if isinstance(written, str) else written
    found: dict[str, Any] = {}
    for pair in pairs:
        if not isinstance(pair, str) or not (pair.strip() == "" or "=" in pair):
            raise ConfigError(
                f"{name} has {pair!r}, expected key=value, as in --{name} {TABLES[name]}, or a table"
            )
        key, _, value = (part.strip() for part in pair.partition("="))
        if key in found:
            raise ConfigError(
                f"{name}.{key} is given twice: {found[key]!r} and {value}. Remove one of them"
            )
        if key or value:
            found[key] = _literal(value)
    return found


def _literal(text: str) -> bool | int | float | str:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def shown(value: Any) -> str:
    """Format a config value for people and for the command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def written_out(overrides: Written, name: str = KEY) -> str:
    """Format overrides, the value of the key ``name``, as the command line takes
    them.
    """
    return ",".join(
        f"{key}={shown(value)}"
        for key, value in parse_overrides(overrides, name).items()
    )


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
            raise ConfigError(f"{KEY}.{key} cannot be set: {fixed[key]}. Leave it out")
        if key not in kinds:
            known = [name for name in kinds if name not in fixed]
            raise ConfigError(
                f"{KEY}.{key} is not known{did_you_mean(key, known)}; expected {', '.join(known)}"
            )
        kind = kinds[key]
        if not fits(value, kind) or (kind is not bool and not 0 < value < math.inf):
            raise ConfigError(f"{KEY}.{key} is {value!r}, expected {_KINDS[kind]}")
        setattr(args, key, kind(value))
    _check_heads(args)


def _check_heads(args: Any) -> None:
    own = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    heads, kv_heads, head_dim = (
        own.get(name) for name in ("n_heads", "n_kv_heads", "head_dim")
    )
    if heads and kv_heads and heads % kv_heads:
        raise ConfigError(
            f"{KEY}: n_heads {heads} is not a multiple of n_kv_heads {kv_heads}: set both so that it is"
        )
    if heads and not head_dim and own.get("dim") and own["dim"] % heads:
        raise ConfigError(
            f"{KEY}: dim {own['dim']} is not a multiple of n_heads {heads}: set both so that it is"
        )
    if head_dim and head_dim % 2 and "rope_theta" in own:
        raise ConfigError(
            f"{KEY}.head_dim is {head_dim}, expected an even number: rotary embeddings rotate pairs"
        )


def named(flavor: str, overrides: Written) -> str:
    """Return a flavor's name with its overrides, for people: "nano with hidden_dim =
    16".
    """
    found = parse_overrides(overrides)
    return flavor + (
        " with " + ", ".join(f"{key} = {shown(value)}" for key, value in found.items())
        if found
        else ""
    )
