"""Everything TorchTitan 0.2.2 needs to run where there is no accelerator, and why. A no-op where there is one.

- The device type falls back to "cuda" without a GPU, and modules copy it at import.
- ``torch.cpu`` lacks the memory statistics and device properties that the metrics read.
- FSDP2 reduces gradients with PREMUL_SUM, which gloo does not have.
- Scaled-dot-product attention has no sharding strategy for CPU DTensors.
- MFU needs a peak, and TorchTitan would take an A100's.
"""

import os
import resource
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def active() -> bool:
    """Whether this process has no accelerator."""
    return not torch.accelerator.is_available()


def resident_bytes() -> int:
    """Bytes of memory that this process holds now. Raises OSError where there is no /proc."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def high_water_mark() -> int:
    """Bytes of memory that this process has held at most. Linux' ru_maxrss would know the parent's as well."""
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS counts in bytes


class _CpuModule(ModuleType):
    """``torch.cpu`` plus what TorchTitan asks of a device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        return 0  # torch.cpu says "cpu", but barrier(device_ids=[…]) wants an index

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """Resident memory of this process; Linux tells the current value cheaply, elsewhere it is left out."""
        try:
            resident = resident_bytes()
        except OSError:
            return {"num_alloc_retries": 0, "num_ooms": 0}
        return {
            "active_bytes.all.peak": resident,
            "reserved_bytes.all.peak": resident,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass


def install() -> None:
    """Make TorchTitan's modules, imported or yet to be, see the CPU as their device."""
    if not active():
        return
    import torchtitan.tools.utils as titan_utils

    module = _CpuModule("titan_disp_cpu_device")
    for name, loaded in list(sys.modules.items()):
        if name.startswith("torchtitan"):
            for copied, value in (("device_type", "cpu"), ("device_module", module)):
                if hasattr(loaded, copied):
                    setattr(loaded, copied, value)
    titan_utils.get_peak_flops = lambda device_name: float("nan")  # "mfu: nan%" is the truth on a CPU


def adapt(model: nn.Module, tp_mesh: DeviceMesh | None) -> None:
    """Mend a model that has been parallelized, before its first step.

    Args:
        model: with blocks in ``model.layers``, after TP and FSDP.
        tp_mesh: the tensor-parallel mesh, or None.
    """
    if not active():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    if tp_mesh is not None:
        for block in model.get_submodule("layers").children():
            attention: Any = block.get_submodule("attention.inner_attention")
            attention.forward = _on_local_heads(attention.forward)


def _on_local_heads(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """[B, heads, N, head_dim] sharded over heads: attention needs no communication, so each rank does its own."""

    def forward(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Tensor:
        if not isinstance(q, DTensor) or not isinstance(k, DTensor) or not isinstance(v, DTensor):
            return attention(q, k, v, **kwargs)  # its own already
        out = attention(q.to_local(), k.to_local(), v.to_local(), **kwargs)
        return DTensor.from_local(out, q.device_mesh, q.placements, run_check=False)

    return forward
