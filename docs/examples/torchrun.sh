#!/usr/bin/env bash
# PyTorch on several hosts: run this on each of them.
#
#   torchrun.sh HOSTS FIRST_HOST train.py [ARGUMENTS…]
set -euo pipefail
usage='usage: torchrun.sh HOSTS FIRST_HOST train.py [ARGUMENTS…]'
hosts=${1:?$usage} first=${2:?$usage} script=${3:?$usage}
shift 3

eval "$(towline env)" # LD_LIBRARY_PATH and NCCL_NET
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} # says "Using network Towline"
exec torchrun --nnodes="$hosts" --nproc-per-node=gpu \
    --rdzv-backend=c10d --rdzv-endpoint="$first:29500" --rdzv-id=1 "$script" "$@"
