"""Baselines: two methods of other papers that may also counteract condensation.

**Noisy embeddings** (NEFTune, arXiv 2310.05914) add U(−1, 1) · α/√(N·F) to the output
of the token embedding in training (N positions in a whole sequence, F features). Every
number is a hash of (seed, step, sequence in the global batch, position, feature). The
hash uses integer arithmetic, so that the number is the same on every device, on every
mesh and after a resume.

**Active forgetting** (arXiv 2307.01163) replaces the token embeddings by new random
values after every K steps, and clears their optimizer state. The embeddings have a
separate learning rate, which rises linearly and then falls linearly to 0 in each interval
of K steps. The new values depend only on (seed, step), and every rank keeps its shard, as
for the initial weights. The checkpoint of step K is saved before the replacement.

Sequence i of a global batch comes from slot (i mod number of slots) (``config.batch``).
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
# The standard deviation of new embeddings, as in the paper and its authors' code
STD = 0.02
_WORD = 0xFFFFFFFF


def check_baseline(job_config: JobConfig) -> None:
    """Raise ConfigError if [baseline] is invalid. training.steps must be known."""
    section = job_config.baseline
    method = section.method
    dispersion = job_config.dispersion.enabled
    for name, user in OPTIONS.items():
        if method != user and getattr(section, name) != getattr(type(section)(), name):
            raise ConfigError(
                f"baseline.{name} is {getattr(section, name)}, but baseline.method "
                f"{method!r} does not use it: set the method to {user!r}, or leave "
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
            f"dispersion.enabled is {str(dispersion).lower()}: leave with_dispersion "
            "out, or switch method and dispersion on"
        )
    steps = job_config.training.steps
    # A preflight takes a single step, so this limit does not apply.
    if method == "active_forgetting" and 1 < steps <= section.forget_every:
        raise ConfigError(
            f"baseline.forget_every is {section.forget_every}, expected fewer than "
            f"the {steps} steps of the run: nothing is forgotten after the last step"
        )


def mix(x: Tensor) -> Tensor:
    """Return a hash of 32-bit words, int64 in [0, 2³²), computed in place.

    The hash is a bijection in which every output bit depends on every input bit: Chris
    Wellons' "lowbias32" with better constants (hash-prospector). Both constants are
    below 2³¹, so products stay below 2⁶³.
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
    """Return a key that depends on the given key and a value."""
    return mix((key + value) & _WORD)


def uniform(
    seed: int, step: int, sequences: Tensor, positions: Tensor, features: int
) -> Tensor:
    """Return numbers from U(−1, 1), float32 [B, n, F] on the device of ``positions``.

    The numbers are multiples of 2⁻²³. ``sequences`` [B] are indices in the global
    batch, and ``positions`` [B, n] are positions in the whole sequence.
    """
    device = positions.device
    # torch.full fills on the device. With torch.tensor, a GPU would wait for a copy from
    # the host.
    key = mix(torch.full((1,), seed & _WORD, device=device))
    key = _absorb(key, (seed >> 32) & _WORD)
    key = _absorb(key, step)
    tokens = _absorb(_absorb(key, sequences.to(device))[:, None], positions.long())
    # The features are hashed too. Otherwise, two tokens whose keys differ in few bits
    # would get the same numbers in another order.
    columns = mix(torch.arange(1, features + 1, device=device))
    words = mix(tokens[..., None] ^ columns)
    return (words >> 8).float().mul_(2.0**-23).sub_(1.0)


