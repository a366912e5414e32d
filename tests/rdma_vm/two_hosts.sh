#!/bin/bash
# Verified transfers between two virtual machines with one RDMA device each, by their IPv4 and by their IPv6 GIDs.
#
#   tests/rdma_vm/two_hosts.sh [OPTIONS OF run.sh]
#
# Needs a release build. Fails when bytes are wrong, or when the packets are not of the family that was asked for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
[ -x target/release/towline ] || { echo "build first: cargo build --release" >&2; exit 1; }
inside=target/two_hosts_inside.sh
cat >"$inside" <<'INSIDE'
set -e
export NCCL_SOCKET_IFNAME=eth0
six() { awk '$1 == "Ip6InReceives" { print $2 }' /proc/net/snmp6; }
for family in AF_INET AF_INET6; do
    before=$(six)
    export NCCL_IB_ADDR_FAMILY=$family
    run="target/release/towline send-recv --backend rdma"
    if [ "$LAB_HOST" = 0 ]; then
        $run --listen "$LAB_ADDR:7000"
    else
        for attempt in $(seq 60); do
            (echo >"/dev/tcp/$LAB_PEER/7000") 2>/dev/null && break || sleep 0.5
        done
        $run --connect "$LAB_PEER:7000" -b 8 -e 4M -f 8 --repetitions 3 --time 100
    fi
    count=$(($(six) - before))
    echo "$family: $count IPv6 packets"
    case $family in
    AF_INET) [ "$count" -lt 1000 ] ;;
    AF_INET6) [ "$count" -gt 1000 ] ;;
    esac
done
INSIDE
exec tests/rdma_vm/run.sh --two-hosts --memory 1024 "$@" -- bash "$inside"
