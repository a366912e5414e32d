"""Networks between two hosts that are made of network namespaces: kinds of interfaces, how many, subnets, rates.

A host is a namespace; a rank runs in it with `Network.command`. Nothing outside the namespaces is touched. Needs root, `ip` and
`tc`; where they are missing, a folder of Debian's iproute2 package and its libraries (`*.deb`) serves.
It must not know what runs on the networks.
"""

import contextlib
import glob
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

# The kernel tells of a carrier once a second.
CARRIER_S = 1.3
# How TCP chooses its rate: CUBIC in most kernels, and it takes packets that arrive out of order for lost ones.
CONGESTION = "/proc/sys/net/ipv4/tcp_congestion_control"


class Missing(Exception):
    """Something that the machine does not have, in words."""


class Tools:
    """`ip` and `tc`, of the system or unpacked from packages."""

    def __init__(self, packages=None):
        self.folder, self.libraries = None, ""
        if packages is None:
            self.ip, self.tc = (self._find(name) for name in ("ip", "tc"))
            return
        debs = glob.glob(os.path.join(packages, "*.deb"))
        if not debs:
            raise Missing(f"there is no *.deb in {packages}")
        self.folder = tempfile.TemporaryDirectory()
        root = self.folder.name
        for deb in debs:
            subprocess.run(["dpkg", "-x", deb, root], check=True)
        self.libraries = ":".join(glob.glob(f"{root}/usr/lib/*-linux-gnu") + glob.glob(f"{root}/lib/*-linux-gnu"))
        found = {name: glob.glob(f"{root}/**/bin/{name}", recursive=True) + glob.glob(f"{root}/**/sbin/{name}", recursive=True) for name in ("ip", "tc")}
        self.ip, self.tc = (next(path for path in found[name] if not os.path.islink(path)) for name in ("ip", "tc"))

    @staticmethod
    def _find(name):
        path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
        if path is None:
            raise Missing(f"{name} is missing: apt-get install iproute2, or give its packages with --iproute-debs DIR")
        return path

    def command(self, tool, *words):
        """A command line for `ip` or `tc`. Its libraries are given to the loader, so what it runs in a namespace has the caller's."""
        path = {"ip": self.ip, "tc": self.tc}[tool]
        if not self.libraries:
            return [path, *words]
        loader = (glob.glob("/lib64/ld-linux-*.so.*") + glob.glob("/lib/ld-linux-*.so.*"))[0]
        return [loader, "--library-path", self.libraries, path, *words]

    def run(self, tool, *words, may_fail=False):
        """Runs it; an error names the command."""
        done = subprocess.run(self.command(tool, *words), capture_output=True, text=True, check=False)
        if done.returncode and not may_fail:
            raise Missing(f"{tool} {' '.join(words)}: {done.stderr.strip()}")
        return done


@dataclass(frozen=True)
class Shape:
    """A network in words: what its interfaces are, how many each host has, one subnet or one each, Gb/s (0: unlimited)."""

    kind: str = "veth"
    count: int = 1
    one_subnet: bool = False
    gbit: float = 0

    def label(self):
        """As a table shows it."""
        nics = f"{self.count} {self.kind}"
        subnets = "" if self.count == 1 else ", one subnet" if self.one_subnet else ", a subnet each"
        return nics + subnets + (f", {self.gbit:g} Gb/s each" if self.gbit else "")


# What is laid on a veth to make an interface of another kind, and whether its address is on the new interface.
UPPER = {
    "vlan": ["link", "add", "link", "{low}", "name", "{name}", "type", "vlan", "id", "7"],
    "macvlan": ["link", "add", "link", "{low}", "name", "{name}", "type", "macvlan", "mode", "bridge"],
    "ipvlan": ["link", "add", "link", "{low}", "name", "{name}", "type", "ipvlan"],
    "bridge": ["link", "add", "{name}", "type", "bridge"],
    "bond": ["link", "add", "{name}", "type", "bond", "mode", "active-backup"],
}

# The prefix of the interfaces that carry data, for NCCL_SOCKET_IFNAME.
PREFIX = "nic"


@contextlib.contextmanager
def congestion(name):
    """Has new connections of this machine choose their rate by `name`; None: as it is. Gives the name that holds.

    Networks made meanwhile have it too, unless this is a container, whose network is not the machine's.
    """
    with open(CONGESTION, encoding="ascii") as file:
        before = file.read().strip()
    if name in (None, before):
        yield before
        return
    _choose_congestion(name)
    try:
        yield name
    finally:
        _choose_congestion(before)


def _choose_congestion(name):
    try:
        with open(CONGESTION, "w", encoding="ascii") as file:
            file.write(name)
    except OSError as error:
        with open(CONGESTION.replace("congestion_control", "available_congestion_control"), encoding="ascii") as file:
            raise Missing(f"{name}: {error.strerror}; this kernel has {file.read().strip()}") from error


