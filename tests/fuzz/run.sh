#!/usr/bin/env bash
# Builds and runs the fuzz targets: handle, handshake, frames, setup, calls.
#
#   tests/fuzz/run.sh TARGET [option of libFuzzer ...]   for example: tests/fuzz/run.sh frames -runs=10000000
#   tests/fuzz/run.sh replay [SECONDS]                   the kept corpus of all targets, then SECONDS of each (default 0)
#   tests/fuzz/run.sh minimise TARGET [FOLDER]           keep of the corpus, and of FOLDER, what reaches something new
#
# Needs a C++ compiler. The stable compiler is asked for its sanitizers by RUSTC_BOOTSTRAP=1; the address sanitizer is
# always on. With cargo-fuzz and a nightly compiler, `cargo fuzz run --fuzz-dir tests/fuzz TARGET` does the same. What
# is found lies in tests/fuzz/artifacts/TARGET; `tests/fuzz/run.sh TARGET FILE` replays it, with NCCL_DEBUG=WARN also
# what the library says of it.
# TOWLINE_FUZZ_TARGET_DIR: where to build.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
targets=(handle handshake frames setup calls)
build=${TOWLINE_FUZZ_TARGET_DIR:-$PWD/target}
triple=$(rustc -vV | sed -n 's/^host: //p')
# The library would complain about it each time that an input initialises it.
unset TOWLINE_FUZZ_TARGET_DIR

# Comparisons are followed where an input has to guess a value. Calls of functions have none, and are faster
# without. The two builds do not share a folder, or each would be the other's from the beginning.
folder() {
    case $1 in setup | calls) echo "$build/calls" ;; *) echo "$build" ;; esac
}

compile() {
    local compares=-Cllvm-args=-sanitizer-coverage-trace-compares
    case $1 in setup | calls) compares= ;; esac
    RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$(folder "$1") \
        RUSTFLAGS="--cfg fuzzing -Zsanitizer=address -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table $compares" \
        cargo build --release --target "$triple" --bin "$1"
}

# Threads of the library outlive each input on purpose, so leaks are not looked for here (tests/memory.sh does).
fuzz() {
    local target=$1
    shift
    mkdir -p "corpus/$target" "artifacts/$target"
    ASAN_OPTIONS=detect_leaks=0:${ASAN_OPTIONS:-} NCCL_SOCKET_IFNAME=lo \
        "$(folder "$target")/$triple/release/$target" -artifact_prefix="artifacts/$target/" -timeout=30 -rss_limit_mb=4096 "$@"
}

case ${1:?a target, replay or minimise} in
replay)
    for target in "${targets[@]}"; do
        compile "$target"
        fuzz "$target" -runs=0 "corpus/$target" 2>&1 | tail -1
        [ "${2:-0}" = 0 ] || { found=$(mktemp -d); fuzz "$target" -max_total_time="$2" "$found" "corpus/$target" 2>&1 | tail -1; rm -r "$found"; }
    done
    ;;
minimise)
    compile "$2"
    found=$(mktemp -d)
    fuzz "$2" -merge=1 "$found" "corpus/$2" ${3:+"$3"}
    rm -r "corpus/$2"
    mv "$found" "corpus/$2"
    ;;
*)
    target=$1
    shift
    compile "$target"
    case ${1:-} in
    -* | "") fuzz "$target" "$@" "corpus/$target" ;;
    *) fuzz "$target" "$@" ;;
    esac
    ;;
esac
