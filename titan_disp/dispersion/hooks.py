"""The loss of an unchanged model: hooks collect the outputs of the model's blocks.

``attach`` ignores outputs outside of a forward pass, because activation checkpointing
runs the blocks and their hooks again in the backward pass. ``outermost_lists`` finds
blocks, and ``collect`` passes on their outputs, for other purposes too.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from titan_disp.dispersion.formula import check_coeff, condensing
from titan_disp.dispersion.loss import DispersionLoss, check_options
from titan_disp.dispersion.variants import Variant
from titan_disp.errors import did_you_mean

# Reasons why there are no outputs
NO_FORWARD = (
    "no outputs of blocks since the last loss(): call it after each forward of the "
    "attached model, in training mode (model.train()), with gradients enabled, and "
    "before detach(); if a compiled forward has run before attach, call "
    "torch._dynamo.reset() after it"
)
RAISED = (
    "the last forward raised an error, so that the outputs of some blocks are "
    "missing: call loss() only after a forward that returns"
)
NOT_CALLED = (
    "no outputs of blocks since the last loss(), although the attached model ran: "
    "where blocks are checkpointed, set use_reentrant=False; if a compiled forward "
    "has run before attach, call torch._dynamo.reset() after it"
)

# Arguments of models that are masks. torch's key_padding_mask is 0 at tokens. Other masks
# are not 0 at tokens, except for additive masks, which are added to the scores of attention:
# they are 0 at tokens and negative elsewhere.
MASKS = ("attention_mask", "src_key_padding_mask", "tgt_key_padding_mask")
# A model with two sequences has one of these sets of arguments.
TWO_SEQUENCES = ({"decoder_input_ids"}, {"src", "tgt"})
Modules = dict[str, nn.Module]  # by their names in ``named_modules()``
Key = TypeVar("Key")


def outermost_lists(
    model: nn.Module, fits: Callable[[Modules], bool]
) -> dict[str, Modules]:
    """Return the model's lists of modules for which ``fits`` is true, by name.

    A list is a ``ModuleList``, a ``ModuleDict``, or a ``Sequential`` of modules of one
    class. A list inside a returned list is left out, such as the experts of a block.
    """
    lists = dict[str, Modules]()
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.".lstrip(".")) for outer in lists)
        modules = _modules_of_list(name, module)
        if modules and not is_inside and fits(modules):
            lists[name] = modules
    return lists


def _modules_of_list(name: str, module: nn.Module) -> Modules:
    """Return the modules of a list, by name; an empty dict if ``module`` is no list.

    A ``Sequential`` of several classes counts as one block, not as a list.
    """
    modules = {
        f"{name}.{child}".lstrip("."): block for child, block in module.named_children()
    }
    is_list = isinstance(module, nn.ModuleList | nn.ModuleDict) or (
        isinstance(module, nn.Sequential) and _are_alike(modules)
    )
    return modules if is_list else {}


def _are_alike(modules: Modules) -> bool:
    return len({*map(type, modules.values())}) == 1


def collect(
    blocks: Mapping[Key, nn.Module], take: Callable[[Key, Tensor], None]
) -> ExitStack:
    """Return hooks that call ``take(key, z)`` after each forward of a block.

    z is the output of the block: the first tensor if the output is a tuple, or the only
    tensor [B, N, F] if it is a dict. ``close()``, or the end of a with statement,
    removes the hooks.
    """
    hooks = ExitStack()
    for key, block in blocks.items():
        hooks.enter_context(block.register_forward_hook(partial(_pass_on, take, key)))
    return hooks


def _pass_on(
    take: Callable[[Key, Tensor], None],
    key: Key,
    block: nn.Module,
    args: tuple[Any, ...],
    output: Any,
) -> None:
    z = _tensor_of(output)
    if z is None:
        raise ValueError(
            f"block {key} returns {_summary(output)}, expected a tensor [B, N, F], a "
            "tuple that begins with one, or a dict with only one: attach to other "
            "modules, with layers=…"
        )
    take(key, z)


def _tensor_of(output: Any) -> Tensor | None:
    """Return the activations in a block's output; None if there are none, or if a dict
    has several candidates.
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list):
        return next((part for part in output if isinstance(part, Tensor)), None)
    if isinstance(output, Mapping):
        tensors = [part for part in output.values() if isinstance(part, Tensor)]
        candidates = [x for x in tensors if x.ndim == 3 and x.is_floating_point()]
        if len(candidates) == 1:
            return candidates[0]
    return None


