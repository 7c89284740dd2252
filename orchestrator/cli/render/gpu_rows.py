"""Rows of `orch gpus` and `orch top`: from the daemon for every node or, without one, from this machine's drivers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.api.errors import DaemonUnreachableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session
    from orchestrator.gpu.balance.view import GpuRow

LIVE_STATES = ("STARTING", "RUNNING", "RECOVERING", "DRAINING")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSummary:
    """The visible GPUs, the jobs that hold some, and errors. ``daemon`` tells whether a daemon answered."""

    rows: tuple[GpuRow, ...]
    jobs: tuple[JobView, ...] = ()
    problems: tuple[str, ...] = ()
    daemon: bool = False


def gpu_summary(session: Session, local: Callable[[], tuple[Sequence[GpuRow], Sequence[str]]]) -> GpuSummary:
    """Query the daemon; without one, use ``local``, which returns this machine's rows and problems."""
    try:
        client = session.client()
        jobs = client.jobs(states=LIVE_STATES).jobs
        rows = client.gpus()
    except DaemonUnreachableError:
        here, problems = local()
        return GpuSummary(rows=tuple(here), problems=tuple(problems))
    return GpuSummary(rows=tuple(rows), jobs=tuple(jobs), daemon=True)
