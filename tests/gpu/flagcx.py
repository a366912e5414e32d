#!/usr/bin/env python3
"""Runs FlagCX over Towline on two GPUs of one host, in both of FlagCX's ways.

1. Its drop-in libnccl: a PyTorch training (ddp_losses.py) gives the same losses and parameters, bit for bit, as without
   it, and Towline's own counters show the gradients on the wire.
2. Its own path, with Towline as its net adaptor: send and receive, all-gather and all-to-all, every byte verified, by two
   communicators one after the other (FlagCX closes the library with the first and opens it again), and the time of each
   beside FlagCX's own Socket adaptor: one that takes longer is named, and a failure.

DIRECTORY is a tree of FlagCX 0.11 or later, built with `make USE_NVIDIA=1` there and in plugin/nccl. Each step says ok or
failed and why; exit status 0 means that all are ok.

    tests/gpu/flagcx.py ~/FlagCX --towline target/release
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

OPERATIONS = ("sendrecv", "allgather", "alltoall")
# What a rank sends to the other: one piece, one that is no multiple of anything, and many chunks of FlagCX's 4 MiB.
SIZES = (4096, (1 << 20) + 4, 64 << 20)
# How often each is timed in a round. The medians of 4 KiB still differ by half from one round to the next.
TIMES = dict(zip(SIZES, (200, 50, 10)))
RANKS, COMMUNICATORS = 2, 2


def arguments():
    """The command line; `--child` is how the script calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIRECTORY", help="a built tree of FlagCX")
    parser.add_argument("--towline", required=True, help="directory of Towline's libnccl-net.so")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="for one run")
    parser.add_argument("--out", help="keep results and logs here")
    parser.add_argument("--rounds", type=int, default=5, help="of FlagCX's own path over each network; default %(default)s")
    parser.add_argument("--skip-training", action="store_true", help="only FlagCX's own path")
    parser.add_argument("--child", type=int, metavar="RANK", help=argparse.SUPPRESS)
    return parser.parse_args()


def unique_id(library, rank, place, number):
    """FlagCX's name of the communicator of this number, from rank 0 to the other through a file."""
    path = os.path.join(place, f"id{number}")
    if rank == 0:
        name = library.flagcxGetUniqueId()
        with open(path + ".new", "wb") as file:
            file.write(bytes(name))
        os.rename(path + ".new", path)
        return name
    while not os.path.exists(path):
        time.sleep(0.01)
    with open(path, "rb") as file:
        return library.unique_id_from_bytes(file.read())


def pattern(sender, receiver, size):
    """What `sender` sends to `receiver`: never the byte 255, with which receive buffers are filled before."""
    import torch

    start = 31 * sender + 17 * receiver
    return ((torch.arange(size, device="cuda", dtype=torch.int64) + start) % 251).to(torch.uint8)


