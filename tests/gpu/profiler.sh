#!/usr/bin/env bash
# Network events and the built-in profiler under real NCCL, on two GPUs or more. Needs bash and python3 (standard library
# only). `profiler.sh --help` lists the options; an example:
#
#   tests/gpu/profiler.sh --tests ~/nccl-tests/build --towline target/release --nccl "$NCCL_DIR" \
#       --example libnccl-profiler-example.so --out results/profiler
set -euo pipefail
exec python3 -B "$(dirname "${BASH_SOURCE[0]}")/profiler.py" "$@"
