"""Helpers that start a script on several ranks, as a launcher would, and objects that scripts and tests both build."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.ports import free_port
from tests.support.stack import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "trainer_scripts"
DEADLINE_SECONDS = PATIENCE_SECONDS
_STARTS = itertools.count()


def environment(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ORCH_", "TORCHELASTIC_"))}
    return kept | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        **more,
    }


class Ranks:
    """Processes of one run, with their outputs."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.processes = processes

    def wait(self) -> list[tuple[int, str, str]]:
        """Return (status, stdout, stderr) of every rank."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            ended.append((process.returncode, out, err))
        return ended

    def signal(self, number: signal.Signals, *ranks: int) -> None:
        for rank in ranks or range(len(self.processes)):
            self.processes[rank].send_signal(number)


@contextmanager
def start(script: str, *arguments: object, ranks: int = 2, cwd: Path, **more: str) -> Iterator[Ranks]:
    """Run a script of `trainer_scripts` (or any path) on `ranks` processes; none is left behind."""
    port = free_port()
    # orch's checkpoints treat all ranks of one parent as one run, unless their launcher counts its restarts.
    more = {"TORCHELASTIC_RESTART_COUNT": str(next(_STARTS)), **more}
    path = SCRIPTS / script
    processes = [
        subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            env=environment(rank, ranks, port, **more),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        yield Ranks(processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.communicate()


def run(script: str, *arguments: object, ranks: int = 2, cwd: Path, **more: str) -> list[tuple[int, str, str]]:
    with start(script, *arguments, ranks=ranks, cwd=cwd, **more) as started:
        return started.wait()


def wait_until(condition: Callable[[], Any], what: str, seconds: float = DEADLINE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.01)


# Objects that both sides of a comparison build

STEPS = 6
RANK_BATCH = 8


def linear_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def normalized_model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def global_batches(steps: int = STEPS, size: int = 2 * RANK_BATCH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    inputs = [torch.randn(size, 8, generator=generator) for _ in range(steps)]
    return [(values, (values.sum(dim=1) > 0).long() + (values[:, 0] > 0).long()) for values in inputs]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.float(), targets)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained_alone(model: nn.Module, batches: list[tuple[Tensor, Tensor]], *, clip: float | None = None) -> nn.Module:
    """Return the model as one process trains it on whole batches."""
    optimizer = momentum(model.parameters())
    for inputs, targets in batches:
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model
