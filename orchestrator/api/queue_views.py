"""API views of queues and shares, and of nodes. Only the standard library is imported."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the routes read the annotations
from dataclasses import dataclass, field

from orchestrator.api.view import NESTED, View

MAX_LABELS = 64
"""Most labels of one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRank(View):
    """Node and resources with which one rank would run."""

    rank: int
    node: str
    gpus: float = 0.0
    cpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView(View):
    """A queue: its terms, the GPUs that its jobs hold, and its fair share of them now.

    ``share`` is the dominant share that determines the order, now and over time. ``running`` and ``waiting`` count
    jobs, including those of the queues below it. ``changed_by`` is empty if the terms are those of the settings.
    """

    name: str
    parent: str = ""
    guaranteed: int = 0
    maximum: int | None = None
    weight: float = 1.0
    gpus: float = 0.0
    fair_share: float = 0.0
    share: float = 0.0
    running: int = 0
    waiting: int = 0
    changed_by: str = ""
    changed_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserShareView(View):
    """A user's part of a queue ("" without queues): GPUs held, and the share that determines the order."""

    queue: str
    user: str
    gpus: float = 0.0
    share: float = 0.0
    running: int = 0
    waiting: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueShares(View):
    """The order of waiting jobs (ids), the queues, and the users that hold something or wait."""

    order: tuple[str, ...]
    queues: tuple[QueueView, ...] = ()
    users: tuple[UserShareView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderView(View):
    """A job that has GPUs: when it is expected to end (None: not known), and the basis of that time.

    ``basis`` is ``max_duration``, ``like jobs`` (``like_jobs`` of them) or ``time so far``; ``error`` is the median
    error of forecasts from like jobs, as a fraction of the time that these took. ``lost_gpu_seconds`` is the most GPU
    time that it would have to repeat if it were stopped.
    """

    job_id: str
    name: str
    user: str
    gpus: float
    ends_at: float | None = None
    basis: str = ""
    like_jobs: int = 0
    error: float | None = None
    lost_gpu_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlookView(View):
    """Expected start of a job (None: not known) and why; or the ``starts`` and the ``order`` of the queue's first jobs.

    ``starts`` is by job id; ``order`` has at most 300 ids. ``ahead`` are the jobs before it in the order; ``rule`` is
    the reason why the last of these is before it: ``resized``, ``overdue``, ``queue``, ``priority``, ``user``,
    ``aged``, ``work`` or ``arrival``. ``holders`` must end first; with ``starts_at`` None these are the jobs with an
    unknown end. ``stops`` would be preempted for it.
    """

    starts_at: float | None = None
    ahead: tuple[str, ...] = ()
    rule: str = ""
    holders: tuple[HolderView, ...] = ()
    stops: tuple[HolderView, ...] = ()
    starts: Mapping[str, float] = field(default_factory=dict)
    order: tuple[str, ...] = ()


NESTED[OutlookView] = {"holders": HolderView, "stops": HolderView}
NESTED.update({QueueShares: {"queues": QueueView, "users": UserShareView}})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationView(View):
    """A time in which no job runs on a node, and the user who reserved it."""

    id: str
    start_at: float
    end_at: float
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeActionReply(View):
    """Result of an action on a node, and the jobs that it moves."""

    node: str
    state: str
    message: str
    jobs: tuple[str, ...] = ()
