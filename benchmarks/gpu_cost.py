"""Count the GPU work of the dispersion loss, on any machine, and predict its time.

    python benchmarks/gpu_cost.py            # a table for three shapes and all estimators
    python benchmarks/gpu_cost.py --ranks 8  # one rank of 8 that share each sequence
    python benchmarks/gpu_cost.py --measure  # compare with measured times on this GPU

With TITAN_DISP_TRITON=0, the compiled functions that the Triton kernel of pairs replaces
are counted.

The loss runs on meta tensors, which have shapes but no data, and takes the path of a
GPU. Unless a name ends in "of_layers", counts are per layer, forward and backward:

kernels         launched kernels. A fused function counts as one; so does the Triton
                kernel of pairs, with its products
host_waits      reads of a number from the device, for which the host waits
product_flops   FLOPs of matrix products
other_bytes     bytes that all other kernels read and write. The sum of the gradients of
                the loss and of the model is included
sent_bytes      bytes that a rank sends in collectives; 0 without --ranks
saved_bytes     bytes held from forward to backward
H100_ms, …      milliseconds of products, other bytes and collectives within a node, added
                up, without gaps between kernels
measured_ms     with --measure, milliseconds of the same kernels on this device

"way" says where the gradient is computed: "saved" in the forward pass, or "hook" in a
hook of the backward pass, as the trainer does for large layers.
"""

import contextlib
import re
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from measuring import DEVICE, Printed, show, timed
from titan_disp.cluster import cost
from titan_disp.cluster.plan import BANDWIDTH_PART
from titan_disp.dispersion import DispersionLoss, kernels, triton_pairs
from titan_disp.dispersion.layers import compute_in_backward
from titan_disp.dispersion.loss import ESTIMATORS

SAVED = "saved"
HOOK = "hook"
WAYS = (SAVED, HOOK)

# FLOP/s of matrix products. Bare products of [8, 4096, 1024] in bf16 took 1.1 ms on an H100
# (docs/benchmarks.md): 375 TFLOP/s. The H200 computes at the same speed.
PRODUCT_FLOPS = 400e12
PREDICTED_GPUS = ("H100", "H200")

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "baddbmm_"}
ALLOCATE = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
INDEXED = {"index": "indices", "index_select": "index"}  # read the rows they return
OVERWRITE = {"copy_", "fill_", "zero_"}  # do not read the tensors that they write


PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "amp": (torch.float32, True),
}


@dataclass(frozen=True)
class Shape:
    """The outputs of one block."""

    size: list[int]  # batch, length, features
    dtype: torch.dtype
    amp: bool  # whether the loss runs under autocast to bf16

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """Return the shape of a text such as 8x2048x1024:amp.

        Raises ValueError if the text has another form.
        """
        matched = re.fullmatch(r"(\d+)x(\d+)x(\d+):(float32|bfloat16|amp)", text)
        if matched is None:
            raise ValueError(f"--shapes has {text!r}, expected such as 8x2048x1024:amp")
        *size, precision = matched.groups()
        return cls([*map(int, size)], *PRECISIONS[precision])

    def tokens(self, device: str, layers: int) -> list[Tensor]:
        """Return random tokens of this shape, one tensor per layer."""
        return [
            torch.randn(self.size, dtype=self.dtype, device=device)
            for _ in range(layers)
        ]


@dataclass
class Options(Printed):
    shapes: tuple[str, ...] = (
        "8x2048x1024:amp",
        "8x4096x1024:bfloat16",
        "1x8192x1024:bfloat16",
    )
    """Sequences x tokens per rank x features : float32, bfloat16, or amp (float32 under
    AMP)."""
    estimators: tuple[str, ...] = ESTIMATORS
    layers: int = 28
    """Layers of the loss."""
    ranks: int = 1
    """Ranks over which each sequence is sharded, in the counts."""
    measure: bool = False
    """Also measure the kernels' time on this device: "measured ms"."""


