"""Queues and shares as the API answers them, and changes of queues and nodes. Only the standard library is imported."""

from __future__ import annotations

from collections.abc import Mapping  # noqa: TC003 - the routes read the annotations
from dataclasses import dataclass, field
from typing import Any

from orchestrator.api.view import NESTED, View

MOST_LABELS = 64
"""More labels no node has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeatPlan(View):
    """Where one rank would run."""

    rank: int
    node: str
    gpus: float = 0.0
    cpus: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueView(View):
    """A queue: its terms, the GPUs that its jobs hold, and its fair share of them now.

    ``share`` is its dominant share as it counts for the order, now and over time. ``running`` and ``waiting`` count jobs, those of
    the queues below it included. ``changed_by`` is empty where the settings' terms hold.
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
    """A user's part of a queue ("" without queues): GPUs held, and the share that counts for the order."""

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
    """A job that has GPUs: when it is expected to end (None: not known), and what that is known from.

    ``basis`` is ``max_duration``, ``like jobs`` (``like_jobs`` of them) or ``time so far``; ``error`` how far forecasts from like jobs were off, as a part
    of what these took: the median. ``lost_gpu_seconds`` is what it would repeat at most if it were stopped.
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
    """When a job is expected to start (None: nothing says), and why not before; or ``starts`` of the first jobs of the queue, by id, with the ``order`` of its first 300.

    ``ahead`` are the jobs before it in the order, ``rule`` says why the last of these is: ``resized``, ``overdue``, ``queue``, ``priority``, ``user``, ``arrival``.
    ``holders`` have to end first; with ``starts_at`` None these are jobs of which nothing is known. ``stops`` would be preempted for it.
    ``moves`` says which jobs would move to other nodes for it, and what that costs and gains, or why none does; ``consolidation`` is the same as a fact.
    """

    starts_at: float | None = None
    ahead: tuple[str, ...] = ()
    rule: str = ""
    holders: tuple[HolderView, ...] = ()
    stops: tuple[HolderView, ...] = ()
    starts: Mapping[str, float] = field(default_factory=dict)
    order: tuple[str, ...] = ()
    moves: str = ""
    consolidation: dict[str, Any] | None = None


NESTED[OutlookView] = {"holders": HolderView, "stops": HolderView}
NESTED.update({QueueShares: {"queues": QueueView, "users": UserShareView}})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueChange:
    """What to change of a queue, or to begin it with; None leaves it. ``unbounded`` takes its maximum away."""

    guaranteed: int | None = None
    maximum: int | None = None
    unbounded: bool = False
    weight: float | None = None
    parent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationView(View):
    """A time in which no job runs on a node, and the user who reserved it."""

    id: str
    start_at: float
    end_at: float
    reason: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest:
    """A node is to be reserved from a wall time on, for so long."""

    start: float
    seconds: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """What to change of a node: ``labels`` to set, None removes one; ``unreserve`` is a reservation's id, "" its only one."""

    labels: Mapping[str, str | None] = field(default_factory=dict)
    reserve: ReservationRequest | None = None
    unreserve: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeActionReply(View):
    """What an action on a node did, and which jobs it moves."""

    node: str
    state: str
    message: str
    jobs: tuple[str, ...] = ()
