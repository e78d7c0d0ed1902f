"""TorchTitan 0.2.2 needs these changes to run without an accelerator.

With one, nothing here has an effect.

- The device type falls back to "cuda" without a GPU, and modules copy it at import.
- ``torch.cpu`` lacks the memory statistics and device properties that the metrics read.
- FSDP2 reduces gradients with PREMUL_SUM, which gloo does not support.
- MFU needs a peak, and TorchTitan would take that of an A100.
- Flex attention has no backward pass.
- The two threads of a gloo group corrupt the heap if both end a collective at once.
"""

import contextlib
import functools
import logging
import os
import re
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


def active() -> bool:
    """Return whether this process has no accelerator."""
    return not torch.accelerator.is_available()


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds now.

    Raises OSError where there is no /proc.
    """
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def high_water_mark() -> int:
    """Return the most bytes of memory that this process has held.

    On Linux, ru_maxrss would include the parent's.
    """
    try:
        with open("/proc/self/status") as file:
            return next(
                int(line.split()[1]) * 1024
                for line in file
                if line.startswith("VmHWM:")
            )
    except OSError:
        # macOS counts in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class _CpuModule(ModuleType):
    """Extend ``torch.cpu`` with what TorchTitan expects of a device module."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def current_device() -> int:
        # torch.cpu returns "cpu", but barrier(device_ids=[…]) expects an index
        return 0

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return "CPU"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        stats = {"num_alloc_retries": 0, "num_ooms": 0}
        with contextlib.suppress(OSError):  # only Linux reports it cheaply
            stats |= dict.fromkeys(
                ("active_bytes.all.peak", "reserved_bytes.all.peak"), resident_bytes()
            )
        return stats

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        pass

    empty_cache = reset_peak_memory_stats


def install() -> None:
    """Make the CPU the device of TorchTitan's modules, whether or not they are imported
    already.
    """
    if not active():
        return
    import torchtitan.tools.utils as titan_utils
    from torchtitan.models.attention import FlexAttentionWrapper
    from torchtitan.tools.logging import logger

    module = _CpuModule("titan_disp_cpu_device")
    for name, loaded in list(sys.modules.items()):
        if name.startswith("torchtitan"):
            for copied, value in (("device_type", "cpu"), ("device_module", module)):
                if hasattr(loaded, copied):
                    setattr(loaded, copied, value)
    FlexAttentionWrapper._compiled_flex_attn = _masked_attention
    # A CPU's peak is unknown, so TorchTitan computes "mfu: nan%".
    titan_utils.get_peak_flops = lambda device_name: float("nan")
    logger.addFilter(_without_unknown_mfu)  # once, however often this is called
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
    """Attend as flex attention does, q [B, heads, N, head_dim], but with the whole
    mask, [B, 1, N, N] bool.
    """
    batch = torch.arange(len(q)).view(-1, 1, 1, 1)
    place = torch.arange(q.shape[2])
    mask = block_mask.mask_mod(batch, torch.zeros_like(batch), place[:, None], place)
    return scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa
    )


def _without_unknown_mfu(record: logging.LogRecord) -> bool:
    if isinstance(record.msg, str):
        record.msg = re.sub(r"  (\x1b\[\d+m)?mfu: nan%", "", record.msg)
    return True


def _give_gloo_groups_one_thread() -> None:
    """Make every gloo group that is created from now on run its collectives in one
    thread instead of two.

    ``ProcessGroupGloo::runLoop`` ends each collective with
    ``pgStatus_->lastCompletedWorkName = opTypeToString(…)``, without the lock that the
    group's two threads share (in torch 2.11, 2.13 and 2.15). A ``std::string`` of more
    than 15 characters is on the heap, and the name of DTensor's all-gather is
    ALLGATHER_COALESCED. Two threads that assign at once free the same memory, or one
    writes its name to memory that the other has freed. A later allocation then aborts
    the process, for example with "malloc(): unaligned tcache chunk detected". With one
    thread, a group's collectives no longer overlap. Ranks cannot wait for each other
    because of this, as all ranks call the collectives of a group in the same order.
    """
    gloo: Any = dist.ProcessGroupGloo
    create = gloo.__init__
    if hasattr(create, "__wrapped__"):
        return  # installed before

    @functools.wraps(create)
    def with_one_thread(
        group: Any,
        store: Any,
        rank: int,
        size: int,
        timeout: Any = dist.default_pg_timeout,
        **others: Any,
    ) -> None:
        # torch takes options, or a timeout, which gives two threads
        given = others.pop("options", timeout)
        if isinstance(given, timedelta) and not any(others.values()):
            create(group, store, rank, size, _with_one_thread(given))
        else:
            create(group, store, rank, size, given, **others)

    gloo.__init__ = with_one_thread


def _with_one_thread(timeout: timedelta) -> Any:
    """Return the options that torch makes from a timeout (``Options::create_default``),
    but with one thread.
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
    """Adapt a model after FSDP, and before its first step."""
    if not active():
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
