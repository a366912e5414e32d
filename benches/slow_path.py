#!/usr/bin/env python3
"""One slow path among the streams of one rail, as where a switch spreads them over equal routes of which one is ill.

Makes two network namespaces with one link, moves messages of 128 KiB over a connection with five streams, and after half a
second gives one of the sockets that carry data 100 Mbit/s (tc, htb), the others what there is. Each socket in turn; the
table shows bandwidth with 8 messages outstanding and the time of a message by itself, medians of what was measured since.
Which socket is which stream is not known, and the first stream carries no long messages: that row shows no difference.

Needs root, iproute2 (ip, tc, ss) and a built `towline`:

    cargo build --release && sudo benches/slow_path.py [--towline FILE] [--plugin FILE]... [--only N]...
"""

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
STREAMS = 5
SETTINGS = {"NCCL_SOCKET_IFNAME": "rail", "TOWLINE_STREAMS": str(STREAMS), "TOWLINE_WORKERS": "4", "TOWLINE_BACKEND": "tcp"}


def shape(hosts):
    """What the sender sends: classid 1:20 is the slow path, 1:10 all others."""
    hosts.tc(1, "qdisc", 0, "root", "handle", "1:", "htb", "default", "10")
    for number, rate in ((10, "4gbit"), (20, "100mbit")):
        hosts.tc(1, "class", 0, "parent", "1:", "classid", f"1:{number}", "htb", "rate", rate, "burst", "256k", "quantum", "60000")
    # The kernel says that the link is up when it next looks.
    time.sleep(2.5)


def data_sockets(hosts):
    """The ports of the sockets that have carried much, in order."""
    near, far = (re.escape(hosts.address(0, side)) for side in (1, 0))
    found = []
    for line in hosts.output(1, "ss", "-tniHO", "state", "established").splitlines():
        ports = re.search(rf"{near}:(\d+)\s+{far}:(\d+)", line)
        sent = re.search(r"bytes_sent:(\d+)", line)
        if ports and sent and int(sent[1]) > 1_000_000:
            found.append(ports.groups())
    return sorted(found)


def measure(hosts, program, which):
    """Bandwidth in GB/s and the time of a message in µs, while socket `which` is slow; None when there is no such socket."""
    address = hosts.address(0, 0)
    follower = hosts.start(0, [*program, "--listen", f"{address}:0"], SETTINGS, stderr=subprocess.STDOUT)
    try:
        port = re.search(r":(\d+)\s*$", follower.stdout.readline())[1]
        with tempfile.NamedTemporaryFile() as results:
            options = ["-b", "128K", "-e", "128K", "--repetitions", "5", "--time", "300", "--json", results.name]
            leader = hosts.start(1, [*program, "--connect", f"{address}:{port}", *options], SETTINGS)
            time.sleep(0.6)
            sockets = data_sockets(hosts)
            if which < len(sockets):
                near, far = sockets[which]
                match = ["match", "ip", "sport", near, "0xffff", "match", "ip", "dport", far, "0xffff"]
                hosts.tc(1, "filter", 0, "parent", "1:", "protocol", "ip", "u32", *match, "flowid", "1:20")
            shown, _ = leader.communicate(timeout=300)
            if leader.returncode != 0:
                sys.exit(f"towline send-recv failed:\n{shown}")
            if which >= len(sockets):
                return None
            result = json.load(results)["results"][0]["plugin"]
        if result["wrong"]:
            sys.exit(f"{result['wrong']} wrong bytes")
        return median(result["bandwidth_gbs"][1:]), median(result["latency_us"][1:])
    finally:
        follower.kill()


def main():
    """The command line."""
    release = os.path.join(ROOT, "target", "release")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", default=os.path.join(release, "towline"))
    parser.add_argument("--plugin", action="append", help="network plugins to compare (default: the one beside towline)")
    parser.add_argument("--only", action="append", type=int, metavar="N", help="make only socket N slow")
    given = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("slow_path: needs root, to make network namespaces")
    if not os.path.exists(given.towline):
        sys.exit(f"slow_path: {given.towline} is not there: cargo build --release")
    print(f"# {os.cpu_count()} cores, Linux {os.uname().release}, {time.strftime('%F')}")
    print(f"{'slow':>6} {'GB/s':>8} {'µs':>9}   plugin", flush=True)
    for which in given.only or range(STREAMS):
        for plugin in given.plugin or [os.path.join(release, "libnccl-net.so")]:
            with Hosts(1) as hosts:
                shape(hosts)
                measured = measure(hosts, [given.towline, "send-recv", "--plugin", os.path.abspath(plugin)], which)
            if measured:
                print(f"{which:>6} {measured[0]:>8.3f} {measured[1]:>9.1f}   {plugin}", flush=True)


if __name__ == "__main__":
    main()
