#!/bin/bash
# Unpack an environment on this node's own disk: `unpack.sh ARCHIVE.tar` → ARCHIVE/. Started by srun, once per node.
# What ended jobs of this user have left there is removed.
set -eu
folder=${1%.tar}
for old in "$(dirname "$1")"/titan-disp-[0-9]*; do
  job=${old##*/titan-disp-}
  job=${job%.tar}
  [[ $job =~ ^[0-9]+$ && $job != "$SLURM_JOB_ID" && -O $old && ! -L $old ]] || continue
  # Only where SLURM answers, and does not list the job any more.
  if listed=$(squeue --noheader --user="$(id -un)" --format=%A 2>/dev/null) && ! grep -qx "$job" <<<"$listed"; then
    echo "titan-disp: $(hostname): removing $old, whose job has ended"
    rm -rf -- "$old"
  fi
done
rm -rf -- "$folder"
mkdir -p "$folder"
tar -xf "$1" -C "$folder"
rm -f "$1"
# conda-pack's archives hold paths of their origin until this is run.
[ ! -x "$folder/bin/conda-unpack" ] || "$folder/bin/conda-unpack"
