"""The workload of the start and recovery benchmarks: a small MLP under DistributedDataParallel, the same for every peer.

Rank 0 appends a line ``step monotonic_ns pid`` after every optimizer step (CLOCK_MONOTONIC is one clock for all processes of
a machine). Every SAVE_EVERY steps (10) it saves model, optimizer and step with torch.save and rename, and starts from there.

usage: steps.py LEDGER STEPS [SECONDS_PER_STEP [SAVE_EVERY [DEVICE]]]; DEVICE is cpu, with gloo, or cuda, with NCCL.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

SAVE_EVERY = 10  # steps


def main(
    ledger: str, steps: int, seconds_per_step: float = 0.0, save_every: int = SAVE_EVERY, device: str = "cpu"
) -> None:
    """Train; ``ledger`` is the file that gets a line per step and, with ``.pids`` appended, one per process."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    handle = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank = dist.get_rank()
    with open(f"{ledger}.pids", "a") as pids:
        pids.write(f"{rank} {os.getpid()}\n")
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = DistributedDataParallel(bare.to(device))
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint = Path(f"{ledger}.pt")
    first = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    inputs, targets = torch.randn(32, 64).to(device), torch.randint(0, 10, (32,)).to(device)
    for step in range(first + 1, steps + 1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        if rank == 0:
            os.write(handle, f"{step} {time.monotonic_ns()} {os.getpid()}\n".encode())
            if step % save_every == 0:
                torch.save(
                    {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step},
                    f"{checkpoint}.new",
                )
                os.rename(f"{checkpoint}.new", checkpoint)
        if seconds_per_step:
            time.sleep(seconds_per_step)
    dist.destroy_process_group()


if __name__ == "__main__":
    _, path, count, *rest = sys.argv
    main(
        path,
        int(count),
        float(rest[0]) if rest else 0.0,
        int(rest[1]) if rest[1:] else SAVE_EVERY,
        rest[2] if rest[2:] else "cpu",
    )
