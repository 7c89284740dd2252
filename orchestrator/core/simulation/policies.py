"""Orders in which a simulation offers waiting jobs to the scheduler. ``orch`` is the daemon's own; the others are for comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from orchestrator.core.simulation.attained import LAS, TIRESIAS

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.core.job.record import Job

Order = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A name, the order of the queue from a job's record and its seconds left, and whether only the first job is offered.

    Without an ``order`` it is the daemon's, with its shares of queues and users, and with ``time_sharing`` and ``consolidate`` where these are set.
    """

    name: str
    summary: str
    order: Callable[[Job, float], Order] | None
    first_only: bool = False
    time_sharing: float | None = None
    consolidate: bool = False


def _arrival(job: Job, _left: float) -> Order:
    return (0.0, float(job.submission.sequence))


def _shortest(job: Job, left: float) -> Order:
    return (left, float(job.submission.sequence))


def _smallest(job: Job, left: float) -> Order:
    return (left * job.num_workers, float(job.submission.sequence))


POLICIES: Final = {
    policy.name: policy
    for policy in (
        Policy(name="orch", summary="as the daemon decides", order=None),
        Policy(name="fifo", summary="by arrival; no job overtakes another", order=_arrival, first_only=True),
        Policy(name="shortest", summary="the shortest first, durations known", order=_shortest),
        Policy(name="smallest", summary="the least GPU time first, durations known", order=_smallest),
        Policy(name="orch-shared", summary="as it decides with ORCH_TIME_SHARING=1m", order=None, time_sharing=60.0),
        Policy(name="orch-moves", summary="as it decides with ORCH_CONSOLIDATE=yes", order=None, consolidate=True),
    )
}
BOUND: Final = "srtf"
"""Shortest remaining time first with free preemption, on GPUs without nodes (``bound.py``): no schedule, but a bound."""
PUBLISHED: Final = {"tiresias": TIRESIAS, "las": LAS}
"""Published policies, with free preemption and on GPUs without nodes as the bound (``attained.py``)."""
