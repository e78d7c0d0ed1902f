"""This module computes what a step costs from shapes alone: memory and checkpoints,
communication, and a table of GPUs.

The activations are counted as eager PyTorch saves them for backward, with flash
attention and a fused norm. A compiled block saves less, so the estimate errs on the
safe side. tests/test_memory.py and benchmarks/step.py compare the estimate with the
tensors of a step.

Communication is counted for ring algorithms, which NCCL and RCCL use for large
messages. In a group of n ranks, an all-gather or a reduce-scatter of B bytes sends
(n−1)/n · B from every rank, and an all-reduce twice as much. If g ranks of the group
share a node, the ring leaves the node only once, so that each of the g ranks sends 1/g
of its bytes over the network. Tree algorithms, latency and other jobs are ignored. The
estimates of memory and communication have not been compared with measurements on GPUs
yet.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torchtitan.config import TORCH_DTYPE_MAP

from titan_disp.checks import build_dispersion_losses
from titan_disp.config.batch import data_parallel_degree, global_batch_size
from titan_disp.config.command_options import Machine
from titan_disp.config.types import JobConfig
from titan_disp.dispersion.cost import Cost, cost_of
from titan_disp.dispersion.layers import GPU_BATCH_ELEMENTS
from titan_disp.errors import ConfigError
from titan_disp.models.arguments import DispModelArgs
from titan_disp.models.decoder import DispModel
from titan_disp.objective import in_backward


@dataclass(frozen=True)
class Memory:
    """Hold the bytes on one GPU at one moment of a step."""

    # weights, gradients and optimizer: the rank's shards; 0 with
    # training.enable_cpu_offload
    weights: int
    gradients: int  # none until the first backward pass of a step
    optimizer: int
    # weights gathered (or cast by autocast) for computing, and their gradients before
    # the reduction
    unsharded: int
    # activations that are saved for backward, and those of a block that is recomputed
    activations: int
    # the saved ∂S/∂z of layers whose gradients are not computed in the backward pass
    dispersion: int
    # All copies that the loss makes of the logits, log-probabilities and their
    # gradients. With a chunked head: the copies for one chunk, and the gradients of
    # hidden states and weight, which the head computes in forward. Later in backward:
    # the gradients of a tied weight until they are added up.
    logits: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def compute_dtype(job_config: JobConfig, fsdp_degree: int) -> torch.dtype:
    """Return the dtype of matrix products and of the outputs of blocks."""
    t = job_config.training
    # FSDP or autocast sets the dtype. TorchTitan 0.2.2 uses neither for TP without FSDP.
    if fsdp_degree > 1 or job_config.parallelism.tensor_parallel_degree == 1:
        return TORCH_DTYPE_MAP[t.mixed_precision_param]
    return TORCH_DTYPE_MAP[t.dtype]


def elements(module: torch.nn.Module, tp: int) -> int:
    """Return how many elements of the weights a rank has before FSDP. TP shards
    matrices, and replicates the vectors of norms.
    """
    vectors = sum(w.numel() for w in module.parameters() if w.ndim < 2)
    return vectors + (sum(w.numel() for w in module.parameters()) - vectors) // tp


def fsdp_groups(model: DispModel, tp: int) -> tuple[int, int, int]:
    """Return the ``elements`` of each of FSDP's groups (models/parallelize.py): of the
    blocks, of untied embeddings, and of the rest.
    """
    blocks = sum(elements(block, tp) for block in model.layers.values())
    embeddings = 0
    if not model.model_args.enable_weight_tying:
        embeddings = sum(elements(table, tp) for table in model.embeddings)
    return blocks, embeddings, elements(model, tp) - blocks - embeddings


def block_elements(job_config: JobConfig, args: DispModelArgs) -> float:
    """Return the saved activations of all blocks, in elements per token of a CP rank."""
    ac = job_config.activation_checkpoint
    saved = args.saved_elements(job_config.parallelism.tensor_parallel_degree)
    none = saved["none"]
    full = saved["full"]
    layers = args.n_layers
    # A budget of 0 saves as much as mode full, and 1 as much as mode none. In between,
    # the compiler interpolates.
    if ac.mode == "memory_budget":
        return layers * (full + ac.memory_budget * (none - full))
    if ac.mode != "selective":
        return layers * saved[ac.mode]
    if ac.selective_ac_option == "op":
        return layers * saved["op"]
    # both 0 and 1 mean that every block is checkpointed
    checkpointed = layers // (int(ac.selective_ac_option) or 1)
    return checkpointed * full + (layers - checkpointed) * none


def saved_gradients(
    job_config: JobConfig, args: DispModelArgs, spread: bool = False
) -> int:
    """Return the number of elements of ∂S/∂z that a rank saves in forward. With
    ``spread``, return the number after backward has spread the gradients of sampled
    tokens over all tokens.
    """
    p = job_config.parallelism
    t = job_config.training
    losses = [loss for _, loss in build_dispersion_losses(job_config).values()]
    shards = p.context_parallel_degree * p.tensor_parallel_degree
    layer = torch.empty(
        t.local_batch_size, t.seq_len // shards, args.dim, device="meta"
    )
    layers = [layer] * len(args.activations)
    if not layers or in_backward(losses, layers, shards > 1):
        return 0
    return len(layers) * sum(
        layer[:, : None if spread else loss.saved_tokens].numel() for loss in losses
    )


def _lower(itemsize: int) -> int:
    """Return the bytes per element of the copy that matrix products use, if there is
    another copy in float32. Return 0 if products are in float32, because they use the
    float32 copy.
    """
    if itemsize < 4:
        return itemsize
    return 0


def logit_bytes(
    job_config: JobConfig, args: DispModelArgs, itemsize: int, tokens: int
) -> int:
    """Return the bytes for the logits of a CP rank's tokens, at the peak in the loss. The
    peak is in backward, or in forward if the head is chunked.
    """
    tp = job_config.parallelism.tensor_parallel_degree
    loss_parallel = tp > 1 and not job_config.parallelism.disable_loss_parallel
    compiled = (
        job_config.compile.enable
        and "loss" in job_config.compile.components
        and not loss_parallel
    )
    chunk = min(job_config.training.head_chunk_tokens, tokens)
    lower = _lower(itemsize)
    # A compiled loss holds the logits and their gradient. An eager loss holds three
    # tensors in fp32: the log-probabilities, their gradient, and the gradient of the
    # logits.
    number = 12
    if compiled:
        number = 2 * itemsize
    if not chunk:
        shards = tp if loss_parallel else 1
        return tokens * args.vocab_size // shards * number
    # The gradients that the chunks give the weight are added up in fp32. With bf16, the
    # gradient of one chunk is a further tensor, and an eager loss also holds the logits
    # in fp32.
    if not compiled or tp > 1:
        number = 4 + lower
    of_chunk = max(chunk * number, lower * (chunk + args.dim))
    return (
        args.vocab_size // tp * (of_chunk + args.dim * 4) + tokens * args.dim * itemsize
    )


def estimate(
    job_config: JobConfig, model: DispModel, fsdp_degree: int, accumulating: bool
) -> Memory:
    """Return one rank's estimated memory at the peak of a step, from a model on the meta
    device.

    FSDP shards over ``fsdp_degree`` ranks, including those of CP. ``accumulating``:
    whether a step has several microbatches.
    """
    p = job_config.parallelism
    t = job_config.training
    args = model.model_args
    tp = p.tensor_parallel_degree
    ac = job_config.activation_checkpoint.mode
    dtype = compute_dtype(job_config, fsdp_degree)
    weights_dtype = TORCH_DTYPE_MAP[t.dtype]
    unsharded_elements = elements(model, tp)
    (blocks, _, rest) = fsdp_groups(model, tp)
    shard = 0
    if not t.enable_cpu_offload:
        shard = -(-unsharded_elements // fsdp_degree) * weights_dtype.itemsize
    # The final norm, the output and a tied model's embeddings stay gathered until their
    # backward. Of the blocks, the current and the next one are gathered. Untied
    # embeddings are not gathered while the output is gathered.
    gathered = rest + 2 * blocks // args.n_layers
    if p.fsdp_reshard_after_forward == "never":
        gathered = unsharded_elements
    unsharded = gathered * dtype.itemsize * 2
    if fsdp_degree == 1:
        # Autocast keeps the cast weights for backward; they have no gradients of their
        # own.
        unsharded = unsharded_elements * dtype.itemsize * (dtype != weights_dtype)
    tokens = t.local_batch_size * t.seq_len // p.context_parallel_degree
    token = tokens * dtype.itemsize
    saved = block_elements(job_config, args) * token
    block = args.saved_elements(tp)
    working = block["gradients"] * token
    if ac != "none":
        working += block["none"] * token
    head = (args.dim / tp + args.dim) * token  # the final norm's input and output
    # Autocast leaves the outputs of blocks, and so their gradients, in the dtype of the
    # weights.
    output = dtype.itemsize
    if fsdp_degree == 1:
        output = weights_dtype.itemsize
    dispersed = saved_gradients(job_config, args) * output
    # the gradients of all tokens in all layers, before backward comes to the head
    spread = saved_gradients(job_config, args, spread=True) * output
    logits = logit_bytes(job_config, args, dtype.itemsize, tokens)
    matrix = args.vocab_size * args.dim // tp
    # a chunked head's gradients, which it computes in forward, and their cast copy
    computed = 0
    cast = 0
    spread_in_loss = spread
    if t.head_chunk_tokens > 0:
        computed = args.dim * token + matrix * 4
        cast = matrix * _lower(dtype.itemsize)
        spread_in_loss = 0
    # three tensors: layers, their unit vectors, and products
    together = 3 * min(dispersed, GPU_BATCH_ELEMENTS * output)
    tied = matrix * dtype.itemsize * args.enable_weight_tying
    before = shard * accumulating
    # Outputs of blocks are counted as saved inputs of the next blocks.
    moments = [
        # in the cross-entropy, or in the head's forward if the head is chunked
        (before, saved + head, spread_in_loss, logits),
        # in the loss of dispersion
        (before, saved + head, dispersed, computed + together),
        # when backward begins with the head
        (before, saved + head, spread, computed + cast),
        # when backward comes to the last block
        (before, saved + working, spread, tied),
        # when backward comes to the first block
        (shard, saved / args.n_layers + working, spread / args.n_layers, tied),
        # when the gradients of output and embedding are added up: the two gradients and
        # their sum, except for the gradient that ``shard`` or ``unsharded`` counts
        (shard, 0, 0, (2 + (accumulating and fsdp_degree == 1)) * tied),
    ]
    # Adam has two moments of the size of the weights.
    memories = [
        Memory(shard, gradients, 2 * shard, unsharded, *map(round, tensors))
        for gradients, *tensors in moments
    ]
    return max(memories, key=lambda memory: memory.total)


def checkpoint_bytes(job_config: JobConfig, model: DispModel) -> int:
    """Return the size of a full checkpoint, in bytes. A tied matrix counts once for
    each of its keys, and its moments count once.
    """
    names = sum(w.numel() for _, w in model.named_parameters(remove_duplicate=False))
    moments = 2 * sum(w.numel() for w in model.parameters())
    return (names + moments) * TORCH_DTYPE_MAP[job_config.training.dtype].itemsize


# Bytes that one part of a checkpoint takes in a plan that rank 0 gathers, and in
# .metadata (measured with Qwen3-0.6B on 8 and on 640 shards).
PLANNED_BYTES = 245
METADATA_BYTES = 185
ADAMW_OPTIONS = 12  # options of AdamW that DCP saves per parameter, one entry each


def checkpoint_parts(model: DispModel, shards: int) -> int:
    """Return how many entries a checkpoint has. A tensor has one entry per shard that
    is not empty.
    """

    def parts(weights: Iterable[torch.Tensor]) -> int:
        chunks = ((len(w), -(-len(w) // shards)) for w in weights)
        return sum(-(-length // chunk) for length, chunk in chunks)

    weights = list(model.parameters())
    names = [w for _, w in model.named_parameters(remove_duplicate=False)]
    return parts(names) + 2 * parts(weights) + ADAMW_OPTIONS * len(weights)


def checkpoint_counts(job_config: JobConfig) -> tuple[int, int, int]:
    """Return how many checkpoints are saved over the run, how many are kept, and the
    largest number that is on disk at one time.
    """
    c = job_config.checkpoint
    steps = job_config.training.steps
    if not c.enable or c.load_only:
        return 0, 0, 0
    saved = {*range(c.interval, steps, c.interval), steps}
    if c.enable_first_step_checkpoint:
        saved.add(1)
    kept = set(sorted(saved)[-c.keep_latest_k :])  # all if keep_latest_k is 0
    if c.keep_every:
        kept |= {step for step in saved if step % c.keep_every == 0}
    return len(saved), len(kept), min(len(saved), len(kept) + 1)


@dataclass(frozen=True)
class Gpu:
    """Describe one device as torch sees it."""

    device: str  # torch's name of the device that has these numbers
    # peak FLOP/s of dense matrix products; data sheets often give twice as much, with
    # sparsity
    bf16_flops: float
    fp32_flops: float  # peak FLOP/s of matrix products without TF32
    # Bytes, with 1 GB = 1e9 bytes. Vendors mean GiB, which are 7 % larger. The CUDA or
    # ROCm context, NCCL and fragmentation take about this difference.
    memory: float
    # peak bytes/s sent to other GPUs of the node; data sheets often give the sum of both
    # directions
    node_bandwidth: float
    # bytes/s sent to other nodes, in the machine that a comment in ``GPUS`` names
    network_bandwidth: float
    # peak bytes/s of its memory; the default is about that of the RTX4090
    memory_bandwidth: float = 1e12


# Each number was compared with the source beside it. For data sheets and the white
# paper, published copies of their tables were read; the other pages were read directly.
# "derived" says how a number follows from other numbers. None was measured here.
GPUS = {
    "A100": Gpu(
        device="NVIDIA A100-SXM4-80GB",
        bf16_flops=312e12,  # NVIDIA A100 data sheet (80 GB SXM): 624 with sparsity
        fp32_flops=19.5e12,  # the same
        memory=80e9,  # the same
        # NVIDIA's blog "Introducing NVIDIA HGX A100": 600 GB/s both ways, through
        # NVSwitch
        node_bandwidth=300e9,
        # DGX A100 data sheet: 8 single-port ConnectX-6 cards of 200 Gb/s for 8 GPUs
        network_bandwidth=25e9,
        memory_bandwidth=2.039e12,  # NVIDIA A100 data sheet
    ),
    "H100": Gpu(
        device="NVIDIA H100 80GB HBM3",
        # Hopper white paper, H100 SXM5. Data sheet: 1,979 TFLOP/s with sparsity, which
        # is twice as much.
        bf16_flops=989.4e12,
        # the same; derived: 132 SMs of 128 cores at 1.98 GHz, 2 FLOPs each
        fp32_flops=66.9e12,
        memory=80e9,  # H100 data sheet, SXM
        node_bandwidth=450e9,  # the same: NVLink, 900 GB/s both ways
        # DGX BasePOD reference architecture: 8 single-port ConnectX-7 of 400 Gb/s for 8
        # GPUs
        network_bandwidth=50e9,
        memory_bandwidth=3.35e12,  # H100 data sheet, SXM
    ),
    "H200": Gpu(
        device="NVIDIA H200",
        # H200 data sheet, SXM: the compute of an H100 (1,979 TFLOP/s with sparsity)
        bf16_flops=989.4e12,
        fp32_flops=66.9e12,  # the same (67 TFLOP/s)
        memory=141e9,  # the same
        node_bandwidth=450e9,  # the same: NVLink, 900 GB/s both ways
        # DGX BasePOD reference architecture: DGX H200 has the network cards of DGX H100
        network_bandwidth=50e9,
        memory_bandwidth=4.8e12,  # H200 data sheet, SXM
    ),
    # One of the two dies (GCDs) of a card. torch sees each as a device.
    "MI250X-GCD": Gpu(
        device="AMD Instinct MI250X",
        # AMD's table of the MI200 series: 383.0 TFLOP/s for a card. Derived from ROCm's
        # page "MI250 microarchitecture": 1,024 FLOPs per clock and CU, 110 CUs, 1.7
        # GHz.
        bf16_flops=191.5e12,
        # AMD's table: 95.7 TFLOP/s for a card (matrix). Derived: 256 FLOPs per clock
        # and CU
        fp32_flops=47.85e12,
        memory=64e9,  # ROCm's page "GPU specifications": 128 GiB for a card
        # Frontier User Guide: 200 GB/s between the two dies of a card, and 50 to 100
        # GB/s between dies of two cards. A ring over all eight is as fast as its
        # slowest link. We assume that the ring uses a link of 50 GB/s.
        node_bandwidth=50e9,
        network_bandwidth=12.5e9,  # Frontier User Guide: 4 cards of 200 Gb/s for 8 dies
        memory_bandwidth=1.6e12,  # AMD's table: 3.2 TB/s for a card
    ),
    "MI300X": Gpu(
        device="AMD Instinct MI300X",
        # ROCm's page "MI300 microarchitecture": peak of dense bf16 matrix products
        bf16_flops=1307.4e12,
        fp32_flops=163.4e12,  # the same, fp32 matrix products
        memory=192e9,  # ROCm's page "GPU specifications": 192 GiB
        # The same page on the microarchitecture: a link to each of the other seven GPUs.
        # Derived: 16 lanes of 32 Gb/s are 64 GB/s one way. The lanes' number and speed
        # are from the press (B. Wheeler, January 2024), not from AMD's pages. A ring
        # uses fewer links at a time than all seven, and may be slower.
        node_bandwidth=448e9,
        # Azure ND MI300X v5: 8 NDR ports of 400 Gb/s for 8 GPUs. Other machines differ
        network_bandwidth=50e9,
        memory_bandwidth=5.3e12,  # ROCm's page on the microarchitecture
    ),
    # GPUs of desktops: PCIe ×16 (4.0, and 5.0 for the last GPU), and 10 Gb/s Ethernet,
    # which is our assumption.
    "RTX3090": Gpu(
        device="NVIDIA GeForce RTX 3090",
        # GA102 white paper: dense, with FP32 sums; twice as much with sparsity
        bf16_flops=71e12,
        fp32_flops=35.6e12,  # the same
        memory=24e9,
        node_bandwidth=32e9,
        network_bandwidth=1.25e9,
        memory_bandwidth=936e9,  # the white paper
    ),
    "RTX4090": Gpu(
        device="NVIDIA GeForce RTX 4090",
        # Ada white paper: dense, with FP32 sums; 330.3 with sparsity
        bf16_flops=165.2e12,
        fp32_flops=82.6e12,  # the same
        memory=24e9,
        node_bandwidth=32e9,
        network_bandwidth=1.25e9,
        memory_bandwidth=1008e9,  # the white paper
    ),
    "RTX5090": Gpu(
        device="NVIDIA GeForce RTX 5090",
        bf16_flops=209.5e12,  # RTX Blackwell white paper: dense, with FP32 sums
        fp32_flops=104.8e12,  # the same
        memory=32e9,
        node_bandwidth=64e9,
        network_bandwidth=1.25e9,
        memory_bandwidth=1792e9,  # the white paper
    ),
}


def gpu_name(asked: str) -> str:
    """Return ``asked``. If ``asked`` is empty, return the name of this computer's GPU,
    or "H100" if there is no GPU. If ``GPUS`` has the device, its name in ``GPUS`` is
    returned.
    """
    if asked or not torch.cuda.is_available():
        return asked or "H100"
    device = torch.cuda.get_device_name()
    return next((name for name, gpu in GPUS.items() if gpu.device == device), device)


def similar_gpu(device: str) -> str:
    """Return the name of the GPU in ``GPUS`` that a device is a variant of, such as H100
    for "NVIDIA H100 PCIe". Return "" if there is none.
    """
    words = device.replace("RTX ", "RTX").replace("-", " ").split()
    return next((name for name in GPUS if name in words), "")


def guessed_gpu(machine: Machine) -> str | None:
    """Return a sentence that says which numbers of a machine's GPU are guesses, or
    None.
    """
    if machine.gpu in GPUS:
        return None
    return (
        f"{machine.gpu} is not in the table of GPUs: numbers that you do not give are "
        f"guesses, those of {similar_gpu(machine.gpu) or 'a desktop GPU'} (--gpu-flops, "
        "--node-bandwidth, --network-bandwidth)"
    )


def find_gpu(machine: Machine) -> Gpu:
    """Return the machine's GPU from the table, with the memory and FLOP/s that
    ``machine`` gives. If ``machine`` names no GPU, the memory is that of this
    computer's GPU.

    Raises ConfigError if the table does not have the GPU, and the machine does not give
    the GPU's memory and FLOP/s.
    """
    name = gpu_name(machine.gpu)
    memory = machine.gpu_memory
    flops = machine.gpu_flops
    if not memory and not machine.gpu and torch.cuda.is_available():
        memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    gpu = GPUS.get(name) or GPUS.get(similar_gpu(name))
    if name not in GPUS and not (memory and (flops or gpu)):
        needed = "--gpu-memory (GB) and --gpu-flops (dense bf16 TFLOP/s)"
        if gpu:
            needed = f"--gpu-memory (GB), with the other numbers of {similar_gpu(name)}"
        raise ConfigError(
            f"gpu is {name!r}, expected one of {', '.join(GPUS)}, or {needed}"
        )
    # with the links of the desktop GPUs above
    gpu = gpu or Gpu(name, 0.0, (flops or 0.0) * 1e12 / 2, 0.0, 32e9, 1.25e9)
    if memory:
        gpu = replace(gpu, memory=memory * 1e9)
    if flops:
        gpu = replace(gpu, bf16_flops=flops * 1e12)
    return gpu


@dataclass(frozen=True)
class Sent:
    """Hold the bytes that one GPU sends over the links of its node and, at the same
    time, over the network.
    """

    within: float = 0.0
    between: float = 0.0

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.within + other.within, self.between + other.between)

    def __mul__(self, factor: float) -> "Sent":
        return Sent(self.within * factor, self.between * factor)


@dataclass(frozen=True)
class Traffic:
    """Describe the communication of one GPU in one step."""

    # Nothing can hide these bytes. A GPU has nothing to compute during the collectives
    # of tensor parallelism. A microbatch begins by gathering the embedding and ends by
    # reducing its gradients. The FSDP group of a tied embedding also has the final norm
    # and the output.
    at_the_ends: tuple[Sent, ...]
    beside: tuple[Sent, ...]  # can overlap with computing in any microbatch
    # the all-reduce over replicas, which waits for the last microbatch
    beside_last_backward: tuple[Sent, ...]
    microbatches: int

    @property
    def total(self) -> Sent:
        return sum(
            (*self.at_the_ends, *self.beside, *self.beside_last_backward), Sent()
        )

    def exposed(
        self, computing: float, node_bandwidth: float, network_bandwidth: float
    ) -> float:
        """Return the seconds that communication adds to ``computing`` seconds of a
        step. Bandwidths are in bytes/s.
        """

        def seconds(sent: Iterable[Sent]) -> float:
            return sum(
                max(s.within / node_bandwidth, s.between / network_bandwidth)
                for s in sent
            )

        # This is a lower bound, because communication that can overlap is assumed to
        # overlap with all of the computing. Backward is two thirds of a microbatch's
        # computing.
        last_backward = 2 / 3 * computing / self.microbatches
        return (
            seconds(self.at_the_ends)
            + max(0.0, seconds(self.beside) - computing)
            + max(0.0, seconds(self.beside_last_backward) - last_backward)
        )


def ring(size: int, stride: int, gpus_per_node: int, count: float) -> Sent:
    """Return what a rank sends in one all-gather or reduce-scatter of a tensor of
    ``count`` bytes.

    The group has ``size`` ranks. The numbers of neighbouring ranks differ by ``stride``.
    """
    sent = (size - 1) / size * count
    together = max(1, min(size, gpus_per_node // stride))
    if together == 1:
        return Sent(between=sent)
    if together == size:
        return Sent(within=sent)
    return Sent(sent, sent / together)


def dispersion_cost(job_config: JobConfig, args: DispModelArgs) -> Cost:
    """Return the cost of dispersion for one sequence: all losses in all layers."""
    p = job_config.parallelism
    tokens = job_config.training.seq_len
    losses = [loss for _, loss in build_dispersion_losses(job_config).values()]
    shards = p.context_parallel_degree * p.tensor_parallel_degree
    segmented = job_config.dispersion.within_documents
    parts = zip(
        *(
            cost_of(
                loss,
                tokens=tokens,
                features=args.dim,
                shards=shards,
                segmented=segmented,
            )
            for loss in losses
        ),
        strict=True,
    )
    return Cost(*(len(args.activations) * sum(part) for part in parts))


def traffic(
    job_config: JobConfig, model: DispModel, gpus_per_node: int, world_size: int
) -> Traffic:
    """Return the communication of a step of a checked config, from a model on the meta
    device.
    """
    p = job_config.parallelism
    t = job_config.training
    args = model.model_args
    tp = p.tensor_parallel_degree
    cp = p.context_parallel_degree
    replicas = p.data_parallel_replicate_degree
    # number of shards; the ranks of context parallelism hold shards, too
    fsdp = world_size // (replicas * tp)
    dp = data_parallel_degree(job_config, world_size)
    microbatches = global_batch_size(job_config, dp) // (t.local_batch_size * dp)

    blocks, embedding, head = fsdp_groups(model, tp)
    outer = embedding or head  # a microbatch begins and ends with this group
    inner = elements(model, tp) - outer
    parameter, gradient = (
        TORCH_DTYPE_MAP[d].itemsize
        for d in (t.mixed_precision_param, t.mixed_precision_reduce)
    )
    # Weights are gathered for forward, and for backward if they were resharded.
    # Gradients are reduced after backward.
    policy = p.fsdp_reshard_after_forward
    chunked = job_config.training.head_chunk_tokens > 0
    again = head * (policy == "always" and not chunked)  # backward begins with the head
    outer_bytes = outer * (parameter + gradient) + again * parameter
    inner_bytes = (
        inner * (parameter + gradient)
        + (blocks + embedding) * (policy != "never") * parameter
    )

    def sharded(count: float) -> Sent:
        return ring(fsdp, tp, gpus_per_node, count) * microbatches

    def replicated(elements: int) -> Sent:
        # train.py's all-reduce, once per step, is a reduce-scatter and an all-gather.
        return ring(replicas, tp * fsdp, gpus_per_node, elements / fsdp * gradient) * 2

    tokens = t.local_batch_size * t.seq_len
    itemsize = compute_dtype(job_config, fsdp).itemsize
    activation = tokens * args.dim * itemsize
    # Each block gathers and scatters around attention and around the feed-forward, in
    # forward and in backward. Activation checkpointing repeats some of these (op keeps
    # the scatters' outputs). Embedding and output add two more in each direction.
    recomputed = {"none": 0, "selective": 2}.get(
        job_config.activation_checkpoint.mode, 4
    )
    # All sequences of a microbatch share one lookup of positions. With context
    # parallelism, each sequence has its own.
    tables = len(model.embeddings) - 1
    positions = 2 * tables
    if cp == 1:
        positions /= t.local_batch_size
    tensor = ring(tp, 1, gpus_per_node, activation / cp) * (
        (8 + recomputed) * args.n_layers + 4 + positions
    )
    cost = dispersion_cost(job_config, args)
    # an all-reduce sends twice as much as an all-gather
    numbers = cost.gathered * itemsize + 2 * cost.reduced * 4
    dispersed = ring(cp * tp, 1, gpus_per_node, t.local_batch_size * numbers)
    # torch's ring attention gathers keys and values in forward and backward. It passes
    # their fp32 gradients to the next rank as many times as there are ranks.
    heads = 2 * tokens * args.n_kv_heads * args.head_dim // tp * args.n_layers
    gathers = 2 if job_config.activation_checkpoint.mode in ("none", "selective") else 3
    passed = heads * 4 * cp / max(1, cp - 1)  # 0 bytes in a ring of one rank
    context = ring(cp, tp, gpus_per_node, gathers * heads * itemsize + passed)
    return Traffic(
        at_the_ends=(sharded(outer_bytes), tensor * microbatches, replicated(outer)),
        beside=(sharded(inner_bytes), dispersed * microbatches, context * microbatches),
        beside_last_backward=(replicated(inner),),
        microbatches=microbatches,
    )
