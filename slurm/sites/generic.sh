# shellcheck shell=bash
# NVIDIA GPUs with InfiniBand (or one node of any NVIDIA GPUs). Sourced by pretrain.sbatch before anything starts.

# A failed GPU or link ends the job with an error instead of a hang; PyTorch's default, said here because all rests on it.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# NCCL says in the log what it chose and which link failed; INFO for more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Less fragmentation with FSDP's buffers of changing sizes.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# NCCL finds InfiniBand by itself. NCCL_ALGO and NCCL_PROTO are left alone on purpose: forcing them is slower, or wrong, elsewhere.
# Nodes with several Ethernet interfaces may need the one that all nodes share, for the rendezvous:
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
