"""A training loop on the processor; prints the mean step time in seconds. `cpu_steps.py STEPS`."""

from __future__ import annotations

import sys
import time

import torch


def main() -> None:
    """A small MLP, one thread."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(256, 256), torch.randint(0, 10, (256,))
    steps = int(sys.argv[1])
    started = 0.0
    for step in range(steps + 20):
        if step == 20:  # warm by then
            started = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    print((time.perf_counter() - started) / steps)


if __name__ == "__main__":
    main()
