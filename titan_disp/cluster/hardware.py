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
    """

    bf16_flops: float
    fp32_flops: float
    memory: float


GPUS = {
    # NVIDIA A100 80GB data sheet (2021).
    "A100": Gpu(bf16_flops=312e12, fp32_flops=19.5e12, memory=80e9),
    # NVIDIA H100 Tensor Core GPU data sheet, SXM: 1,979 TFLOP/s bf16 with sparsity; 989.4 dense in the Hopper white paper.
    "H100": Gpu(bf16_flops=989.4e12, fp32_flops=66.9e12, memory=80e9),
    # NVIDIA H200 data sheet, SXM: the compute of H100, with more memory.
    "H200": Gpu(bf16_flops=989.4e12, fp32_flops=66.9e12, memory=141e9),
    # AMD Instinct MI250X data sheet: 383 and 95.7 (fp32 matrix) TFLOP/s and 128 GB a card, which is two devices (GCDs).
    "MI250X-GCD": Gpu(bf16_flops=191.5e12, fp32_flops=47.85e12, memory=64e9),
    # AMD Instinct MI300X data sheet.
    "MI300X": Gpu(bf16_flops=1307.4e12, fp32_flops=163.4e12, memory=192e9),
}


def find_gpu(name: str) -> Gpu:
    """Raises ConfigError: not in the table."""
    if name not in GPUS:
        raise ConfigError(f"gpu is {name!r}, expected one of {', '.join(GPUS)}")
    return GPUS[name]
