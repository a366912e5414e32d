#!/usr/bin/env bash
# Looks for wrong uses of memory while the functional tests run.
#
#   tests/memory.sh address [TEST ...]    the address sanitizer (leaks included); the whole program and the library are
#                                         built with it, by the stable compiler with RUSTC_BOOTSTRAP=1
#   tests/memory.sh valgrind [TEST ...]   valgrind's memcheck, on the ordinary build; so slow that the
#                                         watchdogs of tests with much traffic may end them
#
# TEST: names of test programs (net_ordering ...); by default those below. Extra arguments for the programs, a filter
# for example, in TOWLINE_TEST_ARGS. TOWLINE_MEMORY_TARGET_DIR: where the address sanitizer's build goes.
#
# Left out: net_fork (a sanitizer's child of a fork is not an ordinary one), net_netns (network namespaces: nothing
# that the others do not have, but many processes), the simulation and the properties (no unsafe code in them).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
how=${1:?address or valgrind}
shift
tests=("$@")
read -ra arguments <<<"${TOWLINE_TEST_ARGS:-}"
triple=$(rustc -vV | sed -n 's/^host: //p')
export CARGO_PROFILE_DEV_DEBUG=line-tables-only CARGO_PROFILE_TEST_DEBUG=line-tables-only

case $how in
address)
    [ ${#tests[@]} -gt 0 ] || tests=(net_ordering net_lifecycle net_hostile net_versions net_placement)
    # The library is opened by a program that holds the sanitizer's runtime, and must find it there.
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Clink-arg=-Wl,--export-dynamic-symbol=__asan_*"
    export CARGO_TARGET_DIR=${TOWLINE_MEMORY_TARGET_DIR:-$PWD/target/address}
    # These measure how the process grows, but the sanitizer keeps what was freed for a while; or how long a connection
    # takes beside ten thousand strangers.
    skip=(--skip made_again_200_times --skip do_not_grow_the_process --skip crowd_of_strangers)
    for test in "${tests[@]}"; do
        printf '== %s, address sanitizer\n' "$test"
        cargo test --quiet --target "$triple" --test "$test" -- "${skip[@]}" "${arguments[@]}"
    done
    ;;
valgrind)
    [ ${#tests[@]} -gt 0 ] || tests=(net_placement)
    for test in "${tests[@]}"; do
        printf '== %s, valgrind\n' "$test"
        # Blocks that are still reachable belong to threads and tables that live as long as the process.
        CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="valgrind --quiet --error-exitcode=9 --leak-check=full \
--errors-for-leak-kinds=definite --show-leak-kinds=definite --num-callers=30 --fair-sched=try" \
            cargo test --quiet --test "$test" -- --test-threads 1 "${arguments[@]}"
    done
    ;;
*)
    echo "address or valgrind, not $how" >&2
    exit 2
    ;;
esac
