# shellcheck shell=bash
# NVIDIA GPUs with InfiniBand, or one node with any NVIDIA GPUs. pretrain.sbatch sources this file before anything starts.

# A failed GPU or link ends the job with an error instead of a hang. This is PyTorch's default, and is set here because
# the job relies on it.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
# NCCL logs warnings, such as which link failed. INFO logs more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# This reduces the fragmentation that FSDP's buffers of changing sizes cause.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# NCCL finds InfiniBand by itself. NCCL_ALGO and NCCL_PROTO are not set on purpose: forced values are slower, or wrong,
# on other clusters. If nodes have several Ethernet interfaces, the rendezvous may need the one that all nodes share:
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
