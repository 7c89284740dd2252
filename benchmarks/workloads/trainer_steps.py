"""The training loop of each contender, turn by turn in one process per rank: `OUT PAIRS STEPS DEVICE PRECISION`.

Same model, same data, same optimizer; a turn is an epoch of STEPS steps. Each contender is used as its documentation
shows. OUT gets, for each contender, the seconds per step of every turn (JSON, from rank 0).
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

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


@dataclass(frozen=True, slots=True)
class Case:
    """Data, ranks, device and precision of a contender."""

    data: TensorDataset
    ranks: int
    device: torch.device
    precision: Literal["fp32", "bf16", "fp16"]

    @property
    def on_gpu(self) -> bool:
        """Whether batches have to be copied to a GPU."""
        return self.device.type == "cuda"


def loader(case: Case) -> DataLoader[Any]:
    pinned = case.on_gpu
    if case.ranks == 1:
        return DataLoader(case.data, batch_size=BATCH, shuffle=True, drop_last=True, pin_memory=pinned)
    sampler: DistributedSampler[Any] = DistributedSampler(case.data, drop_last=True)
    return DataLoader(case.data, batch_size=BATCH, sampler=sampler, pin_memory=pinned)


def set_epoch(batches: Any, epoch: int) -> None:
    if isinstance(batches.sampler, DistributedSampler):
        batches.sampler.set_epoch(epoch)


def plain(case: Case) -> Callable[[int], None]:
    net: nn.Module = model().to(case.device)
    if case.ranks > 1:
        net = DistributedDataParallel(net)
    optimizer, batches = adam(net.parameters()), loader(case)
    if case.on_gpu:
        return plain_on_gpu(case, net, optimizer, batches)

    def turn(epoch: int) -> None:
        set_epoch(batches, epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()

    return turn


def plain_on_gpu(case: Case, net: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> Callable[[int], None]:
    """Return the loop of torch's documentation of automatic mixed precision; fp32 has neither autocast nor a scaler."""
    dtype = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    autocast = nullcontext() if dtype is None else torch.autocast(case.device.type, dtype=dtype)
    scaler = torch.amp.GradScaler(case.device.type) if case.precision == "fp16" else None

    def turn(_epoch: int) -> None:
        for host_inputs, host_targets in batches:
            inputs = host_inputs.to(case.device, non_blocking=True)
            targets = host_targets.to(case.device, non_blocking=True)
            optimizer.zero_grad()
            with autocast:
                loss = nn.functional.mse_loss(net(inputs), targets)
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()

    return turn


def ours(case: Case) -> Callable[[int], None]:
    config = MultiGPUConfig(batch_size=BATCH, checkpoint_frequency=10**9, progress_bar=False, precision=case.precision)
    manager = MultiGPUTrainingManager(config)
    _, batches, _ = manager.setup_training(model(), case.data, loss_fn=nn.functional.mse_loss, optimizer=adam)
    assert manager.place.device.type == case.device.type

    def turn(epoch: int) -> None:
        manager.train_epoch(batches, epoch)

    return turn


def fabric(case: Case) -> Callable[[int], None]:
    from lightning_fabric import Fabric

    precision = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}[case.precision]
    made = Fabric(
        accelerator=case.device.type,
        devices=case.ranks,
        strategy="ddp" if case.ranks > 1 else "auto",
        precision=precision,  # type: ignore[arg-type]  # one of its words
    )
    made.launch()
    bare = model()
    net, optimizer = made.setup(bare, adam(bare.parameters()))
    batches = made.setup_dataloaders(
        DataLoader(case.data, batch_size=BATCH, shuffle=True, drop_last=True, pin_memory=case.on_gpu)
    )

    def turn(epoch: int) -> None:
        set_epoch(batches, epoch)
        for inputs, targets in batches:
            optimizer.zero_grad()
            made.backward(nn.functional.mse_loss(net(inputs), targets))
            optimizer.step()

    return turn


def accelerate(case: Case) -> Callable[[int], None]:
    from accelerate import Accelerator

    made = Accelerator(cpu=not case.on_gpu, mixed_precision="no" if case.precision == "fp32" else case.precision)
    bare = model()
    prepared = made.prepare(
        bare,
        adam(bare.parameters()),
        DataLoader(case.data, batch_size=BATCH, shuffle=True, drop_last=True, pin_memory=case.on_gpu),
    )
    net, optimizer, batches = prepared

    def turn(_epoch: int) -> None:
        for inputs, targets in batches:
            optimizer.zero_grad()
            with made.autocast():
                loss = nn.functional.mse_loss(net(inputs), targets)
            made.backward(loss)
            optimizer.step()

    return turn


def main() -> None:
    out, pairs, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    device, precision = torch.device(sys.argv[4]), cast("Any", sys.argv[5])
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
            turns[name] = make(Case(copy.deepcopy(data), ranks, device, precision))
        except ImportError as error:
            absent[name] = str(error)
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(-1, pairs):
        for name in turns if number % 2 == 0 else reversed(turns):
            if ranks > 1:
                dist.barrier()
            began = time.perf_counter()
            turns[name](number + 1)
            if device.type == "cuda":
                torch.cuda.synchronize()
            if number >= 0:
                seconds[name].append((time.perf_counter() - began) / steps)
    if int(os.environ.get("RANK", "0")) == 0:
        out.write_text(json.dumps({"seconds": seconds, "absent": absent}))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
