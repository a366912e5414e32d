"""A group of processes, one for each GPU, that carry out collectives for one contender when asked.

A group lives as long as the comparison, and is idle while others have their turn: no start-up in any sample. It must not
know about contenders other than the one it is given, nor about statistics.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time

import runner
import table

# Larger buffers take longer to check than to fill: only when an order asks for it.
CHECKED_EACH_TIME = 16 << 20


RANK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank.py")


class Group:
    """The ranks of one communicator, and their standard input and output."""

    def __init__(self, ranks, hosts, environment, limit, script=RANK, wait_every=0, wraps=None):
        """Starts them; `problem` says what went wrong. Ranks are spread over `hosts` pretended hosts.

        They wait for the GPU after `wait_every` operations; 0: after all of an order. `wraps` has a command to run each rank in.
        """
        self.wraps = wraps or [[]] * ranks
        self.wait_every = wait_every
        self.folder = tempfile.TemporaryDirectory()
        self.script = script
        self.last_words = None
        self.problem = ""
        began = time.monotonic()
        self.children = [self._start(rank, ranks, hosts, environment) for rank in range(ranks)]
        self._answers(began + limit)
        self.wall_s = time.monotonic() - began

    def _start(self, rank, ranks, hosts, environment):
        local = ranks // hosts
        # As torchrun says it; but ranks on pretended hosts share this one's processors.
        said = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": ranks if hosts > 1 else local}
        own = {name: str(value) for name, value in said.items()}
        if hosts > 1:
            own["NCCL_HOSTID"] = f"host{rank // local}"
        with open(os.path.join(self.folder.name, f"rank{rank}"), "wb") as errors:
            return subprocess.Popen(
                [*self.wraps[rank], sys.executable, "-B", self.script, str(rank), str(ranks), os.path.join(self.folder.name, "id")],
                env={**environment, **own},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    def _answers(self, deadline):
        """One line of each rank; None when that cannot be."""
        found, waiting = {}, {child.stdout.fileno(): child for child in self.children}
        text = {fd: b"" for fd in waiting}
        while waiting and not self.problem:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.problem = "no answer in time"
            for fd in ready:
                some = os.read(fd, 1 << 16)
                text[fd] += some
                if not some:
                    self.problem = "a rank ended"
                elif some.endswith(b"\n") and text[fd].splitlines()[-1].startswith(b"{"):
                    # NCCL before 2.22 writes its version to standard output.
                    child = waiting.pop(fd)
                    found[child.pid] = json.loads(text[fd].splitlines()[-1])
                    self.problem = found[child.pid].get("failed", "")
        if self.problem:
            self.end()
            return None
        return [found[child.pid] for child in self.children]

    def run(self, collective, band, limit, check_all):
        """One order to all ranks, as a `runner.Run`: times are the mean of the ranks, wrong elements their sum.

        The processor time is that of the timed operations and those before them, without the checks.
        """
        if self.problem:
            return runner.Run([], False, self.problem, 0.0, 0.0, "")
        began = time.monotonic()
        order = {"collective": collective, "sizes": band.sizes(), "iterations": band.iterations, "warmups": band.warmups}
        order["wait_every"] = self.wait_every or band.iterations
        order["check_up_to"] = band.last if check_all else CHECKED_EACH_TIME
        answers = None
        try:
            for child in self.children:
                child.stdin.write(json.dumps(order).encode() + b"\n")
                child.stdin.flush()
            answers = self._answers(began + limit)
        except BrokenPipeError:
            self.problem = "a rank ended"
            self.end()
        if answers is None:
            return runner.Run([], False, self.problem, time.monotonic() - began, 0.0, self.said())
        rows, cpu = [], 0.0
        for of_all in zip(*(answer["rows"] for answer in answers)):
            mean = sum(row["time_us"] for row in of_all) / len(of_all)
            wrong = [row["wrong"] for row in of_all]
            rows.append(table.Row(of_all[0]["size"], mean, None if None in wrong else sum(wrong), None, None))
            cpu += sum(row["cpu_s"] for row in of_all)
        return runner.Run(rows, True, "", time.monotonic() - began, cpu, "")

    def said(self):
        """What the ranks wrote to their standard error."""
        if self.last_words is not None:
            return self.last_words
        text = ""
        for rank in range(len(self.children)):
            with open(os.path.join(self.folder.name, f"rank{rank}"), encoding="utf-8", errors="replace") as file:
                text += file.read()
        return text

    def end(self):
        """Leaves nobody on the GPUs."""
        for child in self.children:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdin.close()
            child.stdout.close()
        self.last_words = self.said()
        self.folder.cleanup()
