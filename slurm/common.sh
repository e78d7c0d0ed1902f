# shellcheck shell=bash disable=SC2154
# How pretrain.sbatch and preflight.sbatch begin; sourced, with `here` = this folder (SC2154 is about that). pretrain.sbatch
# lists the variables. Exports TITAN_DISP_START, _LOCAL, _NPROC and _PYTHON.

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
