"""Checks a node's health with real work: every device multiplies and reduces, the disk returns what was written.

Runs in its own process with a deadline: a driver that hangs delays nothing else. Returns a fact for each failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import tempfile
from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.faults import DevicesFailed, DevicesSilent, DeviceWrong, DiskDamaged, DiskUnwritable

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.core.facts.fact import Fact

DEADLINE_SECONDS: Final = 120.0
MOST_CHARACTERS: Final = 1000  # of the check's output
_DISK_BYTES: Final = 1024 * 1024
_DEVICES: Final = """
import json, sys, tempfile, torch, torch.distributed as dist
torch.set_num_threads(1)
cuda = torch.cuda.is_available()
devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if cuda else [torch.device("cpu")]
a = torch.randn(512, 512, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
expected = a @ a.T
for device in devices:
    error = ((a.to(device) @ a.T.to(device)).cpu() - expected).abs().max().item()
    if not error < 1e-6:
        print(json.dumps({"device": str(device), "operation": "multiply", "off": error}))
with tempfile.TemporaryDirectory() as folder:
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    for device in devices[:1]:
        ones = torch.ones(1024, device=device)
        dist.all_reduce(ones)
        if ones.sum().item() != 1024:
            print(json.dumps({"device": str(device), "operation": "reduce"}))
    dist.destroy_process_group()
print("done")
"""


async def check_node(directory: Path, *, python: str = sys.executable, seconds: float = DEADLINE_SECONDS) -> list[Fact]:
    """Return what is wrong with this node: its devices, and the disk under ``directory``. Empty when nothing is."""
    problems = await asyncio.to_thread(_check_disk, directory)
    return problems + await _check_devices(python, seconds)


def _check_disk(directory: Path) -> list[Fact]:
    data = os.urandom(_DISK_BYTES)
    try:
        with tempfile.NamedTemporaryFile(dir=directory, prefix="health-") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            if file.read() != data:
                return [DiskDamaged(path=str(directory))]
    except OSError as error:
        return [DiskUnwritable(path=str(directory), said=error.strerror or "")]
    return []


async def _check_devices(python: str, seconds: float) -> list[Fact]:
    process = await asyncio.create_subprocess_exec(
        *(python, "-c", _DEVICES), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate()
    except TimeoutError:
        return [DevicesSilent(seconds=seconds)]
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    lines = out.decode(errors="replace").split("\n")
    if process.returncode != 0 or "done" not in lines:
        last = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        return [DevicesFailed(said=last[0][:MOST_CHARACTERS])]
    return [_failure_in(line) for line in lines if line and line != "done"]


def _failure_in(line: str) -> Fact:
    """Return the failure in one line of the check; output of a library counts as a failure, too."""
    try:
        fields = json.loads(line)
        off = fields.get("off")
        known = isinstance(off, float) and math.isfinite(off)
        return DeviceWrong(device=fields["device"], operation=fields["operation"], off=off if known else None)
    except (ValueError, KeyError, AttributeError):
        return DevicesFailed(said=line[:MOST_CHARACTERS])
