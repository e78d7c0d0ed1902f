# shellcheck shell=bash
# AWS with Elastic Fabric Adapter (p4d, p5, …). The image must have aws-ofi-nccl.

export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
# Use libfabric's EFA provider. Without it NCCL falls back to TCP at a fraction of the speed.
export FI_PROVIDER=efa
# Make registered memory safe with fork() (man 7 fi_efa). Our trainer forks the prefetch worker of the data before NCCL
# starts. Under TorchTitan's own trainer, and in other libraries, forks come later.
export FI_EFA_FORK_SAFE=1
# Bootstrap over the instance's own interface, not over docker's or loopback.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-^docker,lo,veth}
