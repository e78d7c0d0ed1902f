"""This module skips steps whose loss or gradients are not finite, on all ranks alike.
Once per step, it also shares flags that single ranks raise.

TorchTitan 0.2.2 continues after a NaN. It is not enough that a rank checks its own
gradients: after clipping by an infinite norm, one rank holds NaN, and others zeros. The
verdict is therefore all-reduced, in one small message that also carries flags: whether
a rank was asked to stop, and whether its save has failed.

The host does not wait for this message. The fused optimizer takes the verdict on the
device: its kernels change nothing if the verdict is 1. The host gets a copy, and reads
the copy in the next step. By then, the copy has arrived, because TorchTitan waits until
the device has summed the valid tokens of all ranks. On a single device, TorchTitan does
not wait; the copy arrives while the next step's kernels are queued. Code that saves,
logs or ends the run calls ``settle`` to read the copy at once. Optimizers that are not
fused, or whose parameters are offloaded to the CPU, cannot take the verdict on the
device. Before such optimizers step, the host waits for the message.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from titan_disp.errors import NonFiniteError, counted

T = TypeVar("T")
Terms = Callable[[], Tensor | None]
# The name in ``bad_terms`` and in the event ``skip`` if all gradients are zero.
ZERO = "zero gradients"
ADVICE = "Try a lower learning rate or a longer warm-up, or check the data"
# If the norm of finite gradients overflows, clipping by it leaves zeros everywhere.
ADVICE_ZERO = (
    "Either the loss does not depend on the weights, or the norm of the gradients has "
    "overflowed, so that clipping has made them zero: check the loss and the data, or "
    "try a lower learning rate"
)


def _end(message: str) -> None:
    """Raise NonFiniteError. This is ``at_limit`` under TorchTitan's own trainer."""
    raise NonFiniteError(message)


def _reason(bad_terms: list[str]) -> str:
    """Return why a step is skipped, for a message, from the names in ``bad_terms``."""
    reasons = []
    not_finite = [term for term in bad_terms if term != ZERO]
    if not_finite:
        reasons.append(f"{' and '.join(not_finite)} not finite")
    if ZERO in bad_terms:
        reasons.append("all gradients are zero")
    return ", and ".join(reasons)


