# shellcheck shell=bash disable=SC2154
# How pretrain.sbatch and preflight.sbatch begin; sourced, with `here` = this folder (SC2154 is about that). pretrain.sbatch
# lists the variables.
# Exports TITAN_DISP_START, _LOCAL, _NPROC, _PYTHON and, by `rendezvous NODE`, _ENDPOINT. Sets two arrays:
# step, an srun of one task per node, and python, the interpreter with its prefix.

say() { echo "titan-disp: $(date -u +%FT%TZ) $*"; }

# A field of `scontrol show job`.
field() { scontrol show job "$SLURM_JOB_ID" | sed -n "s/.*\<$1=\([^ ]*\).*/\1/p" | head -n 1; }

site=${TITAN_DISP_SITE:-generic}
[ -f "$site" ] || site=$here/sites/$site.sh
if [ ! -f "$site" ]; then
  say "error: no site file $site; there are: $(cd "$here/sites" && echo *.sh)"
  exit 2
fi
# shellcheck source=/dev/null
. "$site"

export TITAN_DISP_START=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/tmp}
export TITAN_DISP_NPROC=${TITAN_DISP_NPROC:-gpu}

# One task per node, with all of its cores: since SLURM 22.05 a step gets one core unless told otherwise.
step=(srun --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_ON_NODE:-1}" --cpu-bind=none --kill-on-bad-exit=1)

# Where ranks meet: the node's name as the others resolve it; a site may say better (an interconnect's address, loopback).
# Two jobs of one user on one node must not meet: the port follows from the job. Below Linux' ephemeral ports (32768).
rendezvous() { export TITAN_DISP_ENDPOINT=${TITAN_DISP_HEAD:-$1}:$((20000 + SLURM_JOB_ID % 10000)); }

if [ -n "${TITAN_DISP_ENV_ARCHIVE:-}" ]; then
  # Hundreds of ranks that import Python from a shared file system take minutes, and everybody else's patience.
  say "environment: $TITAN_DISP_ENV_ARCHIVE → $TITAN_DISP_LOCAL on every node"
  archive=$TITAN_DISP_LOCAL/titan-disp-$SLURM_JOB_ID.tar
  sbcast --force "$TITAN_DISP_ENV_ARCHIVE" "$archive" &&
    "${step[@]}" bash "$here/unpack.sh" "$archive" || exit 1
  export TITAN_DISP_PYTHON=$TITAN_DISP_LOCAL/titan-disp-$SLURM_JOB_ID/bin/python
fi
export TITAN_DISP_PYTHON=${TITAN_DISP_PYTHON:-python}
read -ra python <<<"${TITAN_DISP_PREFIX:-}"
python+=("$TITAN_DISP_PYTHON")
