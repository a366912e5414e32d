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


def run(*words):
    """A command that must succeed."""
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


class Hosts:
    """Two namespaces with shaped rails between them, deleted at the end."""

    def __init__(self, rates):
        self.names = [f"towline-{side}-{os.getpid()}" for side in ("receiver", "sender")]
        self.rates = rates

    def __enter__(self):
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for rail, rate in enumerate(self.rates):
            link = f"rail{rail}"
            run("ip", "-n", self.names[0], "link", "add", "name", link, "type", "veth", "peer", "name", link, "netns", self.names[1])
            for number, name in enumerate(self.names, 1):
                run("ip", "-n", name, "address", "add", f"10.77.{rail}.{number}/24", "dev", link)
                run("ip", "-n", name, "link", "set", link, "up")
                # 10 ms of queue at most: a switch's buffer, not a second of it.
                shape = ["rate", f"{rate}mbit", "burst", "256kb", "latency", "10ms"]
                run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *shape)
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    def start(self, side, command, environment=None, **rest):
        """Starts a command on one of the hosts."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[side], *command],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            **rest,
        )


def plain_tcp(hosts, rail, seconds):
    """Bytes per second over one rail."""
    address = f"10.77.{rail}.1"
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
    environment = {"TOWLINE_RAILS": "all", "NCCL_SOCKET_IFNAME": "rail", "TOWLINE_STREAMS": str(len(hosts.rates) + 1)}
    # The orders travel over the last rail, which is not the throttled one.
    address = f"10.77.{len(hosts.rates) - 1}.1"
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
    with Hosts(rates) as hosts:
        for turn in range(given.rounds):
            sums.append(sum(plain_tcp(hosts, rail, given.seconds / 2) for rail in range(len(rates))))
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
