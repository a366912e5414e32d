#!/bin/bash
# Builds the tests that need real verbs and runs them in the RDMA test machine.
#
#   tests/rdma_vm/suite.sh [OPTIONS OF run.sh] [-- FILTER…]
#
# Without a FILTER: the library's own tests on real verbs, `tests/rdma_net.rs`, `tests/rdma_events.rs`, the functional tests that make sense over
# RDMA (the machine's devices make TOWLINE_BACKEND=auto choose it), and a verified all-reduce. With FILTERs: the tests of
# `rdma_net`, `rdma_events` and of the library that match one.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
project=$(cd "$here/../.." && pwd)
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
[ $# = 0 ] || shift

# What the library's tests and the wanted test programs are called; Cargo tells as it builds them.
programs=$(cd "$project" && cargo test --locked --lib --test rdma_net --test rdma_events --test net_events \
    --test net_versions --test net_ordering --test net_placement --test net_fork --no-run --message-format=json |
    sed -n '/"test":true/s/.*"name":"\([^"]*\)".*"executable":"\([^"]*\)".*/\1=\2/p')
declare -A program
for entry in $programs; do program[${entry%%=*}]=${entry#*=}; done
for name in towline rdma_net rdma_events net_events net_versions net_ordering net_placement net_fork; do
    [ -x "${program[$name]:-}" ] || { echo "rdma_vm: the test program $name was not built" >&2; exit 1; }
done
towline=$(dirname "$(dirname "${program[towline]}")")/towline

# One at a time: some count what the kernel holds, some take links down.
ignored="--ignored --test-threads 1"
if [ $# -gt 0 ]; then
    exec "$here/run.sh" "${options[@]}" -- sh -ec "'${program[towline]}' $ignored $*; '${program[rdma_net]}' $ignored $*
        '${program[rdma_events]}' $ignored $*"
fi
# Left out: what needs 6 GiB of memory; sends that are done before their receive is posted, which is TCP's way; events of
# sockets, and events of NCCL's releases, which need a C compiler and are no backend's.
exec "$here/run.sh" "${options[@]}" -- sh -ec "
    '${program[towline]}' $ignored rdma::
    '${program[rdma_net]}' $ignored
    '${program[rdma_events]}' $ignored
    '${program[net_events]}' --test-threads 1 --skip broken_stream --skip nccl_2_2 --skip turned_off \
        --skip event_for_each_part --skip before_isend_returns
    '${program[net_versions]}' --test-threads 1 --skip 4_gib
    '${program[net_ordering]}' --test-threads 1
    '${program[net_placement]}' --test-threads 1
    '${program[net_fork]}' --test-threads 1
    '$towline' all-reduce --backend rdma -b 8 -e 1M --iters 3 -w 1"
