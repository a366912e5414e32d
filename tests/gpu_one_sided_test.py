"""The steps of tests/gpu/one_sided.py between two played ranks, what device_api.py makes of nccl-tests, and that both fail
when they should. Runs without a GPU:

python3 -B -m unittest tests/gpu_one_sided_test.py
"""

import contextlib
import io
import os
import queue
import sys
import tempfile
import threading
import time
import types
import unittest
from unittest import mock

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "gpu"))

import device_api  # noqa: E402
import one_sided  # noqa: E402


class PlayedCuda:
    """Memory whose addresses are numbers, and streams that do at once what they are given."""

    def __init__(self):
        self.held, self.next, self.recording, self.gates = {}, 1 << 20, None, {}

    def memory(self, size):
        at, self.next = self.next, self.next + size + 4096
        self.held[at] = bytearray(size)
        return at

    def free(self, address):
        del self.held[address]

    def place(self, address):
        start = max(at for at in self.held if at <= address)
        return self.held[start], address - start

    def write(self, address, data):
        held, at = self.place(address)
        held[at : at + len(data)] = data

    def read(self, address, size):
        held, at = self.place(address)
        return bytes(held[at : at + size])

    def do(self, body):
        if self.recording is None:
            body()
        else:
            self.recording.append(body)

    def copy(self, target, source, size, stream):
        self.do(lambda: self.write(target, self.read(source, size)))

    def linger(self, scratch, size, stream):
        self.do(lambda: time.sleep(0.005))

    def stream(self, is_urgent=False):
        return object()

    def gate(self):
        return types.SimpleNamespace(value=0)

    def wait(self, gate, stream):
        self.gates[stream] = gate

    def has_ended(self, stream):
        return stream not in self.gates or self.gates[stream].value == 1

    def capture(self, stream, body):
        self.recording = recorded = []
        body()
        self.recording = None
        return lambda: [one() for one in recorded], lambda: None


class PlayedSteps(one_sided.Steps):
    """One rank; `fault` is what its network does wrong."""

    def __init__(self, rank, fault):
        cuda = PlayedCuda()
        self.it = types.SimpleNamespace(rank=rank, other=1 - rank, cuda=cuda, stream="a stream", settle=lambda stream=None: None)
        self.source, self.target = [(cuda.memory(one_sided.MOST), "window") for _ in range(2)]
        self.signals, self.fault, self.peer = queue.Queue(), fault, None

    def put(self, size, start=0, offset=0, stream=None):
        cuda, peer = self.it.cuda, self.peer

        def body():
            data = cuda.read(self.source[0] + start, size)
            if self.fault == "damage":
                data = bytes([data[0] ^ 1]) + data[1:]
            if self.fault != "lost" or start == 0:
                peer.it.cuda.write(peer.target[0] + offset, data)
            peer.signals.put(1)
            if self.fault == "queued":
                cuda.gates[stream] = next(gate for gate in peer.it.cuda.gates.values())

        cuda.do(body)

    def signal(self, stream=None):
        self.it.cuda.do(lambda: self.peer.signals.put(1))

    def wait(self, count=1, stream=None):
        for _ in range(count):
            self.it.cuda.do(lambda: self.signals.get(timeout=2))

    def group(self):
        return contextlib.nullcontext()

    def pointer(self, rank):
        return 4096 if rank == self.it.rank or self.fault == "reachable" else None


class HoldsNothingBack(PlayedSteps):
    """The signals of a barrier, and so every second wait, do nothing."""

    waits = 0

    def signal(self, stream=None):
        pass

    def wait(self, count=1, stream=None):
        self.waits += 1
        if self.waits % 2:
            super().wait(count, stream)