def on_device(*values: Any) -> list[Tensor]:
    """Return the tensors that a GPU would hold: those on the meta device."""
    leaves = tree_leaves(values)
    return [x for x in leaves if isinstance(x, Tensor) and x.device.type == "meta"]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors. A tensor that is expanded from its whole storage counts
    with the bytes of the storage.
    """
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)


def within(tensors: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
    """Return the tensors that share the memory of any tensor in ``memory``."""
    storages = {x.untyped_storage() for x in memory}
    return [x for x in tensors if x.untyped_storage() in storages]


def without(tensors: list[Tensor], memory: list[Tensor]) -> list[Tensor]:
    """Return the tensors that do not share the memory of any tensor in ``memory``."""
    storages = {x.untyped_storage() for x in memory}
    return [x for x in tensors if x.untyped_storage() not in storages]


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
    """Return the tensors on the meta device that a call of an op reads and writes.

    The schema of the op says which arguments it writes. Ops that create a tensor read
    nothing, and ops with indices read or write only some rows: their tensors stand for these
    rows.
    """
    name = op.overloadpacket.__name__
    reads = []
    writes = []
    names = [argument.name for argument in op._schema.arguments]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    for argument in op._schema.arguments:
        tensors = on_device(values.get(argument.name))
        if argument.is_write:
            writes += tensors
        if not (argument.is_write and (argument.is_out or name in OVERWRITE)):
            reads += tensors
    new = without(on_device(result), reads + writes)
    if name.startswith("new_") or name.endswith("_like"):
        reads = []
    elif name in INDEXED:
        reads = [*new, *on_device(values[INDEXED[name]])]
    elif name == "index_put_":  # writes only the rows of ``values``
        writes = on_device(values["values"])
        reads = [*writes, *on_device(values["indices"])]
    return Accesses(reads, [*writes, *new], new)


@dataclass(eq=False)
class Count:
    """The work of a GPU, forward and backward. The docstring of the module explains the
    numbers.
    """

    kernels: float = 0
    host_waits: float = 0
    product_flops: float = 0
    other_bytes: float = 0
    sent_bytes: float = 0
    saved_bytes: float = 0

    def milliseconds(self, gpu: str) -> float:
        """Return the time on one of the GPUs in cost.py, if nothing overlaps."""
        products = self.product_flops / PRODUCT_FLOPS
        bandwidth = BANDWIDTH_PART * cost.GPUS[gpu].memory_bandwidth
        collectives = self.sent_bytes / cost.GPUS[gpu].node_bandwidth
        return 1e3 * (products + self.other_bytes / bandwidth + collectives)


class Counter(Count, TorchDispatchMode):
    """Counts the operations on meta tensors in a with statement; ``counting`` makes one."""

    def __init__(self) -> None:
        super().__init__()
        TorchDispatchMode.__init__(self)
        self._live = weakref.WeakSet[torch.UntypedStorage]()
        self._inside: Accesses | None = None  # of the fused function that is running

    def live_bytes(self) -> int:
        """Return the bytes of counted tensors that still exist."""
        return sum(storage.nbytes() for storage in self._live)

    def __torch_dispatch__(
        self,
        op: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        reads_number = name == "_local_scalar_dense" and bool(on_device(args))
        if reads_number:
            result: Any = 1  # as if a condition that the device computes were true
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
        self.host_waits += reads_number
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

    def run_fused(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a fused function without compiling it, and count it as one kernel that
        reads and writes each argument at most once.
        """
        self._inside = inside = Accesses([], [], [])
        try:
            # Uncompiled code would reuse memory, with other kernels.
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

    def add_span(
        self,
        q: Tensor,
        sums: Tensor,
        FEATURES: int,
        MIRRORED: bool,
        TILE: int,
        **arguments: Any,
    ) -> None:
        """Count the Triton kernel of pairs, given its arguments. It writes ``q`` and
        ``sums``, and reads each of the others once.
        """
        batch, height, width = q.shape
        pairs = height * width
        if MIRRORED:  # it does not compute the tiles below the diagonal
            for first_row in range(0, height, TILE):
                pairs -= min(TILE, height - first_row) * first_row
        self.kernels += 1
        self.product_flops += 2 * batch * pairs * FEATURES
        self.other_bytes += bytes_of([*on_device(arguments), q, sums])

    def _add_new(self, tensors: list[Tensor]) -> None:
        self._live.update(x.untyped_storage() for x in tensors)

    def _add_product(self, operands: list[Tensor]) -> None:
        left, right = operands[-2:]
        self.product_flops += 2 * left.numel() * right.shape[-1]

    def _add_collective(self, name: str, tensors: list[Tensor]) -> None:
        """Count the bytes that a rank sends in a ring."""
        if not tensors:  # a collective of CPU tensors
            return
        ranks = dist.get_world_size()
        largest = max(bytes_of([x]) for x in tensors)
        times = 2 if "reduce" in name else 1  # an all-reduce includes an all-gather
        self.sent_bytes += times * (ranks - 1) / ranks * largest


