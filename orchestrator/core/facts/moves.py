"""Moves of running jobs to other nodes, so that a job fits that needs their places (consolidation)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from orchestrator.core.facts.fact import Fact


class MoveRefusal(StrEnum):
    """Why no job is moved for one that would fit if what is free lay together."""

    OFF = "off"
    BUSY = "busy"
    NO_PLACE = "no_place"
    TOO_DEAR = "too_dear"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByConsolidation(Fact):
    """The job moves to ``nodes``, an id for each rank and called ``names``, because ``job`` fits then.

    It loses at most ``lost_gpu_seconds``: what it repeats since its newest checkpoint on storage, and what its last start took. ``gained_gpu_seconds`` are those that ``job`` gains.
    """

    kind: ClassVar[str] = "by_consolidation"
    job: str
    nodes: tuple[str, ...]
    names: tuple[str, ...]
    lost_gpu_seconds: float
    gained_gpu_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitsMoves(Fact):
    """It starts as soon as these jobs have moved to other nodes."""

    kind: ClassVar[str] = "awaits_moves"
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consolidation(Fact):
    """What a waiting job would fit after, though too little is free together: ``jobs`` move to ``places``, the names of nodes for each.

    They lose ``lost_gpu_seconds`` in all at most, the waiting one gains ``gained_gpu_seconds``. ``refusal`` is why they do not move, ``wait_until`` the
    time of a checkpoint that they wait for before.
    """

    kind: ClassVar[str] = "consolidation"
    jobs: tuple[str, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()
    lost_gpu_seconds: float = 0.0
    gained_gpu_seconds: float = 0.0
    refusal: MoveRefusal | None = None
    wait_until: float | None = None
