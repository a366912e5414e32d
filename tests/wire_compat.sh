#!/usr/bin/env bash
# An older release and this tree exchange data: builds the older one and runs tests/net/wire_compat.rs.
#
#   tests/wire_compat.sh [REVISION]
#
# REVISION is 0.1.0's last commit unless given; it is built under target/older, once. With TOWLINE_OLDER_LIBRARY=FILE that
# library is taken and nothing is built. Building 0.1.0 needs libclang and the headers of rdma-core (on Debian 12:
# libclang-14-dev libibverbs-dev librdmacm-dev).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${TOWLINE_OLDER_LIBRARY:-}" ]; then
    revision=$(git rev-parse --verify "${1:-0cd4088}^{commit}")
    tree=$PWD/target/older/$revision
    if ! [ -e "$tree/target/release/libnccl-net.so" ]; then
        mkdir -p "$tree"
        git archive "$revision" | tar -C "$tree" -xf -
        cargo build --release --locked --manifest-path "$tree/Cargo.toml" --lib --target-dir "$tree/target"
    fi
    TOWLINE_OLDER_LIBRARY=$tree/target/release/libnccl-net.so
fi
export TOWLINE_OLDER_LIBRARY=$(realpath "$TOWLINE_OLDER_LIBRARY")
exec cargo test --locked --test net wire_compat:: -- --ignored
