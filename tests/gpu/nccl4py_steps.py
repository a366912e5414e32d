"""The steps of one_sided.py through nccl4py (`pip install nccl4py`): its lives "py", "py-close" and "py-abort".

Each step is nccl4py's own call; how NCCL's log, the other rank and a silent rank are looked at is one_sided.py's.
"""

import ctypes
import os
import time

from one_sided import MOST, Failed, Steps, check, meet, pattern


class Nccl4pySteps(Steps):
    """A life of a communicator of nccl4py."""

    def __init__(self, rank, given):
        super().__init__(rank, given)
        # After the library that the base class has loaded: nccl4py takes that one, and PyTorch does as well.
        import torch
        import nccl.core as core
        from nccl.core.interop.torch import empty

        torch.cuda.set_device(rank)
        self.torch, self.empty, self.core, self.comm, self.made = torch, empty, core, None, []

    def connect(self, number=0):
        core, it = self.core, self.it
        path = os.path.join(os.environ["ONE_SIDED_FOLDER"], f"py{number}")
        if it.rank == 0:
            with open(path, "wb") as file:
                file.write(bytes(core.get_unique_id()))
        meet(f"id {number}")
        with open(path, "rb") as file:
            unique = core.UniqueId.from_bytes(file.read())
        self.comm = core.Communicator.init(2, it.rank, unique)
        it.comm = ctypes.c_void_p(self.comm.ptr)
        told = core.get_version()
        return f"nccl4py {told.nccl4py}, {told.libnccl}"

    def windows(self, before=0):
        self.memory = [self.empty(MOST, dtype=self.torch.uint8, device=self.it.rank) for _ in range(2)]
        flag = self.core.WindowFlag.COLL_SYMMETRIC
        handles = [self.comm.register_window(memory, flag) for memory in self.memory]
        if not all(window is not None and window.handle for window in handles):
            raise Failed("a window is null")
        self.made = list(handles)
        self.source, self.target = [(memory.data_ptr(), window) for memory, window in zip(self.memory, handles)]
        return f"{handles[0].handle:#x} and {handles[1].handle:#x}; {self.comm.gin_type!r}"

    def peer_pointer(self):
        window, it = self.target[1], self.it
        if window.get_peer_device_pointer(it.other) is not None:
            raise Failed("a pointer into another host's memory")
        if window.get_peer_device_pointer(it.rank) is None:
            raise Failed("no pointer into its own memory")
        return "None, as it must be"

    def put(self, size, offset=0, stream=None):
        stream = (stream or self.it.stream).value
        self.comm.put_signal(self.memory[0][offset : offset + size], self.it.other, self.target[1], offset, stream=stream)

    def wait(self, count=1, stream=None):
        stream = (stream or self.it.stream).value
        self.comm.wait_signal(self.core.WaitSignalDesc(peer=self.it.other, op_count=count), stream=stream)

    def send_and_check(self, size, seed):
        it = self.it
        it.cuda.write(self.source[0], pattern(seed + it.rank, size))
        meet(f"put {size} {seed}")
        self.put(size)
        self.wait()
        it.settle()
        check(it.cuda.read(self.target[0], size), pattern(seed + it.other, size), f"{size} bytes")

    def many_puts(self):
        it, count, size = self.it, 32, 100_000
        it.cuda.write(self.source[0], pattern(90 + it.rank, count * size))
        meet("many")
        with self.core.group():
            for index in range(count):
                self.put(size, index * size)
        self.wait(count)
        it.settle()
        check(it.cuda.read(self.target[0], count * size), pattern(90 + it.other, count * size), "32 puts")
        return f"{count} of {size} bytes"

    def to_and_fro(self, size, stream=None):
        turns = [lambda: self.put(size, 0, stream), lambda: self.wait(1, stream)]
        for turn in turns if self.it.rank == 0 else reversed(turns):
            turn()

    def send_and_receive(self, size):
        it, stream = self.it, self.it.stream.value
        for sends in (it.rank == 0, it.rank != 0):
            if sends:
                self.comm.send(self.memory[0][:size], it.other, stream=stream)
            else:
                self.comm.recv(self.memory[1][:size], it.other, stream=stream)

    def barrier(self):
        it, count = self.it, 50
        began = time.perf_counter()
        for _ in range(count):
            self.comm.signal(it.other, stream=it.stream.value)
            self.wait()
        it.settle()
        return f"{count} times, {(time.perf_counter() - began) / count * 1e6:.0f} us each"

    def reduce(self, operation, expected):
        it, count = self.it, 100_000
        floats = (ctypes.c_float * count)(*([float(it.rank + 1)] * count))
        it.cuda.write(self.source[0], bytes(floats))
        source, target = (memory.view(self.torch.float32)[:count] for memory in self.memory)
        self.comm.allreduce(source, target, operation, stream=it.stream.value)
        it.settle()
        check(it.cuda.read(self.target[0], 4 * count), bytes((ctypes.c_float * count)(*([expected] * count))), "the sum")

    def pre_mul_sum(self):
        operation = self.comm.create_pre_mul_sum(0.5, self.core.NcclDataType.FLOAT32)
        self.made.append(operation)
        self.reduce(operation, 1.5)

    def buffer(self):
        self.made.append(self.comm.register_buffer(self.memory[0]))
        self.reduce(self.core.NcclRedOp.SUM, 3.0)

    def device_comm(self):
        core = self.core
        wants = core.NCCLDevCommRequirements(gin_context_count=4, gin_signal_count=4, world_gin_barrier_count=1,
                                             gin_connection_type=core.NcclGinConnectionType.FULL)
        self.made.append(self.comm.create_dev_comm(wants))
        return f"with GIN; {len(self.made)} resources are open"

    def close_in_another_order(self):
        """Windows first, then what was made last, then the rest; a second close of each does nothing."""
        order = self.made[:1] + self.made[:0:-1]
        for resource in order + order:
            resource.close()
        return " ".join(type(resource).__name__ for resource in order)

    def destroy(self):
        began = time.perf_counter()
        self.comm.destroy()
        return f"{(time.perf_counter() - began) * 1e3:.0f} ms"

    def abort(self):
        for _ in range(self.abort_amid()):
            self.put(MOST)
        time.sleep(0.02)
        began = time.perf_counter()
        self.comm.abort()
        return f"{(time.perf_counter() - began) * 1e3:.0f} ms"

    def run(self, life):
        self.step("init", self.connect)
        self.step("window", self.windows)
        if life == "py-abort":
            self.step("put", self.puts)
            self.step("abort", self.abort)
            self.step("init again", self.connect_again)
            self.step("window", self.windows)
            self.step("put", self.puts)
            self.step("destroy", self.destroy)
            return
        self.step("peer pointer", self.peer_pointer)
        self.step("put", self.puts)
        self.step("many puts", self.many_puts)
        self.step("ping-pong", self.ping_pong)
        self.step("graph", self.graph)
        self.step("barrier", self.barrier)
        self.step("pre-mul-sum", self.pre_mul_sum)
        self.step("buffer", self.buffer)
        self.step("device comm", self.device_comm)
        self.step("put after it", self.puts)
        if life == "py-close":
            self.step("close", self.close_in_another_order)
        self.step("destroy", self.destroy)
