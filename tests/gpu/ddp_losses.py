#!/usr/bin/env python3
"""Trains a small model with PyTorch's DistributedDataParallel over Towline and over NCCL's Socket: equal bit for bit?

Two ranks (`--ranks`), one seed, deterministic algorithms, 50 steps. Each step's loss on each rank, and a digest of the
final parameters, must be the same with both networks, and the ranks must agree on the parameters. NCCL's log must show
that Towline carried the run that is named after it. Exit status 0 only then.

    tests/gpu/ddp_losses.py --towline target/release

With `--flagcx`, a third run has FlagCX's libnccl in front of NCCL and Towline below it. It must give the same as well, and
Towline's counters must show the gradients on the wire (NCCL 2.28 or later, which finds Towline's profiler by itself). All
three runs then do without broadcasts: PyTorch's is NCCL's `ncclBcast`, which FlagCX's libnccl refuses (`plugin/nccl`).
"""

import argparse
import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time

RUNS = ("Towline", "Socket")


def arguments():
    """The command line; `--child` is how the script calls itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--towline", help="directory of Towline's libnccl-net.so")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=1024, help="of the model: about 13 * width² parameters")
    parser.add_argument("--interface", default="lo")
    parser.add_argument("--limit", type=float, default=180, metavar="SECONDS", help="for one training run")
    parser.add_argument("--out", help="keep the losses and NCCL's logs here")
    parser.add_argument("--flagcx", metavar="LIBRARY", help="FlagCX's libnccl.so, for a third run with it in LD_PRELOAD")
    parser.add_argument("--without-broadcast", action="store_true", help="DDP neither broadcasts parameters nor buckets")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.without_broadcast |= given.flagcx is not None
    if not given.child and not given.towline:
        parser.error("--towline is needed")
    return given


def train(rank, given, port):
    """One rank: its losses and the digest of its parameters go to a file."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", f"tcp://127.0.0.1:{port}", rank=rank, world_size=given.ranks)
    torch.manual_seed(2026)
    width = given.width
    model = nn.Sequential(
        nn.Linear(64, width),
        nn.GELU(),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.LayerNorm(4 * width),
        nn.Linear(4 * width, 2 * width),
        nn.GELU(),
        nn.Linear(2 * width, 10),
    ).cuda()
    # The ranks have the same parameters by their seed, and keep the first order of buckets.
    options = {"init_sync": False, "find_unused_parameters": True} if given.without_broadcast else {}
    # Buckets from a few hundred kilobytes to several megabytes, so that more than one all-reduce is in flight.
    parallel = DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=8, **options)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=3e-4)
    data = torch.Generator().manual_seed(100 + rank)
    losses = []
    for _ in range(given.steps):
        inputs = torch.randn(64, 64, generator=data).cuda()
        # Something to learn: which of the first ten inputs is the largest.
        targets = inputs[:, :10].argmax(1)
        optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(parallel(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    # The bits, not a rounded decimal: float32 as hexadecimal digits.
    bits = [struct.pack("<f", loss.item()).hex() for loss in losses]
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    result = {"losses": bits, "parameters": digest.hexdigest(), "elements": sum(p.numel() for p in model.parameters())}
    with open(os.path.join(given.child, f"rank{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(result, file)
    if given.flagcx:
        # PyTorch finalizes and then destroys a communicator, which FlagCX's libnccl frees both times. The pause lets
        # Towline write its metrics, where the environment asks for them.
        time.sleep(1)
        os._exit(0)
    torch.distributed.destroy_process_group()


def child(given):
    """All ranks of one training run, one process each."""
    import torch.multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(given, port), nprocs=given.ranks)


def run(name, given, place):
    """One training run, named after its network or FlagCX; gives the ranks' results, or ends the script with what went
    wrong."""
    network = "Towline" if name == "FlagCX" else name
    folder = os.path.join(place, name.lower())
    os.makedirs(folder, exist_ok=True)
    # What an earlier run left would count as evidence of this one.
    for left in os.listdir(folder):
        os.unlink(os.path.join(folder, left))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NCCL_", "TOWLINE_"))}
    env.update(
        NCCL_NET=network,
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        NCCL_NVLS_ENABLE="0",
        NCCL_SOCKET_IFNAME=given.interface,
        NCCL_DEBUG="INFO",
        NCCL_DEBUG_SUBSYS="INIT,NET",
        NCCL_DEBUG_FILE=os.path.join(folder, "nccl-%p.log"),
        # Deterministic matrix products need a fixed workspace.
        CUBLAS_WORKSPACE_CONFIG=":4096:8",
    )
    if given.ranks > 2:
        # A sum of more than two numbers depends on the order, and so on how NCCL cuts the data: fix that for both.
        env.update(NCCL_ALGO="Ring", NCCL_PROTO="Simple", NCCL_MIN_NCHANNELS="2", NCCL_MAX_NCHANNELS="2")
    if network == "Towline":
        env.update({k: v for k, v in os.environ.items() if k.startswith("TOWLINE_")})
        env["LD_LIBRARY_PATH"] = ":".join(p for p in (os.path.abspath(given.towline), env.get("LD_LIBRARY_PATH")) if p)
    if name == "FlagCX":
        env.update(
            LD_PRELOAD=os.path.abspath(given.flagcx),
            FLAGCX_DEBUG="INFO",
            FLAGCX_DEBUG_SUBSYS="INIT",
            FLAGCX_DEBUG_FILE=os.path.join(folder, "flagcx-%p.txt"),
            FLAGCX_SOCKET_IFNAME=given.interface,
            TOWLINE_PROFILE="metrics",
            TOWLINE_METRICS_FILE=os.path.join(folder, "metrics-%p.prom"),
            TOWLINE_METRICS_INTERVAL="0.2",
        )
    options = ["--ranks", str(given.ranks), "--steps", str(given.steps), "--width", str(given.width)]
    if given.without_broadcast:
        options += ["--without-broadcast"]
    if name == "FlagCX":
        options += ["--flagcx", given.flagcx]
    began = time.monotonic()
    with subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", folder, *options], env=env, start_new_session=True) as process:
        try:
            code = process.wait(given.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            sys.exit(f"{name}: no end after {given.limit:.0f} s")
    if code != 0:
        sys.exit(f"{name}: training ended with status {code}")
    logs = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".log")]
    text = "".join(open(path, encoding="utf-8", errors="replace").read() for path in logs)
    if f"via NET/{network}".lower() not in text.lower():
        sys.exit(f"{name}: NCCL's log does not say 'via NET/{network}'; this run shows nothing")
    if name == "FlagCX" and not any(entry.startswith("flagcx-") for entry in os.listdir(folder)):
        sys.exit("FlagCX: it has written no log; this run shows nothing")
    counted = sent(folder) if name == "FlagCX" else None
    results = []
    for rank in range(given.ranks):
        with open(os.path.join(folder, f"rank{rank}.json"), encoding="utf-8") as file:
            results.append(json.load(file))
    # Each rank sends at least the share of a ring: all gradients once with two ranks.
    least = 2 * (given.ranks - 1) * results[0]["elements"] * 4 * given.steps
    if counted is not None:
        print(f"{name}: Towline counts {counted} bytes sent, for {least} of gradients", flush=True)
        if counted < least:
            sys.exit(f"{name}: that is too little; the gradients took another way")
    print(f"{name}: {given.steps} steps, {results[0]['elements']} parameters, {time.monotonic() - began:.1f} s", flush=True)
    return results


def sent(folder):
    """The bytes that Towline's metrics in `folder` say all ranks have sent."""
    total = 0
    for name in os.listdir(folder):
        if name.startswith("metrics-"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                rows = [line for line in file if line.startswith("towline_wire_bytes_total{") and 'direction="send"' in line]
            total += sum(int(float(line.rsplit(" ", 1)[1])) for line in rows)
    return total


def value(bits):
    """The float32 whose bits are written in `bits`."""
    return struct.unpack("<f", bytes.fromhex(bits))[0]


def differences(towline, name, other):
    """What is not the same over Towline and in the run `name`, in words."""
    for rank, (ours, theirs) in enumerate(zip(towline, other)):
        for step, (a, b) in enumerate(zip(ours["losses"], theirs["losses"])):
            if a != b:
                yield f"rank {rank}, step {step}: loss {value(a):.9g} ({a}) over Towline, {value(b):.9g} ({b}) in the run {name}"
                break
        if ours["parameters"] != theirs["parameters"]:
            yield f"rank {rank}: the final parameters over Towline and in the run {name} differ"
    for run_name, ranks in (("Towline", towline), (name, other)):
        if len({rank["parameters"] for rank in ranks}) != 1:
            yield f"{run_name}: the ranks ended with different parameters"
        if not all(abs(value(bits)) < float("inf") for rank in ranks for bits in rank["losses"]):
            yield f"{run_name}: a loss is not finite, so that equality would mean nothing"


def main():
    """The runs and the verdict."""
    given = arguments()
    if given.child:
        child(given)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        names = RUNS + (("FlagCX",) if given.flagcx else ())
        towline, *others = (run(name, given, given.out or scratch) for name in names)
    found = [line for name, other in zip(names[1:], others) for line in differences(towline, name, other)]
    for line in found:
        print(f"DIFFERENT: {line}")
    if not found:
        first, last = (value(towline[0]["losses"][i]) for i in (0, -1))
        print(f"EQUAL bit for bit: {given.steps} losses on {given.ranks} ranks ({first:.6f} to {last:.6f}) and all parameters")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
