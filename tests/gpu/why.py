#!/usr/bin/env python3
"""Breaks a PyTorch job in six ways while `towline why` watches it, and checks that it names the rank.

Two processes with one GPU each. Each case starts a job, lets it do 50 all-reduces, and then one rank does something that
makes the job hang; `towline why --json` must name that rank within --within seconds, and no case may name a rank before. Prints a
table; exit status 0 when every case held.

    tests/gpu/why.py --towline target/release
    tests/gpu/why.py --towline target/release --cases healthy,absent --looks 20
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "benches", "nccl"))

from contenders import Contender  # noqa: E402

RANKS = 2
# What rank 1 does instead of its 51st all-reduce, and whom `towline why` must name. `healthy`: nothing, for --looks looks.
CASES = ("healthy", "absent", "count", "function", "stopped", "killed", "gpu")
NAMED = 1
BEFORE = 50


def arguments():
    """The command line; `--child` is how the script calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", required=True, help="directory of Towline's libnccl-net.so and of the command")
    parser.add_argument("--cases", default=",".join(CASES), help="of %(default)s")
    parser.add_argument("--within", type=float, default=35, help="seconds until the rank must be named; default %(default)s")
    parser.add_argument("--looks", type=int, default=10, help="looks at the healthy job; default %(default)s")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable for all ranks")
    parser.add_argument("--out", help="keep NCCL's logs here")
    parser.add_argument("--child", type=int, metavar="RANK", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.cases = given.cases.split(",")
    unknown = set(given.cases) - set(CASES)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    return given


def play(rank, given):
    """One rank."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    store = dist.FileStore(os.path.join(given.place, "store"), RANKS)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=600)
    group = dist.ProcessGroupNCCL(store, rank, RANKS, options)
    tensor = torch.ones(1 << 20, device=device)

    def work():
        group.allreduce([tensor]).wait()
        torch.cuda.synchronize()

    for _ in range(BEFORE):
        work()
    with open(os.path.join(given.place, f"ready{rank}"), "w", encoding="utf-8"):
        pass
    go = os.path.join(given.place, "go")
    if given.case == "healthy":
        # Rank 0 sees the file, and tells the other through an all-reduce.
        while True:
            for _ in range(20):
                tensor.fill_(1)
                work()
            tensor.fill_(float(rank == 0 and os.path.exists(go)))
            work()
            if tensor[0].item() > 0:
                os._exit(0)
            time.sleep(0.05)
    while not os.path.exists(go):
        time.sleep(0.02)
    if rank == NAMED:
        if given.case == "absent":
            time.sleep(600)
        if given.case == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if given.case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if given.case == "gpu":
            # Some minutes of a kernel that does nothing.
            torch.cuda._sleep(1 << 39)
        if given.case == "count":
            tensor = tensor[: 1 << 19]
        if given.case == "function":
            group.broadcast([tensor]).wait()
            torch.cuda.synchronize()
    work()
    time.sleep(600)


def ask(given, env):
    """What `towline why` says: its exit status and its JSON."""
    command = [os.path.join(given.towline, "towline"), "why", "--json"]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
    try:
        return done.returncode, json.loads(done.stdout)
    except ValueError:
        return done.returncode, {"verdict": "no JSON", "findings": [], "notes": [done.stdout]}


def described(answer):
    """The sentences, or what stands for them."""
    said = [f"{found['kind']}: {found['sentence']}" for found in answer["findings"]]
    return "; ".join(said) or f"{answer['verdict']} {answer['notes']}"


def holds(case, answer):
    """Whether the answer names the rank that did it, and its GPU; of two ranks with different calls it may name both."""
    for found in answer["findings"]:
        if not all(named["gpu"] for named in found["named"]):
            continue
        ranks = {named["rank"] for named in found["named"]}
        if ranks == {NAMED} or case in ("count", "function") and found["kind"] == "mismatch" and ranks:
            return True
    return False


def run(case, given, place):
    """A job with this fault: seconds until the rank was named, what was said, and what is wrong with that."""
    common = {
        "NCCL_SOCKET_IFNAME": given.interface,
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,NET,PROFILE",
        "NCCL_DEBUG_FILE": os.path.join(place, "nccl-%p.log"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    }
    variables = {"NCCL_NET": "Towline", **dict(pair.split("=", 1) for pair in given.set)}
    env = Contender(case, variables, given.towline).environment(common, None)

    def start(rank):
        command = [sys.executable, os.path.abspath(__file__), "--towline", given.towline]
        command += ["--child", str(rank), "--place", place, "--case", case]
        return subprocess.Popen(command, env=env, start_new_session=True)

    ranks = [start(rank) for rank in range(RANKS)]
    try:
        limit = time.monotonic() + 120
        while not all(os.path.exists(os.path.join(place, f"ready{rank}")) for rank in range(RANKS)):
            if time.monotonic() > limit or any(process.poll() is not None for process in ranks):
                return None, "", "the job did not start"
            time.sleep(0.05)
        if case == "healthy":
            for number in range(given.looks):
                status, answer = ask(given, env)
                if status:
                    return None, described(answer), f"look {number} at a healthy job ended with status {status}"
                time.sleep(0.5)
            return None, described(answer), None
        status, answer = ask(given, env)
        if status == 1:
            return None, described(answer), "somebody was named before anything was wrong"
        with open(os.path.join(place, "go"), "w", encoding="utf-8"):
            began = time.monotonic()
        while time.monotonic() - began < given.within:
            time.sleep(1)
            status, answer = ask(given, env)
            if status == 1:
                return time.monotonic() - began, described(answer), None if holds(case, answer) else "the wrong one"
        return None, described(answer), "nobody was named"
    finally:
        for process in ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main():
    """All cases, a line each."""
    given = arguments()
    given.towline = os.path.abspath(given.towline)
    if given.child is not None:
        play(given.child, given)
        return 0
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for case in given.cases:
            place = os.path.join(given.out or scratch, case)
            os.makedirs(place)
            took, said, problem = run(case, given, place)
            failed |= problem is not None
            print(f"{case:9} {'-' if took is None else f'{took:.0f} s':>5}  {problem or 'ok'}  [{said}]", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
