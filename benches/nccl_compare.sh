#!/usr/bin/env bash
# Compares Towline with NCCL's Socket, Fast Socket and any other network plugin on real GPUs, by NVIDIA's nccl-tests.
# With --processes, by a program of its own with one process for each GPU.
# Needs bash and python3 (standard library only). `nccl_compare.sh --help` lists the options; an example:
#
#   benches/nccl_compare.sh --tests ~/nccl-tests/build --towline target/release --out results \
#       --fastsocket ~/fastsocket --collectives all_reduce,all_gather --gpus 2 --budget 540
set -euo pipefail
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/nccl/compare.py" "$@"
