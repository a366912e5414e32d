#!/usr/bin/env python3
"""Trains a small model with PyTorch's DistributedDataParallel over Towline and over NCCL's Socket: equal bit for bit?

Two ranks (`--ranks`), one seed, deterministic algorithms, 50 steps. Each step's loss on each rank, and a digest of the
final parameters, must be the same with both networks, and the ranks must agree on the parameters. NCCL's log must show
that Towline carried the run that is named after it. Exit status 0 only then.

    tests/gpu/ddp_losses.py --towline target/release
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
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
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
    # Buckets from a few hundred kilobytes to several megabytes, so that more than one all-reduce is in flight.
    parallel = DistributedDataParallel(model, device_ids=[rank], bucket_cap_mb=8)
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
    torch.distributed.destroy_process_group()


def child(given):
    """All ranks of one training run, one process each."""
    import torch.multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(train, args=(given, port), nprocs=given.ranks)


def run(network, given, place):
    """One training run over `network`; gives the ranks' results, or ends the script with what went wrong."""
    folder = os.path.join(place, network.lower())
    os.makedirs(folder, exist_ok=True)
    # What an earlier run left would count as evidence of this one.
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
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
    options = ["--ranks", str(given.ranks), "--steps", str(given.steps), "--width", str(given.width)]
    began = time.monotonic()
    with subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", folder, *options], env=env, start_new_session=True) as process:
        try:
            code = process.wait(given.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            sys.exit(f"{network}: no end after {given.limit:.0f} s")
    if code != 0:
        sys.exit(f"{network}: training ended with status {code}")
    logs = [os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".log")]
    text = "".join(open(path, encoding="utf-8", errors="replace").read() for path in logs)
    if f"via NET/{network}".lower() not in text.lower():
        sys.exit(f"{network}: NCCL's log does not say 'via NET/{network}'; this run shows nothing")
    results = []
    for rank in range(given.ranks):
        with open(os.path.join(folder, f"rank{rank}.json"), encoding="utf-8") as file:
            results.append(json.load(file))
    print(f"{network}: {given.steps} steps, {results[0]['elements']} parameters, {time.monotonic() - began:.1f} s", flush=True)
    return results


def value(bits):
    """The float32 whose bits are written in `bits`."""
    return struct.unpack("<f", bytes.fromhex(bits))[0]


def differences(towline, other):
    """What is not the same, in words."""
    for rank, (ours, theirs) in enumerate(zip(towline, other)):
        for step, (a, b) in enumerate(zip(ours["losses"], theirs["losses"])):
            if a != b:
                yield f"rank {rank}, step {step}: loss {value(a):.9g} ({a}) over Towline, {value(b):.9g} ({b}) over Socket"
                break
        if ours["parameters"] != theirs["parameters"]:
            yield f"rank {rank}: the final parameters differ"
    for name, ranks in (("Towline", towline), ("Socket", other)):
        if len({rank["parameters"] for rank in ranks}) != 1:
            yield f"{name}: the ranks ended with different parameters"
        if not all(abs(value(bits)) < float("inf") for rank in ranks for bits in rank["losses"]):
            yield f"{name}: a loss is not finite, so that equality would mean nothing"


def main():
    """Both runs and the verdict."""
    given = arguments()
    if given.child:
        child(given)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        towline, other = (run(network, given, given.out or scratch) for network in RUNS)
    found = list(differences(towline, other))
    for line in found:
        print(f"DIFFERENT: {line}")
    if not found:
        first, last = (value(towline[0]["losses"][i]) for i in (0, -1))
        print(f"EQUAL bit for bit: {given.steps} losses on {given.ranks} ranks ({first:.6f} to {last:.6f}) and all parameters")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
