"""The workload of the live insight benchmark: steps of real work in lockstep, and at one of them a fault of rank 1.

usage: faulty.py FAULT AT_STEP [DIRECTORY]
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from orchestrator.train import context

STEP_SECONDS = 0.2
STARVED_FACTOR = 3.0
"""Steps for which the starved loader delays a batch, however long these are on a machine that does other work."""
FAULTY_RANK = 1
LEAK_BYTES = 4 * 2**20


class Batches(Dataset[torch.Tensor]):
    """A dataset with rows that are slow from the step on at which the fault begins."""

    def __init__(self, slow_from: int) -> None:
        self.slow_from = slow_from
        self.step_seconds = multiprocessing.get_context("fork").Value("d", STEP_SECONDS)

    def __len__(self) -> int:
        """Return more than any run takes."""
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return one batch."""
        if index >= self.slow_from:
            time.sleep(STARVED_FACTOR * self.step_seconds.value)
        return torch.randn(32, 64)


def work(seconds: float) -> None:
    """Use a processor for this many seconds."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(2000))


def set_up(fault: str) -> None:
    """Join the process group; for some faults never, or with a wrong world size."""
    if fault == "world size":
        dist.init_process_group("gloo", world_size=int(os.environ["WORLD_SIZE"]) + 2, rank=int(os.environ["RANK"]))
    if fault == "never enters" and int(os.environ["RANK"]) == FAULTY_RANK:
        threading.Event().wait()
    dist.init_process_group("gloo")


def fail(fault: str, kept: list[bytearray]) -> None:
    """Inject the fault into rank 1, at each step from the fault on."""
    match fault:
        case "deadlock":
            lock = threading.Lock()
            with lock:
                lock.acquire()
        case "asleep":
            time.sleep(1e6)
        case "slow rank" | "slow rank, no reports":
            work(2.0 * STEP_SECONDS)
        case "slow rank, asleep":
            time.sleep(2.0 * STEP_SECONDS)
        case "memory":
            kept.append(bytearray(os.urandom(1024)) * (LEAK_BYTES // 1024))


def main(fault: str, at_step: int, directory: str = "") -> None:
    """Train until the process is ended."""
    if fault == "port in use":
        socket.create_server(("127.0.0.1", int(directory)))
    set_up(fault)
    training, reports = context(), fault != "slow rank, no reports"
    pair = dist.new_group(list(range(dist.get_world_size())))
    model = DistributedDataParallel(nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = Batches(at_step)
    starved = DataLoader(rows, batch_size=None, num_workers=1, prefetch_factor=2, multiprocessing_context="fork")
    batches = iter(starved) if fault == "starved loader" else iter(lambda: torch.randn(32, 64), None)
    kept: list[bytearray] = []
    for step, batch in enumerate(batches, start=1):
        began = time.monotonic()
        work(STEP_SECONDS / 2.0)
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        begun = step >= at_step
        rows.step_seconds.value = max(STEP_SECONDS, 0.9 * rows.step_seconds.value + 0.1 * (time.monotonic() - began))
        if begun and training.rank == FAULTY_RANK:
            fail(fault, kept)
        if fault == "other group":
            dist.all_reduce(torch.ones(1), group=pair if begun and training.rank == FAULTY_RANK else None)
        if fault == "full disk" and step % 20 == 0:
            training.save({"rows": torch.randn(2**17), "step": step}, step=step)
        if reports:
            training.report(step=step, loss=math.nan if fault == "nan" and begun else float(loss))


if __name__ == "__main__":
    main(sys.argv[1].replace("_", " "), int(sys.argv[2]), *sys.argv[3:])
