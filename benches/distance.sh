#!/usr/bin/env bash
# Data over distance: Towline beside plain TCP, between two network namespaces with a long link between them. See --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
benches/distance.sh [--rtt "1 10 50 200"] [--rate "100M 1000M"] [--loss "0 0.01 0.1 1"] [--sizes "64K 1M 16M 64M"]
                    [--outstanding "1 8"] [--streams 3] [--time 1000] [--repetitions 3] [--bin target/release]

For each round trip (ms), rate (bit/s) and loss (percent, each way): `towline send-recv --compare` from one network namespace
to another, with as many plain TCP sockets as Towline has streams. One line for each size: Mb/s of both, and their ratio, which
should be 0.9 or more. With one message outstanding, each is counted until the receiver has it and has said so, for both.

The link is a program in user space (long_link.c), so no kernel module is needed. Needs root, iproute2, /dev/net/tun, a C
compiler and Python 3. Build with `cargo build --release` first.
TEXT
}

rtts="1 10 50 200" rates="100M 1000M" losses="0 0.01 0.1 1" sizes="64K 1M 16M 64M" outstanding="1 8"
streams=3 time=1000 repetitions=3
here=$(cd "$(dirname "$0")" && pwd)
bin=$here/../target/release
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --rtt) rtts=$2 ;;
        --rate) rates=$2 ;;
        --loss) losses=$2 ;;
        --sizes) sizes=$2 ;;
        --outstanding) outstanding=$2 ;;
        --streams) streams=$2 ;;
        --time) time=$2 ;;
        --repetitions) repetitions=$2 ;;
        --bin) bin=$2 ;;
        *) echo "unknown option $1; see --help" >&2; exit 2 ;;
    esac
    shift 2
done

[ "$(id -u)" = 0 ] || { echo "this needs root, to make network namespaces" >&2; exit 1; }
[ -x "$bin/towline" ] || { echo "$bin/towline is missing: cargo build --release" >&2; exit 1; }

near="towline-near-$$" far="towline-far-$$" listener="" link=""
work=$(mktemp -d)
end() {
    [ -z "$1" ] || { kill "$1" && wait "$1"; } 2>/dev/null || true
}
clean() {
    end "$listener"
    end "$link"
    ip netns del "$near" 2>/dev/null || true
    ip netns del "$far" 2>/dev/null || true
    rm -rf "$work"
}
trap clean EXIT
cc -O2 -pthread -o "$work/long_link" "$here/long_link.c"
ip netns add "$near"
ip netns add "$far"

# A link with this round trip (ms), rate and loss takes the place of the one before.
lay() {
    end "$link"
    rm -f "$work/up"
    "$work/long_link" "$near" "$far" "$(($1 * 500))" "${2/M/000000}" "$3" >"$work/up" &
    link=$!
    until [ -s "$work/up" ]; do sleep 0.1; done
    for host in "$near 1" "$far 2"; do
        set -- $host
        ip -n "$1" address add "10.78.0.$2/24" dev eth0
        ip -n "$1" link set lo up
        ip -n "$1" link set eth0 txqueuelen 10000 up
    done
}

# Messages of size $1, $2 outstanding.
measure() {
    local count=() port=$((5000 + RANDOM % 20000))
    [ "$2" != 1 ] || count=(--iters 1)
    export NCCL_SOCKET_IFNAME=eth0 TOWLINE_STREAMS=$streams
    ip netns exec "$near" "$bin/towline" send-recv --listen "10.78.0.1:$port" >/dev/null 2>&1 &
    listener=$!
    sleep 0.5
    ip netns exec "$far" "$bin/towline" send-recv --connect "10.78.0.1:$port" --bandwidth -b "$1" -e "$1" --outstanding "$2" \
        "${count[@]}" --repetitions "$repetitions" --time "$time" --timeout 120 --compare --sockets "$streams" --json "$work/json" >/dev/null || rm -f "$work/json"
    end "$listener"
    listener=""
    python3 - "$work/json" <<'PYTHON' || echo FAILED
import json, statistics, sys
row = json.load(open(sys.argv[1]))["results"][0]
ours, plain = (statistics.median(row[way]["bandwidth_gbs"]) * 8e3 for way in ("plugin", "raw_tcp"))
print(f"{ours:10.2f} {plain:10.2f} {ours / plain:6.2f}")
PYTHON
}

echo "# rtt ms      rate  loss %  outst    size    towline      plain  ratio"
for rtt in $rtts; do
    for rate in $rates; do
        for loss in $losses; do
            lay "$rtt" "$rate" "$loss"
            for many in $outstanding; do
                for size in $sizes; do
                    printf '%8s %9s %7s %6s %7s %s\n' "$rtt" "$rate" "$loss" "$many" "$size" "$(measure "$size" "$many")"
                done
            done
        done
    done
done
