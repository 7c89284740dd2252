"""Trains a tiny model for three steps on two gloo ranks; prints when each phase was over, as JSON."""

import json
import os
import sys
import time

marks = {"first_line": time.time()}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

dist.init_process_group("gloo")
marks["rendezvous"] = time.time()
model = torch.nn.parallel.DistributedDataParallel(
    torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
)
marks["ddp"] = time.time()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 32)), torch.randint(0, 10, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    marks[f"step_{step}"] = time.time()
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).sum().item()
sys.stdout.write(
    json.dumps({"rank": int(os.environ["RANK"]), "marks": marks, "sum": total.item(), "weights": weights}) + "\n"
)
dist.destroy_process_group()
