"""A torch.profiler trace of a few steps, on request, while training runs.

`orch profile JOB` writes a request beside the rank's progress page; the training loop checks for one as often as it
reports, which costs a microsecond. The finished trace is beside the request. Without orch: `Tracer.ask`.
"""

from __future__ import annotations

import gzip
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.train.script import trace_request as files
from orchestrator.train.script.environment import read_environment
from orchestrator.train.script.scheduled_profilers import ScheduledProfilers
from orchestrator.train.script.trace_request import DEFAULT_STEPS

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile


_OURS: Final = 1
"""Value of torch's flag for a running profiler while the Tracer's profiler runs; torch itself sets True and False."""


@dataclass(frozen=True, slots=True)
class FinishedTrace:
    """A trace that was written. Its requester may remove the file as soon as the file has its final name."""

    path: Path
    size_bytes: int


class Tracer:
    """Checks for a request, traces the following steps, writes the trace. `base` is a path without its suffix."""

    def __init__(self, base: Path | None, device: torch.device) -> None:
        self._base = base
        self._device = device
        self._request = None if base is None else files.beside(base, files.REQUEST_SUFFIX)
        self._profile: profile | None = None
        self._left = 0
        self._scheduled = ScheduledProfilers()
        if base is not None:
            files.withdraw(base)  # left by an earlier process
            files.beside(base, files.READY_SUFFIX).write_text(str(os.getpid()), encoding="ascii")

    @property
    def active(self) -> bool:
        """Whether steps are being traced."""
        return self._profile is not None

    def ask(self, steps: int = DEFAULT_STEPS) -> Path:
        """Request a trace of `steps` steps; return its path. Raises TraceRefusedError while another one is in progress."""
        if self._base is None:
            raise RuntimeError("the Tracer has no path to write traces to: make it with one")
        return files.request(self._base, steps)

    def look(self) -> None:
        """Start tracing if that was requested, and no profiler of the script runs. Call it between steps, now and then."""
        if self._request is None or self.active or not os.path.exists(self._request):  # noqa: PTH110  (twice as fast)
            return
        from torch.autograd import profiler
        from torch.profiler import ProfilerActivity, profile

        if _running_profiler() or self._scheduled.any_ahead():  # torch has one at a time: ours would end the script's
            return
        self._left = files.steps_asked(self._request)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()
        profiler._is_profiler_enabled = _OURS  # type: ignore[assignment]  # noqa: SLF001  # nothing public tells whose it is

    def step_done(self) -> FinishedTrace | None:
        """Count a step; return the trace after the last one. Call it after every step while `active`."""
        self._left -= 1
        return self.finish() if self._left <= 0 else None

    def finish(self) -> FinishedTrace | None:
        """End the trace in progress, with the steps so far; return it, None when there is none."""
        if self._profile is None:
            return None
        finished, self._profile = self._profile, None
        if _running_profiler() is not _OURS or self._scheduled.any_prepared():
            # A profiler of the script started or prepared to record, and ended ours: torch crashes when such an ended
            # profiler is exported, and stopping ours would end the script's profiler if it still runs.
            self._withdraw()
            return None
        finished.stop()
        return self._write(finished)

    def close(self) -> None:
        """Stop accepting requests; a trace in progress is written."""
        self.finish()
        if self._base is not None:
            files.beside(self._base, files.READY_SUFFIX).unlink(missing_ok=True)
            self._request = None

    def _withdraw(self) -> None:
        assert self._request is not None
        self._request.unlink(missing_ok=True)

    def _write(self, finished: profile) -> FinishedTrace | None:
        assert self._base is not None
        raw, target = files.beside(self._base, ".trace.part"), files.beside(self._base, files.TRACE_SUFFIX)
        packed = files.beside(self._base, f"{files.TRACE_SUFFIX}.part")
        try:
            finished.export_chrome_trace(str(raw))
            with raw.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as file:
                shutil.copyfileobj(source, file)
            size = packed.stat().st_size
            packed.replace(target)
        except OSError:  # shared memory is full: no trace, but training continues
            packed.unlink(missing_ok=True)
            return None
        finally:
            raw.unlink(missing_ok=True)
            self._withdraw()
        return FinishedTrace(target, size)


def _running_profiler() -> object:
    """Return torch's flag for a running profiler: False, ``_OURS``, or True for any other."""
    from torch.autograd import profiler

    return profiler._is_profiler_enabled  # noqa: SLF001  # nothing public tells whose it is


def tracer_of_this_rank(device: torch.device) -> Tracer:
    """Return the tracer for `orch profile`; outside of orch, one that receives no requests."""
    path = read_environment(os.environ).progress_path
    return Tracer(None if path is None else Path(path), device)
