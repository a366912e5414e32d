#!/usr/bin/env bash
# Data over distance: Towline beside plain TCP, between two network namespaces with netem on the way. See --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
benches/distance.sh [--rtt "1 10 50 200"] [--rate "100mbit 1gbit"] [--loss "0 0.1"] [--sizes "64K 1M 16M 64M"]
                    [--outstanding "8"] [--streams 3] [--time 2000] [--bin target/release]

For each round trip (ms), rate and loss (percent, each way): `towline send-recv --compare` from one network namespace to
another, with as many plain TCP sockets as Towline has streams. Prints the tables as they come; the last column is the
ratio to plain TCP, which should be 0.9 or more.

Needs root, iproute2, and a kernel with sch_netem (modprobe sch_netem). Build with `cargo build --release` first.
TEXT
}

rtts="1 10 50 200" rates="100mbit 1gbit" losses="0 0.1" sizes="64K 1M 16M 64M" outstanding=8 streams=3 time=2000
bin="$(dirname "$0")/../target/release"
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
        --bin) bin=$2 ;;
        *) echo "unknown option $1; see --help" >&2; exit 2 ;;
    esac
    shift 2
done

[ "$(id -u)" = 0 ] || { echo "this needs root, to make network namespaces" >&2; exit 1; }
[ -x "$bin/towline" ] || { echo "$bin/towline is missing: cargo build --release" >&2; exit 1; }

near="towline-near-$$" far="towline-far-$$" listener=""
clean() {
    [ -z "$listener" ] || kill "$listener" 2>/dev/null || true
    ip netns del "$near" 2>/dev/null || true
    ip netns del "$far" 2>/dev/null || true
}
trap clean EXIT
ip netns add "$near"
ip netns add "$far"
ip link add name eth0 netns "$near" type veth peer name eth0 netns "$far"
for host in "$near 1" "$far 2"; do
    set -- $host
    ip -n "$1" address add "10.78.0.$2/24" dev eth0
    ip -n "$1" link set lo up
    ip -n "$1" link set eth0 up
done

port=5100
for rtt in $rtts; do
    for rate in $rates; do
        for loss in $losses; do
            for host in "$near" "$far"; do
                # Half of the round trip each way, and room for what is on the way.
                tc -n "$host" qdisc replace dev eth0 root netem delay "$(awk "BEGIN { print $rtt / 2 }")ms" \
                    rate "$rate" loss "$loss%" limit 100000 ||
                    { echo "this kernel has no netem: modprobe sch_netem" >&2; exit 1; }
            done
            for many in $outstanding; do
                for size in $sizes; do
                    echo "== round trip $rtt ms, $rate, loss $loss %, messages of $size, $many outstanding, $streams streams"
                    port=$((port + 1))
                    export NCCL_SOCKET_IFNAME=eth0 TOWLINE_STREAMS=$streams
                    ip netns exec "$near" "$bin/towline" send-recv --listen "10.78.0.1:$port" >/dev/null 2>&1 &
                    listener=$!
                    sleep 1
                    ip netns exec "$far" "$bin/towline" send-recv --connect "10.78.0.1:$port" -b "$size" -e "$size" \
                        --outstanding "$many" --repetitions 3 --time "$time" --timeout 120 --compare --sockets "$streams" |
                        grep -v '^#' || echo "FAILED"
                    kill "$listener" 2>/dev/null || true
                    wait "$listener" 2>/dev/null || true
                    listener=""
                done
            done
        done
    done
done
