# shellcheck shell=bash disable=SC2154
# How pretrain.sbatch, sweep.sbatch and preflight.sbatch begin; sourced, with `here` = this folder (SC2154 is about that).
# pretrain.sbatch lists the variables. Exports TITAN_DISP_START, _LOCAL, _NPROC and _PYTHON.

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

# What is set here and above reaches srun's tasks, also after sbatch --export=NONE or --export=ALL,NAME=ANOTHER_VALUE.
export SLURM_EXPORT_ENV=ALL
export TITAN_DISP_START=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/tmp}
export TITAN_DISP_NPROC=${TITAN_DISP_NPROC:-gpu}
export TITAN_DISP_PYTHON=${TITAN_DISP_PYTHON:-python}

# Runs supervise.py with these arguments, and ends with its status. Before, the caller's traps write the names of signals into the
# file $signals and set `interrupted`.
supervise() {
  # Ignored until Python handles them: the supervisor must not die of a signal that comes while it starts.
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
