# shellcheck shell=bash
# OLCF Frontier has 4 × MI250X per node, which are 8 GPUs (GCDs) of 64 GB, with Slingshot and ROCm.
# Use sbatch -A … --gpus-per-node=8, and -C nvme for a node-local disk. LD_LIBRARY_PATH must have aws-ofi-rccl.

export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# Run RCCL over Slingshot with libfabric. If it is named, RCCL fails instead of falling back to TCP unnoticed.
export NCCL_NET="AWS Libfabric"
# Use the interface of the interconnect for bootstrap and for gloo.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn0}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-hsn0}
# Let rings change the network card between nodes. With four cards per node this is faster.
export NCCL_CROSS_NIC=1
# Choose libfabric's memory monitor: the default one deadlocks with PyTorch's allocator.
export FI_MR_CACHE_MONITOR=userfaultfd
# Make registered memory safe with fork(), with huge pages too (man 7 fi_cxi). Our trainer forks the prefetch worker of
# the data before NCCL starts. Under TorchTitan's own trainer, and in other libraries, forks come later.
export CXI_FORK_SAFE=${CXI_FORK_SAFE:-1} CXI_FORK_SAFE_HP=${CXI_FORK_SAFE_HP:-1}
# Large jobs overflow the default completion and transmit queues.
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=2048
# GPU-direct RDMA is not set by default, because forcing it hangs with ROCm 7. With ROCm 6, use NCCL_NET_GDR_LEVEL=3
# sbatch …
[ -z "${NCCL_NET_GDR_LEVEL:-}" ] || export NCCL_NET_GDR_LEVEL
# Compute nodes have no internet; without this, `datasets` and the hub client wait for it.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# Keep MIOpen's and our caches on the node's own disk, not on Lustre.
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/mnt/bb/$USER}
[ -d "$TITAN_DISP_LOCAL" ] || export TITAN_DISP_LOCAL=/tmp
export MIOPEN_USER_DB_PATH=$TITAN_DISP_LOCAL/miopen MIOPEN_CUSTOM_CACHE_DIR=$TITAN_DISP_LOCAL/miopen
