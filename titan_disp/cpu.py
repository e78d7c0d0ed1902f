"""This module changes TorchTitan 0.2.2 so that it runs without an accelerator. If there
is an accelerator, nothing is changed. These are the reasons for the changes:

- The device type falls back to "cuda" without a GPU, and modules copy it at import.
- ``torch.cpu`` lacks the memory statistics and device properties that the metrics read.
- FSDP2 reduces gradients with PREMUL_SUM, which gloo does not support.
- MFU needs the peak FLOPs of the device, and TorchTitan would take those of an A100.
- Flex attention has no backward pass.
- The two threads of a gloo group corrupt the heap if both end a collective at once.
"""

import contextlib
import functools
import os
import resource
import sys
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import scaled_dot_product_attention

# Warnings that mean nothing on a CPU: a pattern of the message, and why.
HARMLESS = {
    r"DTensor (random operators|manual_seed\(\)) may not have complete support on cpu": (
        "titan-disp draws parameters without DTensor's random operators"
    ),
    "In CPU autocast, but the target dtype is not supported": (
        "without a GPU, a single rank trains in float32 anyway"
    ),
}


def active() -> bool:
    """Return whether this process has no accelerator."""
    return not torch.accelerator.is_available()


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds now.

    Raises OSError where there is no /proc.
    """
    with open("/proc/self/statm") as file:
        _, resident_pages, *_ = file.read().split()
    return int(resident_pages) * os.sysconf("SC_PAGE_SIZE")


def high_water_mark() -> int:
    """Return the most bytes of memory that this process has held so far."""
    # On Linux, ru_maxrss would include the memory of the parent process.
    try:
        with open("/proc/self/status") as file:
            sizes = (line.split() for line in file)
            return next(int(size[1]) * 1024 for size in sizes if size[0] == "VmHWM:")
    except OSError:
        # macOS counts in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _CpuModule(ModuleType):
    """Extend ``torch.cpu`` with what TorchTitan expects of a device module."""

    def __getattr__(self, name: str) -> Any:
        """Return the attribute of ``torch.cpu`` with this name."""
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        """Return the index of the only CPU, 0."""
        # torch.cpu returns "cpu", but barrier(device_ids=[…]) expects an index
        return 0

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """Return the name of any device, "CPU"."""
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        """Return an object whose ``total_memory`` is the machine's memory in bytes."""
        return SimpleNamespace(
            total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """Return the keys of ``torch.cuda.memory_stats`` that TorchTitan reads.

        The peaks are the memory that the process holds now, in bytes. They are left out
        where there is no /proc.
        """
        stats = {"num_alloc_retries": 0, "num_ooms": 0}
        with contextlib.suppress(OSError):  # only Linux reports it cheaply
            stats |= dict.fromkeys(
                ("active_bytes.all.peak", "reserved_bytes.all.peak"), resident_bytes()
            )
        return stats

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """Do nothing. There is no peak to reset."""

    empty_cache = reset_peak_memory_stats


def install() -> None:
    """Make the CPU the device of TorchTitan, if there is no accelerator.

    TorchTitan's modules may already be imported. A second call changes nothing.
    """
    if not active():
        return
    from torchtitan.models.attention import FlexAttentionWrapper
    from torchtitan.tools import utils as titan_utils

    device = {
        "device_type": "cpu",
        "device_module": _CpuModule("titan_disp_cpu_device"),
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("torchtitan"):
            for name, value in device.items():
                if hasattr(module, name):
                    setattr(module, name, value)
    FlexAttentionWrapper._compiled_flex_attn = _masked_attention
    # A CPU's peak is unknown.
    titan_utils.get_peak_flops = lambda device_name: float("nan")
    if dist.is_gloo_available():
        _give_gloo_groups_one_thread()


def _masked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_mask: BlockMask,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor:
    """Return what flex attention would return, [B, heads, N, head_dim].

    The whole mask, [B, 1, N, N] bool, exists at once, and is the same for all heads.
    ``return_lse`` belongs to the signature and is ignored.
    """
    batch = torch.arange(len(q)).view(-1, 1, 1, 1)
    token = torch.arange(q.shape[2])
    mask = block_mask.mask_mod(batch, torch.zeros_like(batch), token[:, None], token)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )


def _give_gloo_groups_one_thread() -> None:
    """Make each gloo group created from now on use one thread instead of two.

    ``ProcessGroupGloo::runLoop`` ends each collective with
    ``pgStatus_->lastCompletedWorkName = opTypeToString(…)``, without the lock that the
    group's two threads share (in torch 2.11, 2.13 and 2.15). A ``std::string`` of more
    than 15 characters is on the heap, and the name of DTensor's all-gather is
    ALLGATHER_COALESCED. Two threads that assign at once free the same memory, or one
    writes its name to memory that the other has freed. A later allocation then aborts
    the process, for example with "malloc(): unaligned tcache chunk detected". With one
    thread, a group's collectives no longer overlap. This cannot block ranks for ever,
    as all ranks call the collectives of a group in the same order.
    """
    gloo: Any = dist.ProcessGroupGloo
    create = gloo.__init__
    if hasattr(create, "__wrapped__"):
        return  # an earlier call did this

    @functools.wraps(create)
    def with_one_thread(
        group: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = dist.default_pg_timeout,
        options: Any = None,
        **keywords: Any,
    ) -> None:
        """Create the group with one thread, unless the caller has its own options."""
        # The fourth argument is either options, or a timeout from which torch would make
        # options for two threads.
        options = options or timeout
        if isinstance(options, timedelta):
            options = _with_one_thread(options)
        create(group, store=store, rank=rank, size=size, options=options, **keywords)

    gloo.__init__ = with_one_thread


def _with_one_thread(timeout: timedelta) -> Any:
    """Return gloo options with this timeout and one thread.

    The other options are those that torch creates from a timeout
    (``Options::create_default``).
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    if interfaces := os.environ.get("GLOO_SOCKET_IFNAME"):
        options._devices = [
            gloo.create_device(interface=interface)
            for interface in interfaces.split(",")
        ]
    else:
        options._devices = [gloo.create_default_device()]
    return options


def adapt(model: nn.Module) -> None:
    """Make a model's FSDP modules reduce gradients in a way that gloo supports, if there
    is no accelerator. Call this between applying FSDP and the first step.
    """
    if not active():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
