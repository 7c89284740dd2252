"""Elastic job in plain torch: fits a line on any number of ranks, and records the samples of each step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.train import context

BATCH, SAMPLES = 12, 60


def order(epoch: int) -> list[int]:
    found: list[int] = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
    return found


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=generator)
    return inputs, inputs.sum(dim=1)


def main(steps: int, stop_file: Path, result: Path) -> None:
    ctx = context()
    if ctx.world_size > 1:
        dist.init_process_group("gloo")
    share = ctx.batch_share(BATCH, per_pass=2)
    inputs, targets = data()
    weights = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=0.05, momentum=0.9)
    step, checkpoint = 0, ctx.load()
    if checkpoint is not None:
        step = checkpoint.step
        weights.data.copy_(checkpoint.state["weights"])
        optimizer.load_state_dict(checkpoint.state["optimizer"])
    done = False
    while not done:
        epoch, position = divmod(step * BATCH, SAMPLES)
        taken: list[int] = []
        optimizer.zero_grad(set_to_none=False)
        for piece in share.pieces:
            rows = order(epoch)[position + piece.start : position + piece.stop]
            loss = ((inputs[rows] @ weights - targets[rows]) ** 2).mean()
            (loss * piece.weight).backward()
            taken += rows
        # One rank may see the file a step before another, so they agree on it, as on the request to stop.
        told = torch.tensor([float(ctx.should_stop()), float(stop_file.exists())])
        if ctx.world_size > 1:
            assert weights.grad is not None
            dist.all_reduce(weights.grad)
            weights.grad /= ctx.world_size
            dist.all_reduce(told)
        optimizer.step()
        step += 1
        line = {"step": step, "ranks": ctx.world_size, "attempt": ctx.attempt, "rank": ctx.rank, "samples": taken}
        with Path(f"{result}.{ctx.rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        ctx.report(step=step, total_steps=steps)
        if ctx.should_save(step) or told[0]:
            ctx.save({"weights": weights.detach().clone(), "optimizer": optimizer.state_dict()}, step=step)
        if told[0]:
            return
        done = step >= steps and bool(told[1])
        time.sleep(0.02)
    if ctx.is_main:
        result.write_text(json.dumps({"step": step, "weights": weights.tolist()}))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