def child(given):
    """One rank on FlagCX's own path: its median times go to a file, or what came wrong."""
    import torch

    sys.path.insert(0, os.path.join(given.directory, "plugin", "interservice"))
    import flagcx_wrapper as flagcx

    rank, peer = given.child, 1 - given.child
    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    library = flagcx.FLAGCXLibrary(os.path.join(given.directory, "build", "lib", "libflagcx.so"))
    # The Python module of FlagCX leaves this one out.
    all_to_all = library.lib.flagcxAlltoAll
    all_to_all.restype = ctypes.c_int
    all_to_all.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    stream = library.adaptor_stream_create()
    kind = flagcx.flagcxDataTypeEnum.flagcxUint8

    def address(tensor):
        return ctypes.c_void_p(tensor.data_ptr())

    def call(comm, operation, send, receive, size):
        if operation == "sendrecv":
            library.flagcxGroupStart(comm)
            library.flagcxSend(address(send), size, kind, peer, comm, stream)
            library.flagcxRecv(address(receive), size, kind, peer, comm, stream)
            library.flagcxGroupEnd(comm)
        elif operation == "allgather":
            library.flagcxAllGather(address(send), address(receive), size, kind, comm, stream)
        else:
            library.FLAGCX_CHECK(all_to_all(address(send), address(receive), size, kind, comm, stream))
        library.sync_stream(stream)

    def verified(comm, operation, size, count):
        """Does an operation so often and verifies it each time; the seconds that each took."""
        if operation == "alltoall":
            send = torch.cat([pattern(rank, to, size) for to in range(RANKS)])
            expected = torch.cat([pattern(sender, rank, size) for sender in range(RANKS)])
        elif operation == "allgather":
            send = pattern(rank, 0, size)
            expected = torch.cat([pattern(sender, 0, size) for sender in range(RANKS)])
        else:
            send, expected = pattern(rank, peer, size), pattern(peer, rank, size)
        seconds = []
        for _ in range(count):
            receive = torch.full_like(expected, 255)
            torch.cuda.synchronize()
            began = time.perf_counter()
            call(comm, operation, send, receive, size)
            seconds.append(time.perf_counter() - began)
            wrong = int((receive != expected).sum())
            if wrong:
                sys.exit(f"rank {rank}: {operation} of {size} bytes: {wrong} bytes are wrong")
        return seconds

    times = {}
    for number in range(COMMUNICATORS):
        comm = library.flagcxCommInitRank(RANKS, unique_id(library, rank, given.out, number), rank)
        for operation in OPERATIONS:
            for size in SIZES:
                # The first two also connect and touch the memory.
                seconds = verified(comm, operation, size, 2 + (TIMES[size] if number == 0 else 0))
                if number == 0:
                    times[f"{operation} {size}"] = statistics.median(seconds[2:])
        library.flagcxCommDestroy(comm)
    with open(os.path.join(given.out, f"rank{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(times, file)
    # Without Python's order of destruction: the module's destructor would call a library that is being taken down.
    os._exit(0)


def own_path(given, network, place):
    """FlagCX's own path over `network`: the slower rank's times, and what went wrong or nothing."""
    folder = os.path.join(place, network.lower())
    os.makedirs(folder, exist_ok=True)
    # What an earlier run left would count as evidence of this one.
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "FLAGCX_"))}
    env.update(
        # Two GPUs of one kind in one host take FlagCX's own path and the network only when told to.
        FLAGCX_USE_HETERO_COMM="1",
        FLAGCX_P2P_DISABLE="1",
        FLAGCX_SOCKET_IFNAME=given.interface,
        FLAGCX_DEBUG="INFO",
        FLAGCX_DEBUG_SUBSYS="INIT,NET",
        FLAGCX_DEBUG_FILE=os.path.join(folder, "flagcx-%p.txt"),
        NCCL_SOCKET_IFNAME=given.interface,
        NCCL_NVLS_ENABLE="0",
    )
    if network == "Towline":
        env["FLAGCX_NET_ADAPTOR_PLUGIN"] = os.path.join(os.path.abspath(given.towline), "libnccl-net.so")
    else:
        env["FLAGCX_FORCE_NET_SOCKET"] = "1"
    command = [sys.executable, os.path.abspath(__file__), os.path.abspath(given.directory), "--towline", given.towline, "--out", folder]
    outputs, processes = [], []
    for rank in range(RANKS):
        outputs.append(open(os.path.join(folder, f"rank{rank}.out"), "w+", encoding="utf-8"))
        processes.append(subprocess.Popen([*command, "--child", str(rank)], env=env, stdout=outputs[-1], stderr=subprocess.STDOUT))
    end = time.monotonic() + given.limit
    # FlagCX waits for ever for a peer that has ended.
    while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes) and time.monotonic() < end:
        time.sleep(0.05)
    trouble = []
    for rank, process in enumerate(processes):
        if process.poll() is None:
            process.kill()
            process.wait()
            if not any(p.poll() for p in processes if p is not process):
                trouble.append(f"rank {rank}: no end after {given.limit:.0f} s")
        elif process.returncode:
            outputs[rank].seek(0)
            last = (outputs[rank].read().strip().splitlines() or ["without a word"])[-1]
            trouble.append(f"rank {rank}: status {process.returncode}: {last}")
    for output in outputs:
        output.close()
    if trouble:
        return {}, f"{'; '.join(trouble)} (logs: {folder})"
    logs = [os.path.join(folder, name) for name in os.listdir(folder) if name.startswith("flagcx-")]
    texts = [open(path, encoding="utf-8", errors="replace").read() for path in logs]
    for text in texts:
        why = not_shown(network, text)
        if why:
            return {}, f"{why} (logs: {folder})"
    if len(texts) != RANKS:
        return {}, f"{len(texts)} of {RANKS} ranks have a log of FlagCX's (logs: {folder})"
    ranks = [json.load(open(os.path.join(folder, f"rank{rank}.json"), encoding="utf-8")) for rank in range(RANKS)]
    return {key: max(rank[key] for rank in ranks) for key in ranks[0]}, None


