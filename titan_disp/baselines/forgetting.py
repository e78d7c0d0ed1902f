"""Active forgetting (arXiv 2307.01163): every K steps the token embeddings are drawn anew, N(0, 0.02), and learnt again.

Between step K and step K + 1, 2K and 2K + 1, … the embedding is drawn, and the optimizer forgets what it knew of it. Its learning
rate is its own: in each interval of K steps it grows linearly, then falls linearly to 0. The draw depends on (seed, step) alone,
and every rank keeps its shard of it, as of the initial weights. A checkpoint of step K holds what was learnt in these K steps.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from titan_disp.draws import fill_, generator_of

STD = 0.02  # the paper's, and the authors' released code's


def draw(shape: torch.Size, seed: int, step: int) -> Tensor:
    """The whole embedding after ``step`` steps, float32 on the CPU."""
    generator = generator_of(seed, f"forgotten after {step}/tok_embeddings.weight")
    return torch.empty(shape).normal_(0.0, STD, generator=generator)


def lr_factor(step: int, every: int, warmup: float) -> float:
    """The embedding's learning rate in the step after ``step`` completed ones, as a part of its highest.

    Args:
        every: K. warmup: part of the interval; the rest is a line from 1 to 0, which the interval's last step has.
    """
    done = (step % every + 1) / every
    return done / warmup if done < warmup else (1 - done) / (1 - warmup)


class ForgettingOptimizers(OptimizersContainer):
    """TorchTitan's optimizers, with the embedding in a group of its own, the second, and drawn anew when a step begins."""

    def __init__(
        self, inner: OptimizersContainer, lr: float, every: int, seed: int, steps_completed: Callable[[], int]
    ) -> None:
        """Args:
        inner: what TorchTitan built. lr: the embedding's highest; 0: as the others have. every: K.
        """
        self.inner, self.every, self.seed, self.steps_completed = inner, every, seed, steps_completed
        self.optimizers, self.model_parts = inner.optimizers, inner.model_parts
        (model,), (optimizer,) = self.model_parts, self.optimizers
        self.embedding: nn.Parameter = model.get_submodule("tok_embeddings").weight  # type: ignore[assignment]
        (body,) = optimizer.param_groups
        body["params"] = [p for p in body["params"] if p is not self.embedding]
        optimizer.add_param_group({"params": [self.embedding], **({"lr": lr} if lr else {})})
        self._post_init([p for group in inner.param_groups for p in group["params"]], inner.defaults)
        if model.output.weight is self.embedding:
            logger.warning(
                "baseline.method is active_forgetting and the embedding is tied to the output layer: this is forgotten with it"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """The first thing that TorchTitan's trainer does in a step."""
        step = self.steps_completed()
        if step and step % self.every == 0:
            self.forget(step)
        self.inner.zero_grad(*args, **kwargs)

    @torch.no_grad()
    def forget(self, step: int) -> None:
        """Draw the embedding anew, with an optimizer that has not seen it. Twice is as once."""
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a validation leaves the embedding gathered, and the next forward would take that
        fill_(self.embedding, draw(self.embedding.shape, self.seed, step))
        for state in self.optimizers[0].state.get(self.embedding, {}).values():
            state.zero_()  # Adam's moments and its count of steps; without them a checkpoint would not be whole
        logger.info(
            f"step {step + 1}: the token embeddings are drawn anew, from N(0, {STD}) (baseline.method active_forgetting)"
        )

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.inner.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)

    def init_cache_state_dict(self) -> None:
        self.inner.init_cache_state_dict()


def with_own_schedule(schedulers: LRSchedulersContainer, every: int, warmup: float) -> LRSchedulersContainer:
    """TorchTitan's schedule for the first group of parameters, and ``lr_factor`` for the second, the embedding."""
    (scheduler,) = schedulers.schedulers
    # A partial, as TorchTitan's own: the checkpoint keeps the attributes of other callables.
    own = functools.partial(lr_factor, every=every, warmup=warmup)
    return LRSchedulersContainer([scheduler.optimizer], [scheduler.lr_lambdas[0], own])  # type: ignore[arg-type,list-item,attr-defined]
