"""One rank of a group that `processes.py` drives: libnccl and libcuda by ctypes, no PyTorch, no MPI.

    rank.py RANK RANKS ID_FILE

Rank 0 writes the unique id to ID_FILE, the others read it. Then each line on standard input is an order, and gets one line of
JSON in answer: `{"collective": ..., "sizes": [...], "iterations": N, "warmups": N, "check_up_to": N}` gives for each size the
mean time of an operation in microseconds, the processor time of all in seconds, and, up to that size, the number of wrong
elements of one more that is checked. The end of the input ends the rank.
"""

import ctypes
import json
import os
import sys
import time
from array import array

FLOAT, SUM = 7, 0
# Elements after which the content of a buffer repeats: a prime, so that no chunk, block or rank begins alike.
PERIOD = 65521


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = [("internal", ctypes.c_byte * 128)]


def must(what, code):
    """Ends the rank when a call failed: its group sees the end of its output."""
    if code:
        print(json.dumps({"failed": f"{what} gave {code}"}), flush=True)
        os._exit(1)


class Gpu:
    """The driver's calls that are needed, on one device with one stream."""

    def __init__(self, number):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
        must("cuInit", self.cuda.cuInit(0))
        count = ctypes.c_int()
        must("cuDeviceGetCount", self.cuda.cuDeviceGetCount(ctypes.byref(count)))
        # Where ranks are more than devices, they share them: NCCL takes that from ranks of different hosts only.
        must("cuDeviceGet", self.cuda.cuDeviceGet(ctypes.byref(device), number % max(count.value, 1)))
        must("cuDevicePrimaryCtxRetain", self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        must("cuCtxSetCurrent", self.cuda.cuCtxSetCurrent(context))
        must("cuStreamCreate", self.cuda.cuStreamCreate(ctypes.byref(stream), 1))
        self.cuda.cuStreamSynchronize.argtypes = [ctypes.c_void_p]
        self.stream = stream

    def allocate(self, size):
        """Device memory, for good."""
        memory = ctypes.c_uint64()
        must("cuMemAlloc", self.cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(size)))
        return memory.value

    def free(self, memory):
        """Gives it back."""
        must("cuMemFree", self.cuda.cuMemFree_v2(ctypes.c_uint64(memory)))

    def write(self, memory, data):
        """From the host; returns when it is there."""
        source = (ctypes.c_char * len(data)).from_buffer(data)
        must("cuMemcpyHtoD", self.cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(memory), source, ctypes.c_size_t(len(data))))

    def read(self, memory, size):
        """To the host."""
        data = bytearray(size)
        target = (ctypes.c_char * size).from_buffer(data)
        must("cuMemcpyDtoH", self.cuda.cuMemcpyDtoH_v2(target, ctypes.c_uint64(memory), ctypes.c_size_t(size)))
        return data

    def zero(self, memory, size):
        """So that what an earlier operation left does not pass for a result."""
        must("cuMemsetD8", self.cuda.cuMemsetD8_v2(ctypes.c_uint64(memory), ctypes.c_ubyte(0), ctypes.c_size_t(size)))

    def wait(self):
        """Until everything on the stream is done."""
        must("cuStreamSynchronize", self.cuda.cuStreamSynchronize(self.stream))


