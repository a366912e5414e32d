#!/usr/bin/env bash
# Builds Towline for aarch64 on an x86-64 machine, and runs it under qemu-user: the tests of layouts, of exported tables and
# of one process, and a verified all-reduce of two. Takes about 7 minutes on two cores.
#
#   tests/aarch64.sh
#
# Needs Debian's packages gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user, and Rust under rustup. What does not
# run under qemu-user is left out: tests that start their own program again, network namespaces, RDMA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "aarch64.sh: $*" >&2; exit 1; }

target=aarch64-unknown-linux-gnu
sysroot=/usr/aarch64-linux-gnu
for tool in aarch64-linux-gnu-gcc:gcc-aarch64-linux-gnu qemu-aarch64:qemu-user; do
    command -v "${tool%:*}" >/dev/null || fail "${tool%:*} is missing (package ${tool#*:})"
done
[ -e $sysroot/include/stdint.h ] || fail "the C library for aarch64 is missing (package libc6-dev-arm64-cross)"
libraries=$(rustc --print target-libdir --target $target)
[ -d "$libraries" ] || rustup target add $target || fail "Rust has no standard library for $target, and rustup cannot get it"

emulator="qemu-aarch64 -L $sysroot"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER=$emulator

cargo test --locked --profile emulated --target $target --test abi -- layout:: exports::
cargo test --locked --profile emulated --target $target --lib -- abi:: engine::handle engine::table session::wire --test-threads 2
cargo build --locked --profile emulated --target $target
built=target/$target/emulated
readelf -h $built/libtowline.so | grep -q AArch64 || fail "$built/libtowline.so is not for aarch64"
$emulator $built/towline all-reduce -b 8 -e 1M -f 32 -n 2 -w 1 --wrap "$emulator"
echo "aarch64.sh: all passed in $SECONDS s"
