#!/bin/bash
# Unpack an environment on this node's own disk: `unpack.sh ARCHIVE.tar` → ARCHIVE/. Started by srun, once per node.
set -eu
folder=${1%.tar}
mkdir -p "$folder"
tar -xf "$1" -C "$folder"
rm -f "$1"
# conda-pack's archives hold paths of their origin until this is run.
[ ! -x "$folder/bin/conda-unpack" ] || "$folder/bin/conda-unpack"
