#!/bin/sh
# Installs titan-disp from this script's folder beside the PyTorch of a container's base image. titan-disp.def and Containerfile run it.
set -eu
cd "$(dirname "$0")"
# The base image's Python is the one to install into, although Debian and Ubuntu mark theirs as not for pip.
# (pip before 23.0.1 knows neither the mark nor this variable.)
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# pip stops if this torch is too old or too new, rather than install a second one.
python3 -c "import torch; print('torch==' + torch.__version__)" >torch.txt
python3 -m pip install . --constraint torch.txt
# torchtitan imports triton, which the CPU build of torch does not bring; GPU builds bring their own.
python3 -c "import triton" 2>/dev/null || python3 -m pip install '.[cpu]' --constraint torch.txt
