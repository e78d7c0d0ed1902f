"""These baselines are said to counteract condensation too: noisy embeddings and active
forgetting.

**Noisy embeddings** (NEFTune, arXiv 2310.05914) add U(−1, 1) · α/√(N·F) to the output
of the token embedding in training (N positions in a whole sequence, F features). Every
number is a hash of (seed, step, sequence in the global batch, position, feature), in
integer arithmetic: the same on every device, on every mesh and after a resume.

**Active forgetting** (arXiv 2307.01163) draws the token embeddings anew between steps K
and K + 1, 2K and 2K + 1, and so on, and clears their optimizer state. They have their
own learning rate, which grows linearly and then falls linearly to 0 in each interval of
K steps. The draw depends on (seed, step) alone, and every rank keeps its shard, as for
the initial weights. A checkpoint of step K holds what was learnt in these K steps.

Sequence i of a global batch comes from slot i modulo the number of slots
(``config.batch``).
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.tools.logging import logger

from titan_disp.config.batch import global_batch_size, slot_count
from titan_disp.config.types import JobConfig
from titan_disp.errors import ConfigError
from titan_disp.models.decoder import fill_, generator_of

# The options of [baseline] that only one method uses.
OPTIONS = {
    "noise_alpha": "noisy_embedding",
    "forget_every": "active_forgetting",
    "forget_lr": "active_forgetting",
    "forget_warmup": "active_forgetting",
}
STD = 0.02  # of forgotten embeddings, as in the paper and in the authors' released code
_WORD = 0xFFFFFFFF


def check_baseline(job_config: JobConfig) -> None:
    """Check [baseline], or raise ConfigError. training.steps must be known."""
    section = job_config.baseline
    method = section.method
    dispersion = job_config.dispersion.enabled
    for name, of in OPTIONS.items():
        if method != of and getattr(section, name) != getattr(type(section)(), name):
            raise ConfigError(
                f"baseline.{name} is {getattr(section, name)}, but baseline.method "
                f"{method!r} does not use it: set the method to {of!r}, or leave "
                f"{name} out"
            )
    if method != "none" and dispersion and not section.with_dispersion:
        raise ConfigError(
            f"baseline.method is {method!r} and dispersion.enabled is true, but a "
            "baseline is what dispersion is compared with: set dispersion.enabled = "
            "false, or baseline.with_dispersion = true to train with both"
        )
    if section.with_dispersion and not (method != "none" and dispersion):
        raise ConfigError(
            f"baseline.with_dispersion is true, but baseline.method is {method!r} and "
            f"dispersion.enabled is {str(dispersion).lower()}: leave it out, or "
            "switch both on"
        )
    steps = job_config.training.steps
    # A preflight takes one step, and no upper limit applies to it.
    if method == "active_forgetting" and 1 < steps <= section.forget_every:
        raise ConfigError(
            f"baseline.forget_every is {section.forget_every}, expected fewer than "
            f"the {steps} of the run: nothing is forgotten after its last step"
        )


def mix(x: Tensor) -> Tensor:
    """Apply a bijection to 32-bit words, int64 in [0, 2³²), in place; every bit depends
    on every bit.

    It is Chris Wellons' "lowbias32" with better constants (hash-prospector). Both are
    below 2³¹, so that products stay below 2⁶³.
    """
    x ^= x >> 16
    x *= 0x21F0AAAD
    x &= _WORD
    x ^= x >> 15
    x *= 0x735A2D97
    x &= _WORD
    x ^= x >> 15
    return x


def _absorb(key: Tensor, value: Tensor | int) -> Tensor:
    return mix((key + value) & _WORD)


def uniform(
    seed: int, step: int, sequences: Tensor, positions: Tensor, features: int
) -> Tensor:
    """Return numbers from U(−1, 1), multiples of 2⁻²³: [B, n, F] float32 on the device
    of ``positions``.

    ``sequences`` [B] are indices in the global batch, and ``positions`` [B, n] are in
    the whole sequence.
    """
    device = positions.device
    # Filled on the device: torch.tensor would copy the number from the host, and a GPU
    # would wait for it.
    key = mix(torch.full((1,), seed & _WORD, device=device))
    key = _absorb(key, (seed >> 32) & _WORD)
    key = _absorb(key, step)
    tokens = _absorb(_absorb(key, sequences.to(device))[:, None], positions.long())
    # The features are hashed too: otherwise two tokens whose keys differ in few bits
    # would get the same numbers in another order.
    columns = mix(torch.arange(1, features + 1, device=device))
    words = mix(tokens[..., None] ^ columns)
    return (words >> 8).float().mul_(2.0**-23).sub_(1.0)


@dataclass
class NoisyEmbedding:
    """Add the noise by hooks on a model that has ``tok_embeddings``, in every training
    forward.
    """

    alpha: float
    seq_len: int  # N, of the whole sequence
    seed: int
    step: Callable[[], int]  # returns the number of completed optimizer steps
    slots: int  # of the run
    own_slots: int  # of this data-parallel rank, the first of which is ``first_slot``
    first_slot: int
    per_step: int  # sequences on this rank
    tp_rank: int = 0  # among the ranks over which TP shards the sequence
    _step: int = -1
    _seen: int = 0  # sequences of this step that have had their noise
    _positions: Tensor | None = None  # of the current forward

    def install(self, model: nn.Module) -> None:
        """Register the hooks.

        The model must be parallelized already, so that they run last.
        """
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.get_submodule("tok_embeddings").register_forward_hook(
            self._after_embedding
        )

    def _before_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        tokens = args[0] if args else kwargs["tokens"]
        # Under context parallelism, a rank's part is not contiguous
        positions = kwargs.get("positions")
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        self._positions = positions.expand(tokens.shape)

    def _after_embedding(
        self, embedding: nn.Module, args: Any, h: Tensor
    ) -> Tensor | None:
        if not (embedding.training and torch.is_grad_enabled()):
            return None
        assert self._positions is not None
        step = self.step()
        n = h.shape[1]
        # the latter if a checkpoint was loaded again
        if step != self._step or self._seen >= self.per_step:
            self._step = step
            self._seen = 0
        positions = self._positions
        # TP shards the output along the sequence, in equal parts
        if n < positions.shape[1]:
            positions = positions[:, self.tp_rank * n : (self.tp_rank + 1) * n]
        noise = uniform(
            self.seed, step, self.sequences(h.shape[0], h.device), positions, h.shape[2]
        )
        self._seen += h.shape[0]
        return h + noise.mul_(self.alpha / math.sqrt(self.seq_len * h.shape[2])).to(
            h.dtype
        )

    def sequences(self, count: int, device: torch.device | None = None) -> Tensor:
        """Return the indices in the global batch of this rank's next ``count``
        sequences: its slots take turns.
        """
        turn = torch.arange(self._seen, self._seen + count, device=device)
        return (
            turn // self.own_slots * self.slots
            + self.first_slot
            + turn % self.own_slots
        )


def build_noise(
    job_config: JobConfig, parallel_dims: ParallelDims, step: Callable[[], int]
) -> NoisyEmbedding:
    dp = parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch = parallel_dims.get_optional_mesh("batch")
    tp = parallel_dims.get_optional_mesh("tp")
    slots = slot_count(job_config, dp)
    own = slots // dp
    return NoisyEmbedding(
        alpha=job_config.baseline.noise_alpha,
        seq_len=job_config.training.seq_len,
        seed=job_config.debug.seed or 0,
        step=step,
        slots=slots,
        own_slots=own,
        first_slot=own * (batch.get_local_rank() if batch is not None else 0),
        per_step=global_batch_size(job_config, dp) // dp,
        tp_rank=tp.get_local_rank() if tp is not None else 0,
    )


def draw(shape: torch.Size, seed: int, step: int) -> Tensor:
    """Return the whole embedding for the steps after ``step``, float32 on the CPU."""
    generator = generator_of(seed, f"forgotten after {step}/tok_embeddings.weight")
    return torch.empty(shape).normal_(0.0, STD, generator=generator)


def lr_factor(step: int, every: int, warmup: float) -> float:
    """Return the embedding's learning rate in the step after ``step`` completed ones,
    relative to its highest.

    It grows in the first part of each interval, ``warmup``, and then falls to 0 in the
    interval's last step.
    """
    done = (step % every + 1) / every
    return done / warmup if done < warmup else (1 - done) / (1 - warmup)


class ForgettingOptimizers(OptimizersContainer):
    """Extend the optimizers that TorchTitan built to draw the embedding anew.

    It gets a parameter group of its own.
    """

    def __init__(
        self,
        inner: OptimizersContainer,
        job_config: JobConfig,
        steps_completed: Callable[[], int],
    ) -> None:
        section = job_config.baseline
        self.steps_completed = steps_completed
        self.every = section.forget_every
        self.seed = job_config.debug.seed or 0
        lr = section.forget_lr
        self.optimizers = inner.optimizers
        self.model_parts = inner.model_parts
        (model,) = self.model_parts
        (optimizer,) = self.optimizers
        self.embedding: nn.Parameter = model.get_submodule("tok_embeddings").weight
        (body,) = optimizer.param_groups
        body["params"] = [p for p in body["params"] if p is not self.embedding]
        optimizer.add_param_group(
            {"params": [self.embedding], **({"lr": lr} if lr else {})}
        )
        self._post_init(
            [p for group in inner.param_groups for p in group["params"]], inner.defaults
        )
        if model.output.weight is self.embedding:
            logger.warning(
                "active_forgetting draws the output layer anew, too: it is tied to "
                "the embedding"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget if K steps are complete.

        TorchTitan's trainer calls this first in every step.
        """
        step = self.steps_completed()
        if step and step % self.every == 0:
            self.forget(step)
        super().zero_grad(*args, **kwargs)

    @torch.no_grad()
    def forget(self, step: int) -> None:
        """Draw the embedding anew and clear its optimizer state.

        A second call changes nothing.
        """
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                # Validation leaves the embedding gathered, and the next forward would
                # use that copy
                module.reshard()
        fill_(self.embedding, draw(self.embedding.shape, self.seed, step))
        for state in self.optimizers[0].state.get(self.embedding, {}).values():
            # Adam's moments and step count; not deleted, because a checkpoint needs
            # them
            state.zero_()
        logger.info(
            f"step {step + 1}: active_forgetting draws the token embeddings anew, "
            f"with standard deviation {STD}"
        )


def forgetting_schedule(
    schedulers: LRSchedulersContainer, job_config: JobConfig
) -> LRSchedulersContainer:
    """Return schedulers that keep TorchTitan's schedule for the first group and give
    the embedding ``lr_factor``.
    """
    section = job_config.baseline
    (scheduler,) = schedulers.schedulers
    # A partial, as in TorchTitan: a checkpoint would store the attributes of another
    # kind of callable object.
    own = functools.partial(
        lr_factor, every=section.forget_every, warmup=section.forget_warmup
    )
    return LRSchedulersContainer([scheduler.optimizer], [scheduler.lr_lambdas[0], own])
