# shellcheck shell=bash disable=SC2154
# What pretrain.sbatch, sweep.sbatch and first_run.sbatch share. They set `here` to this folder (hence SC2154) and source
# this file. pretrain.sbatch lists the variables. This file exports TITAN_DISP_SITE (the path of its file), _LOCAL, _NPROC and _PYTHON.
# pretrain.sbatch and sweep.sbatch also set `job`, `pointer` and `early`, and end with `supervise`.

say() { echo "titan-disp: $(date -u +%FT%TZ) $*"; }

# Prints the reason $1 and requeues the job $job. This runs if the supervisor did not end as intended: it was killed, or this
# node lacks Python, a file system or an answer from SLURM. Such a failure must not end the job for good.
again() {
  say "$1"
  state=$(scontrol show job "$job" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p' | head -n 1)
  for pause in 1 10 60; do
    if [ "${state:-RUNNING}" != RUNNING ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 50 ]; then break; fi
    scontrol requeue "$job" && sleep 120 && exit 1
    sleep $pause
  done
  echo "titan-disp: NOT REQUEUED (state ${state:-unknown}, restarts ${SLURM_RESTART_COUNT:-0}): submit the job again"
  exit 1
}

site=$here/site.sh # a launch folder has a copy of the file
if [ ! -f "${here%/slurm}/launch.json" ] || [ ! -f "$site" ]; then
  site=${TITAN_DISP_SITE:-generic}
  [ -f "$site" ] || site=$here/sites/$site.sh
fi
if [ ! -f "$site" ]; then
  [ "${SLURM_RESTART_COUNT:-0}" -eq 0 ] || again "no site file $site" # a file system may be unavailable
  say "error: no site file $site; there are: $(cd "$here/sites" && echo *.sh)"
  exit 2
fi
TITAN_DISP_SITE=$(cd "$(dirname "$site")" && pwd)/$(basename "$site")
export TITAN_DISP_SITE
# Modules and conda read variables that may be unset.
set +u
# shellcheck source=/dev/null
. "$site"
set +e -u # under set -e, a signal would end this script

# With this, srun's tasks get all variables that are set here and above, also after sbatch --export=NONE or
# --export=ALL,NAME=VALUE.
export SLURM_EXPORT_ENV=ALL
export TITAN_DISP_LOCAL=${TITAN_DISP_LOCAL:-/tmp}
export TITAN_DISP_NPROC=${TITAN_DISP_NPROC:-gpu}
export TITAN_DISP_PYTHON=${TITAN_DISP_PYTHON:-python}

# The job's output is a file. Colours would be escape sequences in it.
export NO_COLOR=${NO_COLOR:-1}

# Prints the words of a text, one per line, without their quotes. node.sh does the same.
words() { xargs -r printf '%s\n' <<<"$1"; }
words "${TITAN_DISP_PREFIX:-}" >/dev/null || {
  say "error: TITAN_DISP_PREFIX is $TITAN_DISP_PREFIX, which cannot be split into words"
  exit 2
}

# Without a warning, nobody would notice a variable that is misspelled, or that only an older version read. titan_disp reads
# _TRITON.
unread=$(compgen -e | grep '^TITAN_DISP_' | grep -vxE \
  'TITAN_DISP_(SITE|PYTHON|PREFIX|SRUN_ARGS|ENV_ARCHIVE|NPROC|ENDPOINT|LOCAL|CHECK_SECONDS|RETRIES|SPARES|STAGES|START|TRITON)' | xargs)
[ -z "$unread" ] || say "warning: nothing reads these variables (slurm/pretrain.sbatch lists all): $unread"

# Runs supervise.py with these arguments, and exits with the status that it intended. $early has the signals that the traps of
# the caller have received so far.
supervise() {
  # The supervisor reads the file. TMPDIR may exist on the login node only.
  signals=$(mktemp 2>/dev/null || TMPDIR=/tmp mktemp || TMPDIR=/dev/shm mktemp) || again "no temporary file can be written here"
  trap 'echo USR1 >>"$signals" || kill -USR1 $!; interrupted=1' USR1 # a full disk
  trap 'echo TERM >>"$signals" || kill -TERM $!; interrupted=1' TERM
  trap 'rm -f "$signals"' EXIT
  echo "${early:-}" >>"$signals" # an older version's scripts may lack it and $pointer
  # The signals are ignored until Python handles them: one that comes while the supervisor starts must not kill it.
  (
    trap '' USR1 TERM
    exec python3 "$here/supervise.py" "$signals" "${pointer:-}" "$@"
  ) &
  # A signal's trap interrupts `wait`, not the supervisor.
  while :; do
    interrupted=
    wait $!
    status=$?
    [ -n "$interrupted" ] || break
  done
  [ "$status" -lt 64 ] || [ "$status" -gt 66 ] || exit $((status - 64))
  again "the supervisor ended with status $status"
}
