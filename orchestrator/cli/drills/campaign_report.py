"""The results of a campaign of drills, and their figures by kind."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.cli.drills.drills import DrillReport
    from orchestrator.cli.drills.kinds import Kind


@dataclass(slots=True, kw_only=True)
class Round:
    """One drill. ``refused``: why no fault was injected; ``problem``: the part of the recovery that was not seen."""

    at: float
    kind: Kind
    job_id: str
    rank: int
    report: DrillReport | None = None
    refused: str = ""
    problem: str = ""

    @property
    def intact(self) -> bool:
        """Whether the job recovered as expected."""
        return self.report is not None and self.report.intact

    @property
    def problems(self) -> list[str]:
        """Problems of the drill and of its report."""
        return [*([self.problem] if self.problem else []), *(self.report.problems if self.report else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReached:
    """A job has used ``used`` restarts of a failure class; another drill would take its last one."""

    job_id: str
    failure_class: str
    used: int
    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRepeatedly:
    """The job has refused the kind ``times`` times in a row."""

    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """Kinds that a job was not drilled with at the end of the campaign, and why."""

    job_id: str
    kinds: tuple[Kind, ...]
    reason: BudgetReached | RefusedRepeatedly


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one kind. Seconds are those of the drills with a measurement; None without any."""

    kind: str
    done: int
    refused: int
    intact: int
    detection_p50: float | None
    detection_max: float | None
    recovery_p50: float | None
    recovery_p99: float | None
    recovery_max: float | None
    steps_lost: int


@dataclass(slots=True, kw_only=True)
class CampaignReport:
    """Results of a campaign. ``ended_because`` is empty if the time was over; ``problems`` belong to no round."""

    seed: int
    began_at: float
    jobs: list[str]
    kinds: list[Kind]
    seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    interrupted: bool = False
    ended_because: str = ""
    problems: list[str] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Number of drills that injected a fault."""
        return sum(not done.refused for done in self.rounds)

    @property
    def intact(self) -> bool:
        """Whether every job recovered from every drill; true if none was done."""
        return not self.problems and all(done.intact or done.refused for done in self.rounds)

    def figures(self) -> list[Figures]:
        """Return the figures by kind, in the order of the kinds."""
        return [_figures(kind, [done for done in self.rounds if done.kind is kind]) for kind in self.kinds]

    def all_problems(self) -> list[str]:
        """Return the problems, each with its job and kind."""
        own = [f"{done.kind} on {done.job_id}: {problem}" for done in self.rounds for problem in done.problems]
        return [*own, *self.problems]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return {
            **asdict(self),
            "done": self.done,
            "intact": self.intact,
            "rounds": [{**asdict(done), "intact": done.intact} for done in self.rounds],
            "figures": [asdict(one) for one in self.figures()],
        }


def _figures(kind: Kind, rounds: Sequence[Round]) -> Figures:
    reports = [done.report for done in rounds if done.report is not None]
    detected = [r.detection_seconds for r in reports if r.detection_seconds is not None]
    recovered = [r.recovery_seconds for r in reports if r.recovery_seconds is not None]
    return Figures(
        kind=kind.value,
        done=sum(not done.refused for done in rounds),
        refused=sum(bool(done.refused) for done in rounds),
        intact=sum(done.intact for done in rounds),
        detection_p50=quantile(detected, 0.5),
        detection_max=max(detected, default=None),
        recovery_p50=quantile(recovered, 0.5),
        recovery_p99=quantile(recovered, 0.99),
        recovery_max=max(recovered, default=None),
        steps_lost=sum(r.steps_lost or 0 for r in reports),
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed; None without values."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None
