"""Moves of running jobs to other nodes, so that a waiting job fits in their places (consolidation)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from orchestrator.core.facts.fact import Fact


class MoveRefusal(StrEnum):
    """Reasons why no job is moved for a job that would fit if the free resources were on the same nodes."""

    OFF = "off"
    BUSY = "busy"
    NO_PLACE = "no_place"
    TOO_DEAR = "too_dear"


@dataclass(frozen=True, slots=True, kw_only=True)
class ByConsolidation(Fact):
    """The job moves to ``nodes`` (an id for each rank; their names are ``names``), so that ``job`` fits.

    It loses at most ``lost_gpu_seconds``: its work since its newest checkpoint on storage, and the time of its last start. ``gained_gpu_seconds`` are those that ``job`` gains.
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
    """Moves after which a waiting job fits, as free resources are scattered: ``jobs`` move to ``places``, the names of nodes for each.

    They lose at most ``lost_gpu_seconds`` in all, the waiting one gains ``gained_gpu_seconds``. ``refusal`` is why they do not move, ``wait_until`` the
    time of a checkpoint that they wait for first.
    """

    kind: ClassVar[str] = "consolidation"
    jobs: tuple[str, ...] = ()
    places: tuple[tuple[str, ...], ...] = ()
    lost_gpu_seconds: float = 0.0
    gained_gpu_seconds: float = 0.0
    refusal: MoveRefusal | None = None
    wait_until: float | None = None
