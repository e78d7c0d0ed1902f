"""GPUs by name: peaks and memory as the vendors' data sheets give them."""

from dataclasses import dataclass

from titan_disp.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One device as torch sees it.

    Attributes:
        bf16_flops: peak of dense bf16 matrix products, FLOP/s. Data sheets that give it with sparsity give twice that.
        fp32_flops: peak of fp32 matrix products without TF32, FLOP/s.
        memory: bytes, of 1e9 to a GB. The devices have some 7 % more (their GB are GiB), which is about what the CUDA or ROCm
            context, NCCL and fragmentation take.
        node_bandwidth: bytes/s that a device sends to others of its node, in one direction: what the data sheet calls half of
            the bidirectional peak.
        network_bandwidth: the same to other nodes, of a machine that is named beside it: another one has other network cards.
    """

    bf16_flops: float
    fp32_flops: float
    memory: float
    node_bandwidth: float
    network_bandwidth: float


GPUS = {
    # NVIDIA A100 80GB data sheet (2021): NVLink 600 GB/s both ways. DGX A100: a 200 Gb/s card for each GPU.
    "A100": Gpu(312e12, 19.5e12, memory=80e9, node_bandwidth=300e9, network_bandwidth=25e9),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM: 1,979 TFLOP/s bf16 with sparsity; 989.4 dense in the Hopper white paper.
    # NVLink 900 GB/s both ways. DGX H100: a 400 Gb/s card for each GPU.
    "H100": Gpu(989.4e12, 66.9e12, memory=80e9, node_bandwidth=450e9, network_bandwidth=50e9),
    # NVIDIA H200 data sheet, SXM: the compute and the links of H100, with more memory.
    "H200": Gpu(989.4e12, 66.9e12, memory=141e9, node_bandwidth=450e9, network_bandwidth=50e9),
    # AMD Instinct MI250X data sheet: 383 and 95.7 (fp32 matrix) TFLOP/s and 128 GB a card, which is two devices (GCDs).
    # Frontier: 50 GB/s where two cards are joined by one link, the narrowest of a ring; four 200 Gb/s cards for eight devices.
    "MI250X-GCD": Gpu(191.5e12, 47.85e12, memory=64e9, node_bandwidth=50e9, network_bandwidth=12.5e9),
    # AMD Instinct MI300X data sheet: 896 GB/s both ways to the other seven. A 400 Gb/s card for each, as its platforms have it.
    "MI300X": Gpu(1307.4e12, 163.4e12, memory=192e9, node_bandwidth=448e9, network_bandwidth=50e9),
}


def find_gpu(name: str) -> Gpu:
    """Raises ConfigError: not in the table."""
    if name not in GPUS:
        raise ConfigError(f"gpu is {name!r}, expected one of {', '.join(GPUS)}")
    return GPUS[name]
