#!/bin/bash
# What suite.sh runs inside the test machine: inside.sh RELEASE DEBUG NAME=FILE…, the folders of the release build and of
# the tests' build, and the test programs. A part of one is called PROGRAM::MODULE.
#
# Modules that pass are written to /out/passed and those that fail to /out/failed, a line each; /out/hangs names the test
# that hung. A second machine gets the passed ones in PASSED and leaves them out.
#
# Tests that take links down or count what the whole kernel holds run first and alone. The others run in two rows side by
# side, since the machine has two processors; in each row one test at a time.
release=$1 debug=$2
shift 2
# The tests look for the plugin and the program in the folder of their own build. The plugin's names there are links to one
# file, which the mount covers.
for file in libnccl-net.so towline; do mount --bind "$release/$file" "$debug/$file" || exit 1; done
declare -A program
for entry in "$@"; do program[${entry%%=*}]=${entry#*=}; done
# A module that takes longer than this hangs; the slowest takes three minutes on a quiet computer, five on a busy one.
limit=${RDMA_LIMIT:-480}
alone=(objects_dropped_in_any_order a_link_that leave_nothing_in_the_kernel eight_fused the_traffic_class an_address_that)
others=()
for test in "${alone[@]}"; do others+=(--skip "$test"); done

# Seconds since the machine came up: a test sets its clock.
uptime() { cut -d ' ' -f 1 /proc/uptime; }
# Seconds for which the processors have been busy, in the emulated kernel as well.
busy() { awk '$1 == "cpu" { print ($2 + $3 + $4 + $7 + $8) / 100 }' /proc/stat; }

# Runs the tests of a module one at a time, and says how long they took. Filters and other arguments choose among the
# module's tests; that none is left is a failure. After one that hangs nothing more can be trusted.
# Tests that fail are repeated once, alone: an emulated machine may stand still for seconds. That is said at the end.
run() {
    local name=$1 result=0 start used log failed=() tests module= which= file=${program[${1%%::*}]} what=$*
    ! grep -qxF -- "$what" <<<"${PASSED:-}" || return 0
    [ "$name" = "${name#*::}" ] || module=${name#*::}::
    start=$(uptime) used=$(busy)
    log=$(mktemp)
    shift
    [ ! -e /out/hangs ] || return 0
    [ "${1:-}" != --ignored ] || which=--ignored
    mapfile -t tests <<<"$("$file" --list --format terse "$@" | sed -n "s/^\($module.*\): test$/\1/p")"
    # By way of a file: the machine has no /dev/fd for tee, and a process that is left over would keep a pipe open.
    if [ -n "${tests[0]}" ]; then
        tests/rdma_vm/limited.sh "$limit" "$file" --test-threads 1 $which --exact "${tests[@]}" >"$log" 2>&1 || result=$?
    else
        echo "there are no such tests" >"$log"
        result=1
    fi
    cat "$log"
    mapfile -t failed <<<"$(awk -f tests/support/failed.awk "$log")"
    [ -n "${failed[0]}" ] || failed=()
    if [ "$result" = 101 ] && [ ${#failed[@]} -gt 0 ] && [ ${#failed[@]} -le 2 ]; then
        result=0
        tests/rdma_vm/limited.sh "$limit" "$file" --test-threads 1 --include-ignored --exact "${failed[@]}" >"$log" 2>&1 || result=$?
        cat "$log"
        [ "$result" != 0 ] || printf '%s\n' "${failed[@]/#/$name }" >>/tmp/unstable
    fi
    awk -v what="$what" "BEGIN { printf \"# %s: %.1f s, processors busy for %.1f s\\n\", what, $(uptime) - $start, $(busy) - $used }"
    case $result in
    0) echo "$what" >>/out/passed ;;
    # The last test that began.
    124) sed '/HANGS: after/q' "$log" | sed -n 's/^test \([^ ]*\) \.\.\. .*/\1/p' | tail -n 1 >/out/hangs ;;
    *)
        echo "$what" >>/out/failed
        # Repeated at the end: the beginning of a long log may be cut.
        { echo "# $what:"; grep -A 3 'panicked at' "$log" || tail -n 12 "$log"; } | head -n 30 >>/tmp/reasons
        ;;
    esac
    [ "$result" = 0 ] || failures+=("$what")
    rm -f "$log"
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

# Left out of net's tests: what needs 6 GiB of memory or a C compiler, and what is the same over TCP, where `cargo test` runs
# it: checks of arguments and handles, older versions of the interface (all call the same code), several streams, events
# of sockets, strangers at the door.
row1() {
    # Left out: what needs 3 GiB of memory, and a minute.
    verbs rdma::net "${others[@]}" --skip more_than_1_gib
    newest net::versions --skip 4_gib
    run net::versions properties every_other
    newest net::ordering
    newest net::placement --skip several_streams
    newest net::deregister
    newest net::fork --skip sigpipe --skip receiver_is_killed
    newest net::hostile stale_and_foreign empty_message second_test longer_than wrong_secret
    verbs rdma::events
}
row2() {
    verbs towline rdma:: "${others[@]}"
    verbs rdma::attributes
    verbs rdma::personalities
    # Sends that are done before their receive is posted are TCP's way.
    run net::events --skip broken_stream --skip nccl_2_2 --skip turned_off --skip event_for_each_part \
        --skip before_isend_returns --skip leaves_long_messages
    # Fewer cycles than over TCP, which take an emulated machine minutes: what is counted is counted from the 21st on.
    TOWLINE_CYCLES=${TOWLINE_CYCLES:-22} newest net::lifecycle --skip unload_its_logger --skip again_v9 --skip again_v10 \
        --skip again_v11 --skip v4_accept --skip one_process_per_device
}

failures=()
verbs towline objects_dropped_in_any_order
verbs rdma::net a_link_that leave_nothing_in_the_kernel eight_fused the_traffic_class an_address_that
verbs rdma::mend
verbs rdma::vanish
verbs rdma::faults
TEST_MAY_SET_CLOCK=1 verbs net::clock
row 1 & row 2 &
# What hangs in the kernel keeps its row from ending.
while [ -n "$(jobs -rp)" ]; do
    if [ -e /out/hangs ]; then
        sleep 3
        break
    fi
    sleep 0.2
done
for row in 1 2; do
    rows=("")
    [ ! -e /tmp/row$row ] || mapfile -t rows </tmp/row$row
    [ "${rows[-1]:-}" = ended ] || rows+=("row $row did not end")
    for failure in "${rows[@]}"; do [ "$failure" = ended ] || [ -z "$failure" ] || failures+=("$failure"); done
done
if [ ! -e /out/hangs ]; then
    "$release/towline" all-reduce --ranks 3 --backend rdma -b 16 -e 1M -f 16 --iters 3 -w 1 || failures+=(all-reduce)
    "$release/towline" send-recv --backend rdma -b 8 -e 1M -f 64 --repetitions 1 --time 30 || failures+=(send-recv)
fi
printf '# all in %.0f s\n' "$(uptime)"
[ ! -e /tmp/unstable ] || sed 's/^/UNSTABLE (failed, and passed when repeated): /' /tmp/unstable
[ ${#failures[@]} != 0 ] || exit 0
[ ! -e /tmp/reasons ] || cat /tmp/reasons
printf 'FAILED: %s\n' "${failures[@]}"
exit 1
