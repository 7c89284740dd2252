"""The workload of the goodput benchmark's grid: two gloo ranks, snapshots through orch as often as ``checkpoint.interval`` requires.

The ledger is that of steps.py. The state is large enough that saving it costs something: two million parameters and Adam.

usage: saving.py LEDGER STEPS SECONDS_PER_STEP
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.train import context


def main(ledger: str, steps: int, seconds_per_step: float) -> None:
    """Train from the newest snapshot."""
    handle = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    dist.init_process_group("gloo")
    rank, training = dist.get_rank(), context()
    with open(f"{ledger}.pids", "a") as pids:
        pids.write(f"{rank} {os.getpid()}\n")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    ballast = nn.Embedding(2048, 1024)  # saved with the rest, never trained: no all-reduce to wait for
    ballast.requires_grad_(False)
    model = DistributedDataParallel(body)
    optimizer = torch.optim.Adam(body.parameters())
    first = 0
    if (saved := training.load()) is not None:
        model.load_state_dict(saved.state["model"])
        optimizer.load_state_dict(saved.state["optimizer"])
        first = saved.step
    inputs, targets = torch.randn(32, 64), torch.randint(0, 10, (32,))
    for step in range(first + 1, steps + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        training.report(step=step, total_steps=steps)
        if rank == 0:
            os.write(handle, f"{step} {time.monotonic_ns()} {os.getpid()}\n".encode())
        if training.should_save(step):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "ballast": ballast.state_dict()}
            training.save(state, step=step)
        time.sleep(seconds_per_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
