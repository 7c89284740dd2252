"""Measures how long each rank of an attempt is still, and learns from the job itself, per phase, how long it may be.

Only observed time counts: a gap between two ticks longer than a tick means that the observer itself did not run (the
machine slept, was frozen, or was overloaded), and then neither did the ranks; it counts as one tick. Pure: the caller
passes the clock. One ``Heartbeat`` lives for one attempt, so nothing learned in one attempt affects the next.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.health import Standing, standing
from orchestrator.core.facts.hangs import Hang, Lateness, Sign, Stillness

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core.diagnosis.health import RankLook

TICK_SECONDS: Final = 0.5
LONGEST_TICK_SECONDS: Final = 1.0
"""Nothing was observed in a longer gap between two ticks."""
FLOOR_SECONDS: Final = 3.0
"""No rank is inspected sooner, however short the steps are: reports come once a second."""
PATIENCE: Final = 3.0
"""A rank may be still for this many typical steps."""
PAUSE_SECONDS: Final = 30.0
"""The minimum in evaluations and saves, which have no known pace."""
LEAST_STEPS: Final = 5
"""This many step times make a pace; before, a job is starting: first steps compile, fill caches and load data."""
REPORT_SECONDS: Final = 60.0
REPORT_PATIENCE: Final = 20.0
TRAINING_PHASES: Final = frozenset({"", "train", "training"})


class Phase(enum.StrEnum):
    """A rank's activity, as far as its pace is concerned."""

    STARTUP = "startup"
    STEP = "step"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


LEAST_PAUSES: Final = {Phase.STARTUP: 200.0, Phase.EVALUATION: 60.0, Phase.CHECKPOINT: 60.0}
"""Usual pauses in a phase, in seconds, before the job has shown any: first steps compile, fill caches and load data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A rank's present progress. ``step_seconds`` are its newest steps' durations."""

    rank: int
    phase: str = ""
    saving: bool = False
    steps: int = 0
    step_seconds: tuple[float, ...] = ()


@dataclass(slots=True)
class _Rank:
    seen_at: float
    phase: Phase = Phase.STARTUP
    usual: float | None = None
    longest: float = 0.0


