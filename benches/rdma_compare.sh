#!/bin/bash
# Towline over RDMA beside perftest's ib_write_lat and ib_write_bw, in alternation, in the RDMA test machine.
#
#   [PEER=PLUGIN.so] benches/rdma_compare.sh [ROUNDS [OPTIONS of tests/rdma_vm/run.sh…]]
#   [PEER=PLUGIN.so] benches/rdma_compare.sh --latency [ROUNDS [OPTIONS…]]
#   [PEER=PLUGIN.so] benches/rdma_compare.sh --work [ROUNDS [OPTIONS…]]
#   [PEER=PLUGIN.so] benches/rdma_compare.sh --instructions [OPTIONS…]
#
# PEER: another network plugin for NCCL, somewhere below this folder, which is measured in the same way.
#
# Without a word: time. Prints for each size the medians over the rounds and their ratios. Needs an otherwise idle computer:
# the machine is emulated, and everything in it competes for two processors. `--mtu 4200` gives packets of 4 KiB, as most
# RDMA networks have.
#
# --latency: of these only the one-way times.
#
# --work: the same bandwidths in a machine of one processor whose clock counts instructions, those of the kernel and of
# waiting included. What else the computer does makes no difference there.
#
# --instructions: user-space instructions (callgrind) and system calls (strace) of the thread that moves messages, for each
# message: N messages taken from 2 N, so that what is done once falls out. See benches/rdma_messages.rs.
#
# Needs release builds: cargo build --release --lib --bins --bench rdma_messages
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mode=time
case ${1:-} in
--latency) mode=latency; shift ;;
--work) mode=work; shift ;;
--instructions) mode=instructions; shift ;;
esac
rounds=7
if [ "$mode" != instructions ] && [[ ${1:-} =~ ^[0-9]+$ ]]; then
    rounds=$1
    shift
fi
messages=$(ls -t target/release/deps/rdma_messages-* 2>/dev/null | grep -v '\.d$' | head -1 || true)
[ -x target/release/towline ] && [ -n "$messages" ] ||
    { echo "build first: cargo build --release --lib --bins --bench rdma_messages" >&2; exit 1; }
inside=target/rdma_compare_inside.sh
cat >"$inside" <<'INSIDE'
set -e
mode=$1 rounds=$2 messages=$3
export NCCL_DEBUG= NCCL_SOCKET_IFNAME=veth0 TOWLINE_BACKEND=rdma
plugins="towline=target/release/libnccl-net.so ${4:+peer=$4}"

