"""``titan-disp selftest`` checks the results of the loss on a machine, and measures its
cost: on a CPU, on one GPU, or under torchrun.

Each section yields rows of a page. Each rank checks its device. Then all ranks check
sequences that are sharded over all ranks, and rank 0 alone trains and measures. If a
section raises an error, the page has a row that failed, and the other sections still
run.
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

# This registers the device type, and on CPUs gloo groups of one thread.
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
# (name of a check, values, expected values). A number must be at most the expected
# number, and a text must be equal to the expected text.
Check = tuple[str, Values, Values]

# name, mean of the features, κ
CASES = (("random", 0, 0.25), ("collapsed", 10, 0.25), ("collapsed", 10, 0.005))
# Largest relative errors. In float32, errors are below 1e-5. For bf16 tokens, the gradient
# is stored in bf16, and slopes are rounded to bf16 before they are multiplied. If cosines
# were rounded to bf16, the loss of collapsed tokens would be wrong by 3e-3.
TOLERANCES = {
    "float32": {"loss": 1e-4, "gradient": 1e-4},
    "bfloat16": {"loss": 1e-4, "gradient": 8e-3},
}
# Largest relative errors of *moments* for κ = 0.25. The fit's errors are at most 0.4 %.
OF_MOMENTS = {"loss": 1e-3, "gradient": 1e-2}
# The environment of a process that trains alone
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
TRAINING = """--model.name=qwen3_disp --model.flavor=nano --training.dataset=c4 --training.seq_len=256
    --training.local_batch_size=2 --training.steps=3 --lr_scheduler.warmup_steps=1 --dispersion.enabled
    --checkpoint.enable --checkpoint.interval=1 --metrics.log_freq=1 --condensation.interval=0 --debug.seed=0
    --debug.deterministic --debug.deterministic_warn_only"""


def plain(z: Tensor, clamp: float) -> Tensor:
    """Return the angular loss of [B, N, F] float64 tokens with τ = 1 and ε = 0.01, over
    all pairs, [B].
    """
    u = z / (torch.linalg.vector_norm(z, dim=-1, keepdim=True) + 1e-2)
    cosines = u @ u.mT
    # Clamping does not change the gradient (straight-through).
    clamped = cosines + (cosines.clamp(clamp - 1, 1 - clamp) - cosines).detach()
    pairs = ~torch.eye(z.shape[1], dtype=torch.bool)
    return (-clamped.acos() / math.pi)[:, pairs].logsumexp(1) - math.log(pairs.sum())


def loss_and_gradient(
    loss: Callable[[Tensor], Tensor], z: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss [B] and its gradient [B, N, F], in float64 on the CPU.

    Sequences have different weights, so that the gradient is wrong if it leaks from one
    sequence to another.
    """
    z = z.detach().requires_grad_()
    value = loss(z)
    (gradient,) = torch.autograd.grad(
        (value * torch.arange(1, len(value) + 1, device=z.device)).sum(), z
    )
    return value.detach().double().cpu(), gradient.double().cpu()


def relative_error(values: Tensor, expected: Tensor) -> float:
    return ((values - expected).norm() / expected.norm()).item()


