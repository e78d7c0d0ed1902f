"""This table has the peak FLOP/s, memory and bandwidths of GPUs from their vendors' data sheets."""

from dataclasses import dataclass

from titan_disp.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One device as torch sees it.

    Attributes:
        bf16_flops: peak FLOP/s of dense bf16 matrix products. Peaks with sparsity in data sheets are twice as high.
        fp32_flops: peak FLOP/s of fp32 matrix products without TF32.
        memory: bytes, with 1 GB = 1e9 bytes. Vendors mean GiB, which are 7 % larger. About as much is taken by the CUDA
            or ROCm context, NCCL and fragmentation.
        node_bandwidth: bytes/s that a device sends to others of its node: half of the data sheet's bidirectional peak.
        network_bandwidth: bytes/s that a device sends to other nodes, for the machine named next to it. Other machines
            have other network cards.
    """

    bf16_flops: float
    fp32_flops: float
    memory: float
    node_bandwidth: float
    network_bandwidth: float


GPUS = {
    # NVIDIA A100 80GB data sheet (2021): NVLink 600 GB/s both ways. DGX A100: a 200 Gb/s card for each GPU.
    "A100": Gpu(312e12, 19.5e12, memory=80e9, node_bandwidth=300e9, network_bandwidth=25e9),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM: 1,979 TFLOP/s bf16 with sparsity. Hopper white paper: 989.4 dense.
    # NVLink 900 GB/s both ways. DGX H100: a 400 Gb/s card for each GPU.
    "H100": Gpu(989.4e12, 66.9e12, memory=80e9, node_bandwidth=450e9, network_bandwidth=50e9),
    # NVIDIA H200 data sheet, SXM: the compute and the links of an H100, with more memory.
    "H200": Gpu(989.4e12, 66.9e12, memory=141e9, node_bandwidth=450e9, network_bandwidth=50e9),
    # AMD Instinct MI250X data sheet: 383 (bf16) and 95.7 (fp32 matrix) TFLOP/s and 128 GB per card. A card has two
    # devices (GCDs). Frontier: two cards are joined by one link of 50 GB/s, the slowest in a ring. Eight devices share
    # four 200 Gb/s cards.
    "MI250X-GCD": Gpu(191.5e12, 47.85e12, memory=64e9, node_bandwidth=50e9, network_bandwidth=12.5e9),
    # AMD Instinct MI300X data sheet: 896 GB/s both ways to the other seven. Its platforms have a 400 Gb/s card per GPU.
    "MI300X": Gpu(1307.4e12, 163.4e12, memory=192e9, node_bandwidth=448e9, network_bandwidth=50e9),
}


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table.

    Raises:
        ConfigError: The table has no GPU of this name.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu is {name!r}, expected one of {', '.join(GPUS)}")
    return GPUS[name]
