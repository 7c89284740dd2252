"""Figures of a simulation: completion time, wait, slowdown, use of the GPUs, fairness, and the cost of preemption."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, fsum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.core.simulation.trace import Outcome, Ran

SHORT_SECONDS: Final = 10.0
"""Jobs count as at least this long in slowdowns, so that the shortest do not determine the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, median and 99th percentile."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of some values; zeros without any."""
        if not values:
            return cls(mean=0.0, median=0.0, p99=0.0)
        found = sorted(values)
        return cls(mean=fsum(found) / len(found), median=_quantile(found, 0.5), p99=_quantile(found, 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a policy on a trace. Times in seconds; ratios 0-1.

    ``utilization`` is the share of GPU time that was used, ``idle_while_waiting`` the share that was idle although jobs waited,
    ``fragmentation`` the part of that which lay on partly used nodes. ``fairness`` is Jain's index over users' mean speed: the
    time that their jobs ran per time from submission to end.
    """

    jobs: int
    refused: int
    completion: Spread
    wait: Spread
    slowdown: Spread
    utilization: float
    idle_while_waiting: float
    fragmentation: float
    fairness: float
    preemptions: int
    lost_gpu_seconds: float
    makespan: float

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        spreads = {
            name: {"mean": spread.mean, "median": spread.median, "p99": spread.p99}
            for name, spread in (
                ("completion_seconds", self.completion),
                ("wait_seconds", self.wait),
                ("slowdown", self.slowdown),
            )
        }
        return {
            "jobs": self.jobs,
            "refused": self.refused,
            **spreads,
            "utilization": self.utilization,
            "idle_while_waiting": self.idle_while_waiting,
            "fragmentation": self.fragmentation,
            "fairness": self.fairness,
            "preemptions": self.preemptions,
            "lost_gpu_seconds": self.lost_gpu_seconds,
            "makespan_seconds": self.makespan,
        }


def figures_of(outcome: Outcome) -> Figures:
    """Return the figures of one simulation."""
    ran, usage = outcome.ran, outcome.usage
    return Figures(
        jobs=len(ran),
        refused=len(outcome.refused),
        completion=Spread.of([one.completion for one in ran]),
        wait=Spread.of([one.wait for one in ran]),
        slowdown=Spread.of([_slowdown(one) for one in ran]),
        utilization=_share(usage.busy, usage.total),
        idle_while_waiting=_share(usage.idle_while_waiting, usage.total),
        fragmentation=_share(usage.in_pieces, usage.idle_while_waiting),
        fairness=_fairness(ran),
        preemptions=sum(one.preemptions for one in ran),
        lost_gpu_seconds=fsum(one.lost for one in ran),
        makespan=max((one.ended_at for one in ran), default=0.0) - min((one.job.at for one in ran), default=0.0),
    )


def _slowdown(one: Ran) -> float:
    return max(1.0, one.completion / max(one.job.seconds, SHORT_SECONDS))


def _fairness(ran: Sequence[Ran]) -> float:
    """Return Jain's index: 1 when all users fare equally, 1/n when one of n has everything."""
    times: dict[str, list[float]] = {}
    for one in ran:
        sums = times.setdefault(one.job.user, [0.0, 0.0])
        sums[0] += one.job.seconds
        sums[1] += one.completion
    speeds = [_share(running, whole) for running, whole in times.values()]
    squares = fsum(speed * speed for speed in speeds)
    return _share(fsum(speeds) ** 2, len(speeds) * squares) if squares else 1.0


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