latency() {
    for size in 8 64 256 1024; do
        ib_write_lat -d rxe0 -x 1 -s $size -n 2000 >/dev/null 2>&1 &
        sleep 0.4
        # Its columns: size, iterations, least, most, typical: microseconds one way.
        ib_write_lat -d rxe0 -x 1 -s $size -n 2000 10.7.0.1 2>/dev/null | awk -v s=$size '$1 == s { print "lat", s, "ib", $5; print "ahead", s, "ib", $5 }'
        wait
        for plugin in $plugins; do
            for ahead in "" --ahead; do
                target/release/towline send-recv --backend rdma --plugin "$PWD/${plugin#*=}" -b $size -e $size \
                    --outstanding 1 --repetitions 1 --time 150 $ahead 2>/dev/null |
                    awk -v s=$size -v p=${plugin%%=*} -v what=${ahead:+ahead} '$1 == s { print what ? what : "lat", s, p, $4 }'
            done
        done
    done
}
# Moves $1 MiB in messages of each size.
bandwidth() {
    for size in 65536 262144 1048576 4194304 16777216; do
        count=$(($1 * 1048576 / size > 5 ? $1 * 1048576 / size : 5))
        ib_write_bw -d rxe0 -x 1 -s $size -n $count >/dev/null 2>&1 &
        sleep 0.4
        # Size, iterations, peak, average: MiB/s.
        ib_write_bw -d rxe0 -x 1 -s $size -n $count 10.7.0.1 2>/dev/null | awk -v s=$size '$1 == s { print "bw", s, "ib", $4 * 1.048576 }'
        wait
        for plugin in $plugins; do
            target/release/towline send-recv --backend rdma --plugin "$PWD/${plugin#*=}" -b $size -e $size --repetitions 1 \
                -n $count --json /tmp/bw.json >/dev/null 2>&1
            tr -d ' \n' </tmp/bw.json | sed -n 's/.*"bandwidth_gbs":\[\([0-9.e-]*\).*/\1/p' |
                awk -v s=$size -v p=${plugin%%=*} '{ print "bw", s, p, $1 * 1000 }'
        done
    done
}
# Groups of eight parts; perftest has no such thing.
groups() {
    for size in 8192 65536; do
        for plugin in $plugins; do
            echo "group $size ${plugin%%=*} $($messages groups "${plugin#*=}" $size 8 $(($1 * 131072 / size)) 2>/dev/null)"
        done
    done
}
# Instructions of the counted calls.
collected() {
    valgrind --tool=callgrind --toggle-collect='*counted*' --callgrind-out-file=/dev/null "$messages" "$@" 2>&1 |
        awk '/early/ && $NF > 0 { print "a call came too early" >"/dev/stderr" } / Collected : / { print $NF }'
}
# System calls of the first thread, by name. Sleeping, and giving way while it connects, are the benchmark's own.
calls() {
    strace -c -o /tmp/strace "$messages" "$@" >/dev/null 2>&1
    awk '$4 ~ /^[0-9]+$/ && $NF !~ /^(total|clock_nanosleep|sched_yield)$/ { print $NF, $4 }' /tmp/strace | sort
}
instructions() {
    for plugin in $plugins; do
        file=${plugin#*=}
        for what in "8 1" "1024 1" "65536 1" "1048576 1" "8192 8"; do
            set -- $what
            echo "instructions $1x$2 ${plugin%%=*} $((($(collected count $file $1 $2 40) - $(collected count $file $1 $2 20)) / 20))"
        done
        echo "instructions idle ${plugin%%=*} $((($(collected idle $file 65536 1 400) - $(collected idle $file 65536 1 200)) / 200))"
        for what in "8 1" "65536 1" "8192 8"; do
            set -- $what
            calls count $file $1 $2 50 >/tmp/once
            calls count $file $1 $2 100 >/tmp/twice
            echo "calls $1x$2 ${plugin%%=*} $(join -a 2 -e 0 -o 0,1.2,2.2 /tmp/once /tmp/twice | awk '$3 - $2 >= 10 { printf "%s=%.2f ", $1, ($3 - $2) / 50 }')"
        done
    done
}
case $mode in
instructions) instructions ;;
latency) for round in $(seq "$rounds"); do latency; done ;;
work) for round in $(seq "$rounds"); do bandwidth 8; groups 8; done ;;
time) for round in $(seq "$rounds"); do latency; bandwidth 24; groups 24; done ;;
esac
INSIDE
machine=(--memory 3072 --timeout 2400)
case $mode in
work) machine+=(--count-time) ;;
instructions) machine+=(--with valgrind --with strace) ;;
esac
tests/rdma_vm/run.sh "${machine[@]}" "$@" -- bash "$inside" "$mode" "$rounds" "$messages" ${PEER:+"$PEER"} |
    tee target/rdma_compare.txt | python3 -c '
import collections, statistics, sys
seen = collections.defaultdict(list)
for line in sys.stdin:
    words = line.split()
    if words and words[0] in ("instructions", "calls"):
        print(line, end="", flush=True)
    elif len(words) == 4 and words[0] in ("lat", "ahead", "bw", "group"):
        seen[words[0], int(words[1]), words[2]].append(float(words[3]))
def versus(ours, theirs):
    ratios = sorted(a / b for a, b in zip(ours, theirs))
    return f"{statistics.median(ratios):6.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})" if ratios else ""
titles = {"lat": "one way, us, receives posted just before; ib_write_lat", "ahead": "the same, receives posted well ahead",
          "bw": "MB/s; ib_write_bw", "group": "groups of eight, MB/s; no yardstick"}
for kind, title in titles.items():
    sizes = sorted({key[1] for key in seen if key[0] == kind})
    if sizes:
        print(f"{title}; Towline and its ratio; the peer and its ratio; Towline to the peer (least to most); rounds")
    for size in sizes:
        base, ours, theirs = (seen[kind, size, who] for who in ("ib", "towline", "peer"))
        row = f"{size:9} " + (f"{statistics.median(base):9.2f}" if base else "        -")
        for values in (ours, theirs):
            if values:
                ratio = statistics.median(b / a for a, b in zip(base, values)) if base else float("nan")
                row += f" {statistics.median(values):9.2f} {ratio:6.2f}"
        print(row, versus(ours, theirs), len(ours))
'