def not_shown(network, log):
    """What a rank's log of FlagCX's lacks to show that `network` carried each communicator; none where nothing lacks."""
    wanted = {f"Using network {network}": COMMUNICATORS}
    if network == "Towline":
        wanted.update({"Loaded net adaptor plugin 'Towline'": COMMUNICATORS, "Unloading net adaptor plugin": COMMUNICATORS})
    for line, count in wanted.items():
        found = log.lower().count(line.lower())
        if found != count:
            return f"FlagCX's log says '{line}' {found} times, not {count}"
    return None


# What the medians of five rounds differ by when nothing does. A round of 4 KiB may take half as long again as the next one.
SCATTER, SCATTER_OF_SHORT, SHORT = 1.05, 1.25, 1 << 20


def slower(times):
    """The operations that take longer over Towline than over FlagCX's Socket adaptor, beyond the scatter, in words."""
    for key, ours in times["Towline"].items():
        ratio = ours / times["Socket"][key]
        if ratio > (SCATTER_OF_SHORT if int(key.split()[1]) < SHORT else SCATTER):
            yield f"{key} bytes takes {ratio:.2f} of the time of FlagCX's Socket adaptor"


def training(given, place):
    """The training under FlagCX's libnccl; what went wrong or nothing."""
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "ddp_losses.py")
    library = os.path.join(given.directory, "plugin", "nccl", "build", "lib", "libnccl.so")
    if not os.path.exists(library):
        return f"there is no {library}"
    options = ["--towline", given.towline, "--flagcx", library, "--interface", given.interface, "--out", os.path.join(place, "training")]
    code = subprocess.call([sys.executable, script, *options, "--limit", str(given.limit)])
    return None if code == 0 else f"ddp_losses.py ended with status {code}"


def verdict(step, trouble):
    """Prints a step's end; whether it was good."""
    print(f"{step}: {'failed: ' + trouble if trouble else 'ok'}", flush=True)
    return not trouble


def main():
    """All steps."""
    given = arguments()
    if given.child is not None:
        return child(given)
    for path in (os.path.join(given.directory, "build/lib/libflagcx.so"), os.path.join(given.towline, "libnccl-net.so")):
        if not os.path.exists(path):
            sys.exit(f"there is no {path}")
    place = given.out or tempfile.mkdtemp(prefix="towline-flagcx.")
    good = given.skip_training or verdict("training under FlagCX's libnccl", training(given, place))
    rounds = {"Towline": [], "Socket": []}
    for number in range(given.rounds):
        for network, done in rounds.items():
            found, trouble = own_path(given, network, os.path.join(place, f"round{number}"))
            good &= verdict(f"FlagCX's own path over {network}, round {number + 1}", trouble)
            done += [found] if found else []
    if all(rounds.values()):
        times = {name: {key: statistics.median(it[key] for it in done) for key in done[0]} for name, done in rounds.items()}
        print(f"{'operation':<10} {'bytes':>9} {'Towline ms':>11} {'Socket ms':>10} {'Towline / Socket':>17}")
        for key, towline in times["Towline"].items():
            operation, size = key.split()
            other = times["Socket"][key]
            print(f"{operation:<10} {size:>9} {towline * 1e3:>11.3f} {other * 1e3:>10.3f} {towline / other:>17.2f}")
        for line in slower(times):
            good = False
            print(f"failed: {line}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
