#!/usr/bin/env bash
# Runs the collectives over Towline and over NCCL's Socket with several releases of NCCL, two ranks, every result verified.
# Prints one table: release, interface versions in use, wrong elements, times. Exits 1 when an element is wrong, a run fails, or
# NCCL did not use Towline.
#
#   tests/gpu/releases.sh TOWLINE_DIR NCCL_DIR [NCCL_DIR ...]
#
#   TOWLINE_DIR  libnccl-net.so        NCCL_DIR  libnccl.so.2 of one release (pip's nvidia-nccl-cu12, or one built by hand)
#
#   IFNAME=lo     interface            SIZES="8 32768 131072 524288 2097152 16777216"
#   LIMIT=300     seconds for a run    COLLECTIVES="all_reduce all_gather reduce_scatter broadcast alltoall sendrecv"
#   OUT=          where logs go (default: a new directory under /tmp)
set -uo pipefail

if [ $# -lt 2 ] || [ "$1" = --help ] || [ "$1" = -h ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    [ "${1:-}" = --help ] || [ "${1:-}" = -h ] || exit 2
    exit 0
fi
if [ ! -e "$1/libnccl-net.so" ]; then
    echo "there is no libnccl-net.so in $1" >&2
    exit 2
fi
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/releases.py" "$@"
