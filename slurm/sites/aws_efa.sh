# shellcheck shell=bash
# AWS with Elastic Fabric Adapter (p4d, p5, …). Needs aws-ofi-nccl in the image.

# A failed GPU or link ends the job with an error instead of a hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# libfabric's EFA provider; without it NCCL falls back to TCP at a fraction of the speed.
export FI_PROVIDER=efa
# Registered memory and fork(): the data's prefetch worker is a fork of the rank.
export FI_EFA_FORK_SAFE=1
# Bootstrap over the instance's own interface, never docker's or loopback.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^docker,lo,veth}
