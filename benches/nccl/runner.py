"""Runs one nccl-tests binary once and measures the child: wall time, processor time, table, errors.

It must not know about contenders other than the one it is given, nor about statistics.
"""

import os
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass

import table


@dataclass
class Band:
    """One invocation's sizes: first, first * factor, ... up to last."""

    first: int
    last: int
    factor: int
    iterations: int
    warmups: int
    repetitions: int

    @classmethod
    def parse(cls, text):
        """`FIRST:LAST:FACTOR:ITERATIONS:WARMUPS:REPETITIONS`, as in `8:2K:16:100:10:15`."""
        parts = text.split(":")
        if len(parts) != 6:
            raise ValueError(f"not a band: {text!r} (write FIRST:LAST:FACTOR:ITERATIONS:WARMUPS:REPETITIONS)")
        numbers = [int(part) for part in parts[2:]]
        return cls(table.parse_size(parts[0]), table.parse_size(parts[1]), *numbers)

    def label(self):
        """The band's sizes as they are shown."""
        return f"{table.show_size(self.first)}-{table.show_size(self.last)}"

    def sizes(self):
        """All of them."""
        sizes, size = [], self.first
        while size <= self.last:
            sizes.append(size)
            size *= self.factor
        return sizes

    def arguments(self, ranks, threads, checks):
        """nccl-tests' arguments: one thread that drives all GPUs, or one thread for each GPU."""
        split = ["-t", str(ranks), "-g", "1"] if threads else ["-t", "1", "-g", str(ranks)]
        sizes = ["-b", str(self.first), "-e", str(self.last), "-f", str(self.factor)]
        return [*sizes, "-n", str(self.iterations), "-w", str(self.warmups), "-c", str(checks), *split]


@dataclass
class Run:
    """What one invocation gave."""

    rows: list
    ok: bool
    problem: str
    wall_s: float
    cpu_s: float
    output: str


def invoke(binary, arguments, environment, timeout_s):
    """Runs `binary`; never raises for what the child does. The child's group is killed when the time is up."""
    with tempfile.TemporaryFile() as out:
        began = time.monotonic()
        child = subprocess.Popen(
            [binary, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status, usage, timed_out = _wait(child.pid, began + timeout_s)
        except BaseException:
            # Interrupted: leave no child on the GPUs.
            os.killpg(child.pid, signal.SIGKILL)
            os.wait4(child.pid, 0)
            raise
        wall = time.monotonic() - began
        # The child has been reaped by wait4; tell subprocess so.
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        output = out.read().decode(errors="replace")
    rows = table.parse(output)
    problem = ""
    if timed_out:
        problem = f"no end after {timeout_s:.0f} s"
    elif child.returncode != 0:
        problem = f"exit status {child.returncode}"
    elif not rows or not table.finished(output):
        problem = "the table is not complete"
    return Run(rows, not problem, problem, wall, usage.ru_utime + usage.ru_stime, output)


def _wait(pid, deadline):
    """wait4 with a deadline: resource usage is only to be had from wait4, and it has no timeout of its own."""
    while True:
        done, status, usage = os.wait4(pid, os.WNOHANG)
        if done:
            return status, usage, False
        if time.monotonic() >= deadline:
            os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            return status, usage, True
        time.sleep(0.01)


def tail(output, lines=12):
    """The end of an output, for a message."""
    return "\n".join(output.strip().splitlines()[-lines:])
