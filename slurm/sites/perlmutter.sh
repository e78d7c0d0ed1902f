# shellcheck shell=bash
# NERSC Perlmutter: 4 × A100 per node, Slingshot. sbatch -C gpu --gpus-per-node=4 -A … -q regular

# A failed GPU or link ends the job with an error instead of a hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# The Slingshot plugin of NCCL; without it everything goes over TCP. `module load nccl-plugin` where it is not loaded already.
command -v module >/dev/null && module load nccl-plugin
# Fail rather than fall back to TCP unnoticed.
export NCCL_NET="AWS Libfabric"
# High-speed interfaces, not the management network.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-hsn0}
# Slingshot's memory monitor: the default deadlocks with PyTorch's allocator now and then.
export FI_MR_CACHE_MONITOR=userfaultfd
# The node's own disk is memory there; $SCRATCH is Lustre and would be hammered by compile caches.
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/tmp}
