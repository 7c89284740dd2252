"""What a tracker's library is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.analysis.trackers.points import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run that a job is: ``job_id`` is its id there, ``folder`` where local trackers keep their files."""

    job_id: str
    name: str = ""
    group: str = ""
    folder: Path = Path()
    tags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


class TrackerRun(Protocol):
    """One run of one job. Each call may block, and may raise anything."""

    where: str
    """Where the run can be looked at, in a few words."""

    facts: Mapping[str, str]
    """The same for programs."""

    def missing(self, points: Sequence[Point]) -> Sequence[Point]:
        """Those of the points, written by a process that was killed meanwhile, that the tracker does not have."""

    def write(self, points: Sequence[Point]) -> None:
        """Give points to the tracker."""

    def kept(self) -> int | None:
        """The number of the newest point that is safe with the tracker; None for all that were written."""

    def close(self, outcome: str) -> None:
        """End the run: the job has ended, in this state."""
