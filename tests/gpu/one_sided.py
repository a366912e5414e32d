#!/usr/bin/env python3
"""NCCL's one-sided operations over Towline: two processes, a GPU each, which NCCL takes for two hosts (NCCL_HOSTID).

    tests/gpu/one_sided.py --towline target/release --nccl DIRECTORY_OF_libnccl.so.2

Needs NCCL 2.30.7 or later, two GPUs, no PyTorch. Each step prints ok, failed, or "not offered by this release"; exit status 0
means that none failed. Where one fails the ends of NCCL's logs follow.

The steps, and what they are in nccl4py:
    window        ncclMemAlloc, ncclCommWindowRegister: a real window       Communicator.register_window
    peer pointer  ncclGetPeerDevicePointer: null for another host           RegisteredWindowHandle.get_peer_device_pointer
    put           ncclPutSignal, ncclWaitSignal, 8 B to 64 MiB, verified    put_signal, wait_signal
    many puts     32 puts in one group before one wait, each verified       put_signal in nccl.group()
    ping-pong     the same to and fro, timed, beside ncclSend and ncclRecv  put_signal, wait_signal, send, recv
    numbered      20 ping-pongs of other bytes each, every one verified     put_signal, wait_signal
    graph         the same, by 20 launches of one CUDA graph                the same, in a graph
    barrier       ncclSignal holds puts back until their target is read;    signal, wait_signal
                  without it the same puts must come out wrong
    graph barrier the same, by launches of one CUDA graph                   the same, in a graph
    under waits   puts into a rank of which 16 streams stand in a wait      put_signal, wait_signal
    under kernels the same, with 16 kernels that run until it is over       put_signal, wait_signal
                  (both also by a graph; and with streams of the greatest
                  priority, which Towline's own has: what comes of that is
                  told only)
    pre-mul-sum   ncclRedOpCreatePreMulSum, ncclAllReduce                   create_pre_mul_sum
    buffer        ncclCommRegister, ncclAllReduce                           register_buffer
    device comm   ncclDevCommCreate with GIN, ncclDevCommDestroy            create_dev_comm
    deregister    windows end in another order than they were made          RegisteredWindowHandle.close
    destroy       ncclCommDestroy                                           Communicator.destroy
Lives of a communicator after the first: "left" (destroyed with its windows registered), "abort" (ncclCommAbort amid puts,
whose memory stays as it is from then on, then a new communicator), "cut" (one stream is cut amid puts, and all bytes are
right), "queue" (exchanges of all kinds where streams share the fewest queues that suffice: CUDA_DEVICE_MAX_CONNECTIONS=3),
"socket" (NCCL's own one-sided operations over its sockets, for the times beside Towline's: NCCL 2.32 with the gdrdrv
module; elsewhere it says that they do not start, and why), "topology" (two lives, with TOWLINE_RMA=0 and 1: what each rank
writes to NCCL_TOPO_DUMP_FILE must be the same). Only when asked for: "inner" (windows that begin inside of an
allocation; whether NCCL itself can do that is not known), and the same through nccl4py itself (nccl4py_steps.py): "py"
(destroyed with all resources open), "py-close" (closed in two other orders first), "py-abort" (all resources open).

In every life but "socket" and the one without them NCCL's logs must say of each communicator that Towline was assigned as its RMA plugin, and that
the ranks connected through it; else the life has failed, whatever its steps say.

A rank that is silent for too long is asked where each of its threads is: by /proc, by Python, and natively by a signal
handler or, where there is no C compiler, by cuda-gdb or gdb. To catch a rare hang:

    tests/gpu/one_sided.py --towline target/release --nccl DIRECTORY --lives abort --repeat 10
"""

import argparse
import contextlib
import ctypes
import difflib
import faulthandler
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from xml.etree import ElementTree

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "benches", "nccl"))

RANKS, MIB = 2, 1 << 20
MOST = 64 * MIB
IN_PROGRESS, NOT_READY, NO_COMPILER = 7, 600, 221
CHAR, FLOAT, SUM = 0, 7, 0
COLL_SYMMETRIC = 1
LIVES = ("whole", "left", "abort", "cut", "queue", "socket", "topology")
# The two lives of "topology". Their topologies may differ alone in these: attributes by which NCCL 2.30 marks a device that
# serves one-sided operations, elements that 2.32 adds for it.
WITHOUT_AND_WITH, MARKS = ("without", "with"), ("gin", "rma")
ROUNDS, LINGER = 20, 256 * MIB
# Streams that wait, twice as many as a GPU has queues unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise; and for how many
# seconds a put may take meanwhile.
WAITERS, HELD = 16, 4
TIMED = (8, 4096, 65536, MIB, 16 * MIB)
# The lives that make more than one communicator.
COMMUNICATORS = {"abort": 2, "py-abort": 2}
# What NCCL says of each communicator that Towline serves: at its start, and when its ranks connect for their first window or
# device communicator. And what Towline says when it declines.
ASSIGNED = ("RMA/Plugin: Assigned plugin Towline to comm", "ncclRmaProxyConnectOnce: rmaCommCount 1")
DECLINED = "no one-sided operations over Towline:"


class Failed(Exception):
    """A step that went wrong."""


class NotOffered(Exception):
    """Something that this release has not."""


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class WaitDesc(ctypes.Structure):
    """ncclWaitSignalDesc_t."""

    _fields_ = [(name, ctypes.c_int) for name in ("count", "peer", "signal", "context")]


