"""This table has the peak FLOP/s, memory and bandwidths of GPUs, each with its source."""

from dataclasses import dataclass

from titan_disp.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """Describe one device as torch sees it.

    Attributes:
        bf16_flops: peak FLOP/s of dense bf16 matrix products. Peaks with sparsity in data sheets are twice as high.
        fp32_flops: peak FLOP/s of fp32 matrix products without TF32.
        memory: bytes, with 1 GB = 1e9 bytes. Vendors mean GiB, which are 7 % larger. About as much is taken by the CUDA
            or ROCm context, NCCL and fragmentation.
        node_bandwidth: peak bytes/s that a device sends to others of its node. Data sheets often name the sum of both
            directions, which is twice as much.
        network_bandwidth: bytes/s that a device sends to other nodes, for the machine named next to it. Other machines
            have other network cards.
    """

    bf16_flops: float
    fp32_flops: float
    memory: float
    node_bandwidth: float
    network_bandwidth: float


# Each number was compared with the source named beside it: data sheets and the white paper in copies of their tables that
# others have published, the other pages themselves. "derived" says how a number follows from others. None of these
# numbers was measured here.
GPUS = {
    "A100": Gpu(
        bf16_flops=312e12,  # NVIDIA A100 data sheet (80 GB SXM): 624 with sparsity
        fp32_flops=19.5e12,  # the same
        memory=80e9,  # the same
        node_bandwidth=300e9,  # NVIDIA's blog "Introducing NVIDIA HGX A100": 600 GB/s both ways, through NVSwitch
        network_bandwidth=25e9,  # DGX A100 data sheet: 8 single-port ConnectX-6 cards of 200 Gb/s for 8 GPUs
    ),
    "H100": Gpu(
        # Hopper white paper, H100 SXM5. Data sheet: 1,979 TFLOP/s with sparsity, which is twice as much.
        bf16_flops=989.4e12,
        fp32_flops=66.9e12,  # the same; derived: 132 SMs of 128 cores at 1.98 GHz, 2 FLOPs each
        memory=80e9,  # H100 data sheet, SXM
        node_bandwidth=450e9,  # the same: NVLink, 900 GB/s both ways
        network_bandwidth=50e9,  # DGX BasePOD reference architecture: 8 single-port ConnectX-7 of 400 Gb/s for 8 GPUs
    ),
    "H200": Gpu(
        bf16_flops=989.4e12,  # H200 data sheet, SXM: the compute of an H100 (1,979 TFLOP/s with sparsity)
        fp32_flops=66.9e12,  # the same (67 TFLOP/s)
        memory=141e9,  # the same
        node_bandwidth=450e9,  # the same: NVLink, 900 GB/s both ways
        network_bandwidth=50e9,  # DGX BasePOD reference architecture: DGX H200 has the network cards of DGX H100
    ),
    # One of the two dies (GCDs) of a card. torch sees each as a device.
    "MI250X-GCD": Gpu(
        # AMD's table of the MI200 series: 383.0 TFLOP/s for a card. Derived from ROCm's page "MI250 microarchitecture":
        # 1,024 FLOPs per clock and CU, 110 CUs, 1.7 GHz.
        bf16_flops=191.5e12,
        fp32_flops=47.85e12,  # AMD's table: 95.7 TFLOP/s for a card (matrix). Derived: 256 FLOPs per clock and CU
        memory=64e9,  # ROCm's page "GPU specifications": 128 GiB for a card
        # Frontier User Guide: 200 GB/s between the two dies of a card, and 50 to 100 GB/s between dies of two cards. A
        # ring over all eight is as fast as its slowest link, if it uses one of 50 GB/s; that it does is our assumption.
        node_bandwidth=50e9,
        network_bandwidth=12.5e9,  # Frontier User Guide: 4 cards of 200 Gb/s for 8 dies
    ),
    "MI300X": Gpu(
        bf16_flops=1307.4e12,  # ROCm's page "MI300 microarchitecture": peak of dense bf16 matrix products
        fp32_flops=163.4e12,  # the same, fp32 matrix products
        memory=192e9,  # ROCm's page "GPU specifications": 192 GiB
        # The same page on the microarchitecture: a link to each of the other seven. Derived: 16 lanes of 32 Gb/s are 64
        # GB/s one way. The lanes' number and speed are from the press (B. Wheeler, January 2024), not from AMD's pages.
        # A ring uses fewer links at a time than all seven, and may be slower.
        node_bandwidth=448e9,
        network_bandwidth=50e9,  # Azure ND MI300X v5: 8 NDR ports of 400 Gb/s for 8 GPUs. Other machines differ
    ),
}


def find_gpu(name: str) -> Gpu:
    """Return a GPU of the table.

    Raises:
        ConfigError: The table has no GPU of this name.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu is {name!r}, expected one of {', '.join(GPUS)}")
    return GPUS[name]
