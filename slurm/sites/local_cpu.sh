# shellcheck shell=bash
# Nodes without GPUs, several of which may be one host: the tests' cluster, a laptop.

# One rank per node: nodes that share a host share its cores.
export TITAN_DISP_NPROC=${TITAN_DISP_NPROC:-1}
# All nodes are this host, whose name need not resolve.
export TITAN_DISP_HEAD=${TITAN_DISP_HEAD:-127.0.0.1}
# gloo would look up the host's name for an address.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
# More threads than cores slow every rank down.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
