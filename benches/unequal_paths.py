"""The work of unequal_paths.sh; what it measures stands there."""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from statistics import median

from hosts import Hosts

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# Mbit/s of each rail, and the share of their sum that one connection must reach.
SCENES = {
    "rails": ([1000, 4000], 0.90),
    "throttled": ([400] * 3 + [40] + [400] * 4, 0.95),
}
MESSAGE = 16 << 20
OUTSTANDING = 8
# Only the steady state counts: what the first half second lets through is what buffers and token buckets had in store.
SETTLE_S = 0.5

# Plain TCP, run inside a namespace: prints the bytes per second that the receiver saw once things had settled.
RECEIVE = """
import socket, sys, time
listener = socket.create_server((sys.argv[1], 7100))
print("ready", flush=True)
peer, _ = listener.accept()
peer.settimeout(30)
buffer, start, began, last, count = bytearray(1 << 20), time.monotonic(), None, 0, 0
while (got := peer.recv_into(buffer)):
    last = time.monotonic()
    if began is None:
        began = last if last - start > float(sys.argv[2]) else None
    else:
        count += got
print(count / (last - began))
"""
SEND = """
import socket, sys, time
peer = socket.create_connection((sys.argv[1], 7100), timeout=30)
data, end = bytes(256 << 10), time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    peer.sendall(data)
"""


def shape(hosts, rates):
    """Gives each rail its rate, in Mbit/s, in both directions."""
    for rail, rate in enumerate(rates):
        for side in (0, 1):
            # 10 ms of queue at most: a switch's buffer, not a second of it.
            hosts.tc(side, "qdisc", rail, "root", "tbf", "rate", f"{rate}mbit", "burst", "256kb", "latency", "10ms")


def plain_tcp(hosts, rail, seconds):
    """Bytes per second over one rail."""
    address = hosts.address(rail, 0)
    receiver = hosts.start(0, [sys.executable, "-c", RECEIVE, address, str(SETTLE_S)])
    try:
        receiver.stdout.readline()
        sender = hosts.start(1, [sys.executable, "-c", SEND, address, str(SETTLE_S + seconds)])
        sender.communicate(timeout=seconds + 60)
        return float(receiver.communicate(timeout=60)[0])
    finally:
        receiver.kill()


def towline(hosts, program, seconds):
    """Bytes per second of one connection over all rails."""
    environment = {"TOWLINE_RAILS": "all", "NCCL_SOCKET_IFNAME": "rail", "TOWLINE_STREAMS": str(len(hosts.rails) + 1)}
    # The orders travel over the last rail, which is not the throttled one.
    address = hosts.address(hosts.rails[-1], 0)
    follower = hosts.start(0, [program, "send-recv", "--listen", f"{address}:0"], environment, stderr=subprocess.STDOUT)
    try:
        said = follower.stdout.readline()
        port = re.search(r":(\d+)\s*$", said)
        if not port:
            sys.exit(f"towline did not begin to listen: {said}{follower.communicate()[0]}")
        with tempfile.NamedTemporaryFile() as results:
            options = ["-b", str(MESSAGE), "-e", str(MESSAGE), "--outstanding", str(OUTSTANDING), "--repetitions", "1"]
            options += ["--time", str(int(seconds * 1000)), "--json", results.name]
            leader = hosts.start(1, [program, "send-recv", "--connect", f"{address}:{port.group(1)}", *options], environment)
            shown, _ = leader.communicate(timeout=10 * seconds + 120)
            if leader.returncode != 0:
                sys.exit(f"towline send-recv failed:\n{shown}")
            result = json.load(results)["results"][0]["plugin"]
        if result["wrong"]:
            sys.exit(f"{result['wrong']} wrong bytes")
        return median(result["bandwidth_gbs"]) * 1e9
    finally:
        follower.kill()


def play(name, given):
    """One scene: prints its table and says whether it passes."""
    rates, bound = SCENES[name]
    print(f"{name}: rails of {', '.join(str(rate) for rate in rates)} Mbit/s", flush=True)
    print(f"{'round':>8} {'plain TCP':>10} {'towline':>10} {'ratio':>7}   (GB/s; plain TCP: sum of the rails, one at a time)")
    sums, moved, ratios = [], [], []
    with Hosts(len(rates)) as hosts:
        shape(hosts, rates)
        for turn in range(given.rounds):
            sums.append(sum(plain_tcp(hosts, rail, given.seconds / 2) for rail in hosts.rails))
            # Long enough that the beginning and the end of the run, when not all rails are busy, do not count for much.
            moved.append(towline(hosts, given.towline, given.seconds * 2))
            ratios.append(moved[-1] / sums[-1])
            print(f"{turn + 1:>8} {sums[-1] / 1e9:>10.4f} {moved[-1] / 1e9:>10.4f} {ratios[-1]:>7.3f}", flush=True)
    good = median(ratios) >= bound
    verdict = "ok" if good else "TOO LOW"
    print(f"{'median':>8} {median(sums) / 1e9:>10.4f} {median(moved) / 1e9:>10.4f} {median(ratios):>7.3f}   at least {bound}: {verdict}\n")
    return good


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0, help="scale of each measurement (default: %(default)s)")
    parser.add_argument("--only", choices=SCENES)
    parser.add_argument("--towline", default=os.path.join(ROOT, "target", "release", "towline"))
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("unequal_paths: needs root, to make network namespaces")
    if not os.path.exists(given.towline):
        sys.exit(f"unequal_paths: {given.towline} is not there: cargo build --release")
    with open("/proc/sys/net/ipv4/tcp_congestion_control", encoding="ascii") as file:
        print(f"# congestion control {file.read().strip()}, {os.cpu_count()} cores, Linux {os.uname().release}, {time.strftime('%F')}")
    passed = [play(name, given) for name in SCENES if given.only in (None, name)]
    sys.exit(0 if all(passed) else 1)


if __name__ == "__main__":
    main()