class Network:
    """Two hosts, joined. `close` takes everything away."""

    def __init__(self, tools, shape, tag="tlnet"):
        self.tools, self.shape = tools, shape
        self.hosts = [f"{tag}A", f"{tag}B"]
        self.switch = f"{tag}S"
        self.close()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        time.sleep(CARRIER_S)

    def _make(self):
        ip = self.tools.run
        for name in [*self.hosts, self.switch]:
            ip("ip", "netns", "add", name)
            ip("ip", "-n", name, "link", "set", "lo", "up")
        if self.shape.one_subnet:
            ip("ip", "-n", self.switch, "link", "add", "sw", "type", "bridge")
            ip("ip", "-n", self.switch, "link", "set", "sw", "up")
        for index in range(self.shape.count):
            self._join(index)

    def _join(self, index):
        """One more interface in each host, and the wire between them."""
        ip = self.tools.run
        low = f"low{index}" if self.shape.kind != "veth" else f"{PREFIX}{index}"
        if self.shape.one_subnet:
            for number, host in enumerate(self.hosts):
                port = f"p{number}{index}"
                ip("ip", "link", "add", "tlx", "netns", host, "type", "veth", "peer", "name", port, "netns", self.switch)
                ip("ip", "-n", self.switch, "link", "set", port, "master", "sw", "up")
                ip("ip", "-n", host, "link", "set", "tlx", "name", low)
        else:
            ip("ip", "link", "add", "tlx", "netns", self.hosts[0], "type", "veth", "peer", "name", "tly", "netns", self.hosts[1])
            for host, name in zip(self.hosts, ("tlx", "tly")):
                ip("ip", "-n", host, "link", "set", name, "name", low)
        for number, host in enumerate(self.hosts):
            name = f"{PREFIX}{index}"
            if self.shape.kind in UPPER:
                ip("ip", "-n", host, *(word.format(low=low, name=name) for word in UPPER[self.shape.kind]))
            if self.shape.kind in ("bridge", "bond"):
                ip("ip", "-n", host, "link", "set", low, "down")
                ip("ip", "-n", host, "link", "set", low, "master", name)
            ip("ip", "-n", host, "link", "set", low, "up")
            address = f"10.77.{0 if self.shape.one_subnet else index}.{1 + 2 * index + number if self.shape.one_subnet else 1 + number}/24"
            ip("ip", "-n", host, "addr", "add", address, "dev", name)
            ip("ip", "-n", host, "link", "set", name, "up")
            if self.shape.gbit:
                rate = f"{self.shape.gbit:g}gbit"
                ip("tc", "-n", host, "qdisc", "add", "dev", low, "root", "tbf", "rate", rate, "burst", "1mb", "latency", "3ms")
            self._keep_order(host)
        if self.shape.one_subnet:
            self._keep_order(self.switch)

    def _keep_order(self, host):
        """Gives each flow a processor, as a network card does.

        A veth delivers a packet on the processor that sent it, or that emptied the queue of a rate, so packets of one flow
        overtake each other. Receive packet steering keeps their order.
        """
        mask = f"{sum(1 << processor for processor in os.sched_getaffinity(0)):x}"
        groups = ",".join(mask[max(0, at - 8) : at] for at in range(len(mask), 0, -8)[::-1])
        script = 'for queue in /sys/class/net/*/queues/rx-*/rps_cpus; do echo "$1" > "$queue" || exit 1; done'
        steered = subprocess.run([*self.tools.command("ip", "netns", "exec", host), "sh", "-c", script, "sh", groups], capture_output=True, text=True, check=False)
        if steered.returncode:
            print(f"{host}: packets of a flow may overtake each other, which slows CUBIC down: rps_cpus: {steered.stderr.strip()}", file=sys.stderr)

    def congestion(self):
        """The congestion control of the first host's connections."""
        shown = subprocess.run([*self.command(0), "cat", CONGESTION], capture_output=True, text=True, check=True)
        return shown.stdout.strip()

    def command(self, host):
        """What to put before a command that is to run in a host, by its number."""
        return self.tools.command("ip", "netns", "exec", self.hosts[host])

    def ping(self):
        """Whether each interface of the first host reaches one of the second."""
        last = [f"10.77.{0 if self.shape.one_subnet else index}.{2 + 2 * index if self.shape.one_subnet else 2}" for index in range(self.shape.count)]
        probe = "import socket,sys; s=socket.create_server((sys.argv[1],7777)); print(flush=True); s.accept()"
        for address in last:
            server = subprocess.Popen([*self.command(1), "python3", "-c", probe, address], stdout=subprocess.PIPE)
            server.stdout.readline()
            dial = "import socket,sys; socket.create_connection((sys.argv[1],7777),5)"
            reached = subprocess.run([*self.command(0), "python3", "-c", dial, address], check=False).returncode == 0
            server.kill()
            server.wait()
            if not reached:
                return False
        return True

    def close(self):
        """Takes the namespaces away, and with them all links."""
        for name in [*self.hosts, self.switch]:
            self.tools.run("ip", "netns", "del", name, may_fail=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
