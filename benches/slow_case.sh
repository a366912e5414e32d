#!/usr/bin/env bash
# The case of docs/profiling.md: three ranks over two rails between network namespaces of this host; one rail of one rank is
# throttled, and another rank comes late to every all-reduce. Prints what `towline trace report` finds, and draws one
# all-reduce. Needs root, ip and tc (package iproute2).
#
#   benches/slow_case.sh [DIRECTORY OF towline AND libnccl-net.so] [DIRECTORY FOR THE RESULTS]
set -euo pipefail
towline=$(realpath "${1:-target/release}")/towline
out=$(mkdir -p "${2:-/tmp/towline-slow-case}" && realpath "${2:-/tmp/towline-slow-case}")
name=tl$$
trap 'for host in 0 1 2; do ip netns del "$name$host" 2>/dev/null || true; done; ip netns del "${name}net" 2>/dev/null || true' EXIT

# Two networks, a bridge each, in a namespace of their own; every host has a rail to both, at 2 Gbit/s.
ip netns add "${name}net"
for rail in 0 1; do
    ip -n "${name}net" link add "net$rail" type bridge
    ip -n "${name}net" link set "net$rail" up
done
for host in 0 1 2; do
    ip netns add "$name$host"
    ip -n "$name$host" link set lo up
    for rail in 0 1; do
        ip -n "$name$host" link add "rail$rail" type veth peer name "h${host}r$rail" netns "${name}net"
        ip -n "${name}net" link set "h${host}r$rail" master "net$rail" up
        ip -n "$name$host" address add "10.78.$rail.$((host + 1))/24" dev "rail$rail"
        ip -n "$name$host" link set "rail$rail" up
        rate=2gbit
        if [ $host = 2 ] && [ $rail = 1 ]; then
            rate=${SLOW_RATE:-200mbit}
        fi
        ip netns exec "$name$host" tc qdisc add dev "rail$rail" root tbf rate "$rate" burst 256kb latency 50ms
    done
done

run() { # NAME, then options of all-reduce
    local place=$out/$1
    shift
    rm -rf "$place"
    mkdir -p "$place"
    TOWLINE_PROFILE=trace,summary TOWLINE_PROFILE_DIR=$place TOWLINE_RAILS=rail0,rail1 TOWLINE_STREAMS=5 \
        "$towline" all-reduce --ranks 3 --wrap "ip netns exec ${name}0" --wrap "ip netns exec ${name}1" \
        --wrap "ip netns exec ${name}2" "$@" >"$place/table.txt"
    "$towline" trace check "$place"/*.pftrace
    "$towline" trace report --brief "$place"/*.pftrace
}

echo "A rail of rank 2 has a tenth of the speed of the others:"
run rail -b 8M -e 8M -n 12 -w 2
"$towline" trace draw -o "$out/slow_rail.svg" "$out"/rail/*.pftrace
echo
echo "Rank 1 comes 30 ms late to each all-reduce, and the rail is as it was:"
run late -b 256K -e 256K -n 12 -w 2 --late 1:30
