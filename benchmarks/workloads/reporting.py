"""The workload of the hang benchmark: the model of steps.py, in which every rank reports its steps as a script under orch does.

Rank 0 appends a line ``step monotonic_ns pid`` after every optimizer step. With PAUSE_STEPS, rank 0 stands still for PAUSE_SECONDS
after every PAUSE_STEPS steps, by turns asleep and computing, without a report, as in an evaluation or with a slow disk.

usage: reporting.py LEDGER STEPS SECONDS_PER_STEP [PAUSE_STEPS PAUSE_SECONDS]
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


def main(ledger: str, steps: int, seconds_per_step: float, pause_steps: int = 0, pause_seconds: float = 0.0) -> None:
    """Train; ``ledger`` is the file that gets a line per step and, with ``.pids`` appended, one per process."""
    handle = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    dist.init_process_group("gloo")
    training = context()
    with open(f"{ledger}.pids", "a") as pids:
        pids.write(f"{training.rank} {os.getpid()}\n")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)))
    optimizer = torch.optim.Adam(model.parameters())
    found = training.load()
    first = found.step if found else 0
    inputs, targets = torch.randn(32, 64), torch.randint(0, 10, (32,))
    for step in range(first + 1, steps + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        training.report(step=step, total_steps=steps)
        training.save({"step": step}, step=step)
        if training.is_main:
            os.write(handle, f"{step} {time.monotonic_ns()} {os.getpid()}\n".encode())
            if pause_steps and step % pause_steps == 0:
                _stand_still(pause_seconds, busy=step % (2 * pause_steps) == 0)
        time.sleep(seconds_per_step)
    dist.destroy_process_group()


def _stand_still(seconds: float, *, busy: bool) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not busy:
            time.sleep(end - time.monotonic())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), *map(int, sys.argv[4:5]), *map(float, sys.argv[5:6]))
