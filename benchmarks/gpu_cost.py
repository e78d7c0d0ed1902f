"""Count on any machine what the dispersion loss asks of a GPU, and predict its time.

    python benchmarks/gpu_cost.py            # a table for three shapes and all estimators
    python benchmarks/gpu_cost.py --rule     # moments beside exact, for long sequences
    python benchmarks/gpu_cost.py --measure  # beside what this GPU takes in a step
    python benchmarks/gpu_cost.py --no-kernel  # as without Triton's kernel of pairs

The loss runs on meta tensors, which have shapes but no data, and takes the path of a
GPU. All numbers are of one layer, forward and backward:

kernels         kernels that are launched; a fused function counts as one, and so does
                Triton's kernel of pairs, with its products
calls           calls of PyTorch's dispatcher, also of views
allocations     new tensors that need memory
host_waits      numbers that the host reads from the device, and waits for
product_flops   FLOPs of matrix products
other_bytes     bytes that everything but products reads and writes, with the sum of
                the gradients of the loss and of the model
saved_bytes     what is held from forward to backward
H100_ms, …      the time of products and other bytes, without gaps between kernels

"way" says where the gradient is computed: "saved" in the forward pass, "hook" in a hook
of the backward pass, as the trainer does for large layers. Host times are in CPU
microseconds per layer of few small tokens. On a CPU, they are of the CPU's path with
compiled functions. They leave out the launch of Triton's kernel of pairs: zeros are
written in its place. "two products" is the least that a loss of pairs could take: two
products in one autograd function.
"""

import contextlib
import functools
import math
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from measuring import Printed, show
from titan_disp.cluster import cost
from titan_disp.cluster.plan import BANDWIDTH_PART
from titan_disp.dispersion import DispersionLoss, kernels, triton_pairs
from titan_disp.dispersion.layers import compute_in_backward
from titan_disp.dispersion.loss import ESTIMATORS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAVED = "saved"
HOOK = "hook"
WAYS = (SAVED, HOOK)

# Bare products of [8, 4096, 1024] in bf16 took 1.1 ms on an H100 (docs/benchmarks.md),
# which is 375 TFLOP/s. The H200 computes as fast.
PRODUCT_FLOPS = 400e12  # per second
GPUS = ("H100", "H200")

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "baddbmm_"}
ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
OVERWRITE = {"copy_", "fill_", "zero_"}  # without reading what they write to


@dataclass(frozen=True)
class Shape:
    """The outputs of one block, [batch, tokens, features]."""

    batch: int
    tokens: int
    features: int
    precision: str  # float32, bfloat16, or amp: float32 under bf16 AMP

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Return the shape of a text such as 8x2048x1024:amp."""
        sizes, _, precision = text.partition(":")
        batch, tokens, features = map(int, sizes.split("x"))
        return cls(batch, tokens, features, precision)

    @property
    def amp(self) -> bool:
        return self.precision == "amp"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32

    def empty(self, device: str) -> Tensor:
        return torch.empty(
            self.batch, self.tokens, self.features, dtype=self.dtype, device=device
        )


@dataclass
class Options(Printed):
    shapes: list[str] = field(
        default_factory=lambda: [
            "8x2048x1024:amp",
            "8x4096x1024:bfloat16",
            "1x8192x1024:bfloat16",
        ]
    )
    """Sequences x tokens x features : float32, bfloat16, or amp (float32 under AMP)."""
    estimators: list[str] = field(default_factory=lambda: list(ESTIMATORS))
    layers: int = 28
    """Layers of the loss."""
    host_rounds: int = 5
    """Rounds of host times, of which the least counts. The first compiles for about a
    minute; 0 leaves host times out."""
    rule: bool = False
    """Compare moments with exact for one sequence of 8192 tokens, on 1 and 8 ranks."""
    kernel: bool = True
    """Take Triton's kernel of pairs, or else the compiled functions that it replaces, as
    with TITAN_DISP_TRITON=0."""
    measure: bool = False
    """Measure each estimator in steps of a stack of layers on this device."""


def on_device(*values: Any) -> list[Tensor]:
    """Return the tensors among values that a GPU would hold: those on meta."""
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, Tensor) and x.device.type == "meta"]


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; what is expanded is read once."""
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)


