#!/bin/bash
# Builds the tests that need real verbs and runs them in the RDMA test machine.
#
#   tests/rdma_vm/suite.sh [OPTIONS OF run.sh] [-- FILTER…]
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
[ $# = 0 ] || shift
# The library's own tests; `rdma::` are those whose ignored ones need a device.
tests=$(cd "$here/../.." && cargo test --lib --no-run --message-format=json |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -1)
[ -x "$tests" ] || { echo "rdma_vm: the tests do not build" >&2; exit 1; }
# One at a time: some count what the kernel holds.
exec "$here/run.sh" "${options[@]}" -- "$tests" --ignored --test-threads 1 "${@:-rdma::}"
