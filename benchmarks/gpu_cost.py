"""Count the GPU work of the dispersion loss, on any machine, and predict its time.

    python benchmarks/gpu_cost.py            # a table for three shapes and all estimators
    python benchmarks/gpu_cost.py --rule     # compare moments with exact for a long sequence
    python benchmarks/gpu_cost.py --measure  # compare with the times of steps on this GPU
    python benchmarks/gpu_cost.py --no-kernel  # without the Triton kernel of pairs

The loss runs on meta tensors, which have shapes but no data, and takes the path of a
GPU. All numbers are per layer, forward and backward:

kernels         launched kernels. A fused function counts as one; so does the Triton
                kernel of pairs, with its products
calls           calls of PyTorch's dispatcher, including views
allocations     new tensors that need memory
host_waits      numbers that the host reads from the device, and waits for
product_flops   FLOPs of matrix products
other_bytes     bytes that all other kernels read and write. The sum of the gradients of
                the loss and of the model is included
sent_bytes      bytes that a rank sends in collectives
saved_bytes     bytes held from forward to backward
H100_ms, …      the time of products and other bytes, without gaps between kernels

"way" says where the gradient is computed: "saved" in the forward pass, or "hook" in a
hook of the backward pass, as the trainer does for large layers.

Host times are CPU microseconds per layer with few small tokens. On a CPU, they are those
of the CPU's path with compiled functions. The Triton kernel of pairs is replaced by
writing zeros, so its launch is not included. "two products" is a lower limit for a loss
of pairs: two products in one autograd function.
"""

import contextlib
import functools
import math
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from itertools import product
from typing import Any
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

# FLOP/s of matrix products. Bare products of [8, 4096, 1024] in bf16 took 1.1 ms on an H100
# (docs/benchmarks.md): 375 TFLOP/s. The H200 computes at the same speed.
PRODUCT_FLOPS = 400e12
GPUS = ("H100", "H200")

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "baddbmm_"}
ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
OVERWRITE = {"copy_", "fill_", "zero_"}  # do not read the tensors that they write


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
    """Rounds of host times. The least of each time counts. A first round compiles for
    about a minute. With 0, there are no host times."""
    rule: bool = False
    """Compare moments with exact for one sequence of 8192 tokens, on 1 and 8 ranks."""
    kernel: bool = True
    """Use the Triton kernel of pairs. Otherwise, use the compiled functions that it
    replaces, as with TITAN_DISP_TRITON=0."""
    measure: bool = False
    """Measure each estimator in steps of a stack of layers on this device."""


def on_device(*values: Any) -> list[Tensor]:
    """Return the tensors that a GPU would hold: those on the meta device."""
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, Tensor) and x.device.type == "meta"]


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors. Expanded elements count once."""
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)


def within(tensors: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
    """Return the tensors that share the memory of any tensor in ``memory``."""
    storages = {storage_of(x) for x in memory}
    return [x for x in tensors if storage_of(x) in storages]


def without(tensors: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
    """Return the tensors that do not share the memory of any tensor in ``memory``."""
    storages = {storage_of(x) for x in memory}
    return [x for x in tensors if storage_of(x) not in storages]


@dataclass(frozen=True)
class Accesses:
    """The tensors that one call of an op reads and writes."""

    reads: list[Tensor]
    writes: list[Tensor]  # including the new tensors
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
    """Return the tensors that a call of an op reads and writes."""
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
    elif name == "index":  # reads only the rows that it returns
        reads = [*new, *on_device(values["indices"])]
    elif name == "index_select":
        reads = [*new, *on_device(values["index"])]
    elif name == "index_put_":  # writes only the rows of ``values``
        writes = on_device(values["values"])
        reads = [*writes, *on_device(values["indices"])]
    return Accesses(reads, [*writes, *new], new)


@contextlib.contextmanager
def pretended_kernel(launch: Callable[..., None], dtype: torch.dtype) -> Iterator[None]:
    """Use the Triton kernel of pairs for tokens of this dtype on any device, but call
    ``launch`` with the kernel's arguments instead of the kernel.
    """

    def takes(x: Tensor, pair: triton_pairs.PairFunction) -> bool:
        return triton_pairs.CHOICE != "0" and x.dtype == dtype

    # The module that imports Triton. The grid is the key of ``span_kernel``.
    module = mock.MagicMock(span_kernel=defaultdict(lambda: launch))
    with (
        mock.patch.dict(sys.modules, {triton_pairs.KERNELS: module}),
        mock.patch.object(triton_pairs, "takes", takes),
    ):
        yield


@dataclass(eq=False)
class Count:
    """The work of a GPU, forward and backward. The docstring of the module explains the
    numbers.
    """

    kernels: float = 0
    calls: float = 0
    allocations: float = 0
    host_waits: float = 0
    product_flops: float = 0
    other_bytes: float = 0
    sent_bytes: float = 0
    saved_bytes: float = 0

    def device_ms(self, gpu: str) -> float:
        """Return the milliseconds of products and other bytes on a GPU."""
        products = self.product_flops / PRODUCT_FLOPS
        bandwidth = BANDWIDTH_PART * cost.GPUS[gpu].memory_bandwidth
        return 1e3 * (products + self.other_bytes / bandwidth)

    def collectives_ms(self, gpu: str) -> float:
        """Return the milliseconds of collectives within a node."""
        return 1e3 * self.sent_bytes / cost.GPUS[gpu].node_bandwidth


class Counter(Count, TorchDispatchMode):
    """Counts the operations on meta tensors in a with statement."""

    def __init__(self, amp: bool) -> None:
        super().__init__()
        TorchDispatchMode.__init__(self)
        self.amp = amp
        self._live: dict[int, int] = {}  # bytes by storage
        self._inside: Accesses | None = None  # of the fused function that is running
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
        """Return the bytes of counted tensors that still exist."""
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
            result: Any = 1  # for a test on the device that is true
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
        """Run a fused function without compiling it, and count it as one kernel that
        reads and writes each argument at most once.
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
        """Count the Triton kernel of pairs, given its arguments. Each is read once."""
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
        """Count the bytes that a rank sends in a ring."""
        if not tensors:  # a collective of the host
            return
        ranks = dist.get_world_size()
        largest = max(map(bytes_of, ([x] for x in tensors)))
        times = 2 if "reduce" in name else 1  # an all-reduce includes an all-gather
        self.sent_bytes += times * (ranks - 1) / ranks * largest