class Rank:
    """A communicator, its buffers, and the operations on them."""

    def __init__(self, rank, ranks, path):
        self.rank, self.ranks = rank, ranks
        self.gpu = Gpu(rank)
        self.nccl = nccl = ctypes.CDLL("libnccl.so.2")
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), number, UniqueId, number]
        nccl.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        nccl.ncclReduceScatter.argtypes = nccl.ncclAllReduce.argtypes
        nccl.ncclAllGather.argtypes = [pointer, pointer, size, number, pointer, pointer]
        nccl.ncclBroadcast.argtypes = [pointer, pointer, size, number, number, pointer, pointer]
        nccl.ncclSend.argtypes = [pointer, size, number, number, pointer, pointer]
        nccl.ncclRecv.argtypes = nccl.ncclSend.argtypes
        self.comm = pointer()
        must("ncclCommInitRank", nccl.ncclCommInitRank(ctypes.byref(self.comm), ranks, self._unique(path), rank))
        self.room, self.source, self.target = 0, None, None
        self.tiles = [array("f", ((i * 7 + r * 13) % 251 for i in range(PERIOD))) for r in range(ranks)]
        self.sums = array("f", map(sum, zip(*self.tiles)))
        self._make_room(1 << 20)

    def _unique(self, path):
        unique = UniqueId()
        if self.rank == 0:
            must("ncclGetUniqueId", self.nccl.ncclGetUniqueId(ctypes.byref(unique)))
            with open(path + ".draft", "wb") as draft:
                draft.write(bytes(unique))
            os.rename(path + ".draft", path)
            return unique
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path, "rb") as written:
            return UniqueId.from_buffer_copy(written.read())

    def _make_room(self, size):
        """Buffers of at least `size` bytes; the source is filled with this rank's content."""
        if size <= self.room:
            return
        if self.room:
            self.gpu.free(self.source)
            self.gpu.free(self.target)
        self.room, self.source, self.target = size, self.gpu.allocate(size), self.gpu.allocate(size)
        tile = bytearray(self.tiles[self.rank].tobytes())
        content = tile * -(-min(size, 64 << 20) // len(tile))
        for at in range(0, size, len(content)):
            self.gpu.write(self.source + at, content if at + len(content) <= size else content[: size - at])

    def _begin(self, collective, size):
        """Starts one operation, out of place. `size`: of the larger of its two buffers, as nccl-tests counts."""
        nccl, comm, stream = self.nccl, self.comm, self.gpu.stream
        count, share = size // 4, size // 4 // self.ranks
        if collective == "all_reduce":
            code = nccl.ncclAllReduce(self.source, self.target, count, FLOAT, SUM, comm, stream)
        elif collective == "all_gather":
            code = nccl.ncclAllGather(self.source, self.target, share, FLOAT, comm, stream)
        elif collective == "reduce_scatter":
            code = nccl.ncclReduceScatter(self.source, self.target, share, FLOAT, SUM, comm, stream)
        elif collective == "broadcast":
            code = nccl.ncclBroadcast(self.source, self.target, count, FLOAT, 0, comm, stream)
        else:
            to = range(self.ranks) if collective == "alltoall" else [(self.rank + 1) % self.ranks]
            came = range(self.ranks) if collective == "alltoall" else [(self.rank - 1) % self.ranks]
            part = share if collective == "alltoall" else count
            code = nccl.ncclGroupStart()
            for place, peer in enumerate(to):
                code = code or nccl.ncclSend(self.source + 4 * part * place, part, FLOAT, peer, comm, stream)
            for place, peer in enumerate(came):
                code = code or nccl.ncclRecv(self.target + 4 * part * place, part, FLOAT, peer, comm, stream)
            code = code or nccl.ncclGroupEnd()
        must(collective, code)

    def _expected(self, collective, size):
        """What the target must hold: pieces of (content, first element in it, elements)."""
        count, share = size // 4, size // 4 // self.ranks
        if collective == "all_reduce":
            return [(self.sums, 0, count)]
        if collective == "all_gather":
            return [(tile, 0, share) for tile in self.tiles]
        if collective == "reduce_scatter":
            return [(self.sums, self.rank * share, share)]
        if collective == "broadcast":
            return [(self.tiles[0], 0, count)]
        if collective == "alltoall":
            return [(tile, self.rank * share, share) for tile in self.tiles]
        return [(self.tiles[(self.rank - 1) % self.ranks], 0, count)]

    def _wrong(self, collective, size):
        """Wrong elements after one more operation."""
        self.gpu.zero(self.target, size)
        self._begin(collective, size)
        self.gpu.wait()
        found, at, wrong = memoryview(self.gpu.read(self.target, size)), 0, 0
        for content, first, count in self._expected(collective, size):
            content = memoryview(content.tobytes())
            while count:
                begin = first % PERIOD
                some = min(count, PERIOD - begin)
                want, got = content[4 * begin : 4 * (begin + some)], found[at : at + 4 * some]
                if want != got:
                    wrong += sum(want[k : k + 4] != got[k : k + 4] for k in range(0, 4 * some, 4))
                at, first, count = at + 4 * some, first + some, count - some
        return wrong

    def measure(self, order):
        """Carries out an order."""
        rows = []
        for size in order["sizes"]:
            self._make_room(size)
            cpu = time.process_time()
            for _ in range(order["warmups"]):
                self._begin(order["collective"], size)
            # All begin together.
            self._begin("all_reduce", 8)
            self.gpu.wait()
            began = time.perf_counter()
            for number in range(1, order["iterations"] + 1):
                self._begin(order["collective"], size)
                if number % order["wait_every"] == 0 and number < order["iterations"]:
                    self.gpu.wait()
            self.gpu.wait()
            took = (time.perf_counter() - began) / order["iterations"]
            cpu = time.process_time() - cpu
            wrong = self._wrong(order["collective"], size) if size <= order["check_up_to"] else None
            rows.append({"size": size, "time_us": took * 1e6, "cpu_s": cpu, "wrong": wrong})
        return {"rows": rows}


def main():
    """Until nobody gives orders any more."""
    rank = Rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(rank.measure(json.loads(line))), flush=True)
    # Destroying the communicator waits for the other ranks, which may be gone.
    os._exit(0)


if __name__ == "__main__":
    main()
