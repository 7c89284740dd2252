"""Makes twenty steps on its GPU, then injects a fault, in its first attempt only: `faulty.py KIND`."""

from __future__ import annotations

import sys

import torch

from orchestrator.train import context

KIND = sys.argv[1]
STEPS = 20
ctx = context()


def out_of_memory() -> None:
    held = []
    while True:
        held.append(torch.zeros(2**30, dtype=torch.uint8, device=ctx.device))


def wrong_index() -> None:
    table = torch.nn.Embedding(10, 4, device=ctx.device)
    table(torch.tensor([3, 99], device=ctx.device))
    torch.cuda.synchronize()


def wild_pointer() -> None:
    """Write to an address without memory, as a kernel with a bug does."""
    storage = torch._C._construct_storage_from_data_pointer(0x7F00_0000_0000, ctx.device, 2**20)
    torch.empty(0, dtype=torch.uint8, device=ctx.device).set_(storage).fill_(1)
    torch.cuda.synchronize()


def endless_kernel() -> None:
    torch.cuda._sleep(2**62)
    torch.cuda.synchronize()


factor = torch.randn(1024, 1024, device=ctx.device)
for step in range(1, STEPS + 1):
    (factor @ factor).sum().item()
    ctx.report(step=step)
if ctx.attempt == 1:
    {"oom": out_of_memory, "assert": wrong_index, "pointer": wild_pointer, "hang": endless_kernel}[KIND]()
