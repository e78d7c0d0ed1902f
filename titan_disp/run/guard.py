"""This module skips steps that are not finite, on all ranks alike, and shares what single ranks know once per step.

TorchTitan 0.2.2 continues after a NaN. Ranks cannot check their own gradients only: after clipping by an infinite norm,
one rank holds NaN while the others hold zeros. The verdict is therefore all-reduced, in one small message that also
carries flags: whether a rank was asked to stop, and whether its save has failed. Reading the message waits for the GPU
once per step, after the backward, when only the optimizer remains to be launched. TorchTitan itself also waits once,
for the number of valid tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.tools.logging import logger

from titan_disp.errors import NonFiniteError, counted

Terms = Callable[[], Tensor | None]


class GuardedOptimizers(OptimizersContainer):
    """Hold TorchTitan's optimizers, which step only if loss and gradients are finite on all ranks."""

    def __init__(self, inner: OptimizersContainer, non_finite_terms: Terms, max_skipped_steps: int) -> None:
        """Wrap what TorchTitan built.

        ``non_finite_terms`` returns [2] bool on the device: whether this step's local cross-entropy and local dispersion
        are not finite. It returns None if there was no loss.
        """
        self.inner, self.non_finite_terms, self.max_skipped_steps = inner, non_finite_terms, max_skipped_steps
        self.optimizers, self.model_parts = inner.optimizers, inner.model_parts
        self._post_init([p for group in inner.param_groups for p in group["params"]], inner.defaults)
        self._counts = torch.zeros(3, dtype=torch.int64)  # steps, skipped, in a row; saved in checkpoints
        self.bad_terms: list[str] = []  # what was not finite in the last step
        self.flags: dict[str, Callable[[], bool]] = {}  # asked once per step, by name, for this rank's answer
        self.agreed: dict[str, bool] = {}  # by name, whether any rank answered True in the last step
        self._told = False

    @property
    def in_a_row(self) -> int:
        """Return the number of steps skipped since the last good one."""
        return int(self._counts[2])

    def _message(self) -> Tensor:
        """Return [4 + flags] float32, each 0 or 1, as ``_verdict`` reads them."""
        whole = [p.grad for model in self.model_parts for p in model.parameters() if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in whole]
        gradients = [g for g in local if g.numel()]
        norms = torch.stack(torch._foreach_norm(gradients)) if gradients else torch.zeros(1)
        terms = self.non_finite_terms()
        if terms is None:
            terms = torch.zeros(2, dtype=torch.bool, device=next(self.model_parts[0].parameters()).device)
        said = torch.tensor([ask() for ask in self.flags.values()], dtype=torch.bool)
        # With training.enable_cpu_offload, the gradients are on the CPU; the terms and collective calls are on the GPU.
        found = torch.stack([~norms.isfinite().all(), norms.ne(0).any()]).to(terms.device)
        return torch.cat([found, terms, said.to(terms.device)]).float()

    def _verdict(self) -> None:
        message = self._message()
        if dist.is_initialized():
            dist.all_reduce(message, op=dist.ReduceOp.MAX)
        bad_gradient, any_gradient, bad_ce, bad_dispersion, *agreed = map(bool, message.tolist())
        self.agreed = dict(zip(self.flags, agreed, strict=True))
        # If the norm of finite gradients overflows, clipping by it leaves zeros everywhere.
        verdicts = {
            "cross-entropy": bad_ce,
            "dispersion": bad_dispersion,
            "gradient norm": bad_gradient or not any_gradient,
        }
        self.bad_terms = [name for name, bad in verdicts.items() if bad]

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step or skip, on all ranks alike: a collective call. Raises NonFiniteError after ``max_skipped_steps`` in a row."""
        if not self.flags and not self._told:
            self._told = True
            logger.warning(
                "this is TorchTitan's own trainer: stopping together on a signal, budget.stop_at_tokens, falling back "
                "from damaged checkpoints and counting only complete ones need titan_disp.train"
            )
        self._verdict()
        self._counts[0] += 1
        if not self.bad_terms:
            self._counts[2] = 0
            self.inner.step(*args, **kwargs)
            return
        self._counts[1:] += 1
        step, terms = int(self._counts[0]), " and ".join(self.bad_terms)
        logger.warning(f"step {step} is skipped on all ranks: {terms} not finite ({self.in_a_row} in a row)")
        if self.in_a_row >= self.max_skipped_steps:
            raise NonFiniteError(
                f"step {step}: {terms} not finite, {counted(self.in_a_row, 'step')} in a row (guard.max_skipped_steps). "
                "These steps changed no weights. Try a lower learning rate or a longer warm-up, or check the data"
            )

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        self.inner.zero_grad(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {**self.inner.state_dict(), "guard": self._counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "guard"})
        self._counts = state_dict["guard"].clone()

    def init_cache_state_dict(self) -> None:
        self.inner.init_cache_state_dict()
