"""Facts about ranks that make no progress."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from orchestrator.core.facts.fact import Fact


class Sign(StrEnum):
    """The result of the looks at a rank's processes."""

    STOPPED = "stopped"
    TRACED = "traced"
    WORKS = "works"
    OUTSIDE = "outside"
    UNKNOWN = "unknown"
    UNSEEN = "unseen"
    LOCK = "lock"
    SPINS = "spins"
    MISMATCH = "mismatch"
    COLLECTIVE = "collective"
    RENDEZVOUS = "rendezvous"
    WORLD_SIZE = "world_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stillness(Fact):
    """The activity of a rank without progress; ``rank`` None: all of them.

    ``place`` is its Python frame, ``pid`` its stopped process, ``collective`` what it waits in, and ``others`` the
    collectives that the other ranks wait in. ``said`` is the inspector's reason why nothing was seen. ``waits`` is what
    it waits for outside (``timer``, ``disk``). ``world_size`` is that of the process group that it sets up, in a job of
    ``num_ranks``.
    """

    kind: ClassVar[str] = "stillness"
    rank: int | None
    sign: Sign
    place: str = ""
    pid: int | None = None
    collective: str = ""
    others: tuple[str, ...] = ()
    said: str = ""
    waits: str = ""
    world_size: int | None = None
    num_ranks: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness(Fact):
    """Time without a step of any rank, and the typical time; ``by_steps`` is False where only other progress is known."""

    kind: ClassVar[str] = "lateness"
    still_seconds: float
    usual_seconds: float | None = None
    by_steps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(Fact):
    """No rank can continue. ``ignored``: no action follows, by health.on_hang."""

    kind: ClassVar[str] = "hang"
    seen: Stillness
    late: Lateness
    attempt: int
    ignored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Fact):
    """The job has made no step for long, and may continue."""

    kind: ClassVar[str] = "slow"
    seen: Stillness
    late: Lateness
