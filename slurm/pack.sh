#!/bin/bash
# Pack what earlier starts of a run have left, because each of 640 ranks leaves three files and folders: `pack.sh RUN START`
# makes RUN/logs/OLD.tar of RUN/logs/OLD, and so in RUN/launch. The newest five of each stay, and so does what
# a job uses that runs or waits: START, this script's own folder, and those of other jobs. To read one: tar -xf OLD.tar
# A launch folder also stays for 30 days, because another cluster may have a job that waits and uses it.
set -u
run=$1
start=$2
keep=5
launch=$(basename "$(cd "$(dirname "$0")/.." && pwd)")

# Without SLURM's answer, nobody knows what is in use.
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
  # of a script that was killed
  find . -maxdepth 1 -type f -user "$(id -un)" -name '*.tar.*partial' -mtime +0 -delete
  for name in "${names[@]:$keep}"; do
    in_use "$name" && continue
    # An archive that has its final name is whole, also if this script was killed before it has deleted the folder, or
    # if another job packs the same folder and has begun to delete it.
    partial=$name.tar.$start.partial
    [ -e "$name.tar" ] || { tar -cf "$partial" "$name" && mv -n "$partial" "$name.tar"; }
    rm -f "$partial"
    [ ! -e "$name.tar" ] || rm -rf -- "$name"
  done
done
