"""A torch.profiler trace of a few steps, on request, while training runs.

`orch profile JOB` makes the rank's actor write a request beside the rank's progress page (``request``); the training loop checks for one
as often as it reports, which costs a microsecond (``Tracer``). The finished trace is beside the request (``collect``). Without orch:
`Tracer.ask`. Imports torch only where a trace is made: the rank's actor must not import it.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import shutil
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.spec.plain_files import read_plain

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.autograd.profiler import profile as recording
    from torch.profiler import profile

REQUEST_SUFFIX = ".trace-request.json"
"""Holds {"steps": N}. Removed when the trace is there."""
TRACE_SUFFIX = ".trace.json.gz"
"""A Chrome trace (chrome://tracing, Perfetto), complete once it has this name."""
READY_SUFFIX = ".trace-ready"
"""Holds the process id of a training loop that accepts requests."""
DEFAULT_STEPS = 5
MAX_STEPS = 100
MAX_TRACE_BYTES = 512 * 1024 * 1024
_MAX_NUMBER_BYTES = 32

_LOOK_AHEAD: Final = 1000
"""Number of coming steps in which torch's own schedule must do nothing. A script may count several for one step of the loop."""


# -- the request, and its files


class TraceRefusedError(Exception):
    """No trace is possible now; the message gives the reason and what to do."""


def beside(base: str | os.PathLike[str], suffix: str) -> Path:
    """Return the file of this kind beside a progress page."""
    return Path(f"{os.fspath(base)}{suffix}")


def listens(base: str | os.PathLike[str], pid: int | None) -> bool:
    """Whether process `pid` runs a training loop that accepts requests."""
    try:
        return int(read_plain(beside(base, READY_SUFFIX), _MAX_NUMBER_BYTES)) == pid
    except (OSError, ValueError):
        return False


def request(base: str | os.PathLike[str], steps: int) -> Path:
    """Request a trace of the next `steps` steps; return its path. Raises TraceRefusedError while another one is in progress."""
    target, trace = beside(base, REQUEST_SUFFIX), beside(base, TRACE_SUFFIX)
    draft = beside(base, f"{REQUEST_SUFFIX}.part")
    draft.write_text(json.dumps({"steps": steps}), encoding="utf-8")
    try:
        os.link(draft, target)  # unlike a rename, fails where there is one
    except FileExistsError:
        raise TraceRefusedError("a trace of this rank is being taken already: wait for it, then try again") from None
    finally:
        draft.unlink()
    trace.unlink(missing_ok=True)
    return trace


def collect(base: str | os.PathLike[str]) -> bytes | None:
    """Return and remove the finished trace; None while there is none. Raises OSError for an invalid or too large one."""
    trace = beside(base, TRACE_SUFFIX)
    try:
        data = read_plain(trace, MAX_TRACE_BYTES)
    except FileNotFoundError:
        return None
    trace.unlink()
    return data


def withdraw(base: str | os.PathLike[str]) -> None:
    """Withdraw the request. Also removes files of an earlier process."""
    for suffix in (REQUEST_SUFFIX, TRACE_SUFFIX):
        beside(base, suffix).unlink(missing_ok=True)


def steps_asked(request_path: Path) -> int:
    """Return the number of requested steps; the default for an invalid one."""
    try:
        steps = int(json.loads(request_path.read_text(encoding="utf-8"))["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return DEFAULT_STEPS
    return min(max(steps, 1), MAX_STEPS)


# -- the training process


class ScheduledProfilers:
    """Scheduled profilers that this process started. A call walks over all objects, about 0.1 s, unless the last match still matches."""

    def __init__(self) -> None:
        self._last: weakref.ref[profile] | None = None

    def any_ahead(self) -> bool:
        """Whether a started profiler records, prepares to, or will do so by itself within the coming steps."""
        return self._find(_is_ahead)

    def any_prepared(self) -> bool:
        """Whether a profiler has prepared to record. Ending another profiler now also ends that one, and the process crashes at its end."""
        return self._find(_is_prepared)

    def _find(self, matches: Callable[[profile], bool]) -> bool:
        last = self._last() if self._last is not None else None
        if last is None or not matches(last):
            last = next(filter(matches, _started()), None)
        self._last = None if last is None else weakref.ref(last)
        return last is not None


def _started() -> list[profile]:
    from torch.profiler import profile

    # Not isinstance(): it reads the object's __class__, which runs code of a proxy.
    found = [each for each in gc.get_objects() if profile in type.mro(type(each))]
    return [each for each in found if getattr(each, "step_rec_fn", None) is not None]  # set from start to stop


def _is_prepared(found: profile) -> bool:
    from torch.profiler import ProfilerAction

    return found.step_rec_fn is not None and found.current_action is ProfilerAction.WARMUP


def _is_ahead(found: profile) -> bool:
    from torch.profiler import ProfilerAction, schedule

    if found.step_rec_fn is None:
        return False
    if getattr(found.schedule, "__code__", None) is not schedule(wait=1, warmup=1, active=1).__code__:
        return True  # any other function may count how often it is called
    ahead = range(found.step_num, found.step_num + _LOOK_AHEAD)
    return any(found.schedule(step) is not ProfilerAction.NONE for step in ahead)


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
        self._request = None if base is None else beside(base, REQUEST_SUFFIX)
        self._profile: profile | None = None
        self._left = 0
        self._scheduled = ScheduledProfilers()
        self._before: weakref.WeakSet[recording] = weakref.WeakSet()
        if base is not None:
            withdraw(base)  # left by an earlier process
            beside(base, READY_SUFFIX).write_text(str(os.getpid()), encoding="ascii")

    @property
    def active(self) -> bool:
        """Whether steps are being traced."""
        return self._profile is not None

    def ask(self, steps: int = DEFAULT_STEPS) -> Path:
        """Request a trace of `steps` steps; return its path. Raises TraceRefusedError while another one is in progress."""
        if self._base is None:
            raise RuntimeError("the Tracer has no path to write traces to: make it with one")
        return request(self._base, steps)

    def look(self) -> None:
        """Start tracing if that was requested, and no profiler of the script runs. Call it between steps, now and then."""
        if self._request is None or self.active or not os.path.exists(self._request):  # noqa: PTH110  (twice as fast)
            return
        from torch.profiler import ProfilerActivity, profile

        if _running_profiler() or self._scheduled.any_ahead():  # torch has one at a time: ours would end the script's
            return
        self._left = steps_asked(self._request)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self._before = weakref.WeakSet(_unfinished())  # of none of these comes anything more
        self._profile = profile(activities=activities, record_shapes=True)
        self._profile.start()

    def step_done(self) -> FinishedTrace | None:
        """Count a step; return the trace after the last one. Call it after every step while `active`."""
        self._left -= 1
        return self.finish() if self._left <= 0 else None

    def finish(self) -> FinishedTrace | None:
        """End the trace in progress, with the steps so far; return it, None when there is none."""
        if self._profile is None:
            return None
        finished, self._profile = self._profile, None
        others = [each for each in _unfinished() if each is not finished.profiler and each not in self._before]
        if not _running_profiler() or others or self._scheduled.any_prepared():
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
            beside(self._base, READY_SUFFIX).unlink(missing_ok=True)
            self._request = None

    def _withdraw(self) -> None:
        assert self._request is not None
        self._request.unlink(missing_ok=True)

    def _write(self, finished: profile) -> FinishedTrace | None:
        assert self._base is not None
        raw, target = beside(self._base, ".trace.part"), beside(self._base, TRACE_SUFFIX)
        packed = beside(self._base, f"{TRACE_SUFFIX}.part")
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


def _running_profiler() -> bool:
    """Return torch's flag for a running profiler, which the end of any profiler clears."""
    from torch.autograd import profiler

    return profiler._is_profiler_enabled  # noqa: SLF001  # only read; there is no public name for it


def _unfinished() -> list[recording]:
    """Return every profiler that was started and has no result."""
    from torch.autograd.profiler import profile as recording

    found = [each for each in gc.get_objects() if recording in type.mro(type(each))]  # as in _started
    return [each for each in found if each.entered and each.kineto_results is None]


def tracer_of_this_rank(device: torch.device) -> Tracer:
    """Return the tracer for `orch profile`; outside of orch, one that receives no requests."""
    from orchestrator.train.script.environment import read_environment  # the rank's actor does not need it

    path = read_environment(os.environ).progress_path
    return Tracer(None if path is None else Path(path), device)
