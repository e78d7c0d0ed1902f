#!/bin/bash
# What one node does: `node.sh train --job.config_file CONFIG …` or `node.sh check`. Started by srun, once per node.
set -eu

# Caches of compiled kernels belong on the node's own disk: a shared one is slow and meets races between ranks.
cache=$TITAN_DISP_LOCAL/titan-disp-cache-$(id -u)
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
mkdir -p "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"
export PYTHONUNBUFFERED=1
read -ra prefix <<<"${TITAN_DISP_PREFIX:-}"

what=$1
shift
if [ "$what" = check ]; then
  exec ${prefix[@]+"${prefix[@]}"} "$TITAN_DISP_PYTHON" -m titan_disp.cluster.nodecheck \
    --out "$TITAN_DISP_RUN/nodes/$TITAN_DISP_START" --local "$TITAN_DISP_LOCAL"
fi

tee=()
[ "$SLURM_NODEID" -ne 0 ] || tee=(--tee 0:3) # one rank of the job speaks in its log; all have files of their own
exec ${prefix[@]+"${prefix[@]}"} "$TITAN_DISP_PYTHON" -m torch.distributed.run \
  --nnodes "$SLURM_NNODES" --nproc-per-node "$TITAN_DISP_NPROC" --max-restarts 0 \
  --rdzv-backend c10d --rdzv-id "$TITAN_DISP_START" --rdzv-endpoint "$TITAN_DISP_ENDPOINT" \
  --role rank --redirects 3 "${tee[@]+"${tee[@]}"}" --log-dir "$TITAN_DISP_RUN/logs/$TITAN_DISP_START/node-$SLURM_NODEID" \
  -m "${TITAN_DISP_MODULE:-titan_disp.train}" "$@"
