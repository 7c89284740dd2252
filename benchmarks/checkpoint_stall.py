"""Measures how long training stands still for a checkpoint: ``context().save`` beside ``torch.save`` with fsync and ``dcp.async_save``.

The state is a multilayer perceptron with Adam. In each round every arm does ten times (at 100 million parameters twice) a training step and a
save, as a loop does that saves at every step; its value is their mean. The stall is the time of the save call,
``state_dict()`` included. As in a job, a persister writes our snapshots to storage meanwhile, in a process of its own.
The ratio of a training step with a snapshot at each step to one
without is reported as well, for a batch of 8 (a step that does little but move memory) and, except for the largest model, of
256; beside it the least cost of any copy: ``state_dict()`` and torch's own copy into memory that is already allocated.

On a GPU (--gpu) the host runs ahead of the device, and the time of a call says little. There the stall of every arm is the time of a save and
the step after it, until the device has done both, minus that of a step just before. The bare copy is into page-locked memory.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

from benchmarks import measure
from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.progress import ProgressPage, create_page
from orchestrator.train.script.training_context import Context

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SIZES = {"54K": (64, 13), "2M": (512, 8), "7M": (768, 12), "100M": (2048, 24)}  # width, layers
BATCH, LARGE_BATCH = 8, 256
TARGETS = {"torch.save with fsync": 0.05, "dcp.async_save": 0.5}
PERSISTER = """
import sys
from orchestrator.checkpoint.repository.persister import SnapshotPersister, StoreSettings
persister = SnapshotPersister(sys.argv[1], rank=0, settings=StoreSettings(root=sys.argv[2]))
persister.start()
sys.stdin.read()
persister.close()
"""


class Training:
    """One model with its optimizer."""

    def __init__(self, size: str, device: torch.device) -> None:
        self.device = device
        self.width, layers = SIZES[size]
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(self.width, self.width) for _ in range(layers)]).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.number = 0
        self.batch = BATCH

    def step(self) -> None:
        """Do one optimizer step; return when the device has done it."""
        self.optimizer.zero_grad()
        self.model(torch.randn(self.batch, self.width, device=self.device)).square().mean().backward()
        self.optimizer.step()
        self.settle()
        self.number += 1

    def settle(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def state(self) -> dict[str, Any]:
        """Return the state that every arm saves."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.number}

    @property
    def parameters(self) -> int:
        """Number of the model's parameters."""
        return sum(p.numel() for p in self.model.parameters())


