"""The loss of a model as it is: hooks collect the outputs of its blocks.

They keep what comes within a forward: in the backward pass, activation checkpointing
calls hooks of blocks again.
"""

import inspect
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from titan_disp.dispersion.loss import DispersionLoss
from titan_disp.dispersion.variants import Variant
from titan_disp.errors import did_you_mean

# arguments of models; the second one, torch's own, is 0 at tokens
MASKS = ("attention_mask", "src_key_padding_mask")


class attach(AbstractContextManager["attach"]):
    """Collect the outputs of a model's blocks with hooks, until ``detach`` or the end
    of a with statement.

        handle = attach(model)
        loss = model(**batch).loss + handle.loss()

    The outputs of a forward in training mode and with gradients are held until ``loss``
    takes them or the next one begins.

    Args:
        model: of any library. DDP, ``fully_shard`` or torch.compile may wrap it before
            or after.
        layers: names of modules in ``model.named_modules()`` that return [B, N, F], or
            a tuple that begins with it. The name of a list stands for all its modules.
            None: the longest list of modules of one class.
        coeff: λ, an attribute.
        variant: of the loss. ``options`` are further attributes of ``DispersionLoss``.

    Attributes:
        step: from which the sampled estimator draws its positions. Every ``loss`` adds
            1.
        mask: [B, N], not 0 at tokens, for the next ``loss`` only. None: the
            ``attention_mask`` or ``src_key_padding_mask`` that the model got; without
            one, every position is a token.
        losses: of each block, or of its last call, the mean over the sequences in the
            last ``loss`` without λ, on the device.

    Raises:
        ValueError: the blocks are not found or are ambiguous, their outputs are [N, B,
            F], or an option is wrong.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Iterable[str] | None = None,
        coeff: float = 0.1,
        variant: str | Variant = "angular",
        **options: Any,
    ) -> None:
        self.coeff = coeff
        self._dispersion = DispersionLoss(variant, **options)
        self.step = 0
        self.losses = dict[str, Tensor]()
        self.mask: Tensor | None = None
        self._in_forward = False
        self._inputs = dict[str, Tensor]()
        self._outputs = list[tuple[str, Tensor]]()
        self._arguments = _arguments(model)
        if "decoder_input_ids" in self._arguments:
            raise ValueError(
                f"{type(model).__name__} has two sequences: attach to a part of it, as to model.decoder"
            )
        for name, block in (blocks := _find_blocks(model, layers)).items():
            if any(
                isinstance(part, nn.MultiheadAttention) and not part.batch_first
                for part in block.modules()
            ):
                raise ValueError(
                    f"{name} has tokens as [N, B, F], expected [B, N, F]: build it with batch_first=True"
                )
        self._hooks = [
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._end, always_call=True),
            *(
                block.register_forward_hook(partial(self._collect, name))
                for name, block in blocks.items()
            ),
        ]

    def loss(self, weights: Tensor | None = None) -> Tensor:
        """Return λ times the mean over layers and sequences of the last forward: a
        scalar, to be added to another loss.

        Args:
            weights: [B], with which the sequences are added up. None: 1/B each, their
                mean.

        Raises:
            RuntimeError: nothing was collected since the last call. (Under
                ``torch.no_grad``, the loss is then 0.)
            ValueError: the outputs or the mask do not have the shape that the model's
                input implies.
        """
        outputs = self._outputs
        inputs = self._inputs
        mask = self.mask
        self._outputs = []
        self._inputs = {}
        self.mask = None
        if not outputs:
            if not torch.is_grad_enabled():
                return torch.zeros(())
            raise RuntimeError(
                "no outputs of blocks since the last loss(): call it after each forward of the attached model, in training mode "
                "(model.train()); where blocks are checkpointed, set use_reentrant=False"
            )
        losses = self._dispersion(
            [z for _, z in outputs], step=self.step, valid=_valid(mask, inputs, outputs)
        )
        self.step += 1
        self.losses = {
            name: one.mean()
            for (name, _), one in zip(outputs, losses.detach(), strict=True)
        }
        of_sequences = losses.mean(0)
        return self.coeff * (
            of_sequences.mean() if weights is None else (weights * of_sequences).sum()
        )

    def detach(self, *error: object) -> None:
        """Remove the hooks, and forget what they have collected."""
        for hook in self._hooks:
            hook.remove()
        self._outputs = []
        self._inputs = {}

    __exit__ = detach

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if getattr(model, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel copies the model: start one process per GPU, as with torchrun"
            )
        self._in_forward = model.training and torch.is_grad_enabled()
        if self._in_forward:
            given = (
                dict.fromkeys(self._arguments)
                | dict(zip(self._arguments, args, strict=False))
                | kwargs
            )
            self._inputs = {
                name: x for name, x in given.items() if isinstance(x, Tensor)
            }
            self._outputs = []

    def _collect(
        self, name: str, block: nn.Module, args: tuple[Any, ...], output: Any
    ) -> None:
        if self._in_forward and torch.is_grad_enabled():
            self._outputs.append(
                (name, output if isinstance(output, Tensor) else output[0])
            )

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._in_forward = False


def _arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments of forward, within DDP and torch.compile, which
    take any.
    """
    arguments = inspect.signature(model.forward).parameters
    inner = cast(Any, model)
    while any(one.kind is one.VAR_POSITIONAL for one in arguments.values()):
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if inner is None:
            break
        arguments = inspect.signature(inner.forward).parameters
    return list(arguments)