@dataclass
class NoisyEmbedding:
    """Hooks that add the noise to the output of a model's ``tok_embeddings`` in every
    training forward.
    """

    alpha: float  # α
    seq_len: int  # N, positions of the whole sequence
    seed: int
    step: Callable[[], int]  # returns the number of completed optimizer steps
    slots: int  # number of slots of the run
    own_slots: int  # number of slots of this data-parallel rank
    first_slot: int  # the first slot of this rank
    per_step: int  # sequences per step on this rank
    tp_rank: int = 0  # the index of this rank in the TP mesh, which shards the sequence
    _step: int = -1  # the step of the last forward
    _seen: int = 0  # sequences of this step that have had their noise
    _positions: Tensor | None = None  # positions of the current forward, [B, n]

    def install(self, model: nn.Module) -> None:
        """Register the hooks on the model.

        Parallelize the model first, so that these hooks run last.
        """
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.get_submodule("tok_embeddings").register_forward_hook(
            self._after_embedding
        )

    def _before_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if args:
            tokens = args[0]
        else:
            tokens = kwargs["tokens"]
        # Context parallelism passes positions, as a rank's part is not contiguous.
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
        batch, n, features = h.shape
        # A step is seen twice if its checkpoint was loaded again.
        if step != self._step or self._seen >= self.per_step:
            self._step = step
            self._seen = 0
        positions = self._positions
        # TP shards the output along the sequence, in equal parts.
        if n < positions.shape[1]:
            positions = positions[:, self.tp_rank * n : (self.tp_rank + 1) * n]
        noise = uniform(
            seed=self.seed,
            step=step,
            sequences=self.sequences(batch, h.device),
            positions=positions,
            features=features,
        )
        self._seen += batch
        scale = self.alpha / math.sqrt(self.seq_len * features)
        return h + noise.mul_(scale).to(h.dtype)

    def sequences(self, count: int, device: torch.device | None = None) -> Tensor:
        """Return the indices of this rank's next ``count`` sequences in the global batch,
        int [count]. The rank's slots take turns.
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
    """Return the hooks for this rank. ``step`` returns the number of completed steps."""
    dp = parallel_dims.dp_replicate * parallel_dims.dp_shard
    batch = parallel_dims.get_optional_mesh("batch")
    tp = parallel_dims.get_optional_mesh("tp")
    slots = slot_count(job_config, dp)
    slots_per_rank = slots // dp
    first_slot = 0
    if batch is not None:
        first_slot = slots_per_rank * batch.get_local_rank()
    return NoisyEmbedding(
        alpha=job_config.baseline.noise_alpha,
        seq_len=job_config.training.seq_len,
        seed=job_config.debug.seed or 0,
        step=step,
        slots=slots,
        own_slots=slots_per_rank,
        first_slot=first_slot,
        per_step=global_batch_size(job_config, dp) // dp,
        tp_rank=tp.get_local_rank() if tp is not None else 0,
    )


def draw(shape: torch.Size, seed: int, step: int) -> Tensor:
    """Return the whole new embedding for the steps after ``step``, float32 on the CPU."""
    generator = generator_of(seed, f"forgotten after {step}/tok_embeddings.weight")
    return torch.empty(shape).normal_(0.0, STD, generator=generator)


def lr_factor(step: int, interval: int, warmup: float) -> float:
    """Return the embedding's learning rate in step ``step`` + 1, as a fraction of its
    highest value.

    In each interval of steps, the rate rises during the fraction ``warmup``, and then
    falls to 0 in the last step.
    """
    done = (step % interval + 1) / interval
    if done < warmup:
        return done / warmup
    return (1 - done) / (1 - warmup)


class ForgettingOptimizers(OptimizersContainer):
    """TorchTitan's optimizers, which also replace the embedding by new random values.

    The embedding has a separate parameter group.
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
        group: dict[str, Any] = {"params": [self.embedding]}
        if lr:
            group["lr"] = lr
        optimizer.add_param_group(group)
        self._post_init(
            [p for group in inner.param_groups for p in group["params"]], inner.defaults
        )
        if model.output.weight is self.embedding:
            logger.warning(
                "active_forgetting also replaces the output layer, because it is tied "
                "to the embedding"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, and replace the embedding if K steps are complete.

        TorchTitan's trainer calls this at the beginning of every step.
        """
        step = self.steps_completed()
        if step and step % self.every == 0:
            self.forget(step)
        super().zero_grad(*args, **kwargs)

    @torch.no_grad()
    def forget(self, step: int) -> None:
        """Replace the embedding by new random values, and clear its optimizer state.

        A second call for the same step changes nothing.
        """
        for module in self.model_parts[0].modules():
            if isinstance(module, FSDPModule):
                # Validation leaves a gathered copy of the embedding, which the next
                # forward would use.
                module.reshard()
        fill_(self.embedding, draw(self.embedding.shape, self.seed, step))
        for state in self.optimizers[0].state.get(self.embedding, {}).values():
            # Adam's moments and step count; not deleted, because a checkpoint needs
            # them
            state.zero_()
        logger.info(
            f"step {step + 1}: active_forgetting replaces the token embeddings by new "
            f"random values with standard deviation {STD}"
        )


def forgetting_schedule(
    schedulers: LRSchedulersContainer, job_config: JobConfig
) -> LRSchedulersContainer:
    """Return TorchTitan's schedule for the first parameter group, and ``lr_factor`` for
    the embedding.
    """
    section = job_config.baseline
    (scheduler,) = schedulers.schedulers
    # A partial, as in TorchTitan. A checkpoint would store the attributes of other
    # callable objects.
    factor = functools.partial(
        lr_factor, interval=section.forget_every, warmup=section.forget_warmup
    )
    return LRSchedulersContainer(
        [scheduler.optimizer], [scheduler.lr_lambdas[0], factor]
    )
