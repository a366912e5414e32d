"""What benches/nccl promises: the table is read right, intervals mean what they say, wrong data is not overlooked.

Runs without a GPU, against a stand-in that prints nccl-tests' table:  python3 -B -m unittest tests/nccl_compare_test.py
"""

import argparse
import contextlib
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
import xml.dom.minidom

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "benches", "nccl"))

import compare  # noqa: E402
import compare_networks  # noqa: E402
import contenders  # noqa: E402
import networks  # noqa: E402
import plot  # noqa: E402
import processes  # noqa: E402
import rank  # noqa: E402
import report  # noqa: E402
import runner  # noqa: E402
import stats  # noqa: E402
import table  # noqa: E402

TABLE = """# nccl-tests version 2.19.6 nccl-headers=22809 nccl-library=22809
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
           8             2     float     sum      -1    31.25    0.00    0.00       0    30.11    0.00    0.00       0
     1048576        262144     float    none       0   512.00    2.05    2.05     N/A   510.00    2.06    2.06     N/A
  1073741824     268435456     float     sum      -1  4.3e+05    2.50    2.50       3   430001    2.50    2.50   2e+00
# Out of bounds values : 1 FAILED
# Avg bus bandwidth    : 1.5
"""

# Prints the table that the real binaries print. FAKE_US is the time of one operation, FAKE_WRONG the wrong elements;
# the log is written where NCCL would write it.
FAKE = """#!{python} -IS
import os, sys
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
ranks = int(given["-t"]) * int(given["-g"])
net = os.environ["NCCL_NET"]
log = os.environ.get("NCCL_DEBUG_FILE")
if log:
    via = "SHM/direct" if "NCCL_SHM_DISABLE" not in os.environ else "NET/" + net + "/0"
    net_said = os.environ.get("FAKE_LOG_AS", net)
    via = via.replace(net, net_said)
    open(log, "w").write("NCCL version 2.28.9+cuda13.0\\nUsing network " + net_said + "\\nChannel 00/0 : 0[0] -> 1[1] via " + via)
if net == os.environ.get("FAKE_BROKEN"):
    sys.exit("vm: Test NCCL failure")
time = float(os.environ.get("FAKE_US_" + net, "50"))
size, last = int(given["-b"]), int(given["-e"])
while size <= last:
    us = time + size / 2000
    wrong = os.environ.get("FAKE_WRONG_" + net, "0")
    print("%12d  %12d  %8s  %6s  %6d  %7.2f  %6.2f  %6.2f  %6s  %7.2f  %6.2f  %6.2f  %6s" %
          (size, size // 4, "float", "sum", -1, us, 0, 0, wrong, us, 0, 0, "0"))
    size *= int(given["-f"])
print("# Out of bounds values : 0 OK")
"""


class TimeOfABlock(unittest.TestCase):
    def test_the_check_of_the_first_block_does_not_close_a_band_of_large_sizes(self):
        band = runner.Band.parse("256M:1G:2:2:1:7")
        rows = [table.Row(size, 100_000.0, 0, None, None) for size in band.sizes()]
        checked = runner.Run(rows, True, "", 40.0, 0.0, "")
        self.assertAlmostEqual(compare.unchecked_time(checked, band), compare.FIRST_ORDER_S + 0.9)
        # What took no longer is believed, and what failed too.
        self.assertEqual(compare.unchecked_time(runner.Run(rows, True, "", 0.5, 0.0, ""), band), 0.5)
        self.assertEqual(compare.unchecked_time(runner.Run([], False, "no answer", 40.0, 0.0, ""), band), 40.0)


