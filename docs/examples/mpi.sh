#!/usr/bin/env bash
# nccl-tests (or any other MPI program) with Open MPI: one process for each GPU.
#
#   mpi.sh HOSTFILE PROCESSES [PROGRAM ARGUMENTS…]
set -euo pipefail
usage='usage: mpi.sh HOSTFILE PROCESSES [PROGRAM ARGUMENTS…]'
hostfile=${1:?$usage} processes=${2:?$usage}
shift 2
[ $# -gt 0 ] || set -- ./all_reduce_perf -b 8 -e 1G -f 2 -g 1

# The same directory is needed on all hosts. Open MPI passes a variable on only when it is named.
eval "$(towline env)"
exec mpirun -np "$processes" --hostfile "$hostfile" -x LD_LIBRARY_PATH -x NCCL_NET -x NCCL_DEBUG="${NCCL_DEBUG:-INFO}" "$@"
