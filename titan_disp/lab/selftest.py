"""``titan-disp selftest`` checks what a machine computes, and measures it: on a CPU, on
one GPU, or under torchrun.

Each section yields rows of a page. Every rank checks its own device, then all ranks
check sequences that they share, and rank 0 alone trains and measures. A section that
raises an error is a row that failed, and the others still run.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import AdamW
from torch.utils.benchmark import Timer
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.tools import utils

# The device type, and on CPUs gloo groups of one thread.
import titan_disp.plugin  # noqa: F401
from titan_disp.config.command_options import SelftestOptions
from titan_disp.dispersion import DispersionLoss, kernels
from titan_disp.dispersion.layers import order
from titan_disp.dispersion.loss import ESTIMATORS
from titan_disp.lab.sample import write_sample
from titan_disp.models.registry import MODELS, model_args
from titan_disp.objective import DispersionObjective
from titan_disp.run.folder import versions
from titan_disp.run.reader import read_rows
from titan_disp.text import markdown_table

Values = dict[str, Any]  # numbers and texts by name
# what is checked, found and expected: at most this number, or exactly this text
Found = tuple[str, Values, Values]

# name, mean of the features, κ
CASES = (("random", 0, 0.25), ("collapsed", 10, 0.25), ("collapsed", 10, 0.005))
# Relative errors. Those of float32 are below 1e-5. The gradient of bf16 tokens is
# stored in bf16, and slopes are rounded to bf16 before they are multiplied. Cosines
# rounded to bf16 would make the loss of collapsed tokens wrong by 3e-3.
TOLERANCES = {
    "float32": {"loss": 1e-4, "gradient": 1e-4},
    "bfloat16": {"loss": 1e-4, "gradient": 8e-3},
}
# with κ = 0.25, where the errors of the fit are at most 0.4 %
OF_MOMENTS = {"loss": 1e-3, "gradient": 1e-2}
TRAINING = """--model.name=qwen3_disp --model.flavor=nano --training.dataset=c4 --training.seq_len=256
    --training.local_batch_size=2 --training.steps=3 --lr_scheduler.warmup_steps=1 --dispersion.enabled
    --checkpoint.enable --checkpoint.interval=1 --metrics.log_freq=1 --condensation.interval=0 --debug.seed=0
    --debug.deterministic --debug.deterministic_warn_only"""


def plain(z: Tensor, clamp: float) -> Tensor:
    """The angular loss with τ = 1 and ε = 0.01, by autograd over all pairs: [B, N, F]
    float64 → [B].
    """
    u = z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) + 1e-2)
    cosines = u @ u.mT
    # straight-through
    clamped = cosines + (cosines.clamp(clamp - 1, 1 - clamp) - cosines).detach()
    pairs = ~torch.eye(z.shape[1], dtype=torch.bool)
    return (-clamped.acos() / math.pi)[:, pairs].logsumexp(1) - math.log(pairs.sum())


def loss_and_gradient(
    loss: Callable[[Tensor], Tensor], z: Tensor
) -> tuple[Tensor, Tensor]:
    """Return both in float64 on the CPU.

    The sequences' distinct weights show a gradient that leaks between them.
    """
    z = z.detach().requires_grad_()
    value = loss(z)
    (gradient,) = torch.autograd.grad(
        (value * torch.arange(1, len(value) + 1, device=z.device)).sum(), z
    )
    return value.detach().double().cpu(), gradient.double().cpu()


def errors(found: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> Values:
    loss = ((found[0] - right[0]) / right[0]).abs().max().item()
    return {
        "loss": loss,
        "gradient": ((found[1] - right[1]).norm() / right[1].norm()).item(),
    }


def tokens(mean: float, length: int, precision: str, device: torch.device) -> Tensor:
    z = torch.randn(2, length, 256, generator=torch.Generator().manual_seed(0)) + mean
    return z.to(device, torch.bfloat16 if precision == "bfloat16" else torch.float32)


def accuracy(device: torch.device) -> Iterator[Found]:
    """On a GPU also as in training on one GPU, with float32 tokens under autocast,
    which the loss rounds to bf16.
    """
    precisions = (
        TOLERANCES
        if device.type == "cpu"
        else TOLERANCES | {"autocast": TOLERANCES["bfloat16"]}
    )
    for (kind, mean, clamp), precision, estimator in product(
        CASES, precisions, ESTIMATORS
    ):
        loss = DispersionLoss(estimator=estimator, clamp=clamp)
        z = tokens(mean, 512, precision, device)
        drawn = (
            order(512, 0, 1, 0)[: loss.max_tokens]
            if estimator == "sampled"
            else torch.arange(512)
        )
        exact = (z if precision == "float32" else z.bfloat16()).double().cpu()
        with torch.autocast(
            device.type, torch.bfloat16, enabled=precision == "autocast"
        ):
            found = loss_and_gradient(lambda z: loss([z], step=1)[0], z)  # noqa: B023
        right = loss_and_gradient(lambda z: plain(z[:, drawn], clamp), exact)  # noqa: B023
        if estimator != "moments" or clamp == 0.25:
            expected = OF_MOMENTS if estimator == "moments" else precisions[precision]
            yield (
                f"{estimator}, {precision}, {kind}, clamp {clamp}",
                errors(found, right),
                expected,
            )


def path(device: torch.device) -> Iterator[Found]:
    """Which kernels were compiled, and whether sums of products are float32, of which
    only long ones tell.
    """
    for name, how in kernels.path()["kernels"].items():
        yield (
            f"kernel {name}",
            {"ran": how},
            {"ran": kernels.EAGER_ON_CPU if device.type == "cpu" else "compiled"},
        )
    for precision in TOLERANCES:
        a, b = (
            x.to(kernels.operand_dtype(x))[None]
            for x in tokens(0, 4096, precision, device)
        )
        right = a.mT.double() @ b.double()
        added = torch.zeros(1, 256, 256, device=device)
        kernels.add_product_(added, a.mT, b)
        found = {"bmm": kernels.product(a.mT, b), "baddbmm": added}
        wrong = {
            name: ((sums - right).norm() / right.norm()).item()
            for name, sums in found.items()
        }
        # TF32 has 4e-4
        yield f"errors of {precision} products", wrong, dict.fromkeys(wrong, 1e-4)
    operands = (
        "float32" if device.type == "cpu" else f"{kernels.BF16_PRODUCTS}; float32"
    )
    yield (
        "operands of products",
        {"dtypes": "; ".join(kernels.path()["products"])},
        {"dtypes": operands},
    )


def meshes(device: torch.device) -> Iterator[Found]:
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        yield (
            "sharded sequences",
            {"not checked": "one rank; start it with torchrun"},
            {},
        )
    # Beyond 64 ranks, the moments would be fitted to other tokens than on one.
    for size in (p for p in range(2, min(world, 64) + 1) if world % p == 0):
        mesh = init_device_mesh(
            device.type, (world // size, size), mesh_dim_names=("data", "sequence")
        )["sequence"]
        own = mesh.get_local_rank()
        length = 8 * size * math.ceil(64 / size)
        for precision, estimator in product(TOLERANCES, ESTIMATORS):
            loss = DispersionLoss(estimator=estimator)
            z = tokens(10, length, precision, device)
            value, gradient = loss_and_gradient(lambda z: loss([z], step=1)[0], z)  # noqa: B023
            sharded = loss_and_gradient(
                lambda z: loss([z], mesh, step=1)[0],  # noqa: B023
                z.chunk(size, dim=1)[own],
            )
            found = errors(sharded, (value, gradient.chunk(size, dim=1)[own]))
            yield (
                f"{estimator}, {precision}, {size} ranks",
                found,
                TOLERANCES[precision],
            )


def resume(device: torch.device) -> Iterator[Found]:
    """Train three steps, then, in another process, the last two again.

    The third loss depends on the optimizer's state.
    """
    # torchrun would set these. With its own variables, the process would wait for other
    # ranks.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_")
    }
    environment |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    with tempfile.TemporaryDirectory(prefix="titan-disp-selftest-") as folder:
        write_sample(f"{folder}/sample")
        paths = (
            f"--model.hf_assets_path={folder}/sample/tokenizer",
            f"--training.dataset_path={folder}/sample",
        )
        words = [*TRAINING.split(), *paths, f"--job.dump_folder={folder}/run"]
        command = [sys.executable, "-m", "titan_disp.train", *words]
        for start in ("first", "second"):
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=500
            )
            if done.returncode:
                raise RuntimeError(
                    f"the {start} start ended with status {done.returncode}: "
                    f"{done.stderr[-3000:]}"
                )
            for step in (2, 3):
                shutil.rmtree(f"{folder}/run/checkpoint/step-{step}")
        rows = read_rows(f"{folder}/run")
    yield (
        "steps",
        {"trained": [row["step"] for row in rows]},
        {"trained": [1, 2, 3, 2, 3]},
    )
    for before, after in zip(rows[1:3], rows[3:], strict=True):
        yield (
            f"step {before['step']}, resumed",
            {"loss": repr(after["loss"])},
            {"loss": repr(before["loss"])},
        )


def measured(
    forward: Callable[[], Tensor],
    device: torch.device,
    then: Callable[[], Any] = lambda: None,
) -> Values:
    """Return the median time of forward, backward and ``then``, and the most memory
    beyond what was allocated before.
    """
    forward = torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu")(
        forward
    )
    names = {"forward": forward, "then": then}
    threads = torch.get_num_threads()
    timer = Timer(
        "out = forward(); out.backward(out.detach()); then()",
        globals=names,
        num_threads=threads,
    )
    timer.timeit(1)  # compiles; like the others, it waits for a GPU
    if device.type == "cpu":
        return {
            "ms": 1e3 * timer.blocked_autorange().median,
            "MiB": "not counted on a CPU",
        }
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    seconds = timer.blocked_autorange().median
    return {
        "ms": 1e3 * seconds,
        "MiB": torch.accelerator.max_memory_allocated() - before >> 20,
    }


def nano_step(device: torch.device, estimator: str) -> Values:
    args = model_args("qwen3_disp", "nano")
    args.max_seq_len, args.activations = (
        512,
        () if estimator == "off" else tuple(range(1, args.n_layers + 1)),
    )
    model = MODELS["qwen3_disp"].model_cls(args).to(device)
    model.init_weights(device)
    loss = DispersionLoss(estimator="exact" if estimator == "off" else estimator)
    objective = DispersionObjective(cross_entropy_loss, loss, lambda step: 0.1)
    optimizer = AdamW(model.parameters())
    text = torch.randint(
        args.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0)
    ).to(device)
    return measured(
        lambda: objective(model(text), text) / text.numel(), device, optimizer.step
    )


def cost(device: torch.device) -> Iterator[Found]:
    shape, dtype = (
        ((1, 1024, 256), torch.float32)
        if device.type == "cpu"
        else ((8, 4096, 1024), torch.bfloat16)
    )
    z = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        .to(device, dtype)
        .requires_grad_()
    )
    yield f"z zᵀ of {list(shape)}", measured(lambda: torch.bmm(z, z.mT), device), {}
    for estimator in ESTIMATORS:
        yield (
            estimator,
            measured(partial(DispersionLoss(estimator=estimator), [z]), device),
            {},
        )
    for estimator in ("off", *ESTIMATORS):
        yield f"nano step, dispersion {estimator}", nano_step(device, estimator), {}


def rows_of(
    section: Callable[[torch.device], Iterator[Found]], device: torch.device
) -> Iterator[Values]:
    row = {"ok": False, "section": section.__name__}
    try:
        for check, found, expected in section(device):
            # A comparison with NaN is false.
            ok = all(
                found[k] <= e if isinstance(e, float) else found[k] == e
                for k, e in expected.items()
            )
            yield row | {"ok": ok, "check": check, "found": found, "expected": expected}
    except Exception as error:  # the other sections tell more, whatever it is
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        yield row | {
            "check": "runs to its end",
            "found": found,
            "expected": {"error": "none"},
        }


def page(result: Values) -> str:
    def shown(values: Values, sign: str = "") -> str:
        return ", ".join(
            f"{k} {sign}{v:.3g}" if isinstance(v, float) else f"{k} {v}"
            for k, v in values.items()
        )

    cells = [["", "section", "check", "found", "expected"]]
    for row in result["rows"]:
        found = shown(row["found"])
        expected = shown(row["expected"], "≤ ")
        cells.append(
            [
                "ok" if row["ok"] else "FAILED",
                row["section"],
                row["check"],
                found,
                expected,
            ]
        )
    failed = sum(not row["ok"] for row in result["rows"])
    verdict = (
        f"{failed} of {len(cells) - 1} checks FAILED"
        if failed
        else "everything is as expected"
    )
    return f"titan-disp selftest: {shown(result['facts'])}\n\n{markdown_table(cells, text_columns=5)}\n\n{verdict}"


def selftest(options: SelftestOptions) -> int:
    """Print the page on rank 0.

    Return the exit status, which is the same on every rank.
    """
    world, rank, local = (
        int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    )
    device = torch.device(utils.device_type)
    module = utils.device_module
    module.set_device(local)
    if world > 1 and not dist.is_initialized():
        # for which ranks wait for rank 0
        dist.init_process_group(timeout=timedelta(minutes=30))
    sections = (
        (accuracy, path, meshes, resume, cost)
        if rank == 0
        else (accuracy, path, meshes)
    )
    # a run has fewer shapes and dtypes
    with torch._dynamo.config.patch(recompile_limit=64):
        rows = [row for section in sections for row in rows_of(section, device)]
    failed = [[row for row in rows if not row["ok"]]] * max(1, world)
    if world > 1:
        dist.all_gather_object(failed, failed[rank])
    if rank == 0:
        facts = {
            "device": module.get_device_name(),
            "ranks": len(failed),
            "python": sys.version.split()[0],
        }
        facts |= {**versions(), "CUDA": torch.version.cuda, "HIP": torch.version.hip}
        rows += [
            {**row, "section": f"{row['section']}, rank {r}"}
            for r in range(1, world)
            for row in failed[r]
        ]
        result = {"facts": facts, "rows": rows}
        print(page(result), flush=True)
        if options.json is not None:
            options.json.write_text(
                json.dumps(result, indent=2, ensure_ascii=False) + "\n"
            )
    if world > 1:
        dist.barrier()  # torchrun ends all ranks when the first one ends with a status
    return int(any(failed))