class Played(unittest.TestCase):
    """What two ranks find."""

    def setUp(self):
        for name, size in (("MOST", 4 * one_sided.MIB), ("LINGER", 64), ("HELD", 0.05)):
            small = mock.patch.object(one_sided, name, size)
            small.start()
            self.addCleanup(small.stop)

    def both(self, body, fault=None, kind=PlayedSteps):
        """What `body` gives or raises on each rank."""
        ranks, meeting, found = [kind(rank, fault) for rank in range(2)], threading.Barrier(2, timeout=20), [None, None]
        for rank in range(2):
            ranks[rank].peer = ranks[1 - rank]

        def play(rank):
            try:
                found[rank] = body(ranks[rank])
            except Exception as why:
                found[rank] = why
                meeting.abort()

        with mock.patch.object(one_sided, "meet", lambda name: meeting.wait()), mock.patch.object(one_sided, "tell", lambda **what: None):
            threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return found

    def assert_well(self, body):
        for found in self.both(body):
            self.assertIsInstance(found, str, found)

    def assert_found(self, body, fault, what, kind=PlayedSteps):
        found = [str(it) for it in self.both(body, fault, kind) if isinstance(it, one_sided.Failed)]
        self.assertTrue(any(what in it for it in found), found)

    def test_all_is_well(self):
        for step in ("many_puts", "numbered", "barrier", "peer_pointer", "puts"):
            self.assert_well(lambda steps, step=step: getattr(steps, step)())
        for step in ("numbered", "barrier"):
            self.assert_well(lambda steps, step=step: getattr(steps, step)(True))
        self.assert_well(lambda steps: steps.under(steps.it.cuda.wait))

    def test_wrong_bytes_are_found(self):
        self.assert_found(lambda steps: steps.numbered(), "damage", "20 of 1310720 bytes are wrong")
        self.assert_found(lambda steps: steps.numbered(True), "damage", "bytes are wrong")
        self.assert_found(lambda steps: steps.barrier(), "damage", "bytes are wrong")
        self.assert_found(lambda steps: steps.send_and_check(4096, 1), "damage", "1 of 4096 bytes are wrong")
        self.assert_found(lambda steps: steps.many_puts(), "lost", "32 puts")
        self.assert_found(lambda steps: steps.peer_pointer(), "reachable", "another host's memory")

    def test_puts_behind_streams_that_wait_are_found(self):
        self.assert_found(lambda steps: steps.under(steps.it.cuda.wait), "queued", "plain not within 0.05 s, while 16 streams")
        self.assert_found(lambda steps: steps.under(steps.it.cuda.wait), "damage", "two puts")

    def test_streams_that_do_not_wait_show_nothing(self):
        self.assert_found(lambda steps: steps.under(lambda gate, stream: None), None, "this shows nothing")

    def test_a_barrier_that_holds_nothing_back_is_found(self):
        self.assert_found(lambda steps: steps.barrier(), None, "bytes are wrong", HoldsNothingBack)
        self.assert_found(lambda steps: steps.barrier(True), None, "bytes are wrong", HoldsNothingBack)

    def test_a_barrier_that_shows_nothing_says_so(self):
        with mock.patch.object(PlayedCuda, "linger", lambda *_: None), mock.patch.object(one_sided, "ROUNDS", 1):
            self.assert_found(lambda steps: steps.barrier(), None, "this shows nothing")


class Evidence(unittest.TestCase):
    """What NCCL's log must say."""

    LOG = "\n".join(("vm:1:1 [0] NCCL INFO " + line) for line in one_sided.ASSIGNED) + "\n"

    def test_an_assigned_plugin_is_needed_for_each_communicator(self):
        self.assertIsNone(one_sided.not_shown("whole", self.LOG, 1))
        self.assertIsNone(one_sided.not_shown("abort", 2 * self.LOG, 2))
        self.assertIn("1 of 2 lines", one_sided.not_shown("abort", self.LOG, 2))
        self.assertIn("0 of 1 lines", one_sided.not_shown("whole", "", 1))
        self.assertIn("ConnectOnce", one_sided.not_shown("left", self.LOG.splitlines()[0], 1))

    def test_a_refusal_is_told(self):
        refused = self.LOG + "NET/Towline: no one-sided operations over Towline: the network is not Towline's\n"
        self.assertIn("declined", one_sided.not_shown("whole", refused, 1))

    def test_nccls_own_is_without_ours(self):
        for life in ("socket", "without"):
            self.assertIsNone(one_sided.not_shown(life, "NCCL INFO RMA/Plugin: Assigned plugin Socket to comm", 1))
            self.assertIn("Towline", one_sided.not_shown(life, self.LOG, 1))

    def test_the_table_has_both_networks(self):
        lines = list(one_sided.table({"whole": {"8": [38.2, 29.1]}, "socket": {"8": [55.0, 30.0]}}))
        self.assertEqual(lines[1].split(), ["8", "38", "29", "55", "30"])
        self.assertEqual(list(one_sided.table({})), [])


