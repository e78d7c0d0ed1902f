# shellcheck shell=bash
# Nodes without GPUs, several of which may be on one host, as in the tests' cluster or on a laptop.

# Run one rank per node, because nodes on one host share its cores.
export TITAN_DISP_NPROC=${TITAN_DISP_NPROC:-1}
# All nodes are on this host, whose name may not resolve.
export TITAN_DISP_ENDPOINT=${TITAN_DISP_ENDPOINT:-127.0.0.1}
# Without this, gloo would look up the address of the host's name.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
# More threads than cores slow every rank down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
