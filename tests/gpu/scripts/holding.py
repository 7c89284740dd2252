"""Allocates MIB mebibytes of its GPU and keeps it busy, until a file exists: `holding.py FILE MIB`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from orchestrator.train import context

over, mib = Path(sys.argv[1]), int(sys.argv[2])
ctx = context()
print(f"sees {torch.cuda.device_count()} GPU, {torch.cuda.get_device_name()}, as {ctx.device}", flush=True)
held = torch.zeros(mib * 2**20, dtype=torch.uint8, device=ctx.device)
factor = torch.randn(4096, 4096, device=ctx.device)
step = 0
while not over.exists() and not ctx.should_stop():
    for _ in range(20):
        product = factor @ factor
    torch.cuda.synchronize()
    step += 1
    ctx.report(step=step)