@contextlib.contextmanager
def counting(amp: bool) -> Iterator[Counter]:
    """Yield a counter of the block's operations on meta tensors. In the block, the loss takes
    the path of a GPU, under autocast to bf16 with ``amp``.
    """
    counter = Counter()

    def takes(x: Tensor, pair: triton_pairs.PairFunction) -> bool:
        return triton_pairs.CHOICE != "0" and x.dtype == torch.bfloat16

    # Stands in for the module that imports Triton: ``span_kernel[grid]`` counts.
    module = mock.MagicMock(span_kernel=defaultdict(lambda: counter.add_span))
    with (
        mock.patch.dict(sys.modules, {triton_pairs.KERNELS: module}),
        mock.patch.object(triton_pairs, "takes", takes),
        mock.patch.object(kernels, "run_fused", counter.run_fused),
        # torch has no autocast for meta tensors.
        mock.patch.multiple(
            torch,
            autocast=lambda *args, **kwargs: contextlib.nullcontext(),
            is_autocast_enabled=lambda device: amp,
            get_autocast_dtype=lambda device: torch.bfloat16,
        ),
        counter,
    ):
        yield counter


def added(
    loss: DispersionLoss,
    way: str,
    outputs: list[Tensor],
    group: dist.ProcessGroup | None = None,
    amp: bool = False,
) -> Tensor:
    """Return a scalar to add to a total loss, whose backward pass then includes the
    gradient of the loss of the blocks' outputs. With "hook", the scalar is 0, except for the
    sampled estimator.
    """

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


def as_outputs(tokens: list[Tensor]) -> list[Tensor]:
    """Return the same tensors as the outputs of blocks, which need gradients."""
    return [z.detach().requires_grad_().view_as(z) for z in tokens]


def count(
    shape: Shape,
    estimator: str,
    way: str,
    layers: int,
    group: dist.ProcessGroup | None = None,
) -> Count:
    """Return the mean work per layer of the second of two steps."""
    loss = DispersionLoss(estimator=estimator)
    for number in (1, layers):  # some work is done in the first call only
        outputs = as_outputs(shape.tokens("meta", number))
        gradients = shape.tokens("meta", number)  # from the next blocks
        with counting(shape.amp) as counter:
            value = added(loss, way, outputs, group)
            counter.saved_bytes = counter.live_bytes()
            torch.autograd.backward([value, *outputs], [None, *gradients])
    return Count(*(getattr(counter, n.name) / layers for n in fields(Count)))


def measured_ms(shape: Shape, estimator: str, way: str, layers: int) -> float:
    """Return the mean time per layer of the kernels that ``count`` counts, on this device,
    after two steps that warm up.
    """
    # On a CPU, ops stand in for kernels, so that this code can be tested.
    activity = getattr(ProfilerActivity, DEVICE.upper())
    device = getattr(DeviceType, DEVICE.upper())
    loss = DispersionLoss(estimator=estimator)
    tokens = shape.tokens(DEVICE, layers)
    gradients = shape.tokens(DEVICE, layers)

    def step() -> None:
        outputs = as_outputs(tokens)
        value = added(loss, way, outputs, amp=shape.amp)
        torch.autograd.backward([value, *outputs], [None, *gradients])

    for _ in range(2):
        timed(step)  # waits for the device, so that the profile has none of its kernels
    with profile(activities=[activity]) as profiler:
        timed(step)
    microseconds = sum(
        event.time_range.elapsed_us()
        for event in profiler.events()
        if event.device_type == device and not event.is_user_annotation
    )
    return microseconds / 1e3 / layers


def rows(options: Options) -> list[dict[str, Any]]:
    """Return a row for each shape, estimator and way."""
    table = []
    cases = product(options.shapes, options.estimators, WAYS)
    with fake_ranks(options.ranks) as group:
        for text, estimator, way in cases:
            shape = Shape.parse(text)
            per_layer = count(shape, estimator, way, options.layers, group)
            row = {"shape": text, "estimator": estimator, "way": way}
            row |= asdict(per_layer)
            for gpu in PREDICTED_GPUS:
                milliseconds = per_layer.milliseconds(gpu)
                row[f"{gpu}_ms"] = milliseconds
                row[f"{gpu}_ms_of_layers"] = options.layers * milliseconds
            if options.measure:
                row["measured_ms"] = measured_ms(shape, estimator, way, options.layers)
            table.append(row)
    return table


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[dist.ProcessGroup | None]:
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


def main(options: Options) -> None:
    if options.measure and options.ranks > 1:
        raise SystemExit("--measure measures one rank: leave out --ranks")
    show(options.json, counts=rows(options))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