class Heartbeat:
    """Measures how long each of ``ranks`` ranks has been still; for ranks that never report, since the attempt's start."""

    def __init__(self, ranks: int, now: float) -> None:
        self._clock = 0.0
        self._ticked_at = now
        self._ranks = {rank: _Rank(seen_at=0.0) for rank in range(ranks)}
        self._reporting: set[int] = set()
        self._longest: dict[Phase, float] = {}

    def tick(self, now: float) -> None:
        """Advance the observed time; ``now`` is from any monotonic clock, in seconds."""
        self._clock += min(max(0.0, now - self._ticked_at), LONGEST_TICK_SECONDS)
        self._ticked_at = now

    def beat(self, beat: Beat) -> None:
        """Record a rank's progress."""
        rank = self._ranks.get(beat.rank)
        if rank is None:
            return
        gap = self._clock - rank.seen_at
        if beat.rank in self._reporting and rank.phase is not Phase.STARTUP:
            self._longest[rank.phase] = max(self._longest.get(rank.phase, 0.0), gap)
        rank.seen_at = self._clock
        rank.phase = phase_of(beat)
        if beat.steps or beat.step_seconds:
            self._reporting.add(beat.rank)
        if len(beat.step_seconds) >= LEAST_STEPS:
            rank.usual, rank.longest = median(beat.step_seconds), max(beat.step_seconds)

    def ended(self, rank: int) -> None:
        """Record the end of a rank's process, which is no longer observed."""
        self._ranks.pop(rank, None)
        self._reporting.discard(rank)

    def sign(self) -> None:
        """Record progress of an unknown rank: a script that reports nothing has printed a line."""
        for rank in self._ranks.values():
            rank.seen_at = self._clock

    @property
    def reports(self) -> bool:
        """Whether any rank has reported a step."""
        return bool(self._reporting)

    @property
    def silent(self) -> tuple[int, ...]:
        """Return the ranks that have reported nothing while others have: their stillness is not known by reports."""
        return tuple(sorted(self._ranks.keys() - self._reporting)) if self._reporting else ()

    @property
    def usual_seconds(self) -> float | None:
        """Return the typical time of a step, of the slowest rank; None while unknown."""
        return max((r.usual for r in self._ranks.values() if r.usual is not None), default=None)

    @property
    def phase(self) -> Phase:
        """Return the job's phase: a rank that does not train determines it, since the others wait for it."""
        phases = {self._ranks[rank].phase for rank in self._reporting}
        for phase in (Phase.CHECKPOINT, Phase.EVALUATION, Phase.STEP):
            if phase in phases:
                return phase
        return Phase.STARTUP

    @property
    def still_seconds(self) -> float:
        """Return the longest stillness of any rank that reports; of a job that reports nothing, its own."""
        ranks = [self._ranks[rank] for rank in self._reporting] or self._ranks.values()
        return self._clock - min((rank.seen_at for rank in ranks), default=self._clock)

    @property
    def longest_step(self) -> float:
        """Return the longest of the newest steps of any rank, in seconds; 0.0 before there are some."""
        return max((rank.longest for rank in self._ranks.values()), default=0.0)

    @property
    def longest_pause(self) -> float:
        """Return the job's longest pause in its present phase, in seconds."""
        phase = self.phase
        return max(LEAST_PAUSES.get(phase, 0.0), self._longest.get(phase, 0.0))

    @property
    def stopped_after(self) -> float:
        """Return the seconds of stillness after which a rank that the kernel shows as stopped is hung, in any phase."""
        return max(FLOOR_SECONDS, PATIENCE * (self.usual_seconds or 0.0))

    @property
    def locked_after(self) -> float | None:
        """Return the seconds after which ranks that provably wait for each other are hung; None while no pace is known."""
        match self.phase:
            case Phase.STARTUP:
                return None
            case Phase.STEP:
                return self.stopped_after
            case phase:
                return max(PAUSE_SECONDS, self.stopped_after, PATIENCE * self._longest.get(phase, 0.0))

    @property
    def reported_after(self) -> float | None:
        """Return the seconds after which a job without any such proof is reported, once; None while no pace is known."""
        if self.phase is Phase.STARTUP:
            return None
        return max(REPORT_SECONDS, REPORT_PATIENCE * self.longest_step, PATIENCE * self._longest.get(self.phase, 0.0))


def phase_of(beat: Beat) -> Phase:
    """Return the phase of a report."""
    if beat.saving:
        return Phase.CHECKPOINT
    if beat.phase not in TRAINING_PHASES:
        return Phase.EVALUATION
    return Phase.STEP if len(beat.step_seconds) >= LEAST_STEPS else Phase.STARTUP


LOOK_SECONDS: Final = 5.0
AGAIN_SECONDS: Final = 1.0
"""Time between two looks once a process is seen stopped: one that runs in between was not stopped all the time."""


@dataclass(slots=True)
class SilentRanks:
    """Silent ranks of one attempt. Times are monotonic seconds; ``due`` is the next look, ``hang`` the lasting stop."""

    due: float = 0.0
    hang: Hang | None = None
    _looks: Mapping[int, RankLook] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)

    def seen(self, looks: Mapping[int, RankLook], heartbeat: Heartbeat, attempt: int, now: float) -> bool:
        """Record a look at each of them; return whether ``hang`` is a new one."""
        before, self._looks = self._looks, looks
        pairs = {rank: (before.get(rank, look), look) for rank, look in sorted(looks.items())}
        stopped = [rank for rank, pair in pairs.items() if standing(*pair) is Standing.STOPPED]
        self._since = {rank: self._since.get(rank, now) for rank in stopped}
        self.due = now + (AGAIN_SECONDS if stopped else LOOK_SECONDS)
        told = self.hang.seen if self.hang is not None else None
        rank = next((rank for rank in stopped if now - self._since[rank] >= heartbeat.stopped_after), None)
        if rank is None:
            self.hang = None
            return False
        still, usual = now - self._since[rank], heartbeat.usual_seconds
        late = Lateness(still_seconds=still, usual_seconds=usual, by_steps=False)
        seen = Stillness(rank=rank, sign=Sign.STOPPED, pid=looks[rank].stopped_pid)
        self.hang = Hang(seen=seen, late=late, attempt=attempt)
        return seen != told
