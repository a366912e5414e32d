"""What tests/gpu/profiler.py makes of what it reads, and that it fails when it should. Runs without a GPU:

python3 -B -m unittest tests/gpu_profiler_test.py
"""

import contextlib
import io
import os
import stat
import sys
import tempfile
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "gpu"))

import profiler  # noqa: E402


def line(name, category, phase, **args):
    """A line as NCCL's example profiler writes it."""
    told = ", ".join(f'"{key}": {value}' for key, value in args.items())
    return f'{{"name": "{name}", "cat": "{category}", "ph": "{phase}", "id": 0, "ts": 1.0, "args": {{{told}}}}},'


def operation(size, *steps, name="ProgressSend", op=0):
    """A ProxyOp with transfers, each a list of lengths."""
    wait = "SendWait" if name == "ProgressSend" else "RecvWait"
    lines = [line(name, "PROXY", "b", Channel=0, transSize=size)]
    for step in steps:
        lines += [line("SendGpuWait", "NET", "b"), line("SendGpuWait", "NET", "e"), line(wait, "NET", "b", Step=0)]
        for length in step:
            lines += [line("Sock", "NET_SOCK", "b", sock=5, op=op, size=length), line("Sock", "NET_SOCK", "e")]
        lines.append(line(wait, "NET", "e"))
    return [*lines, line(name, "PROXY", "e")]


class ExampleOutput(unittest.TestCase):
    """The example profiler's file."""

    def faults(self, lines):
        return profiler.Example("[\n" + "\n".join(lines) + "\n{}]\n").faults()

    def test_events_that_add_up_are_fine(self):
        text = operation(30, [10, 5], [15]) + operation(7, [7], name="ProgressRecv", op=1)
        self.assertEqual(self.faults(text), [])
        self.assertEqual(profiler.Example("\n".join(text)).counts(), (2, 3, 4, 37))

    def test_each_fault_is_found(self):
        self.assertIn("has network events of 29", self.faults(operation(30, [29]))[0])
        self.assertIn("without a network event", self.faults(operation(30, [30], []))[0])
        self.assertIn("9 network events", self.faults(operation(9, [1] * 9))[0])
        self.assertIn("other direction", self.faults(operation(9, [9], op=1))[0])
        self.assertEqual(self.faults([]), [])

    def test_an_event_outside_of_a_transfer_is_an_error(self):
        with self.assertRaises(ValueError):
            profiler.Example(line("Sock", "NET_SOCK", "b", sock=5, op=0, size=1))


# Plays nccl-tests under a profiler: FAKE says what goes wrong.
FAKE = f"""#!{sys.executable} -IS
import os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
fault = os.environ.get("FAKE", "")
open(os.environ["NCCL_DEBUG_FILE"], "w").write("via NET/" + ("Socket" if fault == "socket" else "Towline"))
if "NCCL_PROFILE_DUMP_FILE" in os.environ:
    sys.path.insert(0, {ROOT!r} + "/tests")
    import gpu_profiler_test as play
    for rank in range(int(given["-g"])):
        size = 99 if fault == "example" else 100
        text = "\\n".join(play.operation(100, [size]) + play.operation(50, [50], name="ProgressRecv", op=1))
        open(os.environ["NCCL_PROFILE_DUMP_FILE"] + "_77_%d.json" % rank, "w").write(text)
elif "TOWLINE_PROFILE_DIR" in os.environ:
    stem = os.environ["TOWLINE_PROFILE_DIR"] + "/towline-host-7."
    for ending in ["pftrace", "prom"] + ([] if fault == "summary" else ["summary.txt"]):
        open(stem + ending, "w").write('towline_wire_bytes_total{{rail="0"}} 5\\n')
size = int(given["-b"])
while size <= int(given["-e"]):
    slow = 1.5 if os.environ.get("TOWLINE_PROFILE") == "all" and "TOWLINE_NET_EVENTS" not in os.environ and fault == "slow" else 1.0
    print("%12d %12d float sum -1 %.2f 0.00 0.00 0 %.2f 0.00 0.00 0" % (size, size // 4, slow * (20 + size / 1e4), 20.0))
    size *= int(given["-f"])
print("# Out of bounds values : 0 OK")
"""


class Whole(unittest.TestCase):
    """The whole script against stand-ins for nccl-tests and the program."""

    def run_with(self, fault, check=0, parts="example,own,overhead"):
        """(exit status, output)."""
        with tempfile.TemporaryDirectory() as place:
            for name in ("all_reduce_perf", "sendrecv_perf", "alltoall_perf"):
                self.program(os.path.join(place, name), FAKE)
            self.program(os.path.join(place, "towline"), f"#!/bin/sh\necho \"$1 $2\"\n[ $2 != check ] || exit {check}\n")
            words = ["--tests", place, "--towline", place, "--example", "x.so", "--out", place + "/out", "--rounds", "3"]
            words += ["--parts", parts]
            said = io.StringIO()
            with mock.patch.object(sys, "argv", ["profiler.sh", *words]), mock.patch.dict(os.environ, FAKE=fault):
                with contextlib.redirect_stdout(said):
                    status = profiler.main()
            return status, said.getvalue()

    def program(self, path, text):
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR)

    def test_all_is_well(self):
        status, said = self.run_with("")
        self.assertEqual(status, 0, said)
        self.assertIn("| everything | 20.0 µs (1.000, 1.000 to 1.000) |", said)
        self.assertNotIn("missed", said)

    def test_each_part_can_fail(self):
        self.assertIn("has network events of 99", self.run_with("example", parts="example")[1])
        self.assertIn("did not use Towline", self.run_with("socket", parts="example")[1])
        self.assertIn("no .summary.txt", self.run_with("summary", parts="own")[1])
        status, said = self.run_with("", check=1, parts="own")
        self.assertEqual(status, 1)
        self.assertIn("trace check failed", said)

    def test_too_slow_is_said(self):
        said = self.run_with("slow", parts="overhead")[1]
        self.assertIn("missed: everything at 16M: +50.0 %", said)
        self.assertIn("missed: everything at 8: +10.00 µs", said)


if __name__ == "__main__":
    unittest.main()
