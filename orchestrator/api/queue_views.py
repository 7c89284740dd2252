"""Queues and shares as the API answers them, and a change of a queue. Only the standard library is imported."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.api.view import NESTED, View


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


NESTED.update({QueueShares: {"queues": QueueView, "users": UserShareView}})


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueChange:
    """What to change of a queue, or to begin it with; None leaves it. ``unbounded`` takes its maximum away."""

    guaranteed: int | None = None
    maximum: int | None = None
    unbounded: bool = False
    weight: float | None = None
    parent: str | None = None
