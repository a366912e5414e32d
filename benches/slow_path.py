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

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
NAMES = [f"towline-{side}-{os.getpid()}" for side in ("receiver", "sender")]
STREAMS = 5
SETTINGS = {"NCCL_SOCKET_IFNAME": "rail", "TOWLINE_STREAMS": str(STREAMS), "TOWLINE_WORKERS": "4", "TOWLINE_BACKEND": "tcp"}


def run(*words):
    """A command that must succeed."""
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def set_up():
    """A link between two namespaces; classid 1:20 is the slow path."""
    for name in NAMES:
        run("ip", "netns", "add", name)
    run("ip", "-n", NAMES[0], "link", "add", "name", "rail", "type", "veth", "peer", "name", "rail", "netns", NAMES[1])
    for number, name in enumerate(NAMES, 1):
        run("ip", "-n", name, "address", "add", f"10.78.0.{number}/24", "dev", "rail")
        run("ip", "-n", name, "link", "set", "rail", "up")
    sender = ["tc", "-n", NAMES[1]]
    run(*sender, "qdisc", "add", "dev", "rail", "root", "handle", "1:", "htb", "default", "10")
    for number, rate in ((10, "4gbit"), (20, "100mbit")):
        shape = ["htb", "rate", rate, "burst", "256k", "quantum", "60000"]
        run(*sender, "class", "add", "dev", "rail", "parent", "1:", "classid", f"1:{number}", *shape)
    # The kernel says that the link is up when it next looks.
    time.sleep(2.5)


def tear_down():
    """Also what a run before has left."""
    for name in NAMES:
        subprocess.run(["ip", "netns", "del", name], check=False, stderr=subprocess.DEVNULL)


def start(side, command, **rest):
    """Starts a command on one of the hosts."""
    return subprocess.Popen(
        ["ip", "netns", "exec", NAMES[side], *command],
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        **rest,
    )


def data_sockets():
    """The ports of the sockets that have carried much, in order."""
    command = ["ip", "netns", "exec", NAMES[1], "ss", "-tniHO", "state", "established"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = []
    for line in lines:
        ports = re.search(r"10\.78\.0\.2:(\d+)\s+10\.78\.0\.1:(\d+)", line)
        sent = re.search(r"bytes_sent:(\d+)", line)
        if ports and sent and int(sent[1]) > 1_000_000:
            found.append(ports.groups())
    return sorted(found)


def measure(given, plugin, which):
    """Bandwidth in GB/s and the time of a message in µs, while socket `which` is slow; None when there is no such socket."""
    set_up()
    follower = start(0, [given.towline, "send-recv", "--plugin", plugin, "--listen", "10.78.0.1:0"], stderr=subprocess.STDOUT)
    try:
        port = re.search(r":(\d+)\s*$", follower.stdout.readline())[1]
        with tempfile.NamedTemporaryFile() as results:
            options = ["-b", "128K", "-e", "128K", "--repetitions", "5", "--time", "300", "--json", results.name]
            leader = start(1, [given.towline, "send-recv", "--plugin", plugin, "--connect", f"10.78.0.1:{port}", *options])
            time.sleep(0.6)
            sockets = data_sockets()
            if which < len(sockets):
                near, far = sockets[which]
                match = ["match", "ip", "sport", near, "0xffff", "match", "ip", "dport", far, "0xffff"]
                rule = ["parent", "1:", "protocol", "ip", "u32", *match, "flowid", "1:20"]
                run("tc", "-n", NAMES[1], "filter", "add", "dev", "rail", *rule)
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
        tear_down()


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
            measured = measure(given, os.path.abspath(plugin), which)
            if measured:
                print(f"{which:>6} {measured[0]:>8.3f} {measured[1]:>9.1f}   {plugin}", flush=True)


if __name__ == "__main__":
    main()