def _valid(
    mask: Tensor | None,
    inputs: Mapping[str, Tensor],
    outputs: Iterable[tuple[str, Tensor]],
) -> Tensor | None:
    """Return which positions are tokens, [B, N], or None if all are.

    Token ids are [B, N], and other inputs begin with B.
    """
    first = next(iter(inputs.values()), torch.empty(()))
    expected = first.shape[: 1 if first.is_floating_point() else 2]
    for block, z in outputs:
        if z.ndim != 3 or z.shape[: len(expected)] != expected:
            raise ValueError(
                f"the output of {block} is {list(z.shape)}, expected [B, N, F] for an input that begins with {list(expected)}: "
                "name other modules with layers=…, or attach to the part of the model that gets another input"
            )
    name = (
        next((name for name in MASKS if name in inputs), None)
        if mask is None
        else "handle.mask"
    )
    if name is None:
        return None
    mask = inputs[name] if mask is None else mask
    if mask.shape != (of_tokens := z.shape[:2]):
        raise ValueError(
            f"{name} has shape {list(mask.shape)}, expected {list(of_tokens)}: set handle.mask before loss()"
        )
    return mask == 0 if name == MASKS[1] else mask != 0


def _find_blocks(
    model: nn.Module, layers: str | Iterable[str] | None
) -> dict[str, nn.Module]:
    """Return the named blocks, or those of the longest list, if no other has half as
    many. Lists in it do not count.
    """
    modules = dict(model.named_modules())
    blocks = dict[str, nn.Module]()
    lists = dict[str, dict[str, nn.Module]]()
    for name in [layers] if isinstance(layers, str) else layers or ():
        if name not in modules:
            raise ValueError(
                f"layers has {name!r}, which is no module of the model{did_you_mean(str(name), modules)}"
            )
        blocks |= _held(name, modules[name]) or {name: modules[name]}
    if layers is not None:
        return blocks
    for name, module in modules.items():
        nested = any(name.startswith(f"{outer}." if outer else "") for outer in lists)
        if (
            not nested
            and len(held := _held(name, module)) > 1
            and len({*map(type, held.values())}) == 1
        ):
            lists[name] = held
    found = {
        name: held
        for name, held in lists.items()
        if 2 * len(held) >= max(map(len, lists.values()))
    }
    if len(found) != 1:
        choice = " and ".join(
            f"{name} ({len(held)} modules)" for name, held in found.items()
        )
        raise ValueError(
            f"{type(model).__name__} has {choice or 'no list of modules of one class'}, expected one list of blocks: name it, "
            f"or the blocks, as in layers={next(iter(found), 'encoder.layers')!r}"
        )
    return next(iter(found.values()))


def _held(name: str, module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a list by name.

    A ``Sequential`` of several classes is no list, but one block.
    """
    held = {
        f"{name}.{child}".lstrip("."): one for child, one in module.named_children()
    }
    alike = isinstance(module, nn.Sequential) and len({*map(type, held.values())}) == 1
    return held if alike or isinstance(module, nn.ModuleList | nn.ModuleDict) else {}
