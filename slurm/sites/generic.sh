# shellcheck shell=bash
# NVIDIA GPUs with InfiniBand, or one node with any NVIDIA GPUs. pretrain.sbatch sources this file before anything starts.

# NCCL logs warnings, such as which link failed. INFO logs more.
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# This reduces the fragmentation that FSDP's buffers of changing sizes cause.
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Make registered memory safe with fork() (man 3 ibv_fork_init). Our trainer forks the prefetch worker of the data before
# NCCL starts. Under TorchTitan's own trainer, and in other libraries, forks come later.
export RDMAV_FORK_SAFE=${RDMAV_FORK_SAFE:-1}
# NCCL finds InfiniBand by itself. NCCL_ALGO and NCCL_PROTO are not set on purpose: forced values are slower, or wrong,
# on other clusters. If nodes have several Ethernet interfaces, the rendezvous may need the one that all nodes share:
# export NCCL_SOCKET_IFNAME=eth0 GLOO_SOCKET_IFNAME=eth0