class GuardedOptimizers(OptimizersContainer):
    """Hold TorchTitan's optimizers, which step only if loss and gradients are finite on
    all ranks.
    """

    def __init__(
        self,
        inner: OptimizersContainer,
        non_finite_terms: Terms,
        max_skipped_steps: int,
    ) -> None:
        """Wrap the optimizers that TorchTitan built.

        ``non_finite_terms`` returns [2] bool on the device: whether this step's local
        cross-entropy and local dispersion are not finite. It returns None if there was
        no loss.
        """
        self.inner = inner
        self.non_finite_terms = non_finite_terms
        self.max_skipped_steps = max_skipped_steps
        self.optimizers = inner.optimizers
        self.model_parts = inner.model_parts
        self._parameters = [p for group in inner.param_groups for p in group["params"]]
        self._post_init(self._parameters, inner.defaults)
        # numbers of all steps, of skipped steps, and of steps skipped in a row; saved in
        # checkpoints
        self._counts = torch.zeros(3, dtype=torch.int64)
        # the terms that were not finite, or zero, in the last settled step
        self.bad_terms: list[str] = []
        # by name, functions that return this rank's flag, called once per step
        self.flags: dict[str, Callable[[], bool]] = {}
        # by name, whether any rank's flag was True in the last settled step
        self.agreed: dict[str, bool] = defaultdict(bool)
        # Called after a skipped step. The argument says whether the next step has
        # computed its gradients already.
        self.on_skip: Callable[[bool], None] = lambda late: None
        # Called instead of ``on_skip``, with the reason, if ``max_skipped_steps`` steps
        # in a row are skipped.
        self.at_limit: Callable[[str], None] = _end
        # the newest step's message, copied to the CPU, and the event of its arrival
        # (None: it has arrived)
        self._unread: tuple[Tensor, torch.Event | None] | None = None
        self._warned = False

    @property
    def in_a_row(self) -> int:
        """Return the number of steps skipped since the last good one."""
        return int(self._counts[2])

    @torch.no_grad()
    def _message(self) -> Tensor:
        """Return this rank's message: [4 + number of flags] float32 on the device, each
        0 or 1. The first number is 1 if a gradient is not 0. The second, third and
        fourth are 1 if, in this order, the gradient norm, the cross-entropy and the
        dispersion are not finite. The rest are the flags.

        ``settle`` reads the maximum over the ranks. This method does not wait for the
        device.
        """
        gradients = []
        for parameter in self._parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            if gradient is not None and gradient.numel():
                gradients.append(gradient)
        largest = torch.zeros(())
        if gradients:
            # NaN if any gradient has a NaN
            largest = torch.stack(torch._foreach_norm(gradients)).max()
        terms = self.non_finite_terms()
        if terms is None:
            terms = torch.zeros(2, dtype=torch.bool, device=self._parameters[0].device)
        # Pinned, because a copy from pageable memory would wait for the device.
        answers = torch.tensor(
            [float(ask()) for ask in self.flags.values()],
            pin_memory=torch.accelerator.is_available(),
        )
        # With training.enable_cpu_offload, the gradients are on the CPU; the terms and
        # collective calls are on the GPU.
        of_norm = torch.stack([largest > 0, ~(largest < torch.inf)]).to(terms.device)
        answers = answers.to(terms.device, non_blocking=True)
        return torch.cat([of_norm, terms, answers])

    def settle(self, late: bool = False) -> None:
        """Read the message of the newest step and count the step, if this is not done
        yet.

        If the step was skipped, this calls ``on_skip(late)`` or ``at_limit`` on all
        ranks, and raises what they raise.
        """
        if self._unread is None:
            return
        (message, arrived) = self._unread
        self._unread = None
        if arrived is not None:
            arrived.synchronize()
        any_gradient, bad_gradient, bad_ce, bad_dispersion, *agreed = map(
            bool, message.tolist()
        )
        self.agreed = dict(zip(self.flags, agreed, strict=True))
        verdicts = {
            "cross-entropy": bad_ce,
            "dispersion": bad_dispersion,
            "gradient norm": bad_gradient,
            ZERO: not (any_gradient or bad_gradient),
        }
        self.bad_terms = [name for name, bad in verdicts.items() if bad]
        self._counts[0] += 1
        if not self.bad_terms:
            self._counts[2] = 0
            return
        self._counts[1:] += 1
        step = int(self._counts[0])
        reason = _reason(self.bad_terms)
        logger.warning(
            f"step {step} is skipped on all ranks: {reason} ({self.in_a_row} in a row)"
        )
        if self.in_a_row >= self.max_skipped_steps:
            self.at_limit(
                f"step {step}: {reason}, {counted(self.in_a_row, 'step')} in a row "
                "(guard.max_skipped_steps). These steps changed no weights. "
                f"{ADVICE_ZERO if ZERO in self.bad_terms else ADVICE}"
            )
        else:
            self.on_skip(late)

    def healthy(self) -> bool:
        """Return whether the newest step was good, so that its state may be saved.

        After a resume, the newest step may be one of an earlier start, because
        checkpoints hold the counts. This settles the step, and raises as ``settle`` does.
        """
        self.settle()
        return self.in_a_row == 0

    def keeping_counts(self, load: Callable[[], T]) -> T:
        """Return ``load()``, which loads other weights. The counts of steps and of
        skipped steps are kept; the count of steps skipped in a row becomes 0.
        """
        self.settle()
        steps, skipped, _ = self._counts.tolist()
        loaded = load()
        self._counts = torch.tensor([steps, skipped, 0])
        return loaded

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step or skip, on all ranks alike: a collective call.

        This settles the previous step, and raises as ``settle`` does.
        """
        if not self.flags and not self._warned:
            self._warned = True
            logger.warning(
                "this is TorchTitan's own trainer. It does not stop all ranks on a "
                "signal, ignores budget.stop_at_tokens, does not fall back from damaged "
                "checkpoints, and counts unfinished checkpoints. titan_disp.train has "
                "none of these limits"
            )
        self.settle(late=True)
        message = self._message()
        if dist.is_initialized():
            dist.all_reduce(message, op=dist.ReduceOp.MAX)
        arrived = None if message.is_cpu else torch.Event(message.device)
        # torch copies from a GPU into pinned memory, so this does not wait
        self._unread = message.to("cpu", non_blocking=True), arrived
        if arrived is not None:
            arrived.record()
        # Loading a checkpoint may change ``fused``, so it is looked up in every step.
        fused = all(
            group.get("fused")
            for optimizer in self.optimizers
            for group in optimizer.param_groups
        )
        if not fused or message.device != self._parameters[0].device:
            self.settle()
            if not self.bad_terms:
                self.inner.step(*args, **kwargs)
            return
        # the same verdict that ``settle`` computes
        bad = torch.maximum(message[1:4].max(), 1 - message[0])
        for optimizer in self.optimizers:
            optimizer.found_inf = bad  # as GradScaler does
        self.inner.step(*args, **kwargs)
        for optimizer in self.optimizers:
            del optimizer.found_inf

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.inner.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {**self.inner.state_dict(), "guard": self._counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(
            {key: value for key, value in state_dict.items() if key != "guard"}
        )
        self._counts = state_dict["guard"].clone()
