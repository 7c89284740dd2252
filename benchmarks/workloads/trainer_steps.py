"""The training loop of each contender, turn by turn in one process per rank: `OUT PAIRS STEPS`.

Same model, same data, same optimizer; a turn is an epoch of STEPS steps. Each contender is used as its documentation
shows. OUT gets, for each contender, the seconds per step of every turn (JSON, from rank 0).
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from orchestrator.train.trainer.config.config import MultiGPUConfig
from orchestrator.train.trainer.loop.manager import MultiGPUTrainingManager

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 64
WIDTHS = (50, 1024, 1024, 512, 512, 256, 3)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in pairwise(WIDTHS):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3)


def loader(data: TensorDataset, ranks: int) -> DataLoader[Any]:
    if ranks == 1:
        return DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    return DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, drop_last=True))


def set_epoch(batches: Any, epoch: int) -> None:
    if isinstance(batches.sampler, DistributedSampler):
        batches.sampler.set_epoch(epoch)


def plain(data: TensorDataset, ranks: int) -> Callable[[int], None]:
    net: nn.Module = model()
    if ranks > 1:
        net = DistributedDataParallel(net)
    optimizer, batches = adam(net.parameters()), loader(data, ranks)

    def turn(epoch: int) -> None:
        set_epoch(batches, epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()

    return turn


def ours(data: TensorDataset, _ranks: int) -> Callable[[int], None]:
    config = MultiGPUConfig(batch_size=BATCH, checkpoint_frequency=10**9, progress_bar=False)
    manager = MultiGPUTrainingManager(config)
    _, batches, _ = manager.setup_training(model(), data, loss_fn=nn.functional.mse_loss, optimizer=adam)

    def turn(epoch: int) -> None:
        manager.train_epoch(batches, epoch)

    return turn


def fabric(data: TensorDataset, ranks: int) -> Callable[[int], None]:
    from lightning_fabric import Fabric

    made = Fabric(accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto")
    made.launch()
    bare = model()
    net, optimizer = made.setup(bare, adam(bare.parameters()))
    batches = made.setup_dataloaders(DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True))

    def turn(epoch: int) -> None:
        set_epoch(batches, epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            made.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()

    return turn


def accelerate(data: TensorDataset, _ranks: int) -> Callable[[int], None]:
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    bare = model()
    prepared = made.prepare(
        bare, adam(bare.parameters()), DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)
    )
    net, optimizer, batches = prepared

    def turn(_epoch: int) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            made.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()

    return turn


def main() -> None:
    out, pairs, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if ranks > 1:
        dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(1)
    count = steps * BATCH * ranks
    data = TensorDataset(
        torch.randn(count, WIDTHS[0], generator=generator), torch.randn(count, WIDTHS[-1], generator=generator)
    )
    turns: dict[str, Callable[[int], None]] = {}
    absent: dict[str, str] = {}
    for name, make in {"ours": ours, "torch": plain, "fabric": fabric, "accelerate": accelerate}.items():
        try:
            turns[name] = make(copy.deepcopy(data), ranks)
        except ImportError as error:
            absent[name] = str(error)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-1, pairs):
        for name in turns if number % 2 == 0 else reversed(turns):
            if ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            turns[name](number + 1)
            if number >= 0:
                seconds[name].append((time.perf_counter() - began) / steps)
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps({"seconds": seconds, "absent": absent}))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
