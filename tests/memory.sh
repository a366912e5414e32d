#!/usr/bin/env bash
# Looks for wrong uses of memory while the functional tests run.
#
#   tests/memory.sh address [TEST ...]    the address sanitizer (leaks included); the whole program and the library are
#                                         built with it, by the stable compiler with RUSTC_BOOTSTRAP=1
#   tests/memory.sh thread [TEST ...]     the thread sanitizer, with the standard library built with it too: needs its
#                                         source (rustup component add rust-src)
#   tests/memory.sh valgrind [TEST ...]   valgrind's memcheck, on the ordinary build; so slow that the
#                                         watchdogs of tests with much traffic may end them
#
# TEST: test programs (profiler ...) or modules of one (net::ordering ...), or lib for the tests inside the library; by
# default those below. Extra arguments for the programs, `--skip` for example, in TOWLINE_TEST_ARGS. TOWLINE_MEMORY_TARGET_DIR: where a sanitizer's
# build goes.
#
# Left out: net::fork (a sanitizer's child of a fork is not an ordinary one), net::pressure (its injector tells the plugin's
# system calls by who makes them, and the sanitizer stands in between), what counts allocations or memory (the
# sanitizer makes them), processes in a namespace of their own or with a thread that no signal stops (leaks are looked for
# with all threads stopped), net::netns (nothing that the others do not have, but many processes), the simulation (no unsafe
# code in it). tests/leaks.supp says what is kept for good on purpose, tests/valgrind.supp what memcheck takes for a fault
# and is none.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
how=${1:?address, thread or valgrind}
shift
tests=("$@")
read -ra arguments <<<"${TOWLINE_TEST_ARGS:-}"
triple=$(rustc -vV | sed -n 's/^host: //p')
export CARGO_PROFILE_DEV_DEBUG=line-tables-only CARGO_PROFILE_TEST_DEBUG=line-tables-only

# The library would complain about it.
target_dir=${TOWLINE_MEMORY_TARGET_DIR:-}
unset TOWLINE_MEMORY_TARGET_DIR

# These measure how the process grows, but the sanitizer keeps what was freed for a while; or how long a connection takes
# beside ten thousand strangers, or how much is copied in a tenth of a millisecond. A fork waits a second for other threads, which is not enough for slowed ones.
skip=(--skip made_again_200_times --skip do_not_grow_the_process --skip crowd_of_strangers
    --skip reads_a_byte_a_second_holds_up_nobody --skip long_run_with_faults
    --skip a_hundred_busy_connections --skip forks_amid_opening_and_closing --skip a_forked_child_has_no_part
    --skip take_no_memory --skip a_thousand_idle_connections --skip leaves_long_messages
    --skip processes_of_one_name_and_number --skip keeps_nobody_waiting)

# Runs one of them with what comes behind its name.
run() {
    local test=$1 module= long=
    shift
    printf '== %s, %s\n' "$test" "$how"
    [ "$test" = "${test#*::}" ] || module=${test#*::}::
    [ "$test" = "${test%::long}" ] || long=--ignored
    case $test in
    lib) cargo test --quiet --profile emulated --target "$triple" --lib "$@" -- --skip simulation "${skip[@]}" "${arguments[@]}" ;;
    *) cargo test --quiet --profile emulated --target "$triple" --test "${test%%::*}" "$@" -- $module $long "${skip[@]}" "${arguments[@]}" ;;
    esac
}

case $how in
address)
    [ ${#tests[@]} -gt 0 ] || tests=(lib abi::host cli::commands net::devices net::ordering net::lifecycle
        net::hostile net::versions net::versions::long net::placement net::events net::seal net::protocol net::slow net::descriptors net::routes
        net::scale net::traffic_class net::faults net::faults::long net::vanish net::vanish::long net::verdict profiler)
    # The library is opened by a program that holds the sanitizer's runtime, and must find it there.
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Clink-arg=-Wl,--export-dynamic-symbol=__asan_*"
    export CARGO_TARGET_DIR=${target_dir:-$PWD/target/address}
    export LSAN_OPTIONS=suppressions=$PWD/tests/leaks.supp:print_suppressions=0
    for test in "${tests[@]}"; do run "$test"; done
    ;;
thread)
    [ ${#tests[@]} -gt 0 ] || tests=(net::ordering net::lifecycle net::events net::seal net::hostile)
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Clink-arg=-Wl,--export-dynamic-symbol=__tsan_*"
    export CARGO_TARGET_DIR=${target_dir:-$PWD/target/thread}
    for test in "${tests[@]}"; do run "$test" -Zbuild-std; done
    ;;
valgrind)
    [ ${#tests[@]} -gt 0 ] || tests=(net::placement)
    # Blocks that are still reachable belong to threads and tables that live as long as the process.
    memcheck="valgrind --quiet --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite \
--show-leak-kinds=definite --num-callers=30 --fair-sched=try --suppressions=$PWD/tests/valgrind.supp"
    for test in "${tests[@]}"; do
        printf '== %s, valgrind\n' "$test"
        children='' slow=() module=
        [ "$test" = "${test#*::}" ] || module=${test#*::}::
        if [ "$test" = profiler ]; then
            # What it looks at runs in processes of its own. Left out is what awaits a schedule, or reads long traces.
            children='--trace-children=yes --trace-children-skip=*/towline,*/cc'
            slow=(--skip merge:: --skip picture:: --skip setups:: --skip profile_run:: --skip tuner:: --skip the_trace_of_a_killed)
        fi
        CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="$memcheck $children" \
            cargo test --quiet --profile emulated --test "${test%%::*}" -- $module --test-threads 1 "${skip[@]}" "${slow[@]}" "${arguments[@]}"
        [ "$test" = profiler ] || continue
        # The set-ups by themselves, without a look at what they leave.
        for scenario in rank:1,0 rank:6,0 devices:6 threads:6; do
            printf '== %s of %s, valgrind\n' "$scenario" "$test"
            traces=$(mktemp -d)
            CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER=$memcheck PROFILER_TEST_SCENARIO=$scenario TOWLINE_PROFILE=all \
                TOWLINE_PROFILE_DIR=$traces cargo test --quiet --profile emulated --test "$test" -- --exact scenario --ignored
            rm -r "$traces"
        done
    done
    ;;
*)
    echo "address, thread or valgrind, not $how" >&2
    exit 2
    ;;
esac
