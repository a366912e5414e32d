"""The steps of one_sided.py through nccl4py (`pip install nccl4py`): its lives "py", "py-close" and "py-abort".

Each step is nccl4py's own call; how NCCL's log, the other rank and a silent rank are looked at is one_sided.py's.
"""

import ctypes
import os
import time

from one_sided import MOST, Failed, Steps, check, meet


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

    def pointer(self, rank):
        return self.target[1].get_peer_device_pointer(rank)

    def put(self, size, start=0, offset=0, stream=None):
        stream = (stream or self.it.stream).value
        self.comm.put_signal(self.memory[0][start : start + size], self.it.other, self.target[1], offset, stream=stream)

    def signal(self, stream=None):
        self.comm.signal(self.it.other, stream=(stream or self.it.stream).value)

    def wait(self, count=1, stream=None):
        stream = (stream or self.it.stream).value
        self.comm.wait_signal(self.core.WaitSignalDesc(peer=self.it.other, op_count=count), stream=stream)

    def group(self):
        return self.core.group()

    def abort_comm(self):
        self.comm.abort()

    def send_and_receive(self, size):
        it, stream = self.it, self.it.stream.value
        for sends in (it.rank == 0, it.rank != 0):
            if sends:
                self.comm.send(self.memory[0][:size], it.other, stream=stream)
            else:
                self.comm.recv(self.memory[1][:size], it.other, stream=stream)

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
        registered = self.comm.register_buffer(self.memory[0])
        if not registered.handle:
            raise Failed("the registration is null")
        self.made.append(registered)
        self.reduce(self.core.NcclRedOp.SUM, 3.0)

    def device_comm(self):
        core = self.core
        wants = core.NCCLDevCommRequirements(gin_context_count=4, gin_signal_count=4, world_gin_barrier_count=1,
                                             gin_connection_type=core.NcclGinConnectionType.FULL)
        made = self.comm.create_dev_comm(wants)
        if not made.ptr:
            raise Failed("the device communicator is null")
        self.made.append(made)
        return f"with GIN; {len(self.made)} resources are open"

    def close(self, order):
        """Closes what is open in this order; a second close of each does nothing."""
        resources = [self.made[place] for place in order]
        if sorted(order) != list(range(len(self.made))):
            raise Failed(f"{len(self.made)} resources are open")
        for resource in resources + resources:
            resource.close()
            if resource.is_valid:
                raise Failed(f"{resource!r} is still open")
        return " ".join(type(resource).__name__ for resource in resources)

    def destroy(self):
        began = time.perf_counter()
        self.comm.destroy()
        return f"{(time.perf_counter() - began) * 1e3:.0f} ms"

    def closed_by_abort(self):
        """What the abort has closed with the communicator; to close it then is harmless."""
        for resource in self.aborted_resources:
            if resource.is_valid:
                raise Failed(f"{resource!r} is still open")
            resource.close()
        return " ".join(type(resource).__name__ for resource in self.aborted_resources)

    def abort(self):
        # The memory stays until the steps that look at it are over.
        self.aborted_memory, self.aborted_resources = self.memory, self.made
        return super().abort()

    def resources(self):
        """One of each kind beside the two windows."""
        self.step("pre-mul-sum", self.pre_mul_sum)
        self.step("buffer", self.buffer)
        self.step("device comm", self.device_comm)

    def run(self, life):
        self.step("init", self.connect)
        self.step("window", self.windows)
        if life == "py-abort":
            self.step("put", self.puts)
            self.resources()
            self.step("abort", self.abort)
            self.step("closed", self.closed_by_abort)
            self.step("init again", self.connect_again)
            self.step("window", self.windows)
            self.step("put", self.puts)
            self.step("untouched", self.untouched)
            self.step("destroy", self.destroy)
            return
        self.step("peer pointer", self.peer_pointer)
        self.step("put", self.puts)
        if life == "py":
            self.exchanges()
        self.resources()
        self.step("put after it", self.puts)
        if life == "py-close":
            # A window first, then what was made last, then the rest.
            self.step("close", lambda: self.close((0, 4, 3, 2, 1)))
            self.step("window again", self.windows)
            self.resources()
            self.step("put after it", self.puts)
            # What was made first, first.
            self.step("close", lambda: self.close((0, 1, 2, 3, 4)))
        self.step("destroy", self.destroy)
