# shellcheck shell=bash disable=SC2154
# The common beginning of pretrain.sbatch, sweep.sbatch and check_nodes.sbatch, which source this file. They set `here` to
# this folder (hence SC2154). pretrain.sbatch lists the variables. This file exports TITAN_DISP_START, _LOCAL, _NPROC
# and _PYTHON.

say() { echo "titan-disp: $(date -u +%FT%TZ) $*"; }

site=${TITAN_DISP_SITE:-generic}
[ -f "$site" ] || site=$here/sites/$site.sh
if [ ! -f "$site" ]; then
  say "error: no site file $site; there are: $(cd "$here/sites" && echo *.sh)"
  exit 2
fi
# Modules and conda read variables that may be unset.
set +u
# shellcheck source=/dev/null
. "$site"
set -u

# With this, srun's tasks get all variables that are set here and above, also after sbatch --export=NONE or
# --export=ALL,NAME=VALUE.
export SLURM_EXPORT_ENV=ALL
export TITAN_DISP_START=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/tmp}
export TITAN_DISP_NPROC=${TITAN_DISP_NPROC:-gpu}
export TITAN_DISP_PYTHON=${TITAN_DISP_PYTHON:-python}

# Runs supervise.py with these arguments and exits with its status. The caller must first set traps that append the
# names of signals to the file $signals and set `interrupted`.
supervise() {
  # The signals are ignored until Python handles them: one that comes while the supervisor starts must not kill it.
  (
    trap '' USR1 TERM
    exec "${TITAN_DISP_HOST_PYTHON:-python3}" "$here/supervise.py" --signals "$signals" "$@"
  ) &
  # A signal's trap interrupts `wait`, not the supervisor.
  while :; do
    interrupted=
    wait $!
    status=$?
    [ -n "$interrupted" ] || exit $status
  done
}
