"""Two network namespaces as two hosts, for unequal_paths.py and slow_path.py. Needs root and iproute2 (ip, tc)."""

import os
import subprocess


def run(*words):
    """A command that must succeed."""
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)


class Hosts:
    """Two hosts with links between them, the ends of a link named rail0 and so on, deleted at the end."""

    def __init__(self, rails):
        self.names = [f"towline-{side}-{os.getpid()}" for side in ("receiver", "sender")]
        self.rails = range(rails)

    def __enter__(self):
        for name in self.names:
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        for rail in self.rails:
            link = f"rail{rail}"
            run("ip", "-n", self.names[0], "link", "add", "name", link, "type", "veth", "peer", "name", link, "netns", self.names[1])
            for side, name in enumerate(self.names):
                run("ip", "-n", name, "address", "add", f"{self.address(rail, side)}/24", "dev", link)
                run("ip", "-n", name, "link", "set", link, "up")
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False)

    @staticmethod
    def address(rail, side):
        """Of one host on one link."""
        return f"10.77.{rail}.{side + 1}"

    def tc(self, side, what, rail, *words):
        """Adds something to what shapes the traffic that one host sends over a link."""
        run("tc", "-n", self.names[side], what, "add", "dev", f"rail{rail}", *words)

    def output(self, side, *words):
        """What a command on one of the hosts prints; it must succeed."""
        command = ["ip", "netns", "exec", self.names[side], *words]
        return subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout

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
