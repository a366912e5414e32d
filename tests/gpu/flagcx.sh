#!/usr/bin/env bash
# FlagCX over Towline on two GPUs, in both of its ways: flagcx.py with the usual arguments.
#
#   tests/gpu/flagcx.sh DIRECTORY [OPTIONS of flagcx.py]
#
#   DIRECTORY   FlagCX 0.11 or later, built        TOWLINE=  directory of libnccl-net.so (default: target/release)
set -euo pipefail
if [ $# -lt 1 ]; then
    sed -n '2,6s/^# \{0,1\}//p' "$0"
    exit 2
fi
here=$(dirname "$(realpath "$0")")
exec python3 "$here/flagcx.py" "$@" --towline "${TOWLINE:-$here/../../target/release}"
