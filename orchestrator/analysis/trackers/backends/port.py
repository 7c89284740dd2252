"""Interface of a tracker's library."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.analysis.trackers.points import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts about a job's run: ``job_id`` is also the run's id, ``folder`` the directory of local trackers' files."""

    job_id: str
    name: str = ""
    group: str = ""
    folder: Path = Path()
    tags: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


class TrackerRun(Protocol):
    """One run of one job. Each call may block, and may raise anything."""

    where: str
    """Short text for people about how to look at the run."""

    facts: Mapping[str, str]
    """The same for programs."""

    def missing(self, points: Sequence[Point]) -> Sequence[Point]:
        """Return the points that the tracker does not have; a process that was killed may have written some."""

    def write(self, points: Sequence[Point]) -> None:
        """Write points to the tracker."""

    def kept(self) -> int | None:
        """Return the number of the newest point that the tracker has kept; None for all written ones."""

    def close(self, outcome: str) -> None:
        """End the run; ``outcome`` is the state in which the job has ended."""
