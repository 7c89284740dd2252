"""A rank of a benchmark: reads commands, runs them, answers. Started only by ``bench/processes.py``.

The end of its input ends the process at once: no command will follow, and a collective that waits for an ended rank would wait for ever.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import queue
import resource
import signal
import sys
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # missing in torch's stubs

from orchestrator.bench.rank.models import ModelError, make_workload
from orchestrator.bench.rank.probing import all_reduce, beside, overlap, probe, reference
from orchestrator.bench.rank.stepping import WINDOW, DeviceClock, Place, Stepper, communication_split, together, warm_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

JOIN_SECONDS: Final = 600.0
_HIGH_WATER: Final = "VmHWM:"


def describe(_place: Place, rank: int) -> dict[str, Any]:
    """Return torch's description of this machine."""
    del rank
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    nccl = torch.cuda.nccl.version() if gpus and torch.version.hip is None else None
    return {
        "gpus": [
            {"model": gpu.name, "uuid": str(getattr(gpu, "uuid", "")), "memory_bytes": gpu.total_memory} for gpu in gpus
        ],
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version() if gpus else None,
            "nccl": None if nccl is None else ".".join(map(str, nccl)),
        },
        "threads": torch.get_num_threads(),
    }


def join(place: Place, rank: int, *, store: str, sizes: list[int], device: str, ranks: int) -> None:
    """Connect to the other ranks through a file, and create the groups of the first 2, 4, ... of them."""
    if device == "cuda":
        place.device = torch.device("cuda", rank)
        torch.cuda.set_device(place.device)
    place.groups[1] = None
    if ranks == 1:
        return
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=JOIN_SECONDS),
    )
    for size in sorted({1, *sizes}):
        place.groups[size] = dist.new_group(list(range(size)), timeout=timedelta(seconds=JOIN_SECONDS))


def load(_place: Place, rank: int, *, model: str, seed: int, batch: int) -> dict[str, int]:
    """Create the model once and compute one batch on the processor: errors are found before the others join."""
    del rank
    workload = make_workload(model, seed)
    try:
        inputs, targets = workload.batch(batch, torch.Generator().manual_seed(seed))
        loss = workload.loss(workload.model(inputs), targets)
        loss.backward()
    except Exception as error:
        raise ModelError(f"{model} cannot make a training step: {type(error).__name__}: {error}") from error
    trainable = [p for p in workload.model.parameters() if p.requires_grad]
    return {"parameters": workload.parameters, "gradient_bytes": sum(p.numel() * p.element_size() for p in trainable)}


def limit_memory(place: Place, rank: int, *, limit_bytes: int) -> None:
    """Limit torch's memory on this rank's GPU."""
    del rank
    total = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), place.device)


def measure(
    place: Place,
    rank: int,
    *,
    model: str,
    seed: int,
    ranks: int,
    batch: int,
    steps: int,
    precision: str,
    accumulate: int = 1,
    gpus: int = 0,
    window: int = WINDOW,
) -> dict[str, Any]:
    """Make one run of a cell: warm-up (in windows of steps), a timed block, the split of a step, the peak memory."""
    clock = DeviceClock(place.device)
    group = place.groups[ranks]
    used = [torch.device("cuda", index) for index in range(gpus)] or [place.device]
    for device in used:
        _forget_peak(device)
    workload = make_workload(model, seed)
    stepper = Stepper(
        workload,
        batch=batch // ranks,
        precision=precision,
        device=place.device,
        clock=clock,
        seed=seed + rank,
        accumulate=accumulate,
    )
    if gpus:
        stepper.spread(gpus)
    if ranks > 1:
        stepper.wrap(group)
    warmed, stable = warm_up(stepper, group, ranks, window)
    together(group, ranks)
    block = stepper.block(steps)
    peaks = [_peak_bytes(device) for device in used]
    mean = block.seconds / steps
    parts = {"compute_seconds": mean, "exposed_seconds": 0.0, "hidden_seconds": 0.0, "bytes": 0.0, "buckets": 0.0}
    if ranks > 1:
        parts = communication_split(stepper, clock, group, ranks, max(5, steps // 2))
    return {
        "seconds": block.seconds,
        "step_seconds": list(block.steps),
        "warm_up_steps": warmed,
        "stable": stable,
        "peak_memory_bytes": max(peaks),
        "all_memory_bytes": sum(peaks),
        "parts": parts,
    }


def _forget_peak(device: torch.device) -> None:
    """Restart the measurement of the peak memory; the kernel's mark of a process is reset where that is permitted."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes(device: torch.device) -> int:
    """Return the peak memory since ``_forget_peak``: torch's on a GPU, the whole process's on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(_HIGH_WATER):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    "describe": describe,
    "join": join,
    "load": load,
    "limit_memory": limit_memory,
    "measure": measure,
    "probe": probe,
    "beside": beside,
    "all_reduce": all_reduce,
    "overlap": overlap,
    "reference": reference,
}


def main(arguments: list[str]) -> None:
    """Serve until the input closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the benchmark ends its ranks in order
    commands: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_follow, args=(sys.stdin.buffer, commands), daemon=True).start()
    place = Place()
    with os.fdopen(int(arguments[0]), "wb") as answers:
        while True:
            answer = _do(place, json.loads(commands.get()))
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()


def _follow(source: BinaryIO, commands: queue.SimpleQueue[bytes]) -> None:
    for line in source:
        commands.put(line)
    os._exit(0)


def _do(place: Place, command: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": COMMANDS[command.pop("do")](place, **command)}
    except ModelError as error:
        return {"error": str(error)}
    except (torch.OutOfMemoryError, MemoryError) as error:
        return {"error": f"out of memory: {str(error).splitlines()[0] if str(error) else 'no size given'}"}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(sys.argv[1:])
