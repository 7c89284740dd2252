"""How long training stands still for a checkpoint: ``context().save`` beside ``torch.save`` with fsync and ``dcp.async_save``.

The state is a multilayer perceptron with Adam after a few steps. Each round does one training step and one save with every arm; the
stall is the time that the save call takes; with ``overlap``, also what the next optimizer step waits for the rest. As in a
job, a persister brings our snapshots to storage meanwhile, in a process of its own. The time of a training step with a
snapshot at each step, over that without, is reported as well, for a batch of 8 (a step that does next to nothing but move memory)
and, but for the largest model, of 256.
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
from orchestrator.checkpoint.overlap import OptimizerGuard
from orchestrator.checkpoint.snapshot_writer import SnapshotWriter
from orchestrator.checkpoint.tensor_copy import copy_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

SIZES = {"54K": (64, 13), "2M": (512, 8), "7M": (768, 12), "100M": (2048, 24)}  # width, layers
BATCH, LARGE_BATCH = 8, 256
TARGETS = {"torch.save with fsync": 0.05, "dcp.async_save": 0.5}
PERSISTER = """
import sys
from orchestrator.checkpoint.persister import SnapshotPersister, StoreSettings
persister = SnapshotPersister(sys.argv[1], rank=0, settings=StoreSettings(root=sys.argv[2]))
persister.start()
sys.stdin.read()
persister.close()
"""


class Training:
    """One model with its optimizer."""

    def __init__(self, size: str) -> None:
        self.width, layers = SIZES[size]
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*[torch.nn.Linear(self.width, self.width) for _ in range(layers)])
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.number = 0
        self.batch = BATCH

    def step(self) -> None:
        """One optimizer step."""
        self.optimizer.zero_grad()
        self.model(torch.randn(self.batch, self.width)).square().mean().backward()
        self.optimizer.step()
        self.number += 1

    def state(self) -> dict[str, Any]:
        """What every arm saves."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.number}

    @property
    def parameters(self) -> int:
        """How many numbers the model has."""
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


class Saves:
    """Snapshots of one training, with and without overlap, as ``train/saving.py`` takes them."""

    def __init__(self, training: Training, writer: SnapshotWriter) -> None:
        self._training, self._writer = training, writer
        self._guard = OptimizerGuard(self._wait)
        self._waited = 0.0

    def _wait(self) -> None:
        if self._writer.rest is not None:
            self._waited += _timed(self._writer.rest.result)[0]

    def whole(self) -> float:
        """Save; seconds that training stood still."""
        return _timed(lambda: self._save(None))[0]

    def overlapping(self) -> float:
        """Save; seconds that the call took. The rest of the stall is in the next step's."""
        return _timed(lambda: self._save(self._guard.addresses))[0]

    def overlapping_stall(self) -> float:
        """Save, and do a step; seconds that training stood still in both."""
        self._waited = 0.0
        seconds = self.overlapping()
        self._training.step()
        return seconds + self._waited

    def _save(self, may_wait_at: Callable[[], Collection[int]] | None) -> None:
        state, number = {"state": self._training.state()}, self._training.number
        self._writer.save(state, step=number, gang=False, may_wait_at=may_wait_at)

    def close(self) -> None:
        """Let optimizers be."""
        self._guard.close()


def measured(size: str, rounds: int, place: Path) -> dict[str, Any]:
    """All arms at one size."""
    training = Training(size)
    snapshots = Path(tempfile.mkdtemp(prefix="stall-", dir="/dev/shm"))
    persister = subprocess.Popen(
        [sys.executable, "-c", PERSISTER, str(snapshots), str(place / "orch")], stdin=subprocess.PIPE
    )
    writer = SnapshotWriter(
        snapshots, rank=0, world_size=1, attempt=1, job_id="stall", token="stall", threads=copy_threads(1)
    )
    saves = Saves(training, writer)
    try:
        arms = measure.interleave(_arms(training, saves, place), rounds, warm_up=3)
        ways = {"": saves.whole, "overlap": saves.overlapping}
        batches = (BATCH,) if size == "100M" else (BATCH, LARGE_BATCH)
        steps = [_step_shares(training, ways, rounds, batch) for batch in batches]
    finally:
        saves.close()
        writer.close()
        persister.communicate()
        shutil.rmtree(snapshots)
    ours, late = arms.values.pop("orch"), arms.values.pop("orch, overlap")
    name = f"checkpoint_stall_{size}"
    found = _judged(name, ours, arms.values, [of[""] for of in steps], parameters=training.parameters)
    return {**found, "targets": TARGETS, "overlap": _judged(name, late, arms.values, [of["overlap"] for of in steps])}


def _judged(
    name: str, ours: list[float], peers: Mapping[str, list[float]], steps: list[dict[str, float]], **more: Any
) -> dict[str, Any]:
    found = measure.result(name, "seconds", "lower", ours, peers, **more)
    met = {name: found["ratio"][name]["high"] <= limit for name, limit in TARGETS.items() if name in found["ratio"]}
    return {**found, "met": met, "step_time_with_snapshots": steps}


def _arms(training: Training, saves: Saves, place: Path) -> dict[str, Callable[[], float]]:
    def ours() -> float:
        training.step()
        return saves.whole()

    def overlapping() -> float:
        training.step()
        return saves.overlapping_stall()

    def synchronous() -> float:
        training.step()
        return _timed(lambda: _save_with_fsync(training, place / "state.pt"))[0]

    def asynchronous() -> float:
        training.step()
        target = place / "dcp"
        shutil.rmtree(target, ignore_errors=True)
        seconds, future = _timed(lambda: async_save(training.state(), checkpoint_id=target))
        future.result()
        return seconds

    return {
        "orch": ours,
        "orch, overlap": overlapping,
        "torch.save with fsync": synchronous,
        "dcp.async_save": asynchronous,
    }


def _step_shares(
    training: Training, saves: Mapping[str, Callable[[], float]], rounds: int, batch: int
) -> dict[str, dict[str, float]]:
    """For each way to save the median step times, in turns: with a snapshot before the step, and without."""
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
    chosen = options.parse_args()
    torch.set_num_threads(chosen.threads)
    warnings.filterwarnings("ignore")
    place = Path(tempfile.mkdtemp(prefix="stall-"))
    dist.init_process_group("gloo", init_method=f"file://{place}/meet", rank=0, world_size=1)
    try:
        results = {size: measured(size, chosen.pairs, place) for size in chosen.sizes.split(",")}
    finally:
        dist.destroy_process_group()
        shutil.rmtree(place)
    measure.report(
        {
            "measure": "checkpoint_stall",
            "unit": "seconds",
            "better": "lower",
            "threads": chosen.threads,
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
