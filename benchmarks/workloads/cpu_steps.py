"""A training loop on the processor: for each line with a number that it reads, it makes that many steps and prints their mean seconds."""

from __future__ import annotations

import sys
import time

import torch

WARM_UP = 50


def main() -> None:
    """Train a small MLP in one thread; print `ready` once it is warm."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs, labels = torch.randn(256, 256), torch.randint(0, 10, (256,))

    def steps(count: int) -> float:
        started = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        return (time.perf_counter() - started) / count

    steps(WARM_UP)
    print("ready", flush=True)
    for line in sys.stdin:
        print(steps(int(line)), flush=True)


if __name__ == "__main__":
    main()
