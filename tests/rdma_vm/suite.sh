#!/bin/bash
# Builds the tests that need real verbs and runs them in the RDMA test machine.
#
#   tests/rdma_vm/suite.sh [OPTIONS OF run.sh] [-- FILTER…]
#
# Without a FILTER: the library's own tests on real verbs, `tests/rdma_net.rs`, `tests/rdma_mend.rs`,
# `tests/rdma_faults.rs`, `tests/rdma_events.rs`, the functional tests that make sense over RDMA (the machine's devices make
# TOWLINE_BACKEND=auto choose it), and a verified all-reduce: see inside.sh. With FILTERs: the tests of `rdma_net`,
# `rdma_mend`, `rdma_faults`, `rdma_events` and of the library that match one.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
# Ten minutes at most, on a machine that others use too.
options=(--timeout 600)
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
[ $# = 0 ] || shift

# What the library's tests and the wanted test programs are called; Cargo tells as it builds them.
wanted=(rdma_net rdma_mend rdma_faults rdma_events net_events net_lifecycle net_versions net_ordering net_placement net_fork net_hostile)
built=$(cd "$project" && cargo test --locked --lib "${wanted[@]/#/--test=}" --no-run --message-format=json |
    sed -n '/"profile":{[^}]*"test":true/s/.*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1=\2/p')
declare -A program
for entry in $built; do program[${entry%%=*}]=${entry#*=}; done
for name in towline "${wanted[@]}"; do
    [ -x "${program[$name]:-}" ] || { echo "rdma_vm: the test program $name was not built" >&2; exit 1; }
done

# What makes verbs calls fail, beside the plugin, where `rdma_faults` looks for it.
[ -e /usr/include/infiniband/verbs.h ] || { echo "rdma_vm: package libibverbs-dev is missing" >&2; exit 1; }
command -v cc >/dev/null || { echo "rdma_vm: a C compiler is missing (package gcc)" >&2; exit 1; }
cc -shared -fPIC -O1 -Wall -Wextra -Werror -pthread -o "$(dirname "$(dirname "${program[towline]}")")/libfaulty_verbs.so" \
    "$here/../faulty_verbs.c" -ldl

if [ $# -gt 0 ]; then
    # One at a time: some count what the kernel holds, some take links down.
    ignored="--ignored --test-threads 1 $*"
    exec "$here/run.sh" "${options[@]}" -- sh -ec "
        '${program[towline]}' $ignored; '${program[rdma_net]}' $ignored; '${program[rdma_mend]}' $ignored; \
        '${program[rdma_faults]}' $ignored; '${program[rdma_events]}' $ignored"
fi
programs=("all-reduce=$(dirname "$(dirname "${program[towline]}")")/towline")
for name in "${!program[@]}"; do programs+=("$name=${program[$name]}"); done
exec "$here/run.sh" "${options[@]}" -- "$here/inside.sh" "${programs[@]}"