def _save_with_fsync(training: Training, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(training.state(), file)
        file.flush()
        os.fsync(file.fileno())


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    value = call()
    return time.perf_counter() - began, value


def _longer(training: Training, save: Callable[[], Any]) -> float:
    """Return the seconds of a save and the step after it, minus those of a step before it."""
    plain, _ = _timed(training.step)
    began = time.perf_counter()
    save()
    training.step()
    return time.perf_counter() - began - plain


class Saves:
    """Snapshots of one training, as a rank under orch takes them."""

    def __init__(self, training: Training, place: Path) -> None:
        self._training = training
        self.snapshots = Path(tempfile.mkdtemp(prefix="stall-", dir="/dev/shm"))
        os.close(create_page(self.snapshots / "page"))
        self._page = ProgressPage.open(self.snapshots / "page")
        environ = {
            "ORCH_JOB_ID": "stall",
            "ORCH_ATTEMPT": "1",
            "ORCH_TOKEN": "stall",
            "ORCH_CHECKPOINT_DIR": str(place / "orch"),
            "ORCH_SNAPSHOT_DIR": str(self.snapshots),
        }
        self._context = Context(read_environment(environ), self._page)
        self._persister = subprocess.Popen(
            [sys.executable, "-c", PERSISTER, str(self.snapshots), environ["ORCH_CHECKPOINT_DIR"]],
            stdin=subprocess.PIPE,
        )
        self._copies: list[torch.Tensor] = []

    def save(self) -> float:
        """Save; return the seconds that the call took."""
        seconds, done = _timed(lambda: self._context.save(self._training.state(), step=self._training.number))
        assert done
        return seconds

    def bare_copy(self) -> float:
        """Copy all tensors of a state to where they were copied before, and nothing else; return the seconds."""
        if not self._copies:
            pinned = self._training.device.type == "cuda"
            self._copies = [
                torch.empty_like(tensor, device="cpu", pin_memory=pinned) for tensor in _tensors(self._training.state())
            ]
        return _timed(self._copy)[0]

    def _copy(self) -> None:
        torch._foreach_copy_(self._copies, _tensors(self._training.state()), non_blocking=True)
        self._training.settle()

    def close(self) -> None:
        """End the persister, and remove the snapshots."""
        self._context.leave_page()
        self._persister.communicate()
        shutil.rmtree(self.snapshots)


def _tensors(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    if isinstance(state, dict):
        state = list(state.values())
    return [tensor for item in state for tensor in _tensors(item)] if isinstance(state, list) else []


def measured(size: str, rounds: int, place: Path, device: torch.device) -> dict[str, Any]:
    """Measure all arms at one size."""
    training = Training(size, device)
    saves = Saves(training, place / size)
    try:
        times = 2 if size == "100M" else 10
        blocks = {name: _mean_of(one, times) for name, one in _arms(training, saves, place).items()}
        arms = measure.interleave(blocks, rounds)
        ways = {"orch": saves.save, "bare_copy": saves.bare_copy}
        batches = (BATCH,) if size == "100M" else (BATCH, LARGE_BATCH)
        steps = [_step_shares(training, ways, rounds, batch) for batch in batches]
    finally:
        saves.close()
    ours, bare = arms.values.pop("orch"), arms.values.pop("bare copy")
    name = f"checkpoint_stall_{size}"
    found = _judged(name, ours, arms.values, [of["orch"] for of in steps], parameters=training.parameters)
    return {
        **found,
        "targets": TARGETS,
        "bare_copy": _judged(name, bare, arms.values, [of["bare_copy"] for of in steps]),
    }


def _judged(
    name: str, ours: list[float], peers: Mapping[str, list[float]], steps: list[dict[str, float]], **more: Any
) -> dict[str, Any]:
    found = measure.result(name, "seconds", "lower", ours, peers, **more)
    met = {name: found["ratio"][name]["high"] <= limit for name, limit in TARGETS.items() if name in found["ratio"]}
    return {**found, "met": met, "step_time_with_snapshots": steps}


def _arms(training: Training, saves: Saves, place: Path) -> dict[str, Callable[[], float]]:
    def ours() -> float:
        training.step()
        return stall_of(saves.save)

    def bare() -> float:
        training.step()
        return stall_of(saves.bare_copy)

    def synchronous() -> float:
        training.step()
        return stall_of(lambda: _save_with_fsync(training, place / "state.pt"))

    def asynchronous() -> float:
        training.step()
        target = place / "dcp"
        shutil.rmtree(target, ignore_errors=True)
        futures: list[Any] = []
        seconds = stall_of(lambda: futures.append(async_save(training.state(), checkpoint_id=target)))
        futures[0].result()
        return seconds

    def stall_of(save: Callable[[], Any]) -> float:
        return _longer(training, save) if training.device.type == "cuda" else _timed(save)[0]

    return {
        "orch": ours,
        "bare copy": bare,
        "torch.save with fsync": synchronous,
        "dcp.async_save": asynchronous,
    }


def _mean_of(one: Callable[[], float], times: int) -> Callable[[], float]:
    return lambda: statistics.fmean(one() for _ in range(times))


def _step_shares(
    training: Training, saves: Mapping[str, Callable[[], float]], rounds: int, batch: int
) -> dict[str, dict[str, float]]:
    """Return, for each way to save, the median step times in turns: with a snapshot before the step, and without."""
    training.batch = batch
    training.step()
    plain: list[float] = []
    saving: dict[str, list[float]] = {name: [] for name in saves}
    for _ in range(rounds):
        for name, save in saves.items():
            plain.append(_timed(training.step)[0])
            saving[name].append(save() + _timed(training.step)[0])
    return {
        name: {
            "batch": batch,
            "without_seconds": statistics.median(plain),
            "with_seconds": statistics.median(having),
            **measure.ratio(having, plain),
        }
        for name, having in saving.items()
    }


def main() -> None:
    """Run and report."""
    options = measure.parser(str(__doc__).partition("\n")[0], 20)
    options.add_argument("--sizes", default=",".join(SIZES), help="which of " + ", ".join(SIZES))
    options.add_argument(
        "--threads", type=int, default=1, help="of torch in the training process (default 1, as a rank has)"
    )
    options.add_argument("--gpu", action="store_true", help="the model is on a GPU")
    chosen = options.parse_args()
    device = torch.device("cuda" if chosen.gpu else "cpu")
    torch.set_num_threads(chosen.threads)
    warnings.filterwarnings("ignore")
    place = Path(tempfile.mkdtemp(prefix="stall-"))
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=0, world_size=1)
    try:
        results = {size: measured(size, chosen.pairs, place, device) for size in chosen.sizes.split(",")}
    finally:
        dist.destroy_process_group()
        shutil.rmtree(place)
    measure.report(
        {
            "measure": "checkpoint_stall_gpu" if chosen.gpu else "checkpoint_stall",
            "unit": "seconds",
            "better": "lower",
            "threads": chosen.threads,
            "device": torch.cuda.get_device_name() if chosen.gpu else "cpu",
            "sizes": results,
            "met": all(all(found["met"].values()) for found in results.values()),
            **{
                key: value
                for key, value in next(iter(results.values())).items()
                if key in ("machine", "commit", "date")
            },
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
