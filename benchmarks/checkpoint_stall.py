"""How long training stands still for a checkpoint: ``context().save`` beside ``torch.save`` with fsync and ``dcp.async_save``.

The state is a multilayer perceptron with Adam after a few steps. Each round does one training step and one save with every arm; the
stall is the time that the save call takes. As in a job, a persister brings our snapshots to storage meanwhile, in a
process of its own. The time of a training step with a snapshot at each step, over that without, is reported as well.
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
from orchestrator.checkpoint.snapshot_writer import SnapshotWriter
from orchestrator.checkpoint.tensor_copy import copy_threads

if TYPE_CHECKING:
    from collections.abc import Callable

SIZES = {"54K": (64, 13), "2M": (512, 8), "7M": (768, 12), "100M": (2048, 24)}  # width, layers
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

    def step(self) -> None:
        """One optimizer step on a small batch."""
        self.optimizer.zero_grad()
        self.model(torch.randn(8, self.width)).square().mean().backward()
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
    try:
        arms = measure.interleave(_arms(training, writer, place), rounds, warm_up=3)
        share = _step_share(training, writer, rounds)
    finally:
        writer.close()
        persister.communicate()
        shutil.rmtree(snapshots)
    ours = arms.values.pop("orch")
    found = measure.result(
        f"checkpoint_stall_{size}", "seconds", "lower", ours, arms.values, parameters=training.parameters
    )
    met = {name: found["ratio"][name]["high"] <= limit for name, limit in TARGETS.items() if name in found["ratio"]}
    return {**found, "targets": TARGETS, "met": met, "step_time_with_snapshots": share}


def _arms(training: Training, writer: SnapshotWriter, place: Path) -> dict[str, Callable[[], float]]:
    def ours() -> float:
        training.step()
        number = training.number
        return _timed(lambda: writer.save({"state": training.state()}, step=number, gang=False))[0]

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

    return {"orch": ours, "torch.save with fsync": synchronous, "dcp.async_save": asynchronous}


def _step_share(training: Training, writer: SnapshotWriter, rounds: int) -> dict[str, float]:
    """Median step times, alternating: with a snapshot after the step, and without."""
    plain, saving = [], []
    for _ in range(rounds):
        plain.append(_timed(training.step)[0])
        seconds = _timed(training.step)[0]
        seconds += _timed(lambda: writer.save({"state": training.state()}, step=training.number, gang=False))[0]
        saving.append(seconds)
    without, having = statistics.median(plain), statistics.median(saving)
    return {"without_seconds": without, "with_seconds": having, "ratio": having / without}


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
        results = [measured(size, chosen.pairs, place) for size in chosen.sizes.split(",")]
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
            "met": all(all(found["met"].values()) for found in results),
        },
        chosen.json,
    )


if __name__ == "__main__":
    main()