def added(
    loss: DispersionLoss,
    way: str,
    outputs: list[Tensor],
    group: dist.ProcessGroup | None = None,
    amp: bool = False,
) -> Tensor:
    """Return a scalar that adds the loss of the blocks' outputs to a total loss."""

    def mean_of(zs: list[Tensor], **hooks: Any) -> Tensor:
        # The autocast of the forward does not include the backward pass.
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
    """Return the mean work per layer."""
    loss = DispersionLoss(estimator=estimator)
    of_step = partial(_counted, shape, loss, way, group=group)
    of_step(layers=1)  # some work is done in the first call only
    counter = of_step(layers=layers)
    return Count(*(getattr(counter, n.name) / layers for n in fields(Count)))


def _counted(
    shape: Shape,
    loss: DispersionLoss,
    way: str,
    layers: int,
    group: dist.ProcessGroup | None,
) -> Counter:
    """Return the counter of a step of all layers."""
    inputs = [shape.empty("meta").requires_grad_() for _ in range(layers)]
    outputs = [z.view_as(z) for z in inputs]
    gradients = [shape.empty("meta") for _ in range(layers)]  # from the next blocks
    with Counter(shape.amp) as counter:
        value = added(loss, way, outputs, group)
        counter.saved_bytes = counter.live_bytes()
        torch.autograd.backward([value, *outputs], [None, *gradients])
    return counter


def count_rows(options: Options) -> list[dict[str, Any]]:
    """Return a row for each shape, estimator and way."""
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
RULE_RATIO = 0.6  # the largest allowed ratio of times, moments to exact
RULE_GPU = "H200"


def rule_rows(options: Options) -> list[dict[str, Any]]:
    """Return the predicted times of exact and moments for one long sequence, on one rank
    and sharded over 8 ranks.
    """
    rows = []
    for ranks in (1, 8):
        shape = Shape(1, RULE_TOKENS // ranks, RULE_FEATURES, "bfloat16")
        exact_ms = math.nan
        for estimator in ("exact", "moments"):
            with pretended_ranks(ranks) as group:
                per_layer = count(
                    shape, estimator, SAVED, layers=options.layers, group=group
                )
            device_ms = per_layer.device_ms(RULE_GPU)
            collectives_ms = per_layer.collectives_ms(RULE_GPU)
            if estimator == "exact":
                exact_ms = device_ms + collectives_ms
            ratio = (device_ms + collectives_ms) / exact_ms
            rows.append(
                {
                    "ranks": ranks,
                    "estimator": estimator,
                    **asdict(per_layer),
                    "device_ms": device_ms,
                    "collectives_ms": collectives_ms,
                    "ratio_to_exact": ratio,
                    "within_rule": estimator == "exact" or ratio <= RULE_RATIO,
                }
            )
    return rows


@contextlib.contextmanager
def pretended_ranks(ranks: int) -> Iterator[dist.ProcessGroup | None]:
    """Yield a group of this process and other ranks that do not exist; None for one rank.

    Collectives of the group move no data.
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
    """A lower limit for a loss of pairs: the cosines, and their product with the tokens."""

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
    """Return the loss without batches of several layers, as for large layers."""
    return torch.stack([added(loss, SAVED, [z]) for z in zs]).mean()


def host_cases(options: Options) -> dict[tuple[str, str], ValueOf]:
    """Return functions that compute a loss, by estimator and way."""
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
    """Return the CPU microseconds per layer, the least of several rounds."""
    torch.set_num_threads(1)  # otherwise, waiting threads would count
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
    """Replace the Triton kernel of pairs. New memory would have denormal numbers, with
    which the CPU's next products would be slow.
    """
    q.zero_()
    sums.zero_()


def run_compiled(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of a fused function, which is compiled on a CPU too."""
    return compiled(function)(*args, **kwargs)


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled function. It is not dynamic: a trainer's shapes are fixed."""
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
        """Return the time, given the beginning and the end of each kernel in microseconds.
        Kernels may overlap.
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
    """Residual blocks with one linear layer each, and a loss of the last output."""

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
        """Run forward and backward, with a dispersion loss if it is not None."""
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
        """Return the device's time of a step, after two steps that warm up."""
        # A CPU's ops stand for kernels, to test this code.
        activity = getattr(ProfilerActivity, DEVICE.upper())
        device = getattr(DeviceType, DEVICE.upper())
        synchronize = torch.get_device_module(DEVICE).synchronize
        for _ in range(2):
            self.step(loss, way)
        synchronize()
        with profile(activities=[activity]) as profiler:
            self.step(loss, way)
            synchronize()
        return DeviceTime.of(
            (event.time_range.start, event.time_range.end)
            for event in profiler.events()
            if event.device_type == device and not event.is_user_annotation
        )


def measured_rows(options: Options) -> list[dict[str, Any]]:
    """Return the device's times of a step, and the busy time of the loss per layer: the
    difference to a step without the loss.
    """
    gpu = "CPU"
    if DEVICE == "cuda":
        gpu = cost.gpu_name("")
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
