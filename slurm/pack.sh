#!/bin/bash
# Pack the folders of earlier starts of a run, because each of 640 ranks leaves three files and folders: `pack.sh RUN START`
# packs RUN/logs/OLD into RUN/logs/OLD.tar, and does the same in RUN/launch. It leaves the newest five of each alone, and every
# folder of a running or pending job: START, the folder of this script, and those of other jobs. Launch folders stay for 30
# days, because a job that waits on another cluster may use them. To unpack a folder: tar -xf OLD.tar
set -u
run=$1
start=$2
keep=5
launch=$(basename "$(cd "$(dirname "$0")/.." && pwd)")

# Without an answer from SLURM, it is unknown which folders are in use.
jobs=$(squeue --noheader --array --user="$(id -un)" --format="%A %o") || exit 0

in_use() {
  [ "$1" = "$start" ] || [ "$1" = "$launch" ] || [[ $jobs = *"/launch/$1/"* ]] ||
    { [ "${1%%.*}" != "${start%%.*}" ] && grep -q "^${1%%.*} " <<<"$jobs"; }
}

for folder in logs launch; do
  age=()
  if [ $folder = launch ]; then
    umask 077 # only its owner may read what a job runs
    age=(-mtime +30)
  fi
  cd "$run/$folder" 2>/dev/null || continue
  # JOB.RESTARTS.ID, or DATE-TIME-PID of `submit`; the newest first
  mapfile -t names < <(find . -maxdepth 1 -type d -user "$(id -un)" "${age[@]+"${age[@]}"}" -printf '%T@ %f\n' | sort -rn | cut -d ' ' -f 2- |
    grep -xE '[0-9]+\.[0-9]+\.[0-9a-f]{6}|[0-9]{8}-[0-9]{6}-[0-9]+')
  # archives of a script that was killed
  find . -maxdepth 1 -type f -user "$(id -un)" -name '*.tar.*partial' -mtime +0 -delete
  for name in "${names[@]:$keep}"; do
    in_use "$name" && continue
    # An archive that has its final name is complete, even if this script was killed before it deleted the folder, or if
    # another job has packed the same folder and is deleting it.
    partial=$name.tar.$start.partial
    [ -e "$name.tar" ] || { tar -cf "$partial" "$name" && mv -n "$partial" "$name.tar"; }
    rm -f "$partial"
    [ ! -e "$name.tar" ] || rm -rf -- "$name"
  done
done
