"""The workload of the overhead benchmark: steps of about the wanted length, gloo ranks, every step timed by itself.

Rank 0 writes as JSON the durations of its steps in seconds, and for a mean step the minor page faults and the processor seconds of
the process and of the kernel. Under orch every step is reported, as a training script would. With ``keep`` the C
library keeps memory that is freed, instead of returning it to the kernel and requesting it again at each step.

usage: paced.py RESULT STEPS MILLISECONDS [keep]
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from orchestrator.train import context

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
WARM_UP_SECONDS = 5.0  # not measured: the work that a start leaves on a machine is another measure


def warm_up_steps(milliseconds: float) -> int:
    """Return the number of steps before those that are measured, the same on both sides."""
    return int(WARM_UP_SECONDS * 1000 / milliseconds)


def main(target: str, steps: int, milliseconds: float) -> None:
    """Train on one batch; its size sets a step's length."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width = 256
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    batch = _batch_for(milliseconds / 1000, width)
    inputs = torch.randn(batch, width)
    training = context()
    seconds = []
    before = warm_up_steps(milliseconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    for step in range(1, before + steps + 1):
        if step == before + 1:
            used = resource.getrusage(resource.RUSAGE_SELF)
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        training.report(step=step, total_steps=before + steps, samples=batch, loss=float(loss))
        seconds.append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        draft = Path(f"{target}.new")
        draft.write_text(json.dumps({"seconds": seconds[before:], "of_a_step": _of_a_step(used, steps)}))
        draft.rename(target)
    dist.destroy_process_group()


def _of_a_step(before: resource.struct_rusage, steps: int) -> dict[str, float]:
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "page_faults": (after.ru_minflt - before.ru_minflt) / steps,
        "user_seconds": (after.ru_utime - before.ru_utime) / steps,
        "system_seconds": (after.ru_stime - before.ru_stime) / steps,
    }


def _batch_for(seconds: float, width: int) -> int:
    # Fixed sizes, not calibrated ones: both sides must do the same work.
    return max(16, int(seconds * 1000 / 2 * 128 * 256 / width))


if __name__ == "__main__":
    if sys.argv[4:] == ["keep"]:
        library = ctypes.CDLL(None)
        assert library.mallopt(M_TRIM_THRESHOLD, 2**30)
        assert library.mallopt(M_MMAP_THRESHOLD, 2**30)
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