class DevRequirements(ctypes.Structure):
    """ncclDevCommRequirements_t of NCCL 2.30.7."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("resources", ctypes.c_void_p),
        ("teams", ctypes.c_void_p),
        ("lsa_multimem", ctypes.c_bool),
        ("barriers", ctypes.c_int),
        ("lsa_barriers", ctypes.c_int),
        ("rail_gin_barriers", ctypes.c_int),
        ("lsa_lla2a_blocks", ctypes.c_int),
        ("lsa_lla2a_slots", ctypes.c_int),
        ("gin_force_enable", ctypes.c_bool),
        ("gin_contexts", ctypes.c_int),
        ("gin_signals", ctypes.c_int),
        ("gin_counters", ctypes.c_int),
        ("gin_connection", ctypes.c_int),
        ("gin_exclusive", ctypes.c_bool),
        ("gin_queue_depth", ctypes.c_int),
        ("gin_traffic_class", ctypes.c_int),
        ("world_gin_barriers", ctypes.c_int),
        ("gin_strong_signals", ctypes.c_bool),
        ("gin_va_signals", ctypes.c_bool),
    ]


def arguments():
    """The command line; `--child` is how the script calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", help="directory of Towline's libnccl-net.so")
    parser.add_argument("--nccl", help="directory of libnccl.so.2")
    parser.add_argument("--lives", default=",".join(LIVES), help="only these")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="run them so many times")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--seconds", type=float, default=40, help="limit for one step")
    parser.add_argument("--out", help="keep NCCL's logs here")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for both ranks")
    parser.add_argument("--child", type=int, metavar="RANK", help=argparse.SUPPRESS)
    parser.add_argument("--life", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is None and not given.towline:
        parser.error("--towline is needed")
    return given


# What runs in a rank.


def tell(**what):
    """Tells the parent."""
    print(json.dumps(what), flush=True)


def meet(name):
    """Waits until both ranks are here."""
    tell(meet=name)
    if not sys.stdin.readline():
        os._exit(3)


SPIN = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry spin(.param .u64 gate)
{
  .reg .u64 %at;
  .reg .u32 %seen;
  .reg .pred %closed;
  ld.param.u64 %at, [gate];
again:
  ld.volatile.u32 %seen, [%at];
  setp.eq.u32 %closed, %seen, 0;
  @%closed bra again;
  ret;
}
"""


class Cuda:
    """libcuda, as far as this needs it."""

    def __init__(self, ordinal):
        self.lib = ctypes.CDLL("libcuda.so.1")
        device, self.context = ctypes.c_int(), ctypes.c_void_p()
        self("cuInit", 0)
        count = ctypes.c_int()
        self("cuDeviceGetCount", ctypes.byref(count))
        # The ranks are on two pretended hosts, so they may share a device.
        self("cuDeviceGet", ctypes.byref(device), ordinal % max(count.value, 1))
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), device)
        self("cuCtxSetCurrent", self.context)

    def __call__(self, name, *given):
        code = getattr(self.lib, name)(*given)
        if code:
            raise Failed(f"{name}: CUDA error {code}")

    def stream(self, is_urgent=False):
        """A stream, of the greatest priority or of that of most streams."""
        made, least, greatest = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
        self("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
        self("cuStreamCreateWithPriority", ctypes.byref(made), 1, greatest if is_urgent else 0)
        return made

    def gate(self):
        """A number of the host's that streams can wait for: what opens and closes it."""
        memory = ctypes.c_void_p()
        self("cuMemHostAlloc", ctypes.byref(memory), ctypes.c_size_t(4096), 3)
        return ctypes.c_uint32.from_address(memory.value)

    def wait(self, gate, stream):
        """The stream stands until the gate is open."""
        self("cuStreamWaitValue32_v2", stream, ctypes.c_uint64(ctypes.addressof(gate)), 1, 0)

    def spinner(self):
        """What has a stream run a kernel until a gate is open. Each rank loads it, so that none waits where it cannot be."""
        module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
        code = self.lib.cuModuleLoadData(ctypes.byref(module), SPIN)
        if code == NO_COMPILER:
            raise NotOffered("libcuda finds no compiler of kernels here")
        if code:
            raise Failed(f"cuModuleLoadData: CUDA error {code}")
        self("cuModuleGetFunction", ctypes.byref(kernel), module, b"spin")

        def spin(gate, stream):
            address = ctypes.c_uint64(ctypes.addressof(gate))
            given = (ctypes.c_void_p * 1)(ctypes.addressof(address))
            self("cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0, stream, given, None)

        return spin

    def write(self, address, data):
        self("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        self("cuCtxSynchronize")

    def memory(self, size):
        """Memory of the GPU, whose address this gives."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address):
        self("cuMemFree_v2", ctypes.c_uint64(address))

    def copy(self, target, source, size, stream):
        self("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(size), stream)

    def linger(self, scratch, size, stream):
        """Keeps the stream busy by filling `scratch`: about a millisecond for 256 MiB."""
        for _ in range(8):
            self("cuMemsetD8Async", ctypes.c_uint64(scratch), 0, ctypes.c_size_t(size), stream)

    def has_ended(self, stream):
        code = self.lib.cuStreamQuery(stream)
        if code not in (0, NOT_READY):
            raise Failed(f"the stream failed: CUDA error {code}")
        return code == 0

    def capture(self, stream, body):
        """A graph of what `body` enqueues: what launches it, and what ends it."""
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", stream, 2)
        try:
            body()
        finally:
            code = self.lib.cuStreamEndCapture(stream, ctypes.byref(graph))
        if code:
            raise Failed(f"cuStreamEndCapture: CUDA error {code}")
        self("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))

        def end():
            self("cuGraphExecDestroy", executable)
            self("cuGraphDestroy", graph)

        return lambda: self("cuGraphLaunch", executable, stream), end

    def read(self, address, size):
        held = ctypes.create_string_buffer(size)
        self("cuMemcpyDtoH_v2", held, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return held.raw


class Rank:
    """A communicator of one rank."""

    def __init__(self, rank, given):
        self.rank, self.other, self.given = rank, 1 - rank, given
        self.cuda = Cuda(rank)
        self.nccl = ctypes.CDLL("libnccl.so.2")
        self.comm = ctypes.c_void_p()
        number = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(number))
        self.version = number.value
        self.stream = self.cuda.stream()

    def call(self, name, *given):
        """Calls NCCL. A failure says which call."""
        function = getattr(self.nccl, name, None)
        if function is None:
            raise NotOffered(name)
        code = function(*given)
        if code not in (0, IN_PROGRESS):
            raise Failed(f"{name} returned {code}: {self.last_error()}")

    def last_error(self):
        self.nccl.ncclGetLastError.restype = ctypes.c_char_p
        return (self.nccl.ncclGetLastError(self.comm) or b"").decode(errors="replace").strip()

    def connect(self, number):
        """Makes the communicator, with the id that rank 0 leaves in a file."""
        path = os.path.join(os.environ["ONE_SIDED_FOLDER"], f"id{number}")
        unique = UniqueId()
        if self.rank == 0:
            self.call("ncclGetUniqueId", ctypes.byref(unique))
            with open(path, "wb") as file:
                file.write(bytes(unique))
        meet(f"id {number}")
        with open(path, "rb") as file:
            unique = UniqueId.from_buffer_copy(file.read())
        self.nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
        self.comm = ctypes.c_void_p()
        self.call("ncclCommInitRank", ctypes.byref(self.comm), RANKS, unique, self.rank)

    def window(self, size, before=0):
        """Memory of NCCL's, and a window on it that begins so many bytes behind its beginning."""
        memory, window = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("ncclMemAlloc", ctypes.byref(memory), ctypes.c_size_t(before + size))
        start = memory.value + before
        self.call("ncclCommWindowRegister", self.comm, ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.byref(window),
                  COLL_SYMMETRIC)
        if not window.value:
            raise Failed("the window is null: NCCL has no one-sided operations here")
        return start, window

    def settle(self, stream=None):
        """Waits for the stream. A rank that hangs says so before it is ended."""
        end = time.monotonic() + self.given.seconds - 5
        while True:
            if self.cuda.has_ended(stream or self.stream):
                return
            state = ctypes.c_int()
            self.nccl.ncclCommGetAsyncError(self.comm, ctypes.byref(state))
            if state.value not in (0, IN_PROGRESS):
                raise Failed(f"NCCL reports error {state.value}: {self.last_error()}")
            if time.monotonic() > end:
                raise Failed("the stream does not end")
            time.sleep(0)


def pattern(seed, size):
    """Bytes that differ by seed and place."""
    base = bytes((seed * 37 + at * 11 + (at >> 8) * 5) & 255 for at in range(4093))
    return (base * (size // 4093 + 1))[:size]


def check(got, expected, what):
    if got == expected:
        return
    wrong = [at for at in range(0, len(got)) if got[at] != expected[at]]
    raise Failed(f"{what}: {len(wrong)} of {len(got)} bytes are wrong, from {wrong[0]} to {wrong[-1]}")


class Steps:
    """All steps of a life, each told to the parent."""

    def __init__(self, rank, given):
        self.it = Rank(rank, given)
        self.source = self.target = None
        self.failed = False

    # What Nccl4pySteps does by nccl4py.

    def put(self, size, start=0, offset=0, stream=None):
        """Puts what is `start` bytes behind the beginning of the source to this offset of the other's target."""
        it = self.it
        it.call("ncclPutSignal", ctypes.c_void_p(self.source[0] + start), ctypes.c_size_t(size), CHAR, it.other,
                self.target[1], ctypes.c_size_t(offset), 0, 0, 0, it.comm, stream or it.stream)

    def signal(self, stream=None):
        self.it.call("ncclSignal", self.it.other, 0, 0, 0, self.it.comm, stream or self.it.stream)

    def wait(self, count=1, stream=None):
        desc = WaitDesc(count, self.it.other, 0, 0)
        self.it.call("ncclWaitSignal", 1, ctypes.byref(desc), self.it.comm, stream or self.it.stream)

    def group(self):
        """A context manager: what is called in it, NCCL starts together."""

        @contextlib.contextmanager
        def grouped():
            self.it.call("ncclGroupStart")
            yield
            self.it.call("ncclGroupEnd")

        return grouped()

    def pointer(self, rank):
        """The device pointer of a rank's target; none where this rank cannot reach it."""
        where = ctypes.c_void_p()
        self.it.call("ncclGetPeerDevicePointer", self.target[1], ctypes.c_size_t(0), rank, ctypes.byref(where))
        return where.value

    def abort_comm(self):
        self.it.call("ncclCommAbort", self.it.comm)

    # The steps.

    def step(self, name, body):
        """Runs a step. After a failure none follows: the ranks would wait for each other."""
        if self.failed:
            return
        meet(f"before {name}")
        told = {"step": name, "outcome": "ok"}
        try:
            told["note"] = body() or ""
        except NotOffered as missing:
            told.update(outcome="not offered by this release", note=str(missing))
        except Failed as why:
            told.update(outcome="failed", note=str(why))
            self.failed = True
        except Exception as why:  # nccl4py has exceptions of its own.
            told.update(outcome="failed", note=f"{type(why).__name__}: {why}")
            self.failed = True
        tell(**told)

    def windows(self, before=0):
        self.source = self.it.window(MOST, before)
        self.target = self.it.window(MOST, before)
        return f"NCCL {self.it.version}, windows {self.source[1].value:#x} and {self.target[1].value:#x}"

    def windows_of_nccls_own(self):
        try:
            return self.windows()
        except Failed as why:
            raise NotOffered(f"NCCL's own one-sided operations do not start: {why}") from why

    def peer_pointer(self):
        if self.pointer(self.it.other):
            raise Failed("a pointer into another host's memory")
        if not self.pointer(self.it.rank):
            raise Failed("no pointer into its own memory")
        return "null for the other host, not for its own memory"

    def send_and_check(self, size, seed):
        it = self.it
        it.cuda.write(self.source[0], pattern(seed + it.rank, size))
        meet(f"put {size} {seed}")
        self.put(size)
        self.wait()
        it.settle()
        check(it.cuda.read(self.target[0], size), pattern(seed + it.other, size), f"{size} bytes")

    def puts(self):
        sizes = (8, 100, 4096, 65536, MIB, 3 * MIB + 12345, MOST)
        for seed, size in enumerate(sizes):
            self.send_and_check(size, 10 * seed)
        return f"{len(sizes)} sizes, both ways at once"

    def many_puts(self):
        it, count, size = self.it, 32, 100_000
        it.cuda.write(self.source[0], pattern(90 + it.rank, count * size))
        meet("many")
        with self.group():
            for index in range(count):
                self.put(size, index * size, index * size)
        self.wait(count)
        it.settle()
        check(it.cuda.read(self.target[0], count * size), pattern(90 + it.other, count * size), "32 puts")
        return f"{count} of {size} bytes"

    def to_and_fro(self, size):
        turns = [lambda: self.put(size), self.wait]
        for turn in turns if self.it.rank == 0 else reversed(turns):
            turn()

    def send_and_receive(self, size):
        it = self.it
        for sends in (it.rank == 0, it.rank != 0):
            memory = self.source[0] if sends else self.target[0]
            it.call("ncclSend" if sends else "ncclRecv", ctypes.c_void_p(memory), ctypes.c_size_t(size), CHAR, it.other,
                    it.comm, it.stream)

    def ping_pong(self):
        rows, times = [], {}
        for size in TIMED:
            count, took = (50 if size <= MIB else 5), []
            for way in (self.to_and_fro, self.send_and_receive):
                for rounds in (3, count):
                    meet(f"ping {size}")
                    began = time.perf_counter()
                    for _ in range(rounds):
                        way(size)
                    self.it.settle()
                took.append((time.perf_counter() - began) / count / 2 * 1e6)
            rows.append(f"{size} B: {took[0]:.0f} us one way, {took[1]:.0f} us by send and recv")
            times[size] = took
        tell(times=times)
        return "; ".join(rows)

    def rounds(self, turn, size, in_graph):
        """Does `turn(stream, last)` ROUNDS times, in one CUDA graph or without, from a source that differs each time.

        `turn` leaves what came from the other rank in `last`. Gives what came each time, what was due, and the time.
        """
        it, stream = self.it, self.it.cuda.stream()
        numbers, log, last = (it.cuda.memory(count * size) for count in (ROUNDS, ROUNDS, 1))
        seeds = [range(start, start + ROUNDS) for start in (30 + 100 * it.rank, 30 + 100 * it.other)]
        sent, due = (b"".join(pattern(seed, size) for seed in of_rank) for of_rank in seeds)
        it.cuda.write(numbers, sent)
        it.cuda.write(self.target[0], bytes(size))

        def once():
            turn(stream, last)

        launch, end = it.cuda.capture(stream, once) if in_graph else (once, lambda: None)
        meet("rounds")
        began = time.perf_counter()
        for number in range(ROUNDS):
            it.cuda.copy(self.source[0], numbers + number * size, size, stream)
            launch()
            it.cuda.copy(log + number * size, last, size, stream)
        it.settle(stream)
        took = (time.perf_counter() - began) / ROUNDS * 1e6
        came = it.cuda.read(log, ROUNDS * size)
        end()
        for address in (numbers, log, last):
            it.cuda.free(address)
        return came, due, took

    def numbered(self, in_graph=False):
        size = 65536

        def turn(stream, last):
            # Rank 1 puts once it has taken what came: its put lets rank 0 go on.
            if self.it.rank == 0:
                self.put(size, stream=stream)
            self.wait(stream=stream)
            self.it.cuda.copy(last, self.target[0], size, stream)
            if self.it.rank != 0:
                self.put(size, stream=stream)

        came, due, took = self.rounds(turn, size, in_graph)
        check(came, due, f"{ROUNDS} ping-pongs")
        return f"{ROUNDS} of {size} bytes, {took / 2:.0f} us one way"

    def barrier(self, in_graph=False):
        """Each rank puts into the same place again only when the other has taken what was there, as its signal says.

        One rank takes it late. Without signals the next put comes before that: where it does not, this step shows nothing.
        """
        it, size, notes = self.it, 4096, []
        scratch = it.cuda.memory(LINGER)
        for late in range(RANKS):
            for holds in (True, False):
                if in_graph and not holds:
                    continue

                def turn(stream, last, late=late, holds=holds):
                    self.put(size, stream=stream)
                    self.wait(stream=stream)
                    if it.rank == late:
                        it.cuda.linger(scratch, LINGER, stream)
                    it.cuda.copy(last, self.target[0], size, stream)
                    if holds:
                        self.signal(stream)
                        self.wait(stream=stream)

                came, due, took = self.rounds(turn, size, in_graph)
                if holds:
                    check(came, due, f"{ROUNDS} puts held back by signals")
                    notes.append(f"{took:.0f} us each")
                elif it.rank == late and came == due:
                    raise Failed("without signals all bytes are right as well: this shows nothing")
        it.cuda.free(scratch)
        control = "" if in_graph else "; wrong without signals, as it must be"
        return f"{ROUNDS} with each rank late, {', '.join(notes)}{control}"

    def under(self, hold):
        """Puts into a rank whose streams stand in `hold` until their gate opens, which is when the puts have ended.

        Streams of the greatest priority may hold the puts up, and then the gate opens after HELD seconds; others must not.
        """
        it, notes = self.it, []
        for is_urgent in (False, True):
            streams = [it.cuda.stream(is_urgent) for _ in range(WAITERS)]
            for in_graph in (False, True):
                for held in range(RANKS):
                    took = self.put_under(hold, streams, held, in_graph)
                    if it.rank == held:
                        continue
                    told = f"not within {HELD} s" if took is None else f"{took * 1e3:.1f} ms"
                    notes.append(f"{'urgent ' if is_urgent else ''}{'by a graph' if in_graph else 'plain'} {told}")
                    if took is None and not is_urgent:
                        raise Failed(f"{notes[-1]}, while {WAITERS} streams of rank {held} wait")
        return ", ".join(notes)

    def put_under(self, hold, streams, held, in_graph):
        """Two puts while the streams of rank `held` wait: the time they took there, or none where they did not end meanwhile.

        The second one is placed when the first one's signal has been written.
        """
        it, size, stream, gate = self.it, 65536, self.it.cuda.stream(), self.it.cuda.gate()

        def once():
            if it.rank == held:
                self.wait(2, stream)
            else:
                self.put(size, 0, 0, stream)
                self.put(size, size, size, stream)

        # Before anything waits: NCCL allocates as it captures.
        launch, end = it.cuda.capture(stream, once) if in_graph else (once, lambda: None)
        if it.rank != held:
            it.cuda.write(self.source[0], pattern(160 + held, 2 * size))
        else:
            it.cuda.write(self.target[0], bytes(2 * size))
            self.stand(hold, streams, gate)
        meet("held")
        began, took = time.perf_counter(), None
        if it.rank != held:
            launch()
            while took is None and time.perf_counter() - began < HELD:
                if it.cuda.has_ended(stream):
                    took = time.perf_counter() - began
        meet("put")
        if it.rank == held:
            if any(it.cuda.has_ended(waiter) for waiter in streams):
                raise Failed("a stream did not wait: this shows nothing")
            gate.value = 1
            for waiter in streams:
                it.settle(waiter)
            launch()
        it.settle(stream)
        if it.rank == held:
            check(it.cuda.read(self.target[0], 2 * size), pattern(160 + held, 2 * size), "two puts")
        end()
        return took

    def stand(self, hold, streams, gate):
        """Lets the streams wait. At first with an open gate: what is loaded when it is first used is loaded then."""
        gate.value = 1
        for stream in streams:
            hold(gate, stream)
            self.it.settle(stream)
        gate.value = 0
        for stream in streams:
            hold(gate, stream)

    def reduce(self, operation, expected):
        it, count = self.it, 100_000
        floats = (ctypes.c_float * count)(*([float(it.rank + 1)] * count))
        it.cuda.write(self.source[0], bytes(floats))
        it.call("ncclAllReduce", ctypes.c_void_p(self.source[0]), ctypes.c_void_p(self.target[0]), ctypes.c_size_t(count),
                FLOAT, operation, it.comm, it.stream)
        it.settle()
        check(it.cuda.read(self.target[0], 4 * count), bytes((ctypes.c_float * count)(*([expected] * count))), "the sum")

    def pre_mul_sum(self):
        operation, factor = ctypes.c_int(), ctypes.c_float(0.5)
        self.it.call("ncclRedOpCreatePreMulSum", ctypes.byref(operation), ctypes.byref(factor), FLOAT, 1, self.it.comm)
        self.reduce(operation.value, 1.5)
        self.it.call("ncclRedOpDestroy", operation, self.it.comm)

    def buffer(self):
        handle = ctypes.c_void_p()
        self.it.call("ncclCommRegister", self.it.comm, ctypes.c_void_p(self.source[0]), ctypes.c_size_t(MOST),
                     ctypes.byref(handle))
        if not handle.value:
            raise Failed("the registration is null")
        self.reduce(SUM, 3.0)
        self.it.call("ncclCommDeregister", self.it.comm, handle)

    def device_comm(self):
        wants = DevRequirements(magic=0xCAFEBEEF, version=min(self.it.version, 23007), gin_force_enable=True,
                                gin_contexts=4, gin_signals=4, gin_connection=1, gin_traffic_class=-(2**31),
                                gin_strong_signals=True, gin_va_signals=True)
        wants.size = ctypes.sizeof(wants)
        made = ctypes.create_string_buffer(1 << 16)
        self.it.call("ncclDevCommCreate", self.it.comm, ctypes.byref(wants), made)
        self.it.call("ncclDevCommDestroy", self.it.comm, made)
        return "with GIN"

    def deregister(self):
        for memory, window in (self.source, self.target):
            self.it.call("ncclCommWindowDeregister", self.it.comm, window)
            self.it.call("ncclMemFree", ctypes.c_void_p(memory))
        # Again, after others have ended.
        self.windows()
        self.send_and_check(MIB, 140)
        for memory, window in (self.target, self.source):
            self.it.call("ncclCommWindowDeregister", self.it.comm, window)
            self.it.call("ncclMemFree", ctypes.c_void_p(memory))

    def destroy(self):
        began = time.perf_counter()
        self.it.call("ncclCommDestroy", self.it.comm)
        return f"{(time.perf_counter() - began) * 1e3:.0f} ms"

    def abort_amid(self):
        """How many puts a rank has under way when it aborts. Rank 0 has fewer, so it is gone while rank 1's are on their way:
        an abort waits for the rank's own puts only."""
        return 8 if self.it.rank else 1

    def abort(self):
        """Aborts amid puts. What was in its target's memory from then on must stay (`untouched`)."""
        it = self.it
        for _ in range(self.abort_amid()):
            self.put(MOST)
        time.sleep(0.02)
        is_amid = not it.cuda.has_ended(it.stream)
        began = time.perf_counter()
        self.abort_comm()
        took = (time.perf_counter() - began) * 1e3
        # At once, while the other rank's puts may still be on their way.
        self.aborted = self.target[0]
        it.cuda.write(self.aborted, pattern(200 + it.rank, MOST))
        if it.rank and not is_amid:
            raise Failed("its puts had ended before: this shows nothing")
        if not it.cuda.has_ended(it.stream):
            raise Failed("the stream of the aborted puts has not ended")
        return f"{took:.0f} ms"

    def untouched(self):
        check(self.it.cuda.read(self.aborted, MOST), pattern(200 + self.it.rank, MOST), "memory of an aborted communicator")

    def cut(self):
        it = self.it
        meet("cut")
        for round_ in range(24):
            self.send_and_check(MOST, 150 + round_)
        return f"{24 * MOST // MIB} MiB each way, all right"

    def connect(self, number=0):
        self.it.connect(number)

    def connect_again(self):
        self.it.stream = self.it.cuda.stream()
        self.connect(1)

    def exchanges(self):
        """Bytes and signals in every order, in and outside graphs."""
        self.step("many puts", self.many_puts)
        self.step("ping-pong", self.ping_pong)
        self.step("numbered", self.numbered)
        self.step("graph", lambda: self.numbered(True))
        self.step("barrier", self.barrier)
        self.step("graph barrier", lambda: self.barrier(True))

    def held_up(self):
        self.step("under waits", lambda: self.under(self.it.cuda.wait))
        self.step("under kernels", lambda: self.under(self.it.cuda.spinner()))

    def run(self, life):
        self.step("init", self.connect)
        if life == "socket":
            self.step("window", self.windows_of_nccls_own)
            if self.source:
                self.step("put", self.puts)
                self.step("ping-pong", self.ping_pong)
            self.step("destroy", self.destroy)
            return
        if life == "without":
            self.step("destroy", self.destroy)
            return
        self.step("window", lambda: self.windows(MIB if life == "inner" else 0))
        if life == "whole":
            self.step("peer pointer", self.peer_pointer)
            self.step("put", self.puts)
            self.exchanges()
            self.held_up()
            self.step("pre-mul-sum", self.pre_mul_sum)
            self.step("buffer", self.buffer)
            self.step("device comm", self.device_comm)
            self.step("put after it", self.puts)
            self.step("deregister", self.deregister)
            self.step("destroy", self.destroy)
        elif life == "queue":
            self.step("put", self.puts)
            self.exchanges()
            self.held_up()
            self.step("destroy", self.destroy)
        elif life in ("left", "inner"):
            self.step("put", self.puts)
            self.step("destroy", self.destroy)
        elif life == "with":
            self.step("destroy", self.destroy)
        elif life == "cut":
            self.step("cut", self.cut)
            self.step("destroy", self.destroy)
        else:
            self.step("abort", self.abort)
            self.step("init again", self.connect_again)
            self.step("window", self.windows)
            self.step("put", self.puts)
            self.step("untouched", self.untouched)
            self.step("destroy", self.destroy)


def play(rank, given):
    """One rank of one life."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if "ONE_SIDED_STACKS" in os.environ:
        ctypes.CDLL(os.environ["ONE_SIDED_STACKS"])
    if given.life.startswith("py"):
        # This file has the name __main__ here.
        sys.modules["one_sided"] = sys.modules["__main__"]
        from nccl4py_steps import Nccl4pySteps as steps_of
    else:
        steps_of = Steps
    steps = steps_of(rank, given)
    steps.run(given.life)
    tell(end=not steps.failed)
    sys.stdin.readline()
    os._exit(0)


# What runs in the parent.


def environment(given, rank, folder, life):
    from contenders import Contender

    common = {
        "NCCL_SOCKET_IFNAME": given.interface,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,REG,BOOTSTRAP",
        "NCCL_DEBUG_FILE": os.path.join(folder, f"nccl-rank{rank}.log"),
        "NCCL_HOSTID": f"towline-test-host-{rank}",
        "NCCL_MNNVL_ENABLE": "0",
        "ONE_SIDED_FOLDER": folder,
    }
    if life == "queue":
        common["CUDA_DEVICE_MAX_CONNECTIONS"] = "3"
    if life in WITHOUT_AND_WITH:
        common.update(NCCL_TOPO_DUMP_FILE=topology_file(folder, rank), NCCL_TOPO_DUMP_FILE_RANK=str(rank))
    common.update(pair.split("=", 1) for pair in given.env)
    # NCCL has windows only where it may use P2P; between these ranks it cannot, since they are two hosts.
    without = ("NCCL_P2P_DISABLE",)
    if life == "socket":
        row = Contender("socket", {"NCCL_NET": "Socket"}, without=without)
    else:
        ours = {"NCCL_NET": "Towline", "NCCL_GIN_TYPE": "2", "TOWLINE_RMA": "0" if life == "without" else "1"}
        row = Contender("towline", ours, os.path.abspath(given.towline), without=without)
    return row.environment(common, given.nccl and os.path.abspath(given.nccl))


def not_shown(life, log, communicators):
    """Why a rank's log does not show that the life's network served its communicators; none where it does."""
    if life in ("socket", "without"):
        return "Towline's one-sided operations were there as well" if "Assigned plugin Towline" in log else None
    declined = [line for line in log.splitlines() if DECLINED in line]
    if declined:
        return f"Towline declined: {declined[0]}"
    for line in ASSIGNED:
        if log.count(line) != communicators:
            return f"NCCL's log has {log.count(line)} of {communicators} lines '{line}'"
    return None


STACKS = r"""
#include <execinfo.h>
#include <signal.h>

static void *warm[1];

static void tell(int number) {
  void *frames[64];
  (void)number;
  backtrace_symbols_fd(frames, backtrace(frames, 64), 2);
}

__attribute__((constructor)) static void begin(void) {
  struct sigaction action = {.sa_handler = tell, .sa_flags = SA_RESTART};
  backtrace(warm, 1);
  sigaction(SIGUSR2, &action, 0);
}
"""


def stack_teller(folder):
    """A library whose handler of SIGUSR2 prints the native stack of its thread; none without a C compiler."""
    path = os.path.join(folder, "stacks.so")
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
    try:
        subprocess.run(command, input=STACKS, text=True, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return path


def explain(rank, pid, has_teller):
    """Prints where the threads of a silent rank are."""
    print(f"--- rank {rank}, process {pid}: its threads", flush=True)
    tasks = f"/proc/{pid}/task"
    for task in sorted(os.listdir(tasks), key=int):
        words = [read(f"{tasks}/{task}/{name}").strip() for name in ("comm", "wchan", "syscall")]
        stack = " < ".join(line.split()[-1] for line in read(f"{tasks}/{task}/stack").splitlines())
        print(f"{task} {words[0]}: {words[1]}, system call {words[2]}{stack and ', ' + stack}", flush=True)
    sys.stderr.flush()
    # Both handlers write to standard error.
    os.kill(pid, signal.SIGUSR1)
    time.sleep(0.5)
    if has_teller:
        tgkill = ctypes.CDLL(None).tgkill
        for task in sorted(os.listdir(tasks), key=int):
            print(f"thread {task} {read(f'{tasks}/{task}/comm').strip()}", file=sys.stderr, flush=True)
            tgkill(pid, int(task), signal.SIGUSR2)
            time.sleep(0.1)
        return
    debugger = shutil.which("cuda-gdb") or shutil.which("gdb")
    if debugger:
        command = [debugger, "-batch", "-p", str(pid), "-ex", "thread apply all bt"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout
        except subprocess.TimeoutExpired:
            told = f"{debugger} did not come to an end"
        print(told[-60000:], flush=True)


def listen(rank, process, said):
    for line in process.stdout:
        said.put((rank, line))
    said.put((rank, None))


def live(life, given, folder, times):
    """Runs one life and prints its steps. Gives whether it went well; the times of its ping-pong go to `times`."""
    os.makedirs(folder, exist_ok=True)
    command = [sys.executable, os.path.abspath(__file__), "--life", life, "--seconds", str(given.seconds)]
    teller = stack_teller(folder)
    ranks = [
        subprocess.Popen(command + ["--child", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                         env=environment(given, rank, folder, life) | ({"ONE_SIDED_STACKS": teller} if teller else {}),
                         start_new_session=True)
        for rank in range(RANKS)
    ]
    said, problem = queue.Queue(), None
    for rank, process in enumerate(ranks):
        threading.Thread(target=listen, args=(rank, process, said), daemon=True).start()
    waiting, told, ended, cutter, now = {}, {}, 0, None, "start"
    try:
        while ended < RANKS and problem is None:
            try:
                rank, line = said.get(timeout=given.seconds)
            except queue.Empty:
                problem = f"no word for {given.seconds:.0f} s, at \"{now}\"; rank(s) {sorted(waiting)} wait there"
                print(f"{life:6} {problem}; steps that one rank has told: {told}")
                for rank, process in enumerate(ranks):
                    if rank not in waiting:
                        explain(rank, process.pid, teller is not None)
                break
            if line is None:
                ranks[rank].wait()
                problem = f"rank {rank} ended with status {ranks[rank].returncode}, at \"{now}\""
                break
            try:
                word = json.loads(line)
            except ValueError:
                print(f"      rank {rank}: {line.rstrip()}")
                continue
            if "meet" in word:
                waiting[rank] = now = word["meet"]
                if len(waiting) == RANKS:
                    if len(set(waiting.values())) > 1:
                        problem = f"the ranks are at different places: {waiting}"
                        break
                    if now == "cut":
                        cut = os.path.join(ROOT, "tests", "gpu", "cut_stream.py")
                        cutter = subprocess.Popen([sys.executable, cut, str(ranks[0].pid), "--count", "1", "--after", "300"],
                                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                    waiting.clear()
                    for process in ranks:
                        process.stdin.write("go\n")
                        process.stdin.flush()
            elif "step" in word:
                told.setdefault(word["step"], {})[rank] = word
                if len(told[word["step"]]) == RANKS or word["outcome"] == "failed":
                    both = told.pop(word["step"])
                    worst = next((it for it in both.values() if it["outcome"] != "ok"), both[min(both)])
                    where = "" if worst["outcome"] == "ok" else f" (rank {[r for r in both if both[r] is worst][0]})"
                    print(f"{life:6} {word['step']:13} {worst['outcome']}{where}: {worst['note']}".rstrip(": "), flush=True)
                    if worst["outcome"] == "failed":
                        problem = f"step \"{word['step']}\" failed"
            elif "times" in word:
                times[life] = word["times"]
            elif "end" in word:
                ended += 1
        if cutter is not None and problem is None:
            words = cutter.communicate(timeout=70)[0].strip()
            print(f"{life:6} {words}")
            if cutter.returncode:
                problem = "no stream was cut"
    finally:
        for process in ranks + ([cutter] if cutter else []):
            if process.poll() is None:
                process.kill()
                process.wait()
    logs = [read(os.path.join(folder, f"nccl-rank{rank}.log")) for rank in range(RANKS)]
    for rank, log in enumerate(logs):
        why = not_shown(life, log, COMMUNICATORS.get(life, 1))
        if why and problem is None:
            problem = f"rank {rank}: {why}"
    if life == "socket":
        for line in dict.fromkeys(line.split("NCCL ", 1)[-1] for line in logs[0].splitlines() if "RMA/Socket" in line):
            print(f"{life:6} NCCL's log: {line}")
    if problem:
        print(f"{life:6} FAILED: {problem}")
        for rank, log in enumerate(logs):
            lines = log.splitlines()
            telling = [it for it in lines if any(word in it for word in ("WARN", "RMA", "GIN", "owline"))]
            print(f"--- rank {rank}: what NCCL's log says of RMA, GIN, Towline, and warnings (last 40 of {len(telling)})")
            print("\n".join(telling[-40:]))
            print(f"--- rank {rank}: the last 25 lines of {len(lines)}")
            print("\n".join(lines[-25:]))
    return problem is None


def topology_file(folder, rank):
    return os.path.join(folder, f"topology-rank{rank}.xml")


def elements(topology):
    """The lines of a topology without MARKS, the attributes of each element in one order; none where it is not whole."""
    try:
        lines = ElementTree.canonicalize(topology, exclude_attrs=MARKS, exclude_tags=MARKS).splitlines()
        return [line for line in lines if line.strip()]
    except ElementTree.ParseError:
        return []


def unlike(without, with_them):
    """How a rank's topologies without and with one-sided operations differ; none where they do not."""
    both = [elements(without), elements(with_them)]
    for life, lines in zip(WITHOUT_AND_WITH, both):
        if not any(line.lstrip().startswith("<net ") for line in lines):
            return f"there is no network device in the topology {life} them"
    return "\n".join(difflib.unified_diff(*both, *WITHOUT_AND_WITH, n=0, lineterm="")) or None


def topologies(given, folder):
    """Runs the two lives of "topology". Gives whether they went well and each rank's topology is the same in both."""
    folders = [os.path.join(folder, life) for life in WITHOUT_AND_WITH]
    for path in (topology_file(each, rank) for each in folders for rank in range(RANKS)):
        # Of an earlier run.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
    good = all([live(life, given, each, {}) for life, each in zip(WITHOUT_AND_WITH, folders)])
    for rank in range(RANKS):
        dumped = [read(topology_file(each, rank)) for each in folders]
        why = unlike(*dumped)
        good &= why is None
        print(f"topology of rank {rank}: {'FAILED: ' + why if why else f'the same, {len(elements(dumped[0]))} lines'}", flush=True)
    return good


def table(times):
    """The one-way times of the lives that have some."""
    if not times:
        return
    yield f"{'us one way, bytes':>18}" + "".join(f" {life:>10} {'send/recv':>10}" for life in times)
    for size in next(iter(times.values())):
        yield f"{size:>18}" + "".join(f" {put:>10.0f} {send:>10.0f}" for put, send in (rows[size] for rows in times.values()))


def read(path):
    """A file that may be missing."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def main():
    given = arguments()
    if given.child is not None:
        play(given.child, given)
        return 0
    good, times = True, {}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(given.repeat):
            if given.repeat > 1:
                print(f"turn {turn + 1} of {given.repeat}", flush=True)
            for life in given.lives.split(","):
                folder = os.path.join(given.out or scratch, life if turn == 0 else f"{life}-{turn + 1}")
                good &= topologies(given, folder) if life == "topology" else live(life, given, folder, times)
    for line in table(times):
        print(line)
    print("all steps went well" if good else "something failed")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
