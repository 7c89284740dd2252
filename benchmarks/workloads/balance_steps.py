"""Trains on two ranks, of which the second computes everything twice, turn by turn: `OUT TURNS STEPS`.

A turn is three trainings of the same model: both ranks at full speed, the second at half speed with equal shares, and the same with
``balance: measured``. OUT gets the samples per second of each turn (JSON, from rank 0), by processor time: a step lasts as
long as its slowest rank computes, whatever else the machine does meanwhile.
"""

from __future__ import annotations

import copy
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.training_context import Context
from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.engine.step_clock import BusyClock
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager
from orchestrator.train.trainer.process_group import RankGroup, join_ranks

GLOBAL_BATCH = 960
SETTLING = 10
"""Steps between checkpoints; those up to the second are not counted."""


class Twice(nn.Module):
    """A model with ``extra`` additional forward and backward passes, which count for nothing."""

    def __init__(self, inner: nn.Module, *, extra: int) -> None:
        super().__init__()
        self.inner = inner
        self._shadows = [copy.deepcopy(inner) for _ in range(extra)]

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the model's output."""
        for shadow in self._shadows:
            shadow(inputs).square().mean().backward()
            shadow.zero_grad()
        found: Tensor = self.inner(inputs)
        return found


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


def samples_per_second(samples: int, seconds: list[float]) -> float:
    """Return the rate of steps that last as long as the slowest rank's."""
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return samples * len(seconds) / float(slowest.sum())


def trained(
    place: RankGroup, data: TensorDataset, steps: int, balance: str, *, slow: bool = True
) -> tuple[float, list[int]]:
    """Return the samples per second of the training system, and the shares that it ended with."""
    saved = Path(tempfile.mkdtemp(prefix="orch-balance-")) if place.is_main else None
    shared: list[Any] = [str(saved)]
    dist.broadcast_object_list(shared)
    environment = read_environment({**_launched(place), "ORCH_CHECKPOINT_DIR": shared[0], "ORCH_DEVICE": "cpu"})
    common: dict[str, Any] = {"checkpoint_frequency": SETTLING, "progress_bar": False}
    if balance == "measured":  # a pass has room for any share
        config = MultiGPUConfig(batch_size=GLOBAL_BATCH, global_batch_size=GLOBAL_BATCH, balance="measured", **common)
    else:
        config = MultiGPUConfig(batch_size=GLOBAL_BATCH // 2, **common)
    manager = MultiGPUTrainingManager(config, ctx=Context(environment))
    clock = StepTimes(manager.trainer.clock, place.device, now=time.thread_time)
    manager.trainer.clock = clock
    manager.setup_training(
        Twice(model(), extra=place.rank if slow else 0), data, loss_fn=nn.functional.mse_loss, optimizer=sgd
    )
    manager.fit(max_steps=2 * SETTLING + steps)
    shares = manager.fault_tolerance.shares
    portions = [] if shares is None else list(shares.portions)
    dist.barrier()
    if saved is not None:
        shutil.rmtree(saved)
    return samples_per_second(GLOBAL_BATCH, clock.whole[2 * SETTLING :]), portions


class StepTimes(BusyClock):
    """A busy clock that also keeps the processor time of whole steps."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.whole: list[float] = []
        self._start = 0.0

    def begin(self) -> None:
        """Start a step."""
        self._start = time.thread_time()
        super().begin()

    def end(self) -> None:
        """End the step."""
        super().end()
        self.whole.append(time.thread_time() - self._start)


def _launched(place: RankGroup) -> dict[str, str]:
    size = str(place.world_size)
    rank = str(place.rank)
    return {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}


def main() -> None:
    out, turns, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    place = join_ranks(MultiGPUConfig(backend="gloo"))
    generator = torch.Generator().manual_seed(0)
    samples = GLOBAL_BATCH * (2 * SETTLING + steps)
    data = TensorDataset(torch.randn(samples, 50, generator=generator), torch.randn(samples, 3, generator=generator))
    found: dict[str, list[Any]] = {"both_at_full_speed": [], "equal": [], "measured": [], "portions": []}
    for turn in range(turns + 1):
        rates: dict[str, float] = {}
        for kind in ("both_at_full_speed", "equal", "measured")[:: 1 if turn % 2 else -1]:
            slow = kind != "both_at_full_speed"
            rates[kind], portions = trained(place, data, steps, kind if slow else "equal", slow=slow)
            if kind == "measured" and turn:
                found["portions"].append(portions)
        if turn:  # the first warms up
            for kind, rate in rates.items():
                found[kind].append(rate)
    if place.is_main:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
