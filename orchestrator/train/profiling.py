"""A torch.profiler trace of a few steps, on request, while training runs.

`orch profile JOB` leaves a request beside the rank's progress page; the training loop looks for one as often as it
reports, which costs a microsecond. The trace lies beside the request when it is done. Without orch: `Tracer.ask`.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.train.environment import read_environment

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

REQUEST_SUFFIX = ".trace-request.json"
"""Holds {"steps": N}. Removed when the trace is there."""
TRACE_SUFFIX = ".trace.json.gz"
"""A Chrome trace (chrome://tracing, Perfetto), complete once it has this name."""
DEFAULT_STEPS = 5
MAX_STEPS = 100


class Tracer:
    """Looks for a request, traces the steps that follow, writes the trace. `base` is a path without its suffix."""

    def __init__(self, base: Path | None, device: torch.device) -> None:
        self._base = base
        self._device = device
        self._request = None if base is None else str(base) + REQUEST_SUFFIX
        self._profile: profile | None = None
        self._left = 0

    @property
    def active(self) -> bool:
        """Whether steps are being traced."""
        return self._profile is not None

    def ask(self, steps: int = DEFAULT_STEPS) -> Path:
        """Request a trace of `steps` steps; where it will be."""
        if self._base is None or self._request is None:
            raise RuntimeError("nobody said where traces go: make the Tracer with a path")
        temporary = Path(f"{self._request}.part")
        temporary.write_text(json.dumps({"steps": steps}), encoding="utf-8")
        temporary.replace(self._request)
        return Path(str(self._base) + TRACE_SUFFIX)

    def look(self) -> None:
        """Begin to trace if somebody asked for it. Call it between steps, now and then."""
        if self._request is None or self.active or not os.path.exists(self._request):  # noqa: PTH110  (twice as fast)
            return
        self._left = _steps(Path(self._request))
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def step_done(self) -> Path | None:
        """Count a step; the trace's path when this was the last one. Call it after every step while `active`."""
        if self._profile is None:
            return None
        self._left -= 1
        if self._left > 0:
            return None
        finished, self._profile = self._profile, None
        finished.stop()
        return self._write(finished)

    def _write(self, finished: profile) -> Path:
        raw, target = Path(f"{self._base}.trace.part"), Path(str(self._base) + TRACE_SUFFIX)
        packed = Path(f"{target}.part")
        finished.export_chrome_trace(str(raw))
        with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as file:
            shutil.copyfileobj(source, file)
        raw.unlink()
        packed.replace(target)
        assert self._request is not None
        Path(self._request).unlink(missing_ok=True)
        return target


def _steps(request: Path) -> int:
    """The number of steps asked for; what makes no sense is the default."""
    try:
        steps = int(json.loads(request.read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_STEPS
    return min(max(steps, 1), MAX_STEPS)


def tracer_of_this_rank(device: torch.device) -> Tracer:
    """The tracer that `orch profile` talks to; one that nobody can ask outside of orch."""
    path = read_environment(os.environ).progress_path
    return Tracer(None if path is None else Path(path), device)