class Table(unittest.TestCase):
    def test_reads_every_result_line_and_nothing_else(self):
        rows = table.parse(TABLE)
        self.assertEqual([row.size for row in rows], [8, 1 << 20, 1 << 30])
        self.assertEqual([row.time_us for row in rows], [31.25, 512.0, 430000.0])
        self.assertEqual([row.total_wrong() for row in rows], [0, None, 5])
        self.assertTrue(table.finished(TABLE))
        self.assertFalse(table.finished(TABLE[: TABLE.index("# Out")]))

    def test_sizes_round_trip(self):
        for text in ("8", "2K", "128M", "1G"):
            self.assertEqual(table.show_size(table.parse_size(text)), text)
        with self.assertRaises(ValueError):
            table.parse_size("2 KiB")

    def test_counts_every_operation_on_the_wire(self):
        rows = [table.Row(1000, 1.0, 0, 1.0, 0), table.Row(4000, 1.0, 0, 1.0, 0)]
        # Two ranks: 2 * size for an all-reduce; two halves of 1 + 5 + 1 operations; warm-ups at 1000, 2000 and 4000.
        self.assertEqual(table.bytes_on_wire("all_reduce", rows, 2, 5, 3, 1), 2 * (2 * 7 * 5000 + 3 * 7000))

    def test_bus_bandwidth_is_that_of_nccl_tests(self):
        self.assertAlmostEqual(table.bus_bandwidth("all_reduce", 1 << 30, 1e6, 4), 1.073741824 * 1.5)


class Stats(unittest.TestCase):
    def test_the_interval_is_order_statistics_with_their_true_confidence(self):
        spread = stats.median_interval(list(range(15, 0, -1)))
        self.assertEqual((spread.median, spread.low, spread.high), (8, 4, 12))
        self.assertAlmostEqual(spread.confidence, 1 - 2 * (1 + 15 + 105 + 455) / 2**15)

    def test_few_samples_admit_their_lower_confidence(self):
        spread = stats.median_interval([5.0, 1.0, 3.0, 2.0, 4.0])
        self.assertEqual((spread.low, spread.high, spread.confidence), (1.0, 5.0, 0.9375))
        self.assertEqual(stats.median_interval([2.0]).confidence, 0.0)

    def test_ratios_pair_within_blocks_only(self):
        ratio = stats.paired_ratio({1: 20.0, 2: 40.0, 3: 1.0}, {1: 10.0, 2: 20.0, 4: 1.0})
        self.assertEqual((ratio.median, ratio.samples), (2.0, 2))
        self.assertIsNone(stats.paired_ratio({1: 1.0}, {2: 1.0}))


class Contenders(unittest.TestCase):
    def test_the_callers_nccl_variables_do_not_leak_in(self):
        os.environ["NCCL_ALGO"] = "Tree"
        self.addCleanup(os.environ.pop, "NCCL_ALGO")
        rows = {c.name: c.environment({}, None) for c in contenders.builtin("/towline", "/fast")}
        self.assertNotIn("NCCL_ALGO", rows["socket"])
        self.assertEqual(rows["towline-norecovery"]["TOWLINE_RECOVERY"], "0")
        self.assertTrue(rows["towline"]["LD_LIBRARY_PATH"].startswith("/towline"))
        self.assertNotIn("NCCL_SHM_DISABLE", rows["shm"])
        self.assertEqual(rows["fastsocket"]["NCCL_SHM_DISABLE"], "1")

    def test_a_peer_of_the_users_own(self):
        peer = contenders.from_argument("mine=;NCCL_NET=Socket;NCCL_SOCKET_NTHREADS=2")
        self.assertEqual((peer.library_dir, peer.role, peer.variables["NCCL_SOCKET_NTHREADS"]), (None, "peer", "2"))
        self.assertIn("via NET/Socket", peer.evidence)


