"""Noisy embeddings and active forgetting against plain single-process forms; the same
on every mesh and after a resume.
"""

import math
from contextlib import closing

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tests.distributed import spawn
from tests.mesh import (
    GLOBAL_BATCH,
    build,
    errors,
    global_batch,
    plain_model,
    step,
    weights,
)
from titan_disp.errors import ConfigError
from titan_disp.models.baselines import NoisyEmbedding, draw, lr_factor, uniform
from titan_disp.models.qwen3 import Qwen3DispModel
from titan_disp.models.registry import model_args


def numpy_noise(seed, step, sequences, positions, features):
    def mixed(x):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x21F0AAAD)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x735A2D97)
        return x ^ (x >> np.uint32(15))

    def word(x):
        return np.asarray(x, dtype=np.uint64).astype(np.uint32)

    key = mixed(word([seed % 2**32]))
    key = mixed(key + word(seed // 2**32))
    key = mixed(key + word(step))
    key = mixed(key + word(sequences))[:, None]
    key = mixed(key + word(positions)[None])[..., None]
    words = mixed(key ^ mixed(word(np.arange(1, features + 1))))
    return (words >> np.uint32(8)).astype(np.float64) / 2**23 - 1


def test_numbers_of_the_noise():
    found = uniform(
        5_000_000_011,
        17,
        torch.tensor([3, 900]),
        torch.tensor([[0, 1, 4095], [0, 1, 4095]]),
        features=50,
    )
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(
        found.numpy(), numpy_noise(5_000_000_011, 17, [3, 900], [0, 1, 4095], 50)
    )


def test_a_model_in_training():
    args = model_args("qwen3_disp", "nano", "n_layers=1")
    model = Qwen3DispModel(args)
    model.init_weights()
    done = [4]
    alpha = 300.0
    n = 6
    seed = 5_000_000_011
    noise = NoisyEmbedding(
        alpha, n, seed, lambda: done[0], slots=3, own_slots=3, first_slot=0, per_step=3
    )
    noise.install(model)
    tokens = torch.arange(3 * n).view(3, n)
    clean = model.tok_embeddings.weight[tokens]
    bound = alpha / math.sqrt(n * args.dim)

    def added(rows, **kwargs):
        h = model(tokens[rows], return_activations=[0], **kwargs).activations[0]
        return (h - clean[rows]).detach().numpy() / bound

    def check(found, *expected):
        np.testing.assert_allclose(
            found, numpy_noise(seed, done[0], *expected, args.dim), atol=1e-5, rtol=0
        )

    check(added([0, 1]), [0, 1], range(n))
    with torch.no_grad():
        assert not added([0, 1]).any()
    model.eval()
    assert not added([0, 1]).any()
    model.train()
    check(added([2]), [2], range(n))  # the next microbatch
    done[0] = 5
    check(added([0]), [0], range(n))
    # A rank of context parallelism has the first and the last quarter.
    done[0] = 6
    own = [0, 1, 4, 5]
    tokens = tokens[:, own]
    clean = clean[:, own]
    positions = torch.tensor([own], dtype=torch.int32).expand(3, 4)
    check(added([0, 1, 2], positions=positions), [0, 1, 2], own)
    # The second rank of tensor parallelism among it has the second half of these.
    noise.tp_rank = 1
    done[0] = 7
    noise._before_model(model, (tokens,), {"positions": positions})
    half = (
        noise._after_embedding(
            model.tok_embeddings, (), torch.zeros(3, 2, args.dim)
        ).numpy()
        / bound
    )
    check(half, [0, 1, 2], own[2:])


def test_nothing_comes_from_the_host():
    """A forward on a GPU, for which the meta device stands, must not wait for a
    copy.
    """
    host = []

    class Host(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            if function is torch.tensor or (
                isinstance(found, torch.Tensor) and found.device.type == "cpu"
            ):
                host.append(function)
            return found

    model = torch.nn.Module()
    model.tok_embeddings = torch.nn.Embedding(8, 4, device="meta")
    model.forward = lambda tokens: model.tok_embeddings(tokens)
    NoisyEmbedding(
        1.0, 16, 9, lambda: 1, slots=4, own_slots=2, first_slot=0, per_step=4
    ).install(model)
    with Host():
        assert model(torch.zeros(2, 16, dtype=torch.long, device="meta")).shape == (
            2,
            16,
            4,
        )
    assert host == []


def test_learning_rate_of_forgetting():
    """Without warm-up by hand; and the authors' formula: decay over the whole run,
    walked through T/K times.
    """
    assert [lr_factor(step, 4, 0.0) for step in range(4)] == pytest.approx(
        [0.75, 0.5, 0.25, 0.0]
    )
    steps = 3000
    every = 1000
    ramp = 240
    for t in (0, 10, 79, 80, 500, 999, 1000, 2999):
        at = (t + 1) * (steps // every) % steps
        factor = at / ramp if at < ramp else (steps - at) / (steps - ramp)
        assert lr_factor(t, every, ramp / steps) == pytest.approx(factor if at else 0.0)


def test_draws_of_forgetting():
    shape = torch.Size([500, 200])
    found = draw(shape, 3, 1000)
    n = 500 * 200
    assert abs(found.mean()) < 5 * 0.02 / math.sqrt(n)
    assert found.std() == pytest.approx(0.02, rel=5 / math.sqrt(2 * n))
    for other in (draw(shape, 3, 2000), draw(shape, 4, 1000)):
        assert abs((found * other).mean()) < 5 * 0.02**2 / math.sqrt(n)


EVERY = 3
LR = 1e-3
EMBEDDING_LR = 4e-3
WEIGHT_DECAY = 0.3
STEPS = 7
SMALL = ("--model.overrides", "n_layers=2")
UNTIED = ("--model.overrides", "n_layers=2,enable_weight_tying=false")
PLAIN = (
    "--dispersion.no-enabled",
    "--training.steps",
    "100",
    "--optimizer.lr",
    str(LR),
)
FORGET = (
    *PLAIN,
    *("--baseline.method", "active_forgetting", "--baseline.forget_every", str(EVERY)),
    *("--baseline.forget_lr", str(EMBEDDING_LR), "--baseline.forget_warmup", "0.5"),
    *("--optimizer.weight_decay", str(WEIGHT_DECAY), "--checkpoint.enable"),
)
NOISE = (
    *PLAIN,
    "--baseline.method",
    "noisy_embedding",
    "--baseline.noise_alpha",
    "100",
    "--checkpoint.enable",
)


def sent_back(found, folder, name):
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / f"{name}.pt")


def trained_steps(trainer, count):
    before = weights(trainer)
    for _ in range(count):
        step(trainer)
    return {"before": before, "after": weights(trainer)}


def on_two_ranks(sample, folder):
    run = folder / "run"
    with closing(build(sample, run, *FORGET, *SMALL)) as trainer:
        tied = trained_steps(trainer, EVERY)
        trainer.checkpointer.save(EVERY)
        model = trainer.model_parts[0].eval()
        # a validation just before it is forgotten: FSDP leaves the embedding gathered
        with torch.no_grad():
            model(global_batch()[0])
        model.train()
        tied |= {"after": trained_steps(trainer, STEPS - EVERY)["after"]}
        sent_back(tied, folder, "tied")
    with closing(build(sample, run, *FORGET, *SMALL)) as trainer:
        trainer.checkpointer.load()
        resumed = trained_steps(trainer, STEPS - EVERY)["after"]
        assert all(torch.equal(w, tied["after"][n]) for n, w in resumed.items())
    # A checkpoint that does not say what it is of, as TorchTitan's own trainer saves
    # them.
    with closing(build(sample, run, *PLAIN, *SMALL, "--checkpoint.enable")) as trainer:
        trainer.identity.clear()
        trainer.checkpointer.load()
        with pytest.raises(
            ConfigError, match="2 groups of parameters, expected 1: .* baseline.method"
        ):
            trainer.batch_generator([])
    fused = (
        "--optimizer.implementation",
        "fused",
        "--parallelism.tensor_parallel_degree",
        "2",
    )
    with closing(build(sample, folder / "untied", *FORGET, *UNTIED, *fused)) as trainer:
        sent_back(trained_steps(trainer, STEPS), folder, "untied")
    with closing(build(sample, folder / "noise", *NOISE, *SMALL)) as trainer:
        sent_back(
            {"before": weights(trainer), "gradients": step(trainer)}, folder, "noise"
        )
        trainer.checkpointer.save(1)
        second = step(trainer)
        trainer.checkpointer.load()
        assert all(torch.equal(g, second[n]) for n, g in step(trainer).items())


@pytest.fixture(scope="module")
def trained(sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("baselines")
    spawn(2, on_two_ranks, sample, folder)
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def loss_of(model):
    inputs, labels = global_batch()
    return F.cross_entropy(
        model(inputs).flatten(0, 1), labels.flatten(), ignore_index=-100
    )


def distance(found, expected):
    return max(errors(found, expected).values())


@pytest.mark.parametrize(("name", "options"), [("tied", SMALL), ("untied", UNTIED)])
def test_active_forgetting_against_a_plain_loop(trained, name, options):
    """Two of PyTorch's optimizers, one of which is made anew with the embedding.

    Its K = 3 steps have a warm-up of 1.5.
    """
    after = trained[name]["after"]
    before = trained[name]["before"]
    model = plain_model(before, options[1])
    embedding = model.tok_embeddings.weight
    adam = {"betas": (0.9, 0.95), "weight_decay": WEIGHT_DECAY}
    body = torch.optim.AdamW(
        [p for p in model.parameters() if p is not embedding], **adam
    )
    for t in range(STEPS):
        if t % EVERY == 0:
            own = torch.optim.AdamW([embedding], **adam)
        if t in (3, 6):
            with torch.no_grad():
                # debug.seed of tests/mesh.py
                embedding.copy_(draw(embedding.shape, 11, t))
        body.param_groups[0]["lr"] = LR * (1 - t / 100)
        own.param_groups[0]["lr"] = EMBEDDING_LR * (2 / 3, 2 / 3, 0)[t % EVERY]
        model.zero_grad()
        loss_of(model).backward()
        body.step()
        own.step()
    moved = {n: p.detach() - before[n] for n, p in model.named_parameters()}
    # 1e-5 seen: Adam makes whole steps of gradients that are all but zero, where
    # rounding decides.
    assert distance({n: after[n] - before[n] for n in after}, moved) < 2e-4


def test_noise_in_a_step_against_plain_autograd(trained):
    model = plain_model(trained["noise"]["before"], SMALL[1])
    shape = (GLOBAL_BATCH, global_batch()[0].shape[1], 64)
    bound = 100 / math.sqrt(shape[1] * shape[2])
    noise = torch.from_numpy(
        numpy_noise(11, 0, range(shape[0]), range(shape[1]), shape[2]) * bound
    ).float()
    model.tok_embeddings.register_forward_hook(lambda module, args, h: h + noise)
    loss_of(model).backward()
    assert (
        distance(
            trained["noise"]["gradients"],
            {n: p.grad for n, p in model.named_parameters()},
        )
        < 1e-5
    )
