#!/usr/bin/env bash
# Faults under real NCCL on two GPUs of one host, over Towline and, for comparison, over NCCL's Socket:
#   1. streams are cut in the middle of all_reduce_perf, over two rails where the host has two interfaces;
#   2. one of two processes is killed in the middle of an all-reduce.
# Prints one table; exits 1 when Towline did not finish (1) or did not report NCCL's remote error in time (2). Less than
# three minutes.
#
#   tests/gpu/faults.sh TESTS_DIR TOWLINE_DIR [OUT_DIR]
#
#   TESTS_DIR    all_reduce_perf (nccl-tests)           TOWLINE_DIR  libnccl-net.so
#   OUT_DIR      where outputs and logs go (default: a new directory under /tmp)
#
#   NCCL_DIR=    directory of libnccl.so.2, if the loader needs it
#   RAILS=       interfaces to use, separated by commas (default: lo and the first other with an IPv4 address)
#   NETS=        networks to try (default: "Towline Socket")
set -uo pipefail
if [ $# -lt 2 ]; then
    sed -n '2,16s/^# \{0,1\}//p' "$0"
    exit 2
fi
here=$(dirname "$(realpath "$0")")
tests=$(realpath "$1") towline=$(realpath "$2") out=${3:-$(mktemp -d /tmp/towline-faults.XXXXXX)}
mkdir -p "$out"
if [ ! -e "$towline/libnccl-net.so" ]; then
    echo "there is no libnccl-net.so in $towline" >&2
    exit 2
fi
other() { # the first interface beside lo that has an IPv4 address and is up
    python3 - <<'PY'
import fcntl, socket, struct
probe = socket.socket()
for _, name in socket.if_nameindex():
    request = struct.pack("16s240x", name.encode())
    try:
        fcntl.ioctl(probe, 0x8915, request)
        flags = struct.unpack_from("H", fcntl.ioctl(probe, 0x8913, request), 16)[0]
    except OSError:
        continue
    if name != "lo" and flags & 0x40:
        print(name)
        break
PY
}
second=$(other)
rails=${RAILS:-lo${second:+,$second}}
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET
# For NCCL's own sockets and its Socket transport, which uses one interface per connection.
export NCCL_SOCKET_IFNAME="=${rails%%,*}"
libraries=${NCCL_DIR:+$NCCL_DIR:}${LD_LIBRARY_PATH:-}
status=0
echo "rails: $rails; outputs in $out"
printf '| %-34s | %-8s | %s\n' fault network result
printf '|%s|%s|%s\n' ------------------------------------ ---------- --------

# descendant PID NAME: the process of that name below another one.
descendant() {
    local child
    for child in $(cat "/proc/$1/task/$1/children" 2>/dev/null); do
        if [ "$(cat "/proc/$child/comm" 2>/dev/null)" = "$2" ]; then
            echo "$child"
            return
        fi
        descendant "$child" "$2"
    done
}

# under NET: the environment of a run over that network, in front of a command.
under() {
    local net=$1
    shift
    if [ "$net" = Towline ]; then
        NCCL_NET=Towline TOWLINE_RAILS=$rails TOWLINE_RECONNECT_TIMEOUT=10 LD_LIBRARY_PATH=$towline${libraries:+:$libraries} "$@"
    else
        NCCL_NET=Socket LD_LIBRARY_PATH=$libraries "$@"
    fi
}

for net in ${NETS:-Towline Socket}; do
    text=$out/cut-$net.txt log=$out/cut-$net.log
    rm -f "$log"
    started=$(date +%s.%N)
    NCCL_DEBUG_FILE=$log under "$net" timeout -k 2 40 "$tests/all_reduce_perf" -b 64M -e 256M -f 2 -n 150 -w 2 -c 1 -g 2 >"$text" 2>&1 &
    run=$!
    program=
    for _ in $(seq 200); do
        program=$(descendant $run all_reduce_perf)
        [ -n "$program" ] && break
        sleep 0.05
    done
    python3 "$here/cut_stream.py" "${program:-0}" --count 5 --every 0.7 --after 200 --patience 35 >"$out/cut-$net.cuts" 2>&1
    wait $run
    code=$?
    took=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.0f", b - a }')
    cuts=$(grep -c '^cut ' "$out/cut-$net.cuts")
    if [ $code = 0 ] && grep -q '# Out of bounds values : 0 OK' "$text"; then
        result="$cuts streams cut; finished after $took s, 0 wrong"
        good=1
    elif [ $code = 124 ] || [ $code = 137 ]; then
        result="$cuts streams cut; hangs: ended by force after $took s"
        good=0
    else
        result="$cuts streams cut; failed with status $code after $took s"
        good=0
    fi
    if [ "$net" = Towline ]; then
        [ "$cuts" -gt 0 ] && [ $good = 1 ] || status=1
        grep -qs 'via NET/Towline' "$log" "$text" || { status=1 result="$result; NOT over Towline"; }
        result="$result; the log tells of $(cat "$log" "$text" 2>/dev/null | grep -c ' broke (') broken streams"
    fi
    printf '| %-34s | %-8s | %s\n' 'streams cut in all_reduce_perf' "$net" "$result"
done

for net in ${NETS:-Towline Socket}; do
    rm -f "$out/id-$net"
    for rank in 0 1; do
        NCCL_DEBUG_FILE=$out/kill-$net-$rank.log under "$net" timeout -k 2 35 python3 "$here/rank.py" $rank 2 "$out/id-$net" >"$out/kill-$net-$rank.txt" 2>&1 &
        pids[rank]=$!
    done
    for _ in $(seq 150); do
        grep -q running "$out/kill-$net-0.txt" && break
        kill -0 "${pids[0]}" 2>/dev/null || break
        sleep 0.1
    done
    sleep 1
    victim=$(descendant "${pids[1]}" python3)
    if ! grep -q running "$out/kill-$net-0.txt" || [ -z "$victim" ]; then
        result="did not run: $(tail -n 1 "$out/kill-$net-0.txt")" good=0
    else
        kill -KILL "$victim"
        killed=$(date +%s.%N)
        error=
        for _ in $(seq 400); do
            error=$(sed -n 's/^error //p' "$out/kill-$net-0.txt")
            [ -n "$error" ] && break
            sleep 0.05
        done
        after=$(awk -v a="$killed" -v b="$(date +%s.%N)" 'BEGIN { printf "%.2f", b - a }')
        if [ -n "$error" ]; then
            result="the other reports NCCL error $error (6 is the remote error) after $after s" good=0
            # NCCL's process has a Python program around it, which looks every 50 ms.
            [ "$error" = 6 ] && awk -v s="$after" 'BEGIN { exit !(s <= 1.1) }' && good=1
        else
            result="the other reports nothing within $after s" good=0
        fi
    fi
    # The survivor aborts its communicator, which must not hang.
    for _ in $(seq 200); do
        grep -q aborted "$out/kill-$net-0.txt" && break
        kill -0 "${pids[0]}" 2>/dev/null || break
        sleep 0.05
    done
    kill -TERM "${pids[0]}" "${pids[1]}" 2>/dev/null
    wait "${pids[0]}" "${pids[1]}" 2>/dev/null
    if grep -q aborted "$out/kill-$net-0.txt"; then
        result="$result; its communicator was aborted in order"
    else
        result="$result; its communicator could NOT be aborted" good=0
    fi
    [ "$net" = Socket ] || [ $good = 1 ] || status=1
    printf '| %-34s | %-8s | %s\n' 'one of two processes killed' "$net" "$result"
done
exit $status
