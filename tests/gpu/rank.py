#!/usr/bin/env python3
"""One rank of an endless all-reduce through libnccl, by ctypes: no PyTorch, no MPI.

    rank.py RANK RANKS ID_FILE

Rank 0 writes the unique id to ID_FILE, the others read it. Prints "running" after the first all-reduce, and when NCCL
reports an error "error CODE" with NCCL's number for it; then it aborts the communicator and ends.
"""
import ctypes
import os
import sys
import time

IN_PROGRESS, NOT_READY = 7, 600
COUNT = 16 << 20


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


def main():
    rank, ranks, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    cuda, nccl = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL("libnccl.so.2")
    nccl.ncclCommInitRank.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, UniqueId, ctypes.c_int]
    nccl.ncclAllReduce.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int,
                                   ctypes.c_void_p, ctypes.c_void_p]
    nccl.ncclCommGetAsyncError.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    nccl.ncclCommAbort.argtypes = [ctypes.c_void_p]
    cuda.cuStreamQuery.argtypes = [ctypes.c_void_p]

    def must(what, code):
        if code:
            print(f"failed {what} {code}", flush=True)
            os._exit(1)

    device, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    must("cuInit", cuda.cuInit(0))
    must("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), rank))
    must("cuDevicePrimaryCtxRetain", cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    must("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))
    must("cuStreamCreate", cuda.cuStreamCreate(ctypes.byref(stream), 1))
    memory = ctypes.c_uint64()
    must("cuMemAlloc", cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 * COUNT)))
    must("cuMemsetD8", cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(0), ctypes.c_size_t(4 * COUNT)))

    unique = UniqueId()
    if rank == 0:
        must("ncclGetUniqueId", nccl.ncclGetUniqueId(ctypes.byref(unique)))
        with open(path + ".draft", "wb") as draft:
            draft.write(bytes(unique))
        os.rename(path + ".draft", path)
    else:
        while not os.path.exists(path):
            time.sleep(0.01)
        with open(path, "rb") as written:
            unique = UniqueId.from_buffer_copy(written.read())
    comm = ctypes.c_void_p()
    must("ncclCommInitRank", nccl.ncclCommInitRank(ctypes.byref(comm), ranks, unique, rank))
    rounds = 0
    while True:
        # float (7), sum (0), in place.
        code = nccl.ncclAllReduce(memory.value, memory.value, COUNT, 7, 0, comm, stream)
        while code in (0, IN_PROGRESS) and cuda.cuStreamQuery(stream) == NOT_READY:
            state = ctypes.c_int()
            nccl.ncclCommGetAsyncError(comm, ctypes.byref(state))
            code = state.value
            time.sleep(0.0002)
        if code not in (0, IN_PROGRESS):
            print(f"error {code}", flush=True)
            nccl.ncclCommAbort(comm)
            print("aborted", flush=True)
            os._exit(0)
        rounds += 1
        if rounds == 1:
            print("running", flush=True)


main()
