"""The plan's memory equals the live storages of a step on fake tensors, at its peak,
and dispersion adds nothing to it.
"""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac

from tests.command_line import ROOT
from tests.pages import changed, loaded
from titan_disp.cluster.cost import block_elements, estimate
from titan_disp.cluster.plan import meta_model
from titan_disp.dispersion import DispersionLoss
from titan_disp.models.head import chunked, chunked_cross_entropy, loss_and_gradient
from titan_disp.models.registry import MODELS
from titan_disp.objective import DispersionObjective

LAYERS = 4
TOKENS = 1024
# Of each model, the smallest flavor of a size that is trained: logits and norms would
# be most of a nano's memory.
SMALLEST = [
    (e.name, next(f for f in e.flavors if e.flavors[f].dim > 512))
    for e in MODELS.values()
]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are created under this mode: the live ones, and
    their maximum.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def storages(tree):
            return [
                x.untyped_storage()
                for x in tree_leaves(tree)
                if isinstance(x, torch.Tensor)
            ]

        inputs = {s._cdata for s in storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in storages(result):
            if storage._cdata not in inputs and storage not in self.known:
                self.known.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def free(self, size):
        self.now -= size


class FusedNorm(torch.autograd.Function):
    """Saves what the GPU's RMSNorm saves.

    On a CPU, it consists of small operations that save much more.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@pytest.fixture
def live(monkeypatch):
    monkeypatch.setattr(
        torch.nn.RMSNorm, "forward", lambda norm, x: FusedNorm.apply(x, norm.weight)
    )

    def live(model, mode, chunk=0, estimator="exact", in_backward=False, layers=LAYERS):
        """Measure a bf16 step, after the loss and at its peak.

        The estimator "" means no dispersion.
        """
        for limit in ("PACK_ELEMENTS", "GPU_BATCH_ELEMENTS"):
            monkeypatch.setattr(
                f"titan_disp.dispersion.layers.{limit}", 0 if in_backward else 1 << 40
            )
        entry = MODELS[model[0]]
        args = entry.flavors[model[1]]
        args.n_layers = layers
        args.activations = tuple(range(1, layers + 1)) if estimator else ()
        flash_on_cpu = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        )
        with FakeTensorMode():
            torch.set_default_dtype(torch.bfloat16)
            try:
                module = entry.model_cls(args)
            finally:
                torch.set_default_dtype(torch.float32)
            if mode != "none":
                ac = ActivationCheckpoint(
                    mode="selective" if mode == "op" else mode, selective_ac_option="op"
                )
                apply_ac(module, ac, op_sac_save_list={*entry.saved_ops, flash_on_cpu})
            ce = cross_entropy_loss
            if chunk:
                module.output = chunked(module.output, None, loss_parallel=False)
                module.tie_weights()
                ce = partial(
                    chunked_cross_entropy, chunk=chunk, of_chunk=loss_and_gradient
                )
            for p in module.parameters():
                p.grad = torch.zeros_like(p)
            inputs = torch.zeros(1, TOKENS, dtype=torch.long)
            loss = DispersionLoss(estimator=estimator or "exact")
            objective = DispersionObjective(
                ce, loss, lambda step: 0.1, defer=in_backward
            )
            with LiveBytes() as live:
                predictions = module(inputs)
                total = objective(predictions, inputs)
                del predictions  # as the trainer does
                gc.collect()
                saved = live.now
                total.backward()
            assert (objective.take_late() is not None) == in_backward
            return saved, live.peak

    return live


def config(model, mode, chunk):
    keys = {
        "model.name": model[0],
        "model.flavor": model[1],
        "model.overrides": f"n_layers={LAYERS}",
        "training.seq_len": TOKENS,
        "training.head_chunk_tokens": chunk,
        "compile.enable": False,
        "activation_checkpoint.mode": "selective" if mode == "op" else mode,
    }
    return changed(loaded(ROOT / "train_configs" / "qwen3_0.6b_c4.toml"), keys)


@pytest.mark.parametrize("chunk", [0, 128, 600])
@pytest.mark.parametrize("mode", ["none", "op", "full"])
@pytest.mark.parametrize("model", SMALLEST, ids=lambda model: model[0])
def test_the_plan(live, model, mode, chunk):
    _, peak = live(model, mode, chunk, in_backward=chunk == 600)
    job_config = config(model, mode, chunk)
    # The step has gradients already, as after a first microbatch, and the model's
    # weights are not counted.
    plan = estimate(job_config, meta_model(job_config), 1, accumulating=True)
    assert plan.activations + plan.dispersion + plan.logits == pytest.approx(
        peak, rel=0.05
    )


@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_plan_of_sampled_losses(live, monkeypatch, mode):
    """Backward spreads the gradients of all layers out before it comes to the head."""
    # Fake tensors cannot tell how many of the drawn positions are this rank's: all.
    monkeypatch.setattr(
        torch.Tensor, "nonzero", lambda positions: torch.arange(256)[:, None]
    )
    (_, off), (_, peak) = (
        live(SMALLEST[0], mode, estimator=estimator) for estimator in ("", "sampled")
    )
    job_config = config(SMALLEST[0], mode, 0)
    job_config.dispersion.estimator = "sampled"
    plan = estimate(job_config, meta_model(job_config), 8, accumulating=True)
    assert plan.dispersion == pytest.approx(peak - off, rel=0.05)


@pytest.mark.parametrize("mode", ["none", "op", "full"])
@pytest.mark.parametrize("model", SMALLEST, ids=lambda model: model[0])
def test_what_a_layer_saves(live, model, mode):
    """The estimate leaves out the row statistics of norms and attention, and the
    rotations' cosines and sines in bf16.
    """
    (one, _), (three, _) = (live(model, mode, layers=layers) for layers in (1, 3))
    args = meta_model(config(model, mode, 0)).model_args
    block = block_elements(config(model, mode, 0), args) / LAYERS
    assert (three - one) / 2 == pytest.approx(
        (block + args.dim) * TOKENS * 2, rel=0.015
    )


@pytest.mark.parametrize(
    ("mode", "chunk", "estimator"),
    [("none", 0, "exact"), ("full", 0, "moments"), ("full", 128, "exact")],
)
def test_dispersion_adds_nothing_to_a_peak_in_the_backward_pass(
    live, mode, chunk, estimator
):
    """In the forward pass, it adds its saved gradients to a peak that comes later, and
    no more.
    """
    (_, off), (_, saved), (_, late) = (
        live(SMALLEST[0], mode, chunk, name, in_backward)
        for name, in_backward in (("", False), (estimator, False), (estimator, True))
    )
    gradients = LAYERS * TOKENS * MODELS[SMALLEST[0][0]].flavors[SMALLEST[0][1]].dim * 2
    assert late <= 1.02 * off
    assert saved - off <= 1.05 * gradients
    assert chunk or saved - off > 0.5 * gradients
