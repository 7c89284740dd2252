"""Ranks that make no progress: what was seen of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from orchestrator.core.facts.fact import Fact


class Sign(StrEnum):
    """What the looks at a rank's processes show."""

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
    """What a rank without progress is at; ``rank`` None: all of them.

    ``place`` is the Python frame it stands in, ``pid`` its stopped process, ``collective`` what it waits in, and ``others`` the
    collectives that the other ranks wait in. ``said`` is why nothing was seen, in the words of what looked. ``waits`` is what it
    waits for outside (``timer``, ``disk``). ``world_size`` is that of the process group that it sets up, in a job of ``num_ranks``.
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
    """How long no rank has made a step, and what is usual; ``by_steps`` is False where only signs of life are known."""

    kind: ClassVar[str] = "lateness"
    still_seconds: float
    usual_seconds: float | None = None
    by_steps: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang(Fact):
    """No rank can go on. ``ignored``: nothing is done about it, as health.on_hang says."""

    kind: ClassVar[str] = "hang"
    seen: Stillness
    late: Lateness
    attempt: int
    ignored: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow(Fact):
    """The job makes no step for long, and may go on."""

    kind: ClassVar[str] = "slow"
    seen: Stillness
    late: Lateness
