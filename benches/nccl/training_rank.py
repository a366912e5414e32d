"""One rank of a PyTorch training that `processes.py` drives, in the place of `rank.py`.

    training_rank.py RANK RANKS FILE

FILE is where the ranks find each other. An order names a way of training: `fsdp` (parameters and optimizer spread over the ranks)
or `ddp` (each rank has all of them). The model is made at the first order: a transformer of 365 million parameters in single
precision, which is also how it travels. A time is that of a whole step: forward, backward, optimizer.
"""

import json
import os
import sys
import time

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, HEADS, WORDS, LENGTH, BATCH = 1024, 24, 16, 30_720, 256, 4


class Model(nn.Module):
    """Words to the next words."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True) for _ in range(LAYERS)
        )
        self.leave = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words):
        """Scores of each next word."""
        inside = self.enter(words)
        for block in self.blocks:
            inside = block(inside)
        return self.leave(inside)


class Training:
    """One way of training: the model, its optimizer, and its data."""

    def __init__(self, way, rank):
        torch.manual_seed(2026)
        model = Model().cuda()
        if way == "fsdp":
            layers = ModuleWrapPolicy({nn.TransformerEncoderLayer})
            self.model = FullyShardedDataParallel(model, auto_wrap_policy=layers, use_orig_params=True, device_id=torch.cuda.current_device())
        else:
            self.model = DistributedDataParallel(model, device_ids=[torch.cuda.current_device()], gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(rank)
        self.words = torch.randint(WORDS, (BATCH, LENGTH + 1), device="cuda")

    def step(self):
        """One step; does not wait for the GPU."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            scores = self.model(self.words[:, :-1])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1).float(), self.words[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss


def measure(training, order):
    """Carries out an order; a step is wrong when its loss is not a number."""
    rows = []
    for size in order["sizes"]:
        cpu = time.process_time()
        for _ in range(order["warmups"]):
            training.step()
        torch.distributed.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(order["iterations"]):
            loss = training.step()
        torch.cuda.synchronize()
        took = (time.perf_counter() - began) / order["iterations"]
        cpu = time.process_time() - cpu
        rows.append({"size": size, "time_us": took * 1e6, "cpu_s": cpu, "wrong": 0 if torch.isfinite(loss) else 1})
    return {"rows": rows}


def main():
    """Until no more orders come."""
    rank, ranks, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    # Ranks of different hosts may share a GPU.
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", f"file://{path}", rank=rank, world_size=ranks, device_id=device)
    torch.distributed.barrier()
    print(json.dumps({"ready": True}), flush=True)
    trainings = {}
    for line in sys.stdin:
        order = json.loads(line)
        way = order["collective"]
        if way not in trainings:
            trainings[way] = Training(way, rank)
        print(json.dumps(measure(trainings[way], order)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
