#!/usr/bin/env bash
# Compares Towline with three tunings of NCCL's Socket on several networks between two ranks, a GPU each: the loopback,
# and network namespaces with one or two veth pairs at several rates. Needs root, two GPUs or one with CUDA MPS, python3, and
# ip and tc for all but the loopback. `nccl_networks.sh --help` lists the options; an example:
#
#   benches/nccl_networks.sh --towline target/release --nccl ~/nccl/lib --networks loopback,veth,veth25 --budget 540
#
set -euo pipefail
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/nccl/compare_networks.py" "$@"