def errors(result: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> Values:
    """Return the relative errors of (loss, gradient)."""
    loss, gradient = result
    expected_loss, expected_gradient = expected
    return {
        "loss": ((loss - expected_loss) / expected_loss).abs().max().item(),
        "gradient": relative_error(gradient, expected_gradient),
    }


def tokens(mean: float, length: int, precision: str, device: torch.device) -> Tensor:
    """Return random tokens [2, length, 256] in bf16 or float32, always the same."""
    z = torch.randn(2, length, 256, generator=torch.Generator().manual_seed(0)) + mean
    dtype = torch.float32
    if precision == "bfloat16":
        dtype = torch.bfloat16
    return z.to(device, dtype)


def accuracy(device: torch.device) -> Iterator[Check]:
    """Compare each estimator with ``plain``.

    On a GPU, "autocast" is the precision of training on one GPU: float32 tokens, which
    the loss rounds to bf16.
    """
    precisions = TOLERANCES
    if device.type != "cpu":
        precisions = TOLERANCES | {"autocast": TOLERANCES["bfloat16"]}
    for (case, mean, clamp), precision, estimator in product(
        CASES, precisions, ESTIMATORS
    ):
        tolerances = precisions[precision]
        if estimator == "moments":
            if clamp != 0.25:
                continue
            tolerances = OF_MOMENTS
        loss = DispersionLoss(estimator=estimator, clamp=clamp)
        z = tokens(mean, 512, precision, device)
        drawn = torch.arange(512)
        if estimator == "sampled":
            drawn = order(512, 0, 1, 0)[: loss.max_tokens]
        rounded = z
        if precision != "float32":
            rounded = z.bfloat16()
        with torch.autocast(
            device.type, torch.bfloat16, enabled=precision == "autocast"
        ):
            result = loss_and_gradient(lambda z: loss([z], step=1)[0], z)  # noqa: B023
        expected = loss_and_gradient(
            lambda z: plain(z[:, drawn], clamp),  # noqa: B023
            rounded.double().cpu(),
        )
        yield (
            f"{estimator}, {precision}, {case}, clamp {clamp}",
            errors(result, expected),
            tolerances,
        )


def path(device: torch.device) -> Iterator[Check]:
    """Check that kernels were compiled, and that products are summed in float32.

    The sums are long, because short sums have small errors in any dtype.
    """
    compiled = "compiled"
    operands = f"{kernels.BF16_PRODUCTS}; float32"
    if device.type == "cpu":
        compiled = kernels.EAGER_ON_CPU
        operands = "float32"
    for name, mode in kernels.path()["kernels"].items():
        yield f"kernel {name}", {"ran": mode}, {"ran": compiled}
    for precision in TOLERANCES:
        a, b = (
            x.to(kernels.operand_dtype(x))[None]
            for x in tokens(0, 4096, precision, device)
        )
        expected = a.mT.double() @ b.double()
        added = torch.zeros(1, 256, 256, device=device)
        kernels.add_product_(added, a.mT, b)
        relative_errors = {
            "bmm": relative_error(kernels.product(a.mT, b), expected),
            "baddbmm": relative_error(added, expected),
        }
        # The error of TF32 is 4e-4.
        limits = dict.fromkeys(relative_errors, 1e-4)
        yield f"errors of {precision} products", relative_errors, limits
    yield (
        "operands of products",
        {"dtypes": "; ".join(kernels.path()["products"])},
        {"dtypes": operands},
    )


def meshes(device: torch.device) -> Iterator[Check]:
    """Compare the loss of sharded sequences with the loss of whole sequences."""
    world = 1
    if dist.is_initialized():
        world = dist.get_world_size()
    if world == 1:
        yield (
            "sharded sequences",
            {"not checked": "one rank; start it with torchrun"},
            {},
        )
    # With more than 64 ranks, the moments would be fitted to other tokens than on one rank.
    for size in (p for p in range(2, min(world, 64) + 1) if world % p == 0):
        mesh = init_device_mesh(
            device.type, (world // size, size), mesh_dim_names=("data", "sequence")
        )["sequence"]
        local_rank = mesh.get_local_rank()
        length = 8 * size * math.ceil(64 / size)
        for precision, estimator in product(TOLERANCES, ESTIMATORS):
            loss = DispersionLoss(estimator=estimator)
            z = tokens(10, length, precision, device)
            value, gradient = loss_and_gradient(lambda z: loss([z], step=1)[0], z)  # noqa: B023
            sharded = loss_and_gradient(
                lambda z: loss([z], mesh, step=1)[0],  # noqa: B023
                z.chunk(size, dim=1)[local_rank],
            )
            gradient_of_shard = gradient.chunk(size, dim=1)[local_rank]
            yield (
                f"{estimator}, {precision}, {size} ranks",
                errors(sharded, (value, gradient_of_shard)),
                TOLERANCES[precision],
            )


def resume(device: torch.device) -> Iterator[Check]:
    """Train three steps, repeat the last two in another process, and compare the losses.

    The third loss depends on the optimizer's state.
    """
    # With torchrun's variables for this process, the new process would wait for other
    # ranks.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCHELASTIC_")
    }
    environment |= ONE_RANK
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
    """Return the median time of forward, backward and ``then`` in ms, and the additional
    peak memory in MiB (GPU only).
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
    timer.timeit(1)  # compiles the kernels
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
    """Return time and memory of a training step of nano; "off" means no dispersion."""
    args = model_args("qwen3_disp", "nano")
    args.max_seq_len = 512
    args.activations = ()
    loss = DispersionLoss()
    if estimator != "off":
        args.activations = tuple(range(1, args.n_layers + 1))
        loss = DispersionLoss(estimator=estimator)
    model = MODELS["qwen3_disp"].model_cls(args).to(device)
    model.init_weights(device)
    objective = DispersionObjective(cross_entropy_loss, loss, lambda step: 0.1)
    optimizer = AdamW(model.parameters())
    text = torch.randint(
        args.vocab_size, (2, 512), generator=torch.Generator().manual_seed(0)
    ).to(device)
    return measured(
        lambda: objective(model(text), text) / text.numel(), device, optimizer.step
    )


def cost(device: torch.device) -> Iterator[Check]:
    """Measure time and memory of the loss and of training steps; no value is tested."""
    shape = (8, 4096, 1024)
    dtype = torch.bfloat16
    if device.type == "cpu":
        shape = (1, 1024, 256)
        dtype = torch.float32
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
    section: Callable[[torch.device], Iterator[Check]], device: torch.device
) -> Iterator[Values]:
    """Yield the rows of a section. An error of the section is a row that failed."""
    row = {"ok": False, "section": section.__name__}
    try:
        for check, values, expected in section(device):
            ok = all(
                _is_as_expected(values[name], limit) for name, limit in expected.items()
            )
            content = {"check": check, "found": values, "expected": expected}
            yield row | {"ok": ok, **content}
    except Exception as error:  # any error, so that the other sections still run
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        yield row | {
            "check": "runs to its end",
            "found": {"error": message},
            "expected": {"error": "none"},
        }


def _is_as_expected(value: Any, expected: Any) -> bool:
    if isinstance(expected, float):
        return value <= expected  # false for NaN
    return value == expected


def _as_text(values: Values, sign: str = "") -> str:
    """Return names and values as text, with ``sign`` before numbers."""
    parts = []
    for name, value in values.items():
        if isinstance(value, float):
            parts.append(f"{name} {sign}{value:.3g}")
        else:
            parts.append(f"{name} {value}")
    return ", ".join(parts)


def page(result: Values) -> str:
    """Return the facts, the table of all rows and the verdict, as text."""
    cells = [["", "section", "check", "found", "expected"]]
    for row in result["rows"]:
        cells.append(
            [
                "ok" if row["ok"] else "FAILED",
                row["section"],
                row["check"],
                _as_text(row["found"]),
                _as_text(row["expected"], "≤ "),
            ]
        )
    failed = sum(not row["ok"] for row in result["rows"])
    verdict = "everything is as expected"
    if failed:
        verdict = f"{failed} of {len(cells) - 1} checks FAILED"
    heading = f"titan-disp selftest: {_as_text(result['facts'])}"
    return "\n\n".join([heading, markdown_table(cells, text_columns=5), verdict])


def selftest(options: SelftestOptions) -> int:
    """Check all sections, print the page on rank 0, and return the exit status, which is
    the same on all ranks.
    """
    world, rank, local = (
        int(os.environ.get(name, "0")) for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK")
    )
    device = torch.device(utils.device_type)
    module = utils.device_module
    module.set_device(local)
    if world > 1 and not dist.is_initialized():
        # The other ranks wait for rank 0, which trains and measures.
        dist.init_process_group(timeout=timedelta(minutes=30))
    sections = [accuracy, path, meshes]
    if rank == 0:
        sections += [resume, cost]
    rows: list[Values] = []
    # The sections use more shapes and dtypes than the default limit allows.
    with torch._dynamo.config.patch(recompile_limit=64):
        for section in sections:
            rows += rows_of(section, device)
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
        for other_rank in range(1, world):
            for row in failed[other_rank]:
                rows.append(row | {"section": f"{row['section']}, rank {other_rank}"})
        result = {"facts": facts, "rows": rows}
        print(page(result), flush=True)
        if options.json is not None:
            options.json.write_text(
                json.dumps(result, indent=2, ensure_ascii=False) + "\n"
            )
    if world > 1:
        # torchrun ends all ranks when the first rank ends with a nonzero status
        dist.barrier()
    return int(any(failed))