class Topology(unittest.TestCase):
    """What NCCL_TOPO_DUMP_FILE must say with and without one-sided operations."""

    WITHOUT = """<system version="1">
  <cpu host_hash="0x1" numaid="0">
    <nic>
      <net name="lo" keep="1" dev="0" speed="39000" gdr="0" net="1"/>
    </nic>
  </cpu>
</system>
"""
    WITH = WITHOUT.replace('net="1"', 'net="1" gin="1" rma="1"')

    def test_nccls_marks_and_the_order_of_attributes_are_no_difference(self):
        self.assertIsNone(one_sided.unlike(self.WITHOUT, self.WITH))
        moved = self.WITH.replace(' keep="1"', "").replace(' gin="1"', ' gin="1" keep="1"')
        self.assertIsNone(one_sided.unlike(self.WITHOUT, moved))
        added = self.WITHOUT.replace("    </nic>", '      <gin dev="0" name="lo"/>\n      <rma dev="0" name="lo"/>\n    </nic>')
        self.assertIsNone(one_sided.unlike(self.WITHOUT, added))

    def test_anything_else_is(self):
        for before, after in (('gdr="0"', 'gdr="1"'), ('numaid="0"', 'numaid="1"'), ("<nic>", '<nic>\n      <net name="more"/>')):
            self.assertIn("+", one_sided.unlike(self.WITHOUT, self.WITH.replace(before, after)))

    def test_topologies_that_show_nothing_are_found(self):
        for nothing in ("", self.WITHOUT[:-12], self.WITHOUT.replace("<net ", "<gpu ")):
            self.assertIn("no network device in the topology without", one_sided.unlike(nothing, self.WITH))
            self.assertIn("no network device in the topology with them", one_sided.unlike(self.WITHOUT, nothing))

    def test_both_lives_must_go_well_and_dump(self):
        given = types.SimpleNamespace()
        for dumps, goes_well, expected in (((0, 1), True, True), ((0, 1), False, False), ((0,), True, False), ((), True, False)):

            def live(life, given, folder, times, dumps=dumps, goes_well=goes_well):
                os.makedirs(folder, exist_ok=True)
                for rank in dumps:
                    with open(one_sided.topology_file(folder, rank), "w", encoding="utf-8") as file:
                        file.write(self.WITH if life == "with" else self.WITHOUT)
                return goes_well or life == "with"

            with tempfile.TemporaryDirectory() as folder, mock.patch.object(one_sided, "live", live):
                # What an earlier run has left does not count.
                os.makedirs(os.path.join(folder, "with"))
                for rank in range(one_sided.RANKS):
                    with open(one_sided.topology_file(os.path.join(folder, "with"), rank), "w", encoding="utf-8") as file:
                        file.write(self.WITH)
                with contextlib.redirect_stdout(io.StringIO()):
                    self.assertEqual(one_sided.topologies(given, folder), expected, (dumps, goes_well))


class DeviceApi(unittest.TestCase):
    """What the output of nccl-tests, and of NCCL's examples, must say."""

    def output(self, wrong="0", sizes=device_api.SIZES, end="Out of bounds values : 0 OK"):
        rows = [f"{size:12} {size // 8:12} float none -1 {100 + size:.2f} 0.00 0.00 {wrong} 101.00 0.00 0.00 N/A" for size in sizes]
        return "\n".join(["# nccl-tests", *rows, "# " + end])

    def test_a_clean_run_is_well(self):
        self.assertIsNone(device_api.problem(self.output(), 0))
        self.assertEqual(device_api.results(self.output())[64], (164.0, ["0", "N/A"]))

    def test_each_fault_is_found(self):
        self.assertIn("3 and N/A wrong", device_api.problem(self.output("3"), 0))
        self.assertIn("N/A and N/A wrong", device_api.problem(self.output("N/A"), 0))
        self.assertIn("sizes [64, 512]", device_api.problem(self.output(sizes=[64, 512]), 0))
        self.assertIn("no clean end", device_api.problem(self.output(end="Out of bounds values : 1 FAILED"), 0))
        self.assertIn("exit status 2", device_api.problem("Test failure common.cu:1\n", 2))
        self.assertIn("Test failure", device_api.problem("Test failure a.cu:1\n-----\nmpirun ends\n-----\n", 6))
        self.assertIn("without a word", device_api.problem("", "none within 60 s"))

    STARTED = "".join(f"MPI initialized: rank {rank} of 2\n" for rank in range(2))

    def test_an_example_that_is_right_is_well(self):
        for word in ("Pure GIN AlltoAll result: PASSED", "SUCCESS: Example completed successfully!"):
            self.assertIsNone(device_api.problem_of_example(self.STARTED + word, 0))

    def test_each_fault_of_an_example_is_found(self):
        passed = "Pure GIN AlltoAll result: PASSED\n"
        for text, why in (
            (self.STARTED, "does not say"),
            (passed, "MPI=1"),
            (self.STARTED + passed + "  Rank 1: Pure GIN mismatch at [0][3]: got 0, expected 103", "Rank 1: Pure GIN mismatch"),
            (self.STARTED + passed + "FAILED: Incorrect results detected on rank 1", "rank 1"),
            (self.STARTED + "ERROR: rank 0 communicator does not support GIN!", "support GIN"),
        ):
            self.assertIn(why, device_api.problem_of_example(text, 0))
        failed = "Failed, NCCL error main.cu:7 'internal error'\n-----\nmpirun ends\n"
        self.assertIn("internal error", device_api.problem_of_example(self.STARTED + passed + failed, 1))

    def test_examples_are_found_where_they_were_built(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "06_device_api", "c", "alltoall_gin")
            os.makedirs(os.path.dirname(path))
            with open(path, "w", encoding="utf-8"):
                pass
            self.assertIsNone(device_api.found_in(directory, "alltoall_gin"))
            os.chmod(path, 0o755)
            self.assertEqual(device_api.found_in(directory, "alltoall_gin"), path)


if __name__ == "__main__":
    unittest.main()
