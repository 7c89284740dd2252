"""Input of a round of placing. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.core.scheduler.durations import RunTimes
from orchestrator.core.scheduler.live import LiveJobs
from orchestrator.core.scheduler.service.saves import RECORDED

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.lanes import Kind
    from orchestrator.core.scheduler.room.holding import Holding
    from orchestrator.core.scheduler.room.vacancy import Vacancy
    from orchestrator.core.scheduler.service.saves import Saves
    from orchestrator.core.scheduler.shares import Shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Input of one round: the jobs that wait for a gang, in order, those that hold one, and what these leave free.

    ``shares`` count the gangs that jobs hold, and those that the round places; ``waiting`` are the queues of waiting
    jobs. The round takes what it places and claims from ``free``, and only what it places from ``loose``, which is
    given if waiting jobs may have a ``max_duration``. ``brief``: reasons are needed only for the first jobs that wait,
    so the round ends when no GPU is left. ``fits_ever`` returns whether a gang of a kind could fit if nothing else ran.
    ``run_times`` are those of jobs that have ended. ``saves`` has the times at which running jobs save, ``idle`` since
    when all GPUs of running jobs are idle, and ``closed`` the nodes that accept no new ranks.
    """

    queue: Iterable[Job]
    holding: Holding
    free: Vacancy
    nodes: Mapping[str, Node]
    shares: Shares
    waiting: Collection[str] = ()
    brief: bool = False
    fits_ever: Callable[[Job, Kind, Mapping[str, Node]], bool] = field(default_factory=lambda: LiveJobs().fits_ever)
    run_times: RunTimes = field(default_factory=RunTimes)
    loose: Vacancy | None = None
    saves: Saves = RECORDED
    idle: Mapping[JobId, float] = field(default_factory=dict)
    closed: Sequence[Node] = ()
