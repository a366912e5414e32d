#!/bin/bash
# Builds the tests that need real verbs and runs them in the RDMA test machine.
#
#   tests/rdma_vm/suite.sh [--env NAME=VALUE]… [OPTIONS OF run.sh] [-- FILTER…]
#   tests/rdma_vm/suite.sh --build      only builds what it runs, and the machine
#
# `--env` sets a variable for the tests: `RDMA_FAULTS=60` for example makes those of `rdma::faults` last that long.
# Without a FILTER: the library's own tests on real verbs, those of `tests/rdma`, the functional tests of `tests/net` that
# make sense over RDMA (its devices make TOWLINE_BACKEND=auto choose it), a verified all-reduce and a transfer: see
# inside.sh; and transfers between two machines, see two_hosts.sh. With FILTERs: those of the library's tests, of
# `tests/rdma` and of `net::clock` that match one, in one machine.
#
# The whole suite tests the release build: the machine is emulated and slow. The tests around it are those of `cargo test`,
# with the library's own. With FILTERs the library is that of `cargo test` as well, which is built sooner.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
# The limit ends what hangs: on two quiet processors the suite takes half of it.
options=(--timeout 1500)
# Devices without a PCI path are merged for the tests only: SoftRoCE has none.
variables=(TOWLINE_MERGE_ANY=1)
only_build=
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    if [ "$1" = --build ]; then
        only_build=1
    elif [ "$1" = --env ] && [ $# -gt 1 ]; then
        variables+=("$2")
        shift
    else
        options+=("$1")
    fi
    shift
done
[ $# = 0 ] || shift

# What the library's tests and the wanted test programs are called; Cargo tells as it builds them.
wanted=(rdma net)
built=$(cd "$project" && cargo test --locked --lib "${wanted[@]/#/--test=}" --no-run --message-format=json |
    sed -n '/"profile":{[^}]*"test":true/s/.*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1=\2/p')
declare -A program
for entry in $built; do program[${entry%%=*}]=${entry#*=}; done
for name in towline "${wanted[@]}"; do
    [ -x "${program[$name]:-}" ] || { echo "rdma_vm: the test program $name was not built" >&2; exit 1; }
done

debug=$(dirname "$(dirname "${program[towline]}")")
release=$(dirname "$debug")/release
[ $# -gt 0 ] || (cd "$project" && cargo build --locked --release)

# What makes verbs calls fail, beside the plugin, where `rdma::faults` looks for it.
[ -e /usr/include/infiniband/verbs.h ] || { echo "rdma_vm: package libibverbs-dev is missing" >&2; exit 1; }
command -v cc >/dev/null || { echo "rdma_vm: a C compiler is missing (package gcc)" >&2; exit 1; }
cc -shared -fPIC -O1 -Wall -Wextra -Werror -pthread -o "$debug/libfaulty_verbs.so" "$here/../faulty_verbs.c" -ldl

[ -z "$only_build" ] || exec "$here/run.sh" "${options[@]}" --build

if [ $# -gt 0 ]; then
    # One at a time: some count what the kernel holds, some take links down.
    commands=
    for name in towline "${wanted[@]}"; do
        commands+="'${program[$name]}' --ignored --test-threads 1 --skip wire_compat:: --skip side_by_side $*; "
    done
    exec "$here/run.sh" "${options[@]}" -- env "${variables[@]}" TEST_MAY_SET_CLOCK=1 sh -ec "$commands"
fi
programs=()
for name in "${!program[@]}"; do programs+=("$name=${program[$name]}"); done

# Two hosts, beside the tests that run alone and hardly need the processor. In a group of their own, so that they end when
# this script does.
set -m
{ "$here/two_hosts.sh" --quick "$release/towline" "${options[@]}" --memory 768 2>&1 | sed -u "s/^/two_hosts: /"; } & hosts=$!
set +m
left=$(mktemp -d)
trap 'kill -- -$hosts 2>/dev/null || true; rm -rf "$left"' EXIT
trap 'exit 130' INT TERM
# Runs what has not passed yet.
one_machine() {
    "$here/run.sh" --out "$left" "${options[@]}" -- env "${variables[@]}" "PASSED=$(cat "$left/host0/passed" 2>/dev/null)" \
        "$here/inside.sh" "$release" "$debug" "${programs[@]}"
}
failed=() result=0 hung=
one_machine || result=$?
# A module hung once, probably in the emulated kernel. Nothing in that machine can be trusted any more: another one runs
# what has not passed. What fails, or hangs twice, fails the suite.
if [ -e "$left/host0/hangs" ] && [ ! -e "$left/host0/failed" ]; then
    hung=$(<"$left/host0/hangs") result=0
    echo "rdma_vm: $hung hung (HANGS above); running what has not passed in another machine"
    one_machine || result=$?
fi
[ "$result" = 0 ] || failed+=("the tests in one machine")
wait "$hosts" || failed+=("two_hosts.sh")
echo "rdma_vm: the whole suite in $SECONDS s"
[ -z "$hung" ] || echo "rdma_vm: UNSTABLE: $hung hung in the first machine"
[ ${#failed[@]} = 0 ] || { printf 'rdma_vm: FAILED: %s\n' "${failed[@]}" >&2; exit 1; }
