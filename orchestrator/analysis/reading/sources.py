"""Reads a run from a path: a job's directory, its telemetry folder, or a recording of orch or gputop."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from orchestrator.analysis.reading.progress import progress_of, read_progress
from orchestrator.analysis.reading.series import Floats, GpuSeries, Quantity, Run
from orchestrator.analysis.reading.telemetry import gpu_label, read_telemetry
from orchestrator.gpu.recording.reading import RecordingError, read_recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from orchestrator.analysis.reading.series import Progress
    from orchestrator.gpu.recording.reading import RecordedSample

MULTI = "_multi_gpu"


class SourceError(Exception):
    """There is nothing to analyse at a path; the message says what was expected."""


def read_run(path: Path, *, name: str | None = None) -> Run:
    """Return the run at ``path``. Raises SourceError, with the path and what to give instead."""
    try:
        return _read_directory(path, name) if path.is_dir() else _read_file(path, name)
    except RecordingError as error:
        raise SourceError(str(error)) from error
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror or error}") from error


def _read_directory(path: Path, name: str | None) -> Run:
    """Read a job's directory, also by the folder ``telemetry`` in it."""
    job = path.parent if path.name == "telemetry" else path
    gpus, dropped = read_telemetry(job / "telemetry")
    progress = read_progress(job / "metrics.jsonl")
    if not gpus and progress is None:
        raise SourceError(
            f"{path} holds neither telemetry nor metrics.jsonl. Give a job, its directory, or a recording's file."
        )
    return Run(name=name or job.name, sources=(job,), gpus=gpus, progress=progress, dropped=dropped)


def _read_file(path: Path, name: str | None) -> Run:
    """Read a recording; of the two files for several GPUs, the one with all of them."""
    everything = path.with_name(f"{path.stem}{MULTI}{path.suffix}")
    chosen = everything if not path.stem.endswith(MULTI) and everything.is_file() else path
    recording = read_recording(chosen)
    groups: dict[int, list[RecordedSample]] = defaultdict(list)
    for sample in recording.samples:
        groups[sample.gpu_index].append(sample)
    if not groups:
        raise SourceError(f"{chosen} holds no readings.")
    return Run(
        name=name or chosen.stem.removesuffix(MULTI),
        sources=(chosen,),
        gpus=tuple(_series(groups[index]) for index in sorted(groups)),
        progress=_training(recording.samples),
        dropped=recording.dropped,
        repaired=recording.repaired,
    )


def _series(samples: Sequence[RecordedSample]) -> GpuSeries:
    last = samples[-1]

    def column(value: Callable[[RecordedSample], float | None]) -> Floats:
        return np.array([np.nan if (found := value(sample)) is None else found for sample in samples], dtype=np.float64)

    totals, limits = column(lambda s: s.memory_total_bytes), column(lambda s: s.power_limit_watts)
    return GpuSeries(
        label=gpu_label(last.gpu_index, last.gpu_uuid or "", shared=False),
        index=last.gpu_index,
        model=last.gpu_name or "",
        uuid=last.gpu_uuid or "",
        vendor=last.vendor or "",
        times=column(lambda s: s.timestamp),
        values={
            Quantity.UTILIZATION: column(lambda s: s.utilization),
            Quantity.MEMORY: column(lambda s: s.memory_used_bytes),
            Quantity.POWER: column(lambda s: s.power_watts),
            Quantity.TEMPERATURE: column(lambda s: s.temperature_celsius),
            Quantity.CLOCK: column(_clock),
            Quantity.FAN: column(lambda s: s.fan),
        },
        energy_joules=column(lambda s: s.energy_joules),
        memory_total_bytes=_largest(totals),
        power_limit_watts=_largest(limits),
        temperature_limit_celsius=_slowdown(samples),
        throttled=sum(bool(sample.throttle) for sample in samples),
    )


def _clock(sample: RecordedSample) -> float | None:
    clocks = {name.lower(): hertz for name, hertz in sample.clocks}
    return next((clocks[name] for name in ("sm", "graphics", "sclk", "gfx") if name in clocks), None)


def _largest(values: Floats) -> float | None:
    return float(np.nanmax(values)) if np.isfinite(values).any() else None


def _slowdown(samples: Sequence[RecordedSample]) -> float | None:
    """Return the lowest temperature at which the GPU reports to slow down or to exceed its rating."""
    limits = next((sample.temperature_limits for sample in samples if sample.temperature_limits), ())
    return min((celsius for _, _, celsius in limits if celsius > 0), default=None)


def _training(samples: Sequence[RecordedSample]) -> Progress | None:
    """Return progress from a recorded run's labels: ``batch`` is the steps so far."""
    rows: list[dict[str, Any]] = []
    before: object = None
    for sample in samples:
        if sample.training and sample.training != before:
            before = labels = sample.training
            rows.append(
                {"at": sample.timestamp, "attempt": 1, "step": labels.get("batch"), "epoch": labels.get("epoch")}
                | {"phase": labels.get("phase"), "total_steps": labels.get("total_steps")}
            )
    return progress_of(rows)
