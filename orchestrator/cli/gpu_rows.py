"""Where `orch gpus` and `orch top` get their rows: from the daemon for every node, without one from this machine's drivers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from orchestrator.api.errors import DaemonUnreachableError, ProtocolMismatchError
from orchestrator.api.protocol import API_PREFIX
from orchestrator.gpu.view import GpuRow

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session

LIVE_STATES = ("STARTING", "RUNNING", "RECOVERING", "DRAINING")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPicture:
    """The GPUs in view, the jobs that hold some, and what could not be seen. ``daemon`` tells whether one answered."""

    rows: tuple[GpuRow, ...]
    jobs: tuple[JobView, ...] = ()
    problems: tuple[str, ...] = ()
    daemon: bool = False


def picture(session: Session, local: Callable[[], tuple[Sequence[GpuRow], Sequence[str]]]) -> GpuPicture:
    """Ask the daemon; without one, ``local`` gives this machine's rows and problems."""
    try:
        jobs = session.client().jobs(states=LIVE_STATES).jobs
        rows = _rows_of_daemon(session)
    except DaemonUnreachableError:
        here, problems = local()
        return GpuPicture(rows=tuple(here), problems=tuple(problems))
    return GpuPicture(rows=rows, jobs=tuple(jobs), daemon=True)


def _rows_of_daemon(session: Session) -> tuple[GpuRow, ...]:
    from orchestrator.api import wire

    document: Any = wire.call(session.endpoint, "GET", f"{API_PREFIX}/gpus")
    try:
        return tuple(GpuRow.from_json(row) for row in document["gpus"])
    except (KeyError, TypeError) as error:
        raise ProtocolMismatchError(f"the daemon's answer is not a list of GPUs: {error}") from error