def within(tensors: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
    """Return those of the tensors that are in the memory of others."""
    storages = {storage_of(x) for x in memory}
    return [x for x in tensors if storage_of(x) in storages]


def without(tensors: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
    """Return those of the tensors that are not in the memory of others."""
    storages = {storage_of(x) for x in memory}
    return [x for x in tensors if storage_of(x) not in storages]


@dataclass(frozen=True)
class Accesses:
    """The tensors that one call of an op reads and writes."""

    reads: list[Tensor]
    writes: list[Tensor]  # with the new ones
    new: list[Tensor]

    @property
    def bytes(self) -> int:
        return bytes_of(self.reads) + bytes_of(self.writes)


def accesses(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    result: Any,
) -> Accesses:
    name = op.overloadpacket.__name__
    reads = []
    writes = []
    names = [argument.name for argument in op._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    for argument in op._schema.arguments:
        tensors = on_device(values.get(argument.name))
        if argument.is_write:
            writes += tensors
        if not argument.is_write or not (argument.is_out or name in OVERWRITE):
            reads += tensors
    new = without(on_device(result), reads + writes)
    if name.startswith("new_") or name.endswith("_like"):
        reads = []
    elif name == "index":  # reads only the rows that it takes
        reads = [*new, *on_device(values["indices"])]
    elif name == "index_select":
        reads = [*new, *on_device(values["index"])]
    elif name == "index_put_":  # writes only the rows that it is given
        writes = on_device(values["values"])
        reads = [*writes, *on_device(values["indices"])]
    return Accesses(reads, [*writes, *new], new)


@dataclass(frozen=True)
class PretendedKernels:
    """Stands for the module that imports Triton, and for its kernel. Unlike a mock, it
    does not record its calls, which would take longer than to launch a kernel.
    """

    launch: Callable[..., None]

    @property
    def span_kernel(self) -> "PretendedKernels":
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch

    def __getattr__(self, function: str) -> str:
        return function


@contextlib.contextmanager
def pretended_kernel(launch: Callable[..., None], dtype: torch.dtype) -> Iterator[None]:
    """Let Triton's kernel of pairs take tokens of a dtype on any device, and call
    ``launch`` with its arguments in place of it.
    """

    def takes(x: Tensor, pair: triton_pairs.PairFunction) -> bool:
        return triton_pairs.CHOICE != "0" and x.dtype == dtype

    module = PretendedKernels(launch)
    with (
        mock.patch.dict(sys.modules, {triton_pairs.KERNELS: cast(Any, module)}),
        mock.patch.object(triton_pairs, "takes", takes),
    ):
        yield


class Counter(TorchDispatchMode):
    """Counts what runs on meta tensors within it."""

    def __init__(self, amp: bool) -> None:
        super().__init__()
        self.amp = amp
        self.kernels = 0
        self.calls = 0
        self.allocations = 0
        self.host_waits = 0
        self.product_flops = 0
        self.other_bytes = 0
        self.sent_bytes = 0.0  # by collectives, in rings
        self._live: dict[int, int] = {}  # bytes by storage
        self._inside: Accesses | None = None  # of the fused function that runs
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> "Counter":
        # torch has no autocast for meta tensors.
        autocast = mock.patch.multiple(
            torch,
            autocast=lambda *args, **kwargs: contextlib.nullcontext(),
            is_autocast_enabled=lambda device: self.amp,
            get_autocast_dtype=lambda device: torch.bfloat16,
        )
        self._patches.enter_context(autocast)
        self._patches.enter_context(
            mock.patch.object(kernels, "run_fused", self._run_fused)
        )
        self._patches.enter_context(
            pretended_kernel(self._add_span, dtype=torch.bfloat16)
        )
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def live_bytes(self) -> int:
        """Return the bytes of the tensors that were allocated here and still exist."""
        return sum(self._live.values())

    def __torch_dispatch__(
        self,
        op: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        reads_number = name == "_local_scalar_dense" and on_device(args)
        if reads_number:
            result: Any = 1  # as a test of the device would find it: true
        elif name == "baddbmm" and "out" in kwargs:  # torch 2.13 fails on meta
            result = kwargs["out"]
        else:
            result = op(*args, **kwargs)
        accessed = accesses(op, args, kwargs, result)
        is_view = op.is_view or name == "_unsafe_view"
        if name in PRODUCTS:
            self._add_product(on_device(args))
        if self._inside is not None:
            if not is_view:
                self._inside.reads.extend(accessed.reads)
                self._inside.writes.extend(accessed.writes)
            return result
        self.calls += 1
        self.host_waits += bool(reads_number)
        if is_view:
            return result
        self._add_new(accessed.new)
        if op.namespace == "c10d":
            self._add_collective(name, on_device(args))
        elif accessed.writes and name not in ALLOCATE:
            self.kernels += 1
            if name not in PRODUCTS:
                self.other_bytes += accessed.bytes
        return result

    def _run_fused(
        self, function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a fused function as it is, and count it as one kernel that reads and
        writes each argument at most once.
        """
        self._inside = inside = Accesses([], [], [])
        try:
            with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
                result = function(*args, **kwargs)
        finally:
            self._inside = None
        arguments = on_device(args, kwargs)
        new = without(on_device(result), arguments)
        accessed = Accesses(
            reads=within(arguments, inside.reads),
            writes=[*within(arguments, inside.writes), *new],
            new=new,
        )
        self.kernels += 1
        self.other_bytes += accessed.bytes
        self._add_new(new)
        return result

    def _add_span(
        self,
        q: Tensor,
        sums: Tensor,
        FEATURES: int,
        MIRRORED: bool,
        TILE: int,
        **arguments: Any,
    ) -> None:
        """Count Triton's kernel of pairs, given its arguments. It reads each once."""
        batch, rows, cols = q.shape
        pairs = rows * cols
        if MIRRORED:  # it does not compute the tiles below the diagonal
            for below in range(0, rows, TILE):
                pairs -= min(TILE, rows - below) * below
        self.kernels += 1
        self.product_flops += 2 * batch * pairs * FEATURES
        self.other_bytes += bytes_of([*on_device(arguments), q, sums])

    def _add_new(self, tensors: list[Tensor]) -> None:
        self.allocations += len(tensors)
        for x in tensors:
            storage = x.untyped_storage()
            self._live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self._live.pop, storage._cdata, None)

    def _add_product(self, operands: list[Tensor]) -> None:
        left, right = operands[-2:]
        self.product_flops += 2 * left.numel() * right.shape[-1]

    def _add_collective(self, name: str, tensors: list[Tensor]) -> None:
        if not tensors:  # of the host
            return
        ranks = dist.get_world_size()
        largest = max(map(bytes_of, ([x] for x in tensors)))
        times = 2 if "reduce" in name else 1  # an all-reduce is also an all-gather
        self.sent_bytes += times * (ranks - 1) / ranks * largest


@dataclass(frozen=True)
class Count:
    """What one layer asks of a GPU, forward and backward."""

    kernels: float
    calls: float
    allocations: float
    host_waits: float
    product_flops: float
    other_bytes: float
    sent_bytes: float
    saved_bytes: float

    def device_ms(self, gpu: str) -> float:
        """Return the milliseconds of products and other bytes on a GPU."""
        products = self.product_flops / PRODUCT_FLOPS
        bandwidth = BANDWIDTH_PART * cost.GPUS[gpu].memory_bandwidth
        return 1e3 * (products + self.other_bytes / bandwidth)

    def collectives_ms(self, gpu: str) -> float:
        """Return the milliseconds of collectives within a node."""
        return 1e3 * self.sent_bytes / cost.GPUS[gpu].node_bandwidth


def added(
    loss: DispersionLoss,
    way: str,
    outputs: list[Tensor],
    group: dist.ProcessGroup | None = None,
    amp: bool = False,
) -> Tensor:
    """Return the scalar that adds the loss of the blocks' outputs to a total."""

    def mean_of(zs: list[Tensor], **hooks: Any) -> Tensor:
        # A backward pass is outside of the forward's autocast.
        with torch.autocast(zs[0].device.type, torch.bfloat16, enabled=amp):
            return loss(zs, group, fit_errors=[], **hooks).mean()

    if way == SAVED:
        return mean_of(outputs)
    if loss.estimator == "sampled":
        return mean_of(outputs, in_hooks=True)

    def of_part(layer: int, z: Tensor, part: slice, arriving: list[Tensor]) -> Tensor:
        return mean_of([z], arriving=arriving)

    return compute_in_backward(outputs, of_part, finish=lambda: None)


def count(
    shape: Shape,
    estimator: str,
    way: str,
    layers: int,
    group: dist.ProcessGroup | None = None,
) -> Count:
    """Return what one of the layers takes on average."""
    loss = DispersionLoss(estimator=estimator)
    of_step = partial(_counted, shape, loss, way, group=group)
    of_step(layers=1)  # what only the first call does
    counter, saved_bytes = of_step(layers=layers)
    return Count(
        kernels=counter.kernels / layers,
        calls=counter.calls / layers,
        allocations=counter.allocations / layers,
        host_waits=counter.host_waits / layers,
        product_flops=counter.product_flops / layers,
        other_bytes=counter.other_bytes / layers,
        sent_bytes=counter.sent_bytes / layers,
        saved_bytes=saved_bytes / layers,
    )


def _counted(
    shape: Shape,
    loss: DispersionLoss,
    way: str,
    layers: int,
    group: dist.ProcessGroup | None,
) -> tuple[Counter, int]:
    """Return the counter of a step, and the bytes saved between its two passes."""
    inputs = [shape.empty("meta").requires_grad_() for _ in range(layers)]
    outputs = [z.view_as(z) for z in inputs]
    gradients = [shape.empty("meta") for _ in range(layers)]  # of the blocks after them
    with Counter(shape.amp) as counter:
        value = added(loss, way, outputs, group)
        saved_bytes = counter.live_bytes()
        torch.autograd.backward([value, *outputs], [None, *gradients])
    return counter, saved_bytes


def count_rows(options: Options) -> list[dict[str, Any]]:
    rows = []
    for text in options.shapes:
        shape = Shape.parse(text)
        for estimator, way in product(options.estimators, WAYS):
            per_layer = count(shape, estimator, way, options.layers)
            row = {"shape": text, "estimator": estimator, "way": way}
            row |= asdict(per_layer)
            for gpu in GPUS:
                row[f"{gpu}_ms"] = per_layer.device_ms(gpu)
                row[f"{gpu}_ms_of_layers"] = options.layers * per_layer.device_ms(gpu)
            rows.append(row)
    return rows


RULE_TOKENS = 8192
RULE_FEATURES = 1024
RULE_RATIO = 0.6  # at most this part of the time of exact
RULE_GPU = "H200"


def rule_rows(options: Options) -> list[dict[str, Any]]:
    """Return the predicted times of exact and moments for one long sequence on one
    rank, and with its tokens on 8.
    """
    rows = []
    for ranks in (1, 8):
        shape = Shape(1, RULE_TOKENS // ranks, RULE_FEATURES, "bfloat16")
        with pretended_ranks(ranks) as group:
            counts = {
                estimator: count(
                    shape, estimator, SAVED, layers=options.layers, group=group
                )
                for estimator in ("exact", "moments")
            }
        total_ms = {
            estimator: per_layer.device_ms(RULE_GPU)
            + per_layer.collectives_ms(RULE_GPU)
            for estimator, per_layer in counts.items()
        }
        for estimator, per_layer in counts.items():
            ratio = total_ms[estimator] / total_ms["exact"]
            rows.append(
                {
                    "ranks": ranks,
                    "estimator": estimator,
                    "kernels": per_layer.kernels,
                    "product_flops": per_layer.product_flops,
                    "other_bytes": per_layer.other_bytes,
                    "sent_bytes": per_layer.sent_bytes,
                    "device_ms": per_layer.device_ms(RULE_GPU),
                    "collectives_ms": per_layer.collectives_ms(RULE_GPU),
                    "ratio_to_exact": ratio,
                    "within_rule": estimator == "exact" or ratio <= RULE_RATIO,
                }
            )
    return rows


@contextlib.contextmanager
def pretended_ranks(ranks: int) -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of this process and others that do not exist; None for one rank.

    Its collectives move nothing.
    """
    if ranks == 1:
        yield None
        return
    dist.init_process_group(
        "meta:fake,cpu:fake", store=FakeStore(), rank=0, world_size=ranks
    )
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class TwoProducts(torch.autograd.Function):
    """The least that a loss of pairs could take: the cosines, and their product."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        cosines = torch.bmm(z, z.transpose(1, 2))
        ctx.save_for_backward(torch.bmm(cosines, z))
        return cosines.sum((1, 2))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gradient,) = ctx.saved_tensors
        return gradient * grad[:, None, None]


HOST_LAYERS = 28
HOST_SHAPE = (8, 32, 16)  # so small that the host takes longer than the device
HOST_SAMPLE = 16  # positions of the sampled estimator
TWO_PRODUCTS = "two products"
ValueOf = Callable[[list[Tensor]], Tensor]


def two_products(zs: list[Tensor]) -> Tensor:
    return torch.stack([TwoProducts.apply(z) for z in zs]).mean()


def layer_by_layer(loss: DispersionLoss, zs: list[Tensor]) -> Tensor:
    """Return the loss as it is of large layers, which are not computed together."""
    return torch.stack([added(loss, SAVED, [z]) for z in zs]).mean()


def host_cases(options: Options) -> dict[tuple[str, str], ValueOf]:
    cases: dict[tuple[str, str], ValueOf] = {(TWO_PRODUCTS, SAVED): two_products}
    for estimator in options.estimators:
        if estimator == "sampled":
            loss = DispersionLoss(estimator=estimator, max_tokens=HOST_SAMPLE)
            cases[estimator, SAVED] = partial(added, loss, SAVED)
        else:
            loss = DispersionLoss(estimator=estimator)
            cases[estimator, SAVED] = partial(layer_by_layer, loss)
        cases[estimator, HOOK] = partial(added, loss, HOOK)
    return cases


def host_rows(options: Options) -> list[dict[str, Any]]:
    """Return CPU microseconds per layer, the least of a few rounds."""
    torch.set_num_threads(1)  # else threads that wait for others count
    cases = host_cases(options)
    best = dict.fromkeys(cases, math.inf)
    with (
        mock.patch.object(kernels, "run_fused", run_compiled),
        pretended_kernel(write_zeros, dtype=torch.float32),
    ):
        for round_ in range(options.host_rounds + 1):
            for case, value_of in cases.items():
                seconds = host_seconds(value_of)
                if round_ > 0:  # the first round compiles
                    best[case] = min(best[case], seconds)
    least = best[TWO_PRODUCTS, SAVED]
    return [
        {
            "estimator": estimator,
            "way": way,
            "host_us": 1e6 * seconds / HOST_LAYERS,
            "ratio_to_two_products": seconds / least,
        }
        for (estimator, way), seconds in best.items()
    ]


def write_zeros(q: Tensor, sums: Tensor, **arguments: Any) -> None:
    """Take the place of Triton's kernel of pairs. What is in new memory would be
    multiplied afterwards, and a CPU is slow with the denormal numbers in it.
    """
    q.zero_()
    sums.zero_()


def run_compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a fused function compiled, also on a CPU."""
    return compiled(function)(*args, **kwargs)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Not dynamic: a trainer's shapes do not change.
    return torch.compile(function, fullgraph=True, dynamic=False)


def host_seconds(value_of: ValueOf) -> float:
    """Return the CPU seconds of forward and backward of all layers."""
    inputs = [
        torch.randn(HOST_SHAPE, device=DEVICE, requires_grad=True)
        for _ in range(HOST_LAYERS)
    ]
    outputs = [z.view_as(z) for z in inputs]
    gradients = [torch.zeros_like(z) for z in inputs]
    torch.get_device_module(DEVICE).synchronize()
    start = time.process_time()
    torch.autograd.backward([value_of(outputs), *outputs], [None, *gradients])
    return time.process_time() - start


@dataclass(frozen=True)
class DeviceTime:
    """The time of a device between its first and its last kernel."""

    busy_ms: float
    idle_ms: float

    @classmethod
    def of(cls, intervals: Iterable[tuple[float, float]]) -> "DeviceTime":
        """Return it of the beginnings and ends of kernels in microseconds, which may
        overlap.
        """
        busy = 0.0
        idle = 0.0
        last_end = None
        for begin, end in sorted(intervals):
            if last_end is None:
                last_end = begin
            idle += max(0.0, begin - last_end)
            busy += max(0.0, end - max(begin, last_end))
            last_end = max(end, last_end)
        return cls(busy_ms=busy / 1e3, idle_ms=idle / 1e3)


class Stack(nn.Module):
    """Residual blocks of one linear layer each, with a loss of their last output."""

    def __init__(self, shape: Shape, layers: int) -> None:
        super().__init__()
        dtype = shape.dtype
        self.amp = shape.amp
        self.blocks = nn.ModuleList(
            nn.Linear(shape.features, shape.features, device=DEVICE, dtype=dtype)
            for _ in range(layers)
        )
        self.x = torch.randn_like(shape.empty(DEVICE))

    def step(self, loss: DispersionLoss | None, way: str) -> None:
        self.zero_grad()
        z = self.x
        outputs = []
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.amp):
            for block in self.blocks:
                z = z + block(z)
                outputs.append(z)
        total = z.float().square().mean()
        if loss is not None:
            total = total + added(loss, way, outputs, amp=self.amp)
        del z, outputs
        total.backward()

    def profiled(self, loss: DispersionLoss | None, way: str) -> DeviceTime:
        """Return the device's time of a step, after two others."""
        on_gpu = DEVICE == "cuda"
        activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
        synchronize = torch.get_device_module(DEVICE).synchronize
        for _ in range(2):
            self.step(loss, way)
        synchronize()
        with profile(activities=[activity]) as profiler:
            self.step(loss, way)
            synchronize()
        # A CPU's ops stand for kernels, to try this out.
        device = DeviceType.CUDA if on_gpu else DeviceType.CPU
        return DeviceTime.of(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == device and not event.is_user_annotation
        )


def measured_rows(options: Options) -> list[dict[str, Any]]:
    """Return the device's times of a step, and those of the loss per layer: busy beyond
    a step without it.
    """
    gpu = cost.gpu_name("") if DEVICE == "cuda" else "CPU"
    rows = []
    for text in options.shapes:
        shape = Shape.parse(text)
        stack = Stack(shape, options.layers)
        off = stack.profiled(None, SAVED)
        rows.append({"shape": text, "estimator": "off", **asdict(off)})
        for estimator, way in product(options.estimators, WAYS):
            on = stack.profiled(DispersionLoss(estimator=estimator), way)
            loss_ms = (on.busy_ms - off.busy_ms) / options.layers
            row = {"shape": text, "estimator": estimator, "way": way, **asdict(on)}
            row["loss_ms_per_layer"] = loss_ms
            if gpu in GPUS:
                per_layer = count(shape, estimator, way, options.layers)
                row["predicted_ms_per_layer"] = per_layer.device_ms(gpu)
                row["predicted_to_measured"] = per_layer.device_ms(gpu) / loss_ms
            rows.append(row)
    return rows


def main(options: Options) -> None:
    if not options.kernel:
        triton_pairs.CHOICE = "0"
    tables = {"counts": count_rows(options)}
    if options.rule:
        tables["rule"] = rule_rows(options)
    if options.host_rounds:
        tables["host"] = host_rows(options)
    if options.measure:
        tables["measured"] = measured_rows(options)
    show(options.json, **tables)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
