#!/bin/bash
# Verified transfers between two virtual machines with one RDMA device each, by their IPv4 and by their IPv6 GIDs.
#
#   tests/rdma_vm/two_hosts.sh [--quick PROGRAM] [OPTIONS OF run.sh]
#
# Needs a release build; with --quick a few sizes by that build of `towline`, as the suite runs it. Fails when bytes are
# wrong, when the packets are not of the family that was asked for, or when the bytes did not cross by RDMA; and when what
# looks for that would not notice.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [ -z "${LAB_HOST:-}" ]; then
    program=$PWD/target/release/towline sizes="-b 8 -e 4M -f 8 --repetitions 3 --time 100" least=4194304
    if [ "${1:-}" = --quick ]; then
        program=$2 sizes="-b 8 -e 256K -f 32 --repetitions 1 --time 30" least=262144
        shift 2
    fi
    [ -x "$program" ] || { echo "build first: cargo build --release" >&2; exit 1; }
    exec tests/rdma_vm/run.sh --two-hosts --memory 1024 "$@" -- \
        env PROGRAM="$program" SIZES="$sizes" LEAST="$least" tests/rdma_vm/two_hosts.sh
fi

# From here on inside one of the machines: the first one listens.
export NCCL_SOCKET_IFNAME=eth0
counted() { cat "/sys/class/infiniband/rxe0/ports/1/hw_counters/$1"; }
six() { awk '$1 == "Ip6InReceives" { print $2 }' /proc/net/snmp6; }

# What tells a machine that stood still from packets that were lost and from a program that waits for ever.
state() {
    uptime
    grep -H . /sys/class/infiniband/rxe0/ports/1/hw_counters/* | sed 's/.*hw_counters.//' | tr '\n' ' '
    echo
    rdma resource show qp
    dmesg | tail -15
}

# A verified transfer with the rest of the arguments on port $1: how many packets came by RDMA, and how many by IPv6.
transfer() {
    local port=$1 before=($(counted rcvd_pkts) $(six)) output=
    shift
    failed() { echo "$output"; echo "FAILED: $*, ${NCCL_IB_ADDR_FAMILY:-}" >&2; state >&2; exit 1; }
    if [ "$LAB_HOST" = 0 ]; then
        output=$("$PROGRAM" send-recv "$@" --listen "$LAB_ADDR:$port") || failed
    else
        for attempt in $(seq 60); do
            (echo >"/dev/tcp/$LAB_PEER/$port") 2>/dev/null && break || sleep 0.5
        done
        output=$("$PROGRAM" send-recv "$@" --connect "$LAB_PEER:$port" $SIZES) || failed
        grep -q '^# Wrong bytes : 0 OK' <<<"$output" || failed
    fi
    echo "$output"
    rdma=$(($(counted rcvd_pkts) - before[0])) ipv6=$(($(six) - before[1]))
    echo "$*, ${NCCL_IB_ADDR_FAMILY:-any family}: $rdma RDMA packets, $ipv6 IPv6 packets received"
}
# Whether at least the longest message came by RDMA, 1024 bytes to a packet; to the other machine its acknowledgements.
crossed() { [ "$rdma" -ge $((LAB_HOST == 0 ? LEAST / 1024 : 10)) ]; }

export NCCL_IB_ADDR_FAMILY=AF_INET
transfer 7000 --backend rdma
crossed
[ "$ipv6" -lt 100 ]
export NCCL_IB_ADDR_FAMILY=AF_INET6
transfer 7001 --backend rdma
crossed
[ "$ipv6" -ge "$rdma" ]
# What does not cross by RDMA is told apart.
transfer 7002 --backend tcp
! crossed || { echo "TCP counts as RDMA" >&2; exit 1; }
