# shellcheck shell=bash
# OLCF Frontier: 4 × MI250X per node, which are 8 GPUs (GCDs) of 64 GB; Slingshot, ROCm.
# sbatch -A … --gpus-per-node=8, with -C nvme for node-local disk. Needs aws-ofi-rccl in LD_LIBRARY_PATH.

# A failed GPU or link ends the job with an error instead of a hang.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export NCCL_DEBUG=${NCCL_DEBUG:-WARN}
# RCCL over Slingshot by libfabric; naming it makes RCCL fail rather than fall back to TCP unnoticed.
export NCCL_NET="AWS Libfabric"
# Interface of the interconnect, for bootstrap and for gloo.
export NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-hsn0}
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-hsn0}
# Rings may change the network card between nodes: with four cards per node this is faster there.
export NCCL_CROSS_NIC=1
# libfabric's memory monitor: the default one deadlocks with PyTorch's allocator.
export FI_MR_CACHE_MONITOR=userfaultfd
# Large jobs overflow the default completion and transmit queues.
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=2048
# GPU-direct RDMA: unset by default, as forcing it hangs with ROCm 7. With ROCm 6: NCCL_NET_GDR_LEVEL=3 sbatch …
[ -z "${NCCL_NET_GDR_LEVEL:-}" ] || export NCCL_NET_GDR_LEVEL
# Compute nodes have no internet; without this, `datasets` and the hub client wait for it.
export HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1
# MIOpen's and our caches on the node's own disk, not on Lustre.
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/mnt/bb/$USER}
[ -d "$TITAN_DISP_LOCAL" ] || export TITAN_DISP_LOCAL=/tmp
export MIOPEN_USER_DB_PATH=$TITAN_DISP_LOCAL/miopen MIOPEN_CUSTOM_CACHE_DIR=$TITAN_DISP_LOCAL/miopen
