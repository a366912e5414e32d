#!/usr/bin/env bash
# Runs six collectives of NVIDIA's nccl-tests over Towline from 8 bytes to 1 GiB with every result verified, and over
# NCCL's Socket at 256 MiB for comparison. Prints one table; exits 1 when an element is wrong, a run fails, or NCCL did
# not really use Towline.
#
#   tests/gpu/collectives.sh TESTS_DIR TOWLINE_DIR [OUT_DIR]
#
#   TESTS_DIR    all_reduce_perf and the others         TOWLINE_DIR  libnccl-net.so
#   OUT_DIR      where full outputs and logs go (default: a new directory under /tmp)
#
#   GPUS=2       GPUs to use                            NCCL_DIR=    directory of libnccl.so.2, if the loader needs it
#   IFNAME=lo    interface                              LIMIT=180    seconds for one run
#   FACTOR=2     from one size to the next              COLLECTIVES= a part of the six
set -uo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,13s/^# \{0,1\}//p' "$0"
    exit 2
fi
tests=$(realpath "$1") towline=$(realpath "$2") out=${3:-$(mktemp -d /tmp/towline-collectives.XXXXXX)}
gpus=${GPUS:-2} limit=${LIMIT:-180} factor=${FACTOR:-2}
read -r -a collectives <<<"${COLLECTIVES:-all_reduce all_gather reduce_scatter broadcast sendrecv alltoall}"
mkdir -p "$out"
if [ ! -e "$towline/libnccl-net.so" ]; then
    echo "there is no libnccl-net.so in $towline" >&2
    exit 2
fi

# Traffic between GPUs of one host takes the network only when every shorter way is closed.
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_NVLS_ENABLE=0 NCCL_SOCKET_IFNAME=${IFNAME:-lo}
libraries=${NCCL_DIR:+$NCCL_DIR:}${LD_LIBRARY_PATH:-}

# run NAME NET LIBRARIES COLLECTIVE FIRST LAST: one nccl-tests run; its output and NCCL's log go to $out.
run() {
    # What an earlier run left would count as evidence of this one.
    rm -f "$out/$1-$4.log"
    NCCL_NET=$2 LD_LIBRARY_PATH=$3 NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_DEBUG_FILE="$out/$1-$4.log" \
        timeout -k 5 "$limit" "$tests/$4_perf" -b "$5" -e "$6" -f "$factor" -n 5 -w 1 -c 1 -g "$gpus" \
        >"$out/$1-$4.txt" 2>&1
}

# Result lines are those that begin with two numbers: size and count, then type, redop, root, and time, algbw, busbw,
# #wrong out of place (6 to 9) and in place (10 to 13).
worst() { # the largest count of wrong elements, or "?" when there is no checked result
    awk '$1 ~ /^[0-9]+$/ && $2 ~ /^[0-9]+$/ && NF >= 9 {
        for (i = 9; i <= 13; i += 4) if (i <= NF && $i != "N/A") { seen++; if ($i + 0 > max) max = $i + 0 }
    } END { if (seen) printf "%d", max; else printf "?" }' "$1"
}
busbw() { # bus bandwidth out of place at 256 MiB; sizes that ranks do not divide evenly are rounded down a little
    awk '$1 ~ /^[0-9]+$/ && $2 ~ /^[0-9]+$/ && $1 > 267000000 && $1 <= 268435456 { print $8; exit }' "$1"
}

status=0
printf '| %-14s | %-8s | %-5s | %-15s | %-14s | %-6s | %s\n' collective 'max wrong' sizes 'Towline GB/s' 'Socket GB/s' ratio result
printf '|%s|%s|%s|%s|%s|%s|%s\n' ---------------- ----------- ------- ----------------- ---------------- -------- --------
for collective in "${collectives[@]}"; do
    result=ok
    run towline Towline "$towline${libraries:+:$libraries}" "$collective" 8 1G || result="FAILED: exit status $?"
    text=$out/towline-$collective.txt log=$out/towline-$collective.log
    wrong=$(worst "$text")
    sizes=$(awk '$1 ~ /^[0-9]+$/ && $2 ~ /^[0-9]+$/ && NF >= 9' "$text" | wc -l)
    if [ "$result" = ok ]; then
        [ "$wrong" = 0 ] || result="FAILED: wrong data"
        grep -q '# Out of bounds values : 0 OK' "$text" || result="FAILED: no clean end"
        grep -q 'via NET/Towline' "$log" "$text" || result="FAILED: not over Towline"
    fi
    run socket Socket "$libraries" "$collective" 256M 256M || result="$result; Socket failed"
    ours=$(busbw "$text") theirs=$(busbw "$out/socket-$collective.txt")
    ratio=$(awk -v a="${ours:-0}" -v b="${theirs:-0}" 'BEGIN { if (b > 0) printf "%.2f", a / b }')
    printf '| %-14s | %-9s | %-5s | %-15s | %-14s | %-6s | %s\n' \
        "$collective" "$wrong" "$sizes" "${ours:--}" "${theirs:--}" "$ratio" "$result"
    if [[ $result == FAILED* ]]; then
        status=1
        tail -n 8 "$text" | sed 's/^/    /'
        grep -h 'WARN' "$log" 2>/dev/null | tail -n 8 | sed 's/^/    /'
    fi
done
echo "bus bandwidth at 256 MiB; outputs in $out"
exit $status