class Runs(unittest.TestCase):
    def setUp(self):
        self.place = tempfile.TemporaryDirectory()
        self.addCleanup(self.place.cleanup)
        self.out = os.path.join(self.place.name, "out")
        binary = os.path.join(self.place.name, "all_reduce_perf")
        with open(binary, "w", encoding="utf-8") as file:
            file.write(FAKE.replace("{python}", sys.executable))
        os.chmod(binary, 0o755)

    def compare(self, *arguments, **variables):
        command = [os.path.join(ROOT, "benches", "nccl_compare.sh"), "--tests", self.place.name, "--towline", self.place.name]
        command += ["--out", self.out, "--bands", "8:128:16:5:1:3,1M:4M:2:5:1:1", "--only", "towline,socket,shm", *arguments]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)
        return done

    def summary(self):
        with open(os.path.join(self.out, "summary.csv"), encoding="utf-8") as file:
            return {(row["size"], row["contender"]): row for row in csv.DictReader(file)}

    def test_a_whole_comparison(self):
        done = self.compare("--bands", "8:128:16:5:1:6,1M:4M:2:5:1:2", FAKE_US_Towline="25")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        summary = self.summary()
        row = summary["8", "towline"]
        self.assertEqual((row["samples"], row["best_peer"]), ("6", "socket"))
        self.assertAlmostEqual(float(row["peer_over_this"]), 2.0, delta=0.01)
        self.assertEqual(summary["4194304", "shm"]["samples"], "2")
        with open(os.path.join(self.out, "all_reduce.svg"), encoding="utf-8") as file:
            xml.dom.minidom.parse(file)
        with open(os.path.join(self.out, "report.md"), encoding="utf-8") as file:
            self.assertIn("0 wrong elements, 0 results unchecked", file.read())

    def test_wrong_data_fails_the_comparison(self):
        done = self.compare(FAKE_WRONG_Towline="1")
        self.assertEqual(done.returncode, 1)
        self.assertIn(" wrong elements", done.stdout)

    def test_a_run_over_another_network_is_no_towline_run(self):
        done = self.compare(FAKE_LOG_AS="Socket")
        self.assertEqual(done.returncode, 1)
        self.assertIn("`towline` took no part: NCCL's log does not say 'Using network Towline'", done.stdout)

    def test_without_towline_nothing_was_shown(self):
        self.assertEqual(self.compare("--only", "socket").returncode, 1)

    def test_a_contender_that_fails_is_named_and_the_others_go_on(self):
        done = self.compare(FAKE_BROKEN="Socket")
        self.assertIn("`socket` took no part: exit status 1", done.stdout)
        self.assertIn(("8", "towline"), self.summary())
        self.assertEqual(self.compare(FAKE_BROKEN="Towline").returncode, 1)

    def test_a_short_budget_still_reports(self):
        done = self.compare("--budget", "7")
        self.assertIn("left out", done.stdout)
        self.assertTrue(os.path.exists(os.path.join(self.out, "report.md")))

    def test_samples_of_two_calls_are_reported_together(self):
        self.compare()
        raw = os.path.join(self.out, "raw.jsonl")
        again = subprocess.run(
            [os.path.join(ROOT, "benches", "nccl_compare.sh"), "--report-only", "--out", self.out, raw, raw],
            capture_output=True,
            text=True,
        )
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(self.summary()["8", "socket"]["samples"], "6")

    def test_a_hanging_run_is_ended(self):
        script = os.path.join(self.place.name, "hang")
        with open(script, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\nsleep 60\n")
        os.chmod(script, 0o755)
        run = runner.invoke(script, [], dict(os.environ), 0.3)
        self.assertFalse(run.ok)
        self.assertLess(run.wall_s, 10)


# Speaks as rank.py does, without a GPU. FAKE says what goes wrong.
FAKE_RANK = """
import json, os, sys
rank, ranks = int(sys.argv[1]), int(sys.argv[2])
assert os.environ["LOCAL_WORLD_SIZE"] == str(ranks) and int(os.environ["RANK"]) == rank
if os.environ.get("FAKE") == "no start" and rank == 1:
    sys.exit("no such GPU")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    if os.environ.get("FAKE") == "dies" and rank == 1:
        sys.exit()
    if os.environ.get("FAKE") == "hangs" and rank == 1:
        sys.stdin.read()
    wrong = lambda size: rank if size <= order["check_up_to"] else None
    rows = [{"size": size, "time_us": 10.0 * (rank + 1), "cpu_s": 0.5, "wrong": wrong(size)} for size in order["sizes"]]
    if os.environ.get("FAKE") == "order":
        rows = [{**row, "time_us": order["wait_every"]} for row in rows]
    print(json.dumps({"rows": rows}), flush=True)
"""


class Processes(unittest.TestCase):
    BAND = runner.Band(1 << 20, 64 << 20, 8, 3, 1, 5)

    def group(self, fake="", limit=20, wait_every=0):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        script = os.path.join(folder.name, "rank.py")
        with open(script, "w") as file:
            file.write(FAKE_RANK)
        group = processes.Group(2, 1, {**os.environ, "FAKE": fake}, limit, script, wait_every)
        self.addCleanup(group.end)
        return group

    def test_a_group_lives_from_order_to_order(self):
        group = self.group()
        for check_all in (True, False):
            run = group.run("all_reduce", self.BAND, 20, check_all)
            self.assertEqual((run.ok, [row.size for row in run.rows]), (True, [1 << 20, 8 << 20, 64 << 20]))
            self.assertEqual({row.time_us for row in run.rows}, {15.0})
            self.assertEqual(run.cpu_s, 3.0)
            # Wrong elements of all ranks together; None where nobody looked.
            self.assertEqual([row.wrong for row in run.rows], [1, 1, 1 if check_all else None])

    def test_processes_begin_anew_after_so_many_blocks(self):
        class Stub(compare.Comparison):
            def __init__(self, every):
                self.given = argparse.Namespace(restart_every=every)
                self.generation, self.groups, self.ended = 0, {}, 0

            def end(self):
                self.ended += len(self.groups)

        for every, ended in ((3, [0, 0, 0, 1, 1, 1, 2, 2]), (0, [0] * 8)):
            stub, seen = Stub(every), []
            for block in range(8):
                # Once for each band of a block.
                for _ in range(2):
                    stub.begin_anew(block)
                    stub.groups.setdefault("towline", "processes")
                seen.append(stub.ended)
            self.assertEqual(seen, ended)

    def test_the_blocks_of_one_group_are_one_sample(self):
        row = {"size": 8, "wrong": 0, "in_place_wrong": None}
        run = {"kind": "sample", "contender": "towline", "role": "towline", "collective": "all_reduce", "band": "8B"}
        for grouped, want in ((True, [1.5, 9.5, 11.0]), (False, [1.0, 2.0, 9.0, 10.0, 11.0])):
            with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as raw:
                for block, time in enumerate([1.0, 2.0, 9.0, 10.0, 11.0]):
                    group = block // 2 if grouped else None
                    print(json.dumps({**run, "block": block, "group": group, "rows": [{**row, "time_us": time}]}), file=raw)
                raw.flush()
                times = report.Samples([raw.name]).times["all_reduce"][8]["towline"]
            self.assertEqual(sorted(times.values()), want)

    def test_a_rank_that_ends_or_hangs_ends_its_group_and_is_said(self):
        failed = self.group("no start")
        self.assertIn("ended", failed.run("all_reduce", self.BAND, 20, True).problem)
        self.assertIn("no such GPU", failed.said())
        self.assertIn("ended", self.group("dies").run("all_reduce", self.BAND, 20, True).problem)
        hung = self.group("hangs")
        run = hung.run("all_reduce", self.BAND, 0.5, True)
        self.assertEqual((run.ok, run.problem), (False, "no answer in time"))
        self.assertTrue(all(child.poll() is not None for child in hung.children))

    def test_ranks_wait_as_often_as_they_are_told(self):
        calls = []

        class Gpu:
            def wait(self):
                calls.append("wait")

        of = rank.Rank.__new__(rank.Rank)
        of.gpu, of._make_room = Gpu(), lambda size: None
        of._begin = lambda collective, size: calls.append(size)
        order = {"collective": "all_reduce", "sizes": [64], "iterations": 5, "warmups": 0, "check_up_to": 0}
        all_begin = [8, "wait"]
        of.measure({**order, "wait_every": 2})
        self.assertEqual(calls, [*all_begin, 64, 64, "wait", 64, 64, "wait", 64, "wait"])
        calls.clear()
        of.measure({**order, "wait_every": 5})
        self.assertEqual(calls, [*all_begin, 64, 64, 64, 64, 64, "wait"], "once at the end, not twice")
        self.assertEqual(self.group(wait_every=7).wait_every, 7)
        self.assertEqual(self.group(fake="order").run("all_reduce", self.BAND, 20, True).rows[0].time_us, 3.0)

    def test_every_element_of_every_collective_is_checked(self):
        class Gpu:
            def zero(self, memory, size):
                pass

            def wait(self):
                pass

            def read(self, memory, size):
                return bytearray(self.content)

        of = rank.Rank.__new__(rank.Rank)
        of.rank, of.ranks, of.target, of.gpu = 1, 2, 0, Gpu()
        of.tiles = [rank.array("f", ((i * 7 + r * 13) % 251 for i in range(rank.PERIOD))) for r in range(2)]
        of.sums = rank.array("f", map(sum, zip(*of.tiles)))
        of._begin = lambda collective, size: None
        size = 1 << 20
        value = lambda r, i: (i % rank.PERIOD * 7 + r * 13) % 251
        half = size // 8
        right = {
            "all_reduce": [value(0, i) + value(1, i) for i in range(2 * half)],
            "all_gather": [value(r, i) for r in range(2) for i in range(half)],
            "reduce_scatter": [value(0, half + i) + value(1, half + i) for i in range(half)],
            "alltoall": [value(r, half + i) for r in range(2) for i in range(half)],
            "sendrecv": [value(0, i) for i in range(2 * half)],
            "broadcast": [value(0, i) for i in range(2 * half)],
        }
        for collective, content in right.items():
            for changed in (None, 0, len(content) // 2, len(content) - 1):
                found = rank.array("f", content + [0.0] * (2 * half - len(content)))
                if changed is not None:
                    found[changed] += 1
                of.gpu.content = found.tobytes()
                self.assertEqual(of._wrong(collective, size), int(changed is not None), (collective, changed))


class Plot(unittest.TestCase):
    def test_one_size_and_one_contender_are_enough(self):
        drawing = plot.draw("sendrecv", {8: {"towline": {1: 20.0}}}, {"towline": "towline"}, 2)
        with contextlib.redirect_stderr(io.StringIO()):
            xml.dom.minidom.parseString(drawing)


class Networks(unittest.TestCase):
    """`nccl_networks.sh`: a size at which Towline is slower than the best Socket is named."""

    RANK = """
import json, os, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    own = os.environ["NCCL_NET"] == "Towline"
    best = os.environ.get("NCCL_SOCKET_NTHREADS") == "2"
    time = lambda size: 30.0 if own and size > 8 else 10.0 if own else 20.0 if best else 40.0
    rows = [{"size": size, "time_us": time(size), "cpu_s": 0.6 if own else 0.4 if best else 0.9, "wrong": 0} for size in order["sizes"]]
    print(json.dumps({"rows": rows}), flush=True)
"""

    def test_every_miss_is_named_against_the_best_socket(self):
        with tempfile.TemporaryDirectory() as folder:
            script = os.path.join(folder, "rank.py")
            with open(script, "w") as file:
                file.write(self.RANK)
            words = "--towline . --networks loopback --collectives all_reduce --sizes 8,128K --rounds 3".split()
            options, kept = compare_networks.arguments(words), []
            with unittest.mock.patch.object(processes, "RANK", script):
                samples, wrong, problems = compare_networks.measure(options, "loopback", time.monotonic() + 60, kept.append)
            options = compare_networks.arguments([*words, "--training"])
            with unittest.mock.patch.object(compare_networks, "TRAINING_RANK", script):
                steps, _, no_problems = compare_networks.measure(options, "loopback", time.monotonic() + 60, kept.append)
        self.assertEqual((wrong, problems, no_problems, len(kept)), (0, [], [], 2 * 2 * 3 * 4))
        self.assertEqual(list(steps), [("fsdp", 365_000_000), ("ddp", 365_000_000)])
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown):
            misses = compare_networks.report("loopback", samples, options.margin)
        self.assertEqual(len(misses), 1)
        self.assertIn("all_reduce of 131072 bytes, towline: 1.50", misses[0])
        self.assertIn("| all_reduce | 8 | socket-2x8 | 20.0 | towline: 10.0 | 0.50 | 0.50 to 0.50 | 1.50 |", shown.getvalue())

    def test_the_congestion_control_is_restored(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "tcp_congestion_control")
            with open(path, "w") as file:
                file.write("cubic\n")
            now = lambda: open(path).read()
            with unittest.mock.patch.object(networks, "CONGESTION", path):
                with networks.congestion(None) as name:
                    self.assertEqual((name, now()), ("cubic", "cubic\n"))
                with self.assertRaises(ZeroDivisionError), networks.congestion("bbr") as name:
                    self.assertEqual((name, now()), ("bbr", "bbr"))
                    1 / 0
            self.assertEqual(now(), "cubic")

    def test_what_is_no_network_is_refused(self):
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit):
            compare_networks.arguments(["--towline", ".", "--networks", "loopback,veth7"])


if __name__ == "__main__":
    unittest.main()
