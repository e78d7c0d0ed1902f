"""Active forgetting (arXiv 2307.01163) draws the token embeddings anew every K steps, and they are learnt again.

The embedding is drawn from a normal distribution with standard deviation 0.02 between steps K and K + 1, 2K and 2K + 1,
and so on, and its optimizer state is cleared. It has its own learning rate, which grows linearly and then falls
linearly to 0 in each interval of K steps. The draw depends on (seed, step) alone, and every rank keeps its shard, as
for the initial weights. A checkpoint of step K holds what was learnt in these K steps.
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

from titan_disp.random_parameters import fill_, generator_of

STD = 0.02  # as in the paper and in the authors' released code


def draw(shape: torch.Size, seed: int, step: int) -> Tensor:
    """Return the whole embedding for the steps after ``step``, float32 on the CPU."""
    generator = generator_of(seed, f"forgotten after {step}/tok_embeddings.weight")
    return torch.empty(shape).normal_(0.0, STD, generator=generator)


def lr_factor(step: int, every: int, warmup: float) -> float:
    """Return the embedding's learning rate in the step after ``step`` completed ones, relative to its highest.

    Args:
        every: K.
        warmup: part of the interval in which the rate grows. It then falls linearly and is 0 in the interval's last
            step.
    """
    done = (step % every + 1) / every
    return done / warmup if done < warmup else (1 - done) / (1 - warmup)


class ForgettingOptimizers(OptimizersContainer):
    """Extend TorchTitan's optimizers to draw the embedding anew. It is in a second parameter group, of its own."""

    def __init__(
        self, inner: OptimizersContainer, lr: float, every: int, seed: int, steps_completed: Callable[[], int]
    ) -> None:
        """Move the embedding to a parameter group of its own.

        Args:
            inner: the optimizers that TorchTitan built.
            lr: highest learning rate of the embedding; 0: that of the other parameters.
            every: K.
            seed: seed of the draws.
            steps_completed: returns the number of completed steps.
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
                "baseline.method is active_forgetting, and the embedding is tied to the output layer, which is drawn "
                "anew with it"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget if K steps are complete. TorchTitan's trainer calls this first in every step."""
        step = self.steps_completed()
        if step and step % self.every == 0:
            self.forget(step)
        self.inner.zero_grad(*args, **kwargs)

    @torch.no_grad()
    def forget(self, step: int) -> None:
        """Draw the embedding anew and clear its optimizer state. A second call changes nothing."""
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # validation leaves the embedding gathered, and the next forward would use that copy
        fill_(self.embedding, draw(self.embedding.shape, self.seed, step))
        for state in self.optimizers[0].state.get(self.embedding, {}).values():
            state.zero_()  # Adam's moments and step count; not deleted, because a checkpoint needs them
        logger.info(
            f"step {step + 1}: the token embeddings are drawn anew with standard deviation {STD} "
            "(baseline.method active_forgetting)"
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
    """Return schedulers that keep TorchTitan's schedule for the first group and give the embedding ``lr_factor``."""
    (scheduler,) = schedulers.schedulers
    # A partial, as in TorchTitan: a checkpoint would store the attributes of another kind of callable object.
    own = functools.partial(lr_factor, every=every, warmup=warmup)
    return LRSchedulersContainer([scheduler.optimizer], [scheduler.lr_lambdas[0], own])  # type: ignore[arg-type,list-item,attr-defined]
