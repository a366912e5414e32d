#!/bin/bash
# Towline over RDMA beside perftest's ib_write_lat and ib_write_bw, in alternation, in the RDMA test machine.
#
#   [PEER=PLUGIN.so] benches/rdma_compare.sh [ROUNDS [OPTIONS of tests/rdma_vm/run.sh…]]
#
# PEER: another network plugin for NCCL, somewhere below this folder, which is measured in the same way.
# Prints for each size the medians over the rounds and their ratios. Needs a release build, and an otherwise idle computer:
# the machine is emulated, and everything in it competes for two processors. `--mtu 4200` gives packets of 4 KiB, as most
# RDMA networks have.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
rounds=${1:-7}
shift || true
[ -x target/release/towline ] || { echo "build first: cargo build --release" >&2; exit 1; }
inside=target/rdma_compare_inside.sh
cat >"$inside" <<'INSIDE'
set -e
export NCCL_DEBUG= NCCL_SOCKET_IFNAME=veth0
plugins="towline=target/release/libnccl-net.so ${2:+peer=$2}"
for round in $(seq "$1"); do
    for size in 8 64 256 1024; do
        ib_write_lat -d rxe0 -x 1 -s $size -n 2000 >/dev/null 2>&1 &
        sleep 0.4
        # Its columns: size, iterations, least, most, typical: microseconds one way.
        ib_write_lat -d rxe1 -x 1 -s $size -n 2000 10.7.0.1 2>/dev/null | awk -v s=$size '$1 == s { print "lat", s, "ib", $5 }'
        wait
        for plugin in $plugins; do
            target/release/towline send-recv --backend rdma --plugin "$PWD/${plugin#*=}" -b $size -e $size --outstanding 1 \
                --repetitions 1 --time 150 2>/dev/null | awk -v s=$size -v p=${plugin%%=*} '$1 == s { print "lat", s, p, $4 }'
        done
    done
    for size in 65536 262144 1048576 4194304 16777216; do
        count=$((24 * 1048576 / size > 5 ? 24 * 1048576 / size : 5))
        ib_write_bw -d rxe0 -x 1 -s $size -n $count >/dev/null 2>&1 &
        sleep 0.4
        # Size, iterations, peak, average: MiB/s.
        ib_write_bw -d rxe1 -x 1 -s $size -n $count 10.7.0.1 2>/dev/null | awk -v s=$size '$1 == s { print "bw", s, "ib", $4 * 1.048576 }'
        wait
        for plugin in $plugins; do
            target/release/towline send-recv --backend rdma --plugin "$PWD/${plugin#*=}" -b $size -e $size --repetitions 1 \
                -n $count --json /tmp/bw.json >/dev/null 2>&1
            tr -d ' \n' </tmp/bw.json | sed -n 's/.*"bandwidth_gbs":\[\([0-9.e-]*\).*/\1/p' |
                awk -v s=$size -v p=${plugin%%=*} '{ print "bw", s, p, $1 * 1000 }'
        done
    done
done
INSIDE
tests/rdma_vm/run.sh --memory 3072 --timeout 1500 "$@" -- sh "$inside" "$rounds" ${PEER:+"$PEER"} | tee target/rdma_compare.txt | python3 -c '
import collections, statistics, sys
seen = collections.defaultdict(list)
for line in sys.stdin:
    words = line.split()
    if len(words) == 4 and words[0] in ("lat", "bw"):
        seen[words[0], int(words[1]), words[2]].append(float(words[3]))
for kind, title in (("lat", "one way, us"), ("bw", "MB/s")):
    print(f"{title}: size, ib_write_{kind}; then Towline, and the peer if there is one, each with its ratio to ib_write_{kind}; rounds")
    for size in sorted({key[1] for key in seen if key[0] == kind}):
        base = seen[kind, size, "ib"]
        row = f"{size:9} {statistics.median(base):9.2f}" if base else f"{size:9}         -"
        for who in ("towline", "peer"):
            values = seen[kind, size, who]
            if values:
                ratios = [b / a for a, b in zip(base, values)]
                row += f" {statistics.median(values):9.2f} {statistics.median(ratios) if ratios else 0:6.2f}"
        print(row, len(base))
'
