#!/bin/bash
# Unpack an environment on this node's own disk: `unpack.sh ARCHIVE.tar` → ARCHIVE/. srun starts it once per node. It
# also removes environments there of this user's ended jobs, and of earlier starts of this job.
set -eu
folder=${1%.tar}
for old in "$(dirname "$1")"/titan-disp-[0-9]*; do
  job=${old##*/titan-disp-} # JOB, or JOB.RESTARTS.ID of a start, maybe with .tar
  job=${job%%.*}
  [[ $job =~ ^[0-9]+$ && $old != "$folder" && $old != "$1" && -O $old && ! -L $old ]] || continue
  if [ "$job" = "$SLURM_JOB_ID" ]; then
    rm -rf -- "$old"
  # Remove it only if SLURM answers and no longer lists the job.
  elif listed=$(squeue --noheader --user="$(id -un)" --format=%A 2>/dev/null) && ! grep -qx "$job" <<<"$listed"; then
    echo "titan-disp: $(hostname): removing $old, whose job has ended"
    rm -rf -- "$old"
  fi
done
# No earlier start has used this name, so another node has created the folder.
mkdir -- "$folder" || {
  echo "titan-disp: error: $(hostname): nodes share $(dirname "$1"): set TITAN_DISP_LOCAL to a folder on each node's own disk"
  exit 1
}
tar -xf "$1" -C "$folder"
rm -f "$1"
# Environments of conda-pack contain the paths of their origin until conda-unpack is run.
[ ! -x "$folder/bin/conda-unpack" ] || "$folder/bin/conda-unpack"
