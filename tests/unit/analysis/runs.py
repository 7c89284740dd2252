"""Files of runs for tests: a job's directory, and gputop's recordings, with values that a test chooses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.analysis.runs import GpuSeries, Quantity, Run
from orchestrator.gpu.recording.job_record import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

START = 1.7e9
MIB = 2**20


def gpu(index: int = 0, seconds: int = 60, **values: Any) -> GpuSeries:
    """Return a GPU with one reading per second; each of ``values`` is a number or a list of them, memory in MiB."""
    columns = {Quantity(name): np.resize(np.asarray(value, dtype=float), seconds) for name, value in values.items()}
    if Quantity.MEMORY in columns:
        columns[Quantity.MEMORY] = columns[Quantity.MEMORY] * MIB
    return GpuSeries(
        label=f"GPU {index}",
        index=index,
        times=START + np.arange(seconds, dtype=float),
        values=columns,
        energy_joules=np.full(seconds, np.nan),
    )


def run(*gpus: GpuSeries, name: str = "run", **values: Any) -> Run:
    return Run(name=name, sources=(), gpus=gpus, **values)


def write_job(
    directory: Path,
    *,
    gpus: int = 2,
    seconds: int = 40,
    memory: float = 1000.0,
    step_seconds: float = 0.1,
    utilization: Callable[[int, int], float] = lambda _gpu, _second: 0.9,
    metrics: Callable[[int], Mapping[str, float]] = lambda second: {"loss": 1.0 / (second + 1)},
) -> Path:
    """Write a job's directory with telemetry and metrics.jsonl, as orch writes them."""
    folder = directory / "telemetry"
    folder.mkdir(parents=True)
    for index in range(gpus):
        lines = [",".join(COLUMNS)]
        for second in range(seconds):
            busy = utilization(index, second)
            cells = [START + second, busy, int(memory * MIB), 100 + index, (100 + index) * second, 55.0, 1.4e9, "", 1]
            lines.append(",".join(str(cell) for cell in cells))
        (folder / f"telemetry-GPU-{index}.csv").write_text("\n".join(lines) + "\n")
        identity = {"uuid": f"GPU-{index}", "index": index, "model": "NVIDIA A10G", "vendor": "nvidia"}
        (folder / f"telemetry-GPU-{index}.json").write_text(json.dumps({**identity, "memory_total_bytes": 24576 * MIB}))
    rows = [progress_row(second, int(second / step_seconds), metrics(second)) for second in range(seconds)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def progress_row(
    second: float, step: int, metrics: Mapping[str, float] | None = None, **changes: Any
) -> dict[str, Any]:
    row = {"at": START + second, "attempt": 1, "step": step, "total_steps": 1000, "epoch": None, "phase": "training"}
    return {
        **row,
        "samples": 32 * step,
        "tokens": None,
        "step_seconds": None,
        "metrics": dict(metrics or {}),
        **changes,
    }


def gputop_entry(second: int, **changes: Any) -> dict[str, Any]:
    entry = {
        "timestamp": f"2025-01-15T10:{second // 60:02}:{second % 60:02}",
        "gpu_index": 0,
        "gpu_name": "NVIDIA A10G",
        "utilization": 85,
        "memory_used": 12800,
        "memory_total": 24576,
        "power": 150,
    }
    return {**entry, **changes}


def write_json(path: Path, entries: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text(json.dumps(list(entries), indent=2))
    return path
