# shellcheck shell=bash
# NERSC Perlmutter has 4 × A100 per node, with Slingshot. Use sbatch -C gpu --gpus-per-node=4 -A … -q regular.

export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Load NCCL's plugin for Slingshot, without which everything goes over TCP.
command -v module >/dev/null && module load nccl-plugin
# Make NCCL fail instead of falling back to TCP unnoticed.
export NCCL_NET="AWS Libfabric"
# Use the high-speed interfaces, not the management network.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-hsn0}
# Choose libfabric's memory monitor: the default one sometimes deadlocks with PyTorch's allocator.
export FI_MR_CACHE_MONITOR=userfaultfd
# Make registered memory safe with fork(), with huge pages too (man 7 fi_cxi). Our trainer forks the prefetch worker of
# the data before NCCL starts. Under TorchTitan's own trainer, and in other libraries, forks come later.
export CXI_FORK_SAFE=${CXI_FORK_SAFE:-1} CXI_FORK_SAFE_HP=${CXI_FORK_SAFE_HP:-1}
# The node's own disk is in memory. $SCRATCH is on Lustre, which compile caches would overload.
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/tmp}