def _summary(output: Any) -> str:
    """Return a text with the type of a block's output, and the shapes inside it."""
    if isinstance(output, Mapping):
        parts = [f"{name} {_shape(part)}" for name, part in output.items()]
        return f"a dict of {' and '.join(parts) or 'nothing'}"
    if isinstance(output, tuple | list):
        return f"a tuple of {' and '.join(map(_shape, output)) or 'nothing'}"
    return f"a {type(output).__name__}"


def _shape(part: Any) -> str:
    """Return the shape of a tensor, or the type's name of any other object."""
    if isinstance(part, Tensor):
        return str(list(part.shape))
    return type(part).__name__


class attach(AbstractContextManager["attach"]):
    """Collect the outputs of a model's blocks with hooks, until ``detach`` or the end
    of a with statement.

        handle = attach(model)
        loss = model(**batch).loss + handle.loss()

    Outputs are collected in training mode with gradients enabled. They are held until
    ``loss`` is called or the next forward begins.

    Args:
        model: of any library. DDP, ``fully_shard`` or torch.compile may wrap the model
            before or after attach. The first dimension of the model's inputs is B; token
            ids are [B, N]. Blocks that return [N, B, F] are an error. If B = N, or if
            the inputs are [N, B] as well, this error is found only in torch's modules,
            by their ``batch_first``.
        layers: names of modules in ``model.named_modules()``. Each returns [B, N, F], a
            tuple whose first tensor is [B, N, F], or a dict with one such tensor. The
            name of a list stands for all its modules. A block that runs several times
            in a forward counts as several layers, as in ["block"] of a universal
            transformer. None: the longest list of modules of one class; if these have
            lists of blocks themselves, as the stages of Swin, attach warns. The
            ``repr`` of the handle lists the blocks.
        coeff: λ, also an attribute, which may change from step to step. If it is
            negative, the embeddings condense, and attach warns.
        variant: the variant of the loss.
        options: further attributes of ``DispersionLoss``.

    Attributes:
        step: the step from which the sampled estimator draws its positions. Every call
            of ``loss`` adds 1.
        mask: [B, N] for the next ``loss`` only: 0 except at tokens, or additive, which is
            0 at tokens and negative elsewhere. A floating-point mask of zeros is additive.
            None: the ``attention_mask``, ``src_key_padding_mask`` or ``tgt_key_padding_mask`` of
            the model's inputs, or of a dict that is the first input. Without a mask,
            all positions are tokens.
        losses: a dict from the name of a block to the block's last loss without λ, a
            scalar on the device: the mean over sequences. A block that runs several
            times has the loss of its last run.

    Raises:
        TypeError: ``model`` is no module, or an option is unknown.
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
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model is a {type(model).__name__}, expected a torch.nn.Module: load "
                "it first, as with AutoModelForCausalLM.from_pretrained"
            )
        check_coeff("coeff", coeff)
        if warning := condensing(coeff):
            warnings.warn(warning, stacklevel=2)
        self.coeff = coeff
        check_options(options)
        self._dispersion = DispersionLoss(variant, **options)
        self.step = 0
        self.losses = dict[str, Tensor]()
        self.mask: Tensor | None = None
        self._in_forward = False
        self._why_missing = NO_FORWARD
        self._inputs = dict[str, Tensor]()
        self._outputs = list[tuple[str, Tensor]]()
        self._arguments = _arguments(model)
        if any(names <= {*self._arguments} for names in TWO_SEQUENCES):
            parts = " or ".join(f"attach(model.{part})" for part in _parts(model))
            raise ValueError(
                f"{type(model).__name__} has two sequences: attach to a part of it, "
                f"as in {parts or 'attach(model.decoder)'}"
            )
        if layers is None:
            blocks = _longest_list(model)
            if inner := _lists_inside(blocks):
                warnings.warn(
                    f"attach takes {', '.join(blocks)} as blocks. They have lists of "
                    "modules themselves: to take such a list, whose modules return "
                    "equally many tokens, name it, as in "
                    f"layers={max(inner, key=lambda name: len(inner[name]))!r}",
                    stacklevel=2,
                )
        else:
            blocks = _named(model, layers)
        for name, block in blocks.items():
            if any(
                isinstance(part, nn.MultiheadAttention | nn.RNNBase)
                and not part.batch_first
                for part in block.modules()
            ):
                raise ValueError(
                    f"{name} has tokens as [N, B, F], expected [B, N, F]: build it "
                    "with batch_first=True"
                )
        self._blocks = list(blocks)
        self._hooks = ExitStack()
        for hook in (
            model.register_forward_pre_hook(self._begin, with_kwargs=True),
            model.register_forward_hook(self._succeed),
            model.register_forward_hook(self._end, always_call=True),
            collect(blocks, self._take),
        ):
            self._hooks.enter_context(hook)

    def __repr__(self) -> str:
        """Return a text with the names of the blocks, λ and the variant."""
        return (
            f"<attach: {', '.join(self._blocks)}; coeff={self.coeff}, "
            f"variant={self._dispersion.variant!r}>"
        )

    def loss(self, weights: Tensor | None = None) -> Tensor:
        """Return λ times the dispersion loss of the last forward, averaged over layers
        and sequences: a scalar. Add it to the training loss.

        Args:
            weights: [B], the weight of each sequence. None: 1/B, which gives the mean;
                the loss is then 0 if B is 0.

        Raises:
            RuntimeError: nothing was collected since the last call, or the last forward
                raised an error. (Under ``torch.no_grad``, the loss is 0 instead.)
            ValueError: the shape of the outputs, the mask or the weights does not fit
                the model's inputs.
        """
        outputs = self._outputs
        inputs = self._inputs
        mask = self.mask
        why_missing = self._why_missing
        self._outputs = []
        self._inputs = {}
        self.mask = None
        self._why_missing = NO_FORWARD
        if not outputs:
            if not torch.is_grad_enabled():
                return torch.zeros(())
            raise RuntimeError(why_missing)
        losses = self._dispersion(
            [z for _, z in outputs], step=self.step, valid=_valid(mask, inputs, outputs)
        )
        self.step += 1
        self.losses = {
            name: _mean(of_block)
            for (name, _), of_block in zip(outputs, losses.detach(), strict=True)
        }
        of_sequences = losses.mean(0)
        if weights is None:
            return self.coeff * _mean(of_sequences)
        if getattr(weights, "shape", None) != of_sequences.shape:
            raise ValueError(
                f"weights is {_shape(weights)}, expected a tensor "
                f"{_shape(of_sequences)}, one weight for each sequence"
            )
        return self.coeff * (weights * of_sequences).sum()

    def detach(self, *error: object) -> None:
        """Remove the hooks and the collected outputs."""
        self._hooks.close()
        self._outputs = []
        self._inputs = {}
        self._why_missing = NO_FORWARD

    __exit__ = detach

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for a copy or a pickle, without collected outputs."""
        return vars(self) | {
            "_outputs": [],
            "_inputs": {},
            "_why_missing": NO_FORWARD,
            "mask": None,
        }

    def _begin(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if getattr(model, "_is_replica", False):
            raise RuntimeError(
                "nn.DataParallel copies the model: start one process per GPU, as with "
                "torchrun"
            )
        self._in_forward = model.training and torch.is_grad_enabled()
        if self._in_forward:
            inputs = (
                dict.fromkeys(self._arguments)
                | dict(zip(self._arguments, args, strict=False))
                | kwargs
            )
            first = next(iter(inputs.values()), None)
            if isinstance(first, Mapping):  # a dict of all inputs
                inputs |= {name: first[name] for name in MASKS if name in first}
            self._inputs = {
                name: x for name, x in inputs.items() if isinstance(x, Tensor)
            }
            self._outputs = []
            self._why_missing = RAISED  # until _succeed is called

    def _take(self, name: str, z: Tensor) -> None:
        if self._in_forward and torch.is_grad_enabled():
            self._outputs.append((name, z))

    def _succeed(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._in_forward:  # this hook is not called after an error
            self._why_missing = NOT_CALLED

    def _end(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """End a forward pass, also one that raised, whose outputs are dropped."""
        self._in_forward = False
        if self._why_missing == RAISED:
            self._outputs = []


def _mean(losses: Tensor) -> Tensor:
    """Return the mean of losses [B]; 0 if B is 0."""
    return losses.sum() / max(1, len(losses))


def _arguments(model: nn.Module) -> list[str]:
    """Return the names of the arguments of ``model.forward``.

    DDP and torch.compile take any arguments, so the names are the wrapped model's.
    """
    arguments = inspect.signature(model.forward).parameters
    inner = cast(Any, model)
    while any(
        argument.kind is inspect.Parameter.VAR_POSITIONAL
        for argument in arguments.values()
    ):
        inner = getattr(inner, "_orig_mod", getattr(inner, "module", None))
        if inner is None:
            break
        arguments = inspect.signature(inner.forward).parameters
    return list(arguments)


def _parts(model: nn.Module) -> list[str]:
    """Return the names of the outermost encoders and decoders in a model."""
    parts = list[str]()
    for name, _ in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in parts)
        if name.rpartition(".")[2] in ("encoder", "decoder") and not is_inside:
            parts.append(name)
    return parts


def _valid(
    mask: Tensor | None,
    inputs: Mapping[str, Tensor],
    outputs: Iterable[tuple[str, Tensor]],
) -> Tensor | None:
    """Return which positions are tokens, bool [B, N]; None if all are.

    Raises ValueError if the first dimensions of the outputs differ from those of the
    first input ([B, N] of token ids, B of other inputs), or if the mask is not [B, N].
    """
    first = next(iter(inputs.values()), torch.empty(()))
    expected = first.shape[: 1 if first.is_floating_point() else 2]
    for block, z in outputs:
        if z.ndim != 3 or z.shape[: len(expected)] != expected:
            raise ValueError(
                f"the output of {block} is {list(z.shape)}, expected [B, N, F] for an "
                f"input that begins with {list(expected)}: name other modules with "
                "layers=…, or attach to the part of the model that gets another input"
            )
    name = "handle.mask"
    if mask is None:
        name = next((name for name in MASKS if name in inputs), "")
        if not name:
            return None
        mask = inputs[name]
    tokens = z.shape[:2]
    if getattr(mask, "shape", None) != tokens:
        raise ValueError(
            f"{name} is {_shape(mask)}, expected a tensor {list(tokens)}: set "
            "handle.mask before loss()"
        )
    if name.endswith("key_padding_mask"):
        return mask == 0
    is_additive = (mask < 0).any()
    if mask.is_floating_point():  # an additive mask without padding has only zeros
        is_additive = ~(mask > 0).any()
    return (mask == 0) == is_additive


def _named(model: nn.Module, layers: str | Iterable[str]) -> Modules:
    """Return the modules with these names, by name. A list stands for its modules.

    Raises ValueError if a name is unknown or no string, or if there are no names.
    """
    modules = dict(model.named_modules())
    blocks = Modules()
    names = layers
    if isinstance(layers, str) or not isinstance(layers, Iterable):
        names = [layers]
    for name in names:
        if not isinstance(name, str):
            lists = outermost_lists(model, bool).values()
            example = next(chain.from_iterable(lists), "encoder.layers.0")
            raise ValueError(
                f"layers has an object of type {type(name).__name__}, expected names "
                f"in model.named_modules(), such as {example!r}"
            )
        if name not in modules:
            hint = did_you_mean(name, modules)
            raise ValueError(
                f"layers has {name!r}, which is no module of the model{hint}"
            )
        blocks |= _modules_of_list(name, modules[name]) or {name: modules[name]}
    if not blocks:
        raise ValueError("layers names no module, expected at least one")
    return blocks


def _lists_inside(blocks: Modules) -> dict[str, Modules]:
    """Return the lists of modules of one class that are children of blocks, by name.

    A block with such a list may be a stage of several blocks, as in Swin. Lists of
    modules without children, such as norms, are left out.
    """
    lists = dict[str, Modules]()
    for name, block in blocks.items():
        for child, module in block.named_children():
            modules = _modules_of_list(f"{name}.{child}", module)
            first = next(iter(modules.values()), nn.Module())
            if len(modules) > 1 and _are_alike(modules) and any(first.children()):
                lists[f"{name}.{child}"] = modules
    return lists


def _longest_list(model: nn.Module) -> Modules:
    """Return the blocks of the longest list of modules of one class.

    Raises ValueError if there is none, or if another list is at least half as long.
    """
    lists = outermost_lists(
        model, lambda modules: len(modules) > 1 and _are_alike(modules)
    )
    longest = max(map(len, lists.values()), default=0)
    candidates = {
        name: modules for name, modules in lists.items() if 2 * len(modules) >= longest
    }
    if len(candidates) != 1:
        choice = " and ".join(
            f"{name} ({len(modules)} modules)" for name, modules in candidates.items()
        )
        lists_of_any_modules = outermost_lists(model, bool)
        example = next(iter(candidates or lists_of_any_modules), "encoder.layers")
        raise ValueError(
            f"{type(model).__name__} has "
            f"{choice or 'no list of modules of one class'}, expected one list of "
            f"blocks: name it, or the blocks, as in layers={example!r}. A block that "
            "runs several times in a forward counts as several layers"
        )
    (blocks,) = candidates.values()
    return blocks
