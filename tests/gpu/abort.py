#!/usr/bin/env python3
"""Aborts PyTorch process groups in the middle of all-reduces, frees the memory at once, and goes on with new groups.

Two processes with one GPU each. Each round makes a new group, starts all-reduces of 64 to 256 MiB, aborts the group while
they run, frees their tensors and the allocator's cache, makes another group and verifies an all-reduce over it. So a network
that still touches memory of an aborted transfer crashes, or spoils the sum. Three runs: Towline, Towline with
TOWLINE_CHECKSUM=1, and NCCL's Socket. Prints a table; exit status 0 only when every round of every run held.

    tests/gpu/abort.py --towline target/release
    tests/gpu/abort.py --towline target/release --rounds 40      # within three minutes
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "benches", "nccl"))

from contenders import Contender  # noqa: E402

RANKS = 2
MIB = 1 << 20
RUNS = (
    ("Towline", "Towline", {}),
    ("Towline, checksums", "Towline", {"TOWLINE_CHECKSUM": "1"}),
    ("Socket", "Socket", {}),
)


def arguments():
    """The command line; `--child` is how the script calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", help="directory of Towline's libnccl-net.so")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--runs", help="only the runs with these numbers, from 1, as in 1,3")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--seconds", type=float, help="limit for one run (30 + 4 for each round unless given)")
    parser.add_argument("--out", help="keep NCCL's logs here")
    parser.add_argument("--child", type=int, metavar="RANK", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child is None and not given.towline:
        parser.error("--towline is needed")
    if given.seconds is None:
        given.seconds = 30 + 4 * given.rounds
    return given


def play(rank, given):
    """One rank: what it measured goes to a file after each round, so that a crash leaves what came before it."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", given.port, RANKS, is_master=rank == 0, timeout=timedelta(seconds=60))

    def group(name):
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=60)
        return dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, RANKS, options)

    def meet(name):
        """Waits for the other rank, without a group."""
        store.set(f"{name}/{rank}", "here")
        store.wait([f"{name}/{other}" for other in range(RANKS)], timedelta(seconds=60))

    aborts, over = [], 0
    # The same on both ranks.
    chance = random.Random(2026)
    for number in range(given.rounds):
        size = chance.choice((64, 128, 256)) * MIB
        # From before the first byte to the middle of a later all-reduce: twelve of 64 MiB take 40 ms and more.
        delay = chance.uniform(0.0, 0.06)
        who = chance.choice(("both", "first", "second"))
        doomed = group(f"doomed{number}")
        # Makes the communicator and its connections.
        doomed.allreduce([torch.ones(1024, device=device)]).wait()
        torch.cuda.synchronize()
        meet(f"begin{number}")
        tensors = [torch.ones(size // 4, device=device) for _ in range(12)]
        torch.cuda.synchronize()
        works = [doomed.allreduce([tensor]) for tensor in tensors]
        time.sleep(delay)
        over += all(work.is_completed() for work in works)
        # The other rank finds its peer gone a moment later, and aborts as well.
        if who == ("second", "first")[rank]:
            time.sleep(0.05)
        began = time.monotonic()
        doomed.abort()
        aborts.append(time.monotonic() - began)
        del works, tensors, doomed
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        # Memory of the same size, where the aborted transfers may have had theirs.
        fresh = torch.full((size // 4,), float(rank + 1), device=device)
        meet(f"aborted{number}")
        healthy = group(f"healthy{number}")
        healthy.allreduce([fresh]).wait()
        torch.cuda.synchronize()
        wrong = int((fresh != RANKS * (RANKS + 1) / 2).sum().item())
        if wrong:
            sys.exit(f"round {number}, rank {rank}: {wrong} of {fresh.numel()} elements are wrong")
        # In order: nobody closes while the other still needs it.
        meet(f"verified{number}")
        healthy.shutdown()
        del healthy, fresh
        torch.cuda.empty_cache()
        aborts_so_far = {"rounds": number + 1, "aborts": aborts, "over": over}
        with open(given.result + ".new", "w", encoding="utf-8") as file:
            json.dump(aborts_so_far, file)
        os.replace(given.result + ".new", given.result)
    meet("end")
    # What is left of aborted groups is not to hold up the end.
    sys.stdout.flush()
    os._exit(0)


def run(name, network, more, given, place):
    """Both ranks over one network: a row of the table, and what went wrong, if anything did."""
    folder = os.path.join(place, name.lower().replace(", ", "-"))
    os.makedirs(folder, exist_ok=True)
    for old in os.listdir(folder):
        os.unlink(os.path.join(folder, old))
    common = {
        "NCCL_SOCKET_IFNAME": given.interface,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET",
        "NCCL_DEBUG_FILE": os.path.join(folder, "nccl-%p.log"),
        # A failure of the aborted group is expected: the process must outlive it.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    library = os.path.abspath(given.towline) if network == "Towline" else None
    env = Contender(name, {"NCCL_NET": network, **more}, library).environment(common, None)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = [os.path.join(folder, f"rank{rank}.json") for rank in range(RANKS)]

    def start(rank):
        command = [sys.executable, os.path.abspath(__file__), "--child", str(rank), "--port", str(port)]
        command += ["--result", results[rank], "--rounds", str(given.rounds)]
        return subprocess.Popen(command, env=env, start_new_session=True)

    began = time.monotonic()
    ranks = [start(rank) for rank in range(RANKS)]
    problem = None
    try:
        while problem is None and any(process.poll() is None for process in ranks):
            if time.monotonic() - began > given.seconds:
                problem = f"no end after {given.seconds:.0f} s"
            for rank, process in enumerate(ranks):
                # Negative: the signal that ended it.
                if process.poll():
                    problem = f"rank {rank} ended with status {process.returncode}"
            time.sleep(0.1)
        codes = [process.poll() for process in ranks]
        if problem is None and any(codes):
            problem = f"the ranks ended with status {codes}"
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    took = time.monotonic() - began
    measured = []
    for path in results:
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                measured.append(json.load(file))
    rounds = min((of["rounds"] for of in measured), default=0) if len(measured) == RANKS else 0
    logs = [os.path.join(folder, file) for file in os.listdir(folder) if file.endswith(".log")]
    text = "".join(open(path, encoding="utf-8", errors="replace").read() for path in logs)
    if problem is None and f"via NET/{network}".lower() not in text.lower():
        problem = f"NCCL's log does not say 'via NET/{network}': this run shows nothing"
    if problem is None and rounds < given.rounds:
        problem = f"only {rounds} rounds"
    # As many aborts as came too late show nothing.
    over = max((of["over"] for of in measured), default=0)
    if problem is None and over > given.rounds // 2:
        problem = f"{over} of {given.rounds} aborts came when all was over"
    aborts = sorted(took for of in measured for took in of["aborts"])
    warnings = sum(line.count(" NCCL WARN ") for line in text.splitlines())
    row = (
        name,
        f"{rounds}/{given.rounds}",
        str(rounds - over),
        f"{aborts[len(aborts) // 2] * 1000:.0f}" if aborts else "-",
        f"{aborts[-1] * 1000:.0f}" if aborts else "-",
        str(warnings),
        f"{took:.0f}",
        problem or "ok",
    )
    return row, problem


def main():
    """All runs, the table, the verdict."""
    given = arguments()
    if given.child is not None:
        play(given.child, given)
        return 0
    chosen = [RUNS[int(number) - 1] for number in given.runs.split(",")] if given.runs else RUNS
    rows = [("network", "rounds", "amid", "abort ms", "slowest", "WARN", "s", "result")]
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for name, network, more in chosen:
            row, problem = run(name, network, more, given, given.out or scratch)
            rows.append(row)
            failed |= problem is not None
            print(f"{name}: {problem or 'ok'}", flush=True)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
