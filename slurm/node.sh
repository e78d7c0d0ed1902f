#!/bin/bash
# Runs the work of one node: `node.sh train RUN --job.config_file CONFIG …`, `node.sh ranks FOLDER MODULE [arguments]`,
# `node.sh check [arguments]`, or on the first node `node.sh freeze`, `prepare` and `process`. srun starts it once per node.
set -eu

# Caches of compiled kernels belong on the node's own disk: a shared disk is slow, and ranks would race on it. Code is
# loaded from them, so no other user may write there.
local=${TITAN_DISP_LOCAL:-/tmp}
cache=$local/titan-disp-cache-$(id -u)
mkdir -p "$local"
mkdir -m 700 "$cache" 2>/dev/null || true
if [ -L "$cache" ] || [ ! -O "$cache" ] || ! chmod 700 "$cache"; then
  other=$cache
  cache=$(mktemp -d "$cache-XXXXXX")
  echo "titan-disp: $(hostname): $other belongs to somebody else, so compiled kernels are kept in $cache"
fi
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$cache/inductor}
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$cache/triton}
mkdir -p "$TORCHINDUCTOR_CACHE_DIR" "$TRITON_CACHE_DIR"
export PYTHONUNBUFFERED=1
# torchrun's --role below is empty, so that nothing stands before the lines of rank 0 in the job's log.
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="\${role_name}"
python=("${TITAN_DISP_PYTHON:-python}")
if [ -n "${TITAN_DISP_PREFIX:-}" ]; then
  # A container may start with a clean environment (apptainer's --cleanenv). The variables of SLURM, the site and this
  # script are passed on, but no secrets, because others on this node may read the command line.
  settings=()
  while read -r name; do settings+=("$name=${!name}"); done < <(compgen -e | grep -E \
    '^(SLURM|TITAN_DISP_|PYTHONUNBUFFERED|TORCH|PYTORCH_|TRITON_|NCCL_|RCCL_|GLOO_|FI_|CXI_|IBV_|RDMAV_|HSA_|MIOPEN_|OMP_|HF_|WANDB_|FAULTS|TESTS_ON_GPU|CUDA_DEVICE_MAX_CONNECTIONS|[A-Z]+_VISIBLE_DEVICES)' |
    grep -Ev 'KEY|TOKEN|SECRET|PASS|JWT|CREDENTIAL|NOTIFY|WEBHOOK')
  mapfile -t prefix < <(xargs -r printf '%s\n' <<<"$TITAN_DISP_PREFIX")
  python=("${prefix[@]}" env "${settings[@]}" "${python[@]}")
fi

what=$1
shift
case $what in
check) exec "${python[@]}" -m titan_disp.cluster.node_health --local "$local" "$@" ;;
freeze) exec "${python[@]}" -m titan_disp.cluster.freeze "$@" ;;
prepare) exec "${python[@]}" -m titan_disp.cluster.job_check "$@" ;;
process) exec "${python[@]}" "$@" ;;
train) set -- "$1" titan_disp.train "${@:2}" ;;
esac

run=$1
module=$2
shift 2

# torch.distributed.run also reads its options from variables: PET_STANDALONE=1 would start a separate run on every node.
unset "${!PET_@}"
# torch looks for an address for 15 minutes, without a message in the job's log. Names may also appear late.
host=${TITAN_DISP_ENDPOINT%:*}
host=${host//[\[\]]/}
if command -v getent >/dev/null && ! getent ahosts "$host" >/dev/null; then
  echo "titan-disp: $(hostname): warning: $host, where the ranks meet, has no address here" >&2
fi
tee=()
[ "$SLURM_NODEID" -ne 0 ] || tee=(--tee 0:3) # rank 0 also writes to the job's log; every rank has its own files
# The rendezvous is static, so that rank 0 is on the first node: c10d sorts nodes by their address as text, gpu10 before
# gpu8. torch waits 900 s for nodes that start slowly; then the ranks must meet within comm.init_timeout_seconds.
exec "${python[@]}" -m torch.distributed.run \
  --nnodes "${SLURM_STEP_NUM_NODES:-$SLURM_NNODES}" --node-rank "$SLURM_NODEID" --nproc-per-node "$TITAN_DISP_NPROC" --max-restarts 0 \
  --rdzv-backend static --rdzv-id "$TITAN_DISP_START" --rdzv-endpoint "$TITAN_DISP_ENDPOINT" \
  --role "" --redirects 3 "${tee[@]+"${tee[@]}"}" --log-dir "$run/logs/$TITAN_DISP_START/node-$SLURM_NODEID" \
  -m "$module" "$@"
