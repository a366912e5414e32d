#!/bin/bash
# What suite.sh runs inside the test machine. Its arguments are the test programs, as NAME=FILE.
#
# Tests that take links down or count what the whole kernel holds run first and alone. The others run in two rows side by
# side, since the machine has two processors; in each row one test at a time.
declare -A program
for entry in "$@"; do program[${entry%%=*}]=${entry#*=}; done
alone=(objects_dropped_in_any_order a_link_that leave_nothing_in_the_kernel eight_fused the_traffic_class)
others=()
for test in "${alone[@]}"; do others+=(--skip "$test"); done

# Runs a program's tests one at a time, and says how long they took.
run() {
    local name=$1 result=0 start=$EPOCHREALTIME
    shift
    "${program[$name]}" --test-threads 1 "$@" || result=$?
    printf '# %s %s: %.1f s\n' "$name" "$*" "$(awk "BEGIN { print $EPOCHREALTIME - $start }")"
    [ "$result" = 0 ] || failures+=("$name $*")
}
# Runs the tests of a row, its output marked with the row's number; its failures and a last word go into a file.
row() {
    { failures=(); "row$1"; printf '%s\n' "${failures[@]}" ended >"/tmp/row$1"; } 2>&1 |
        while IFS= read -r line; do printf '%s| %s\n' "$1" "$line"; done
}
# Ignored tests are those that need RDMA devices.
verbs() { run "$1" --ignored "${@:2}"; }
# Most tests with the newest version of the interface.
newest() { TEST_NEWEST=1 run "$@"; }

row1() {
    verbs rdma_net "${others[@]}"
    # Every size, address and count with the newest version; with each of the others the rest: groups, tags, sizes, flushes.
    newest net_versions every_size unaligned larger_than_its_send every_count run_out
    run net_versions --skip every_size --skip unaligned --skip larger_than_its_send --skip every_count --skip run_out \
        --skip 4_gib
    newest net_ordering
    run net_placement
}
row2() {
    # Left out of the whole: what needs 6 GiB of memory; sends that are done before their receive is posted, which is TCP's
    # way; events of sockets, and events of NCCL's releases, which need a C compiler and are no backend's; strangers at the
    # door, whom TCP's handshake turns away before RDMA has its turn.
    verbs towline rdma:: "${others[@]}"
    verbs rdma_events
    run net_events --skip broken_stream --skip nccl_2_2 --skip turned_off --skip event_for_each_part \
        --skip before_isend_returns --skip leaves_long_messages
    # Fewer cycles than over TCP, which take an emulated machine minutes.
    TOWLINE_CYCLES=${TOWLINE_CYCLES:-40} newest net_lifecycle
    newest net_hostile handle device_that null_pointers empty_message second_test longer_than finalized wrong_secret
    newest net_fork
}

failures=()
verbs towline objects_dropped_in_any_order
verbs rdma_net a_link_that leave_nothing_in_the_kernel eight_fused the_traffic_class
verbs rdma_mend
verbs rdma_faults
row 1 & row 2 & wait
for row in 1 2; do
    mapfile -t rows </tmp/row$row
    [ "${rows[-1]:-}" = ended ] || rows+=("row $row did not end")
    for failure in "${rows[@]}"; do [ "$failure" = ended ] || [ -z "$failure" ] || failures+=("$failure"); done
done
"${program[all-reduce]}" all-reduce --backend rdma -b 8 -e 1M --iters 3 -w 1 || failures+=(all-reduce)
printf '# all in %s s\n' "$SECONDS"
[ ${#failures[@]} = 0 ] || { printf 'FAILED: %s\n' "${failures[@]}"; exit 1; }
