"""Requests a trace from a training process: used by the rank's actor for `orch profile`.

Owns the names of the files between the two; profiling.py is the training process's side. Standard library only: the
rank's actor must not import torch.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from orchestrator.spec.plain_files import read_plain

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
