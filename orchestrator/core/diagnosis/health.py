"""Whether ranks that make no progress are late, and whether a late job is hung or only slow. Pure.

``Heartbeat`` measures how long each rank of an attempt is still, and learns from the job itself, per phase, how long it may be. Only
observed time counts: a gap between two ticks longer than a tick means that the observer itself did not run (the machine slept, was
frozen, or was overloaded), and then neither did the ranks; it counts as one tick. One ``Heartbeat`` lives for one attempt, so nothing
learned in one attempt affects the next.

Time alone cannot distinguish a hang from a pause. So being late is no proof of a hang: two looks at the ranks' processes, a moment
apart, must show that no rank can continue. A stopped process cannot. Neither can ranks that all wait, each in a lock that no thread
can release, or in a collective for the others. A rank that computes, reads, sleeps or waits for something outside may continue, and is
at most slow. The runtime's process_inspector takes the looks.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Final

from orchestrator.core.codec import Count, Message, Number, Text
from orchestrator.core.facts.findings import Hang, Lateness, Sign, Stillness

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

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
class LastProgress:
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

    def beat(self, beat: LastProgress) -> None:
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


def phase_of(beat: LastProgress) -> Phase:
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


IDLE_SHARE: Final = 0.01
"""Share of one processor; threads of communication libraries use less than this."""
IDLE_SECONDS: Final = 0.015
"""The kernel counts in hundredths of a second."""
IDLE_BYTES: Final = 64 * 1024
TIMER: Final = "timer"
"""The name of the wait of a thread that sleeps for a time."""
DISK: Final = "disk"
LEAST_APART: Final = 0.5
"""Two looks closer than this, in seconds, show nothing."""
PATIENT_SECONDS: Final = 60.0
PATIENT_STEPS: Final = 10.0


class Wait(enum.StrEnum):
    """Wait of a rank's training thread, as the kernel reports it."""

    RUNNING = "running"
    LOCK = "lock"  # without a time limit: only another thread can end it
    OUTSIDE = "outside"  # a file, a pipe, the network, a sleep, a lock with a limit: it may end by itself
    UNKNOWN = "unknown"


class Standing(enum.StrEnum):
    """A rank's activity, from two looks."""

    STOPPED = "stopped"
    TRACED = "traced"
    WORKS = "works"
    SPINS = "spins"  # uses its processor, and its stack does not change: a long call, or a wait for its GPU
    OUTSIDE = "outside"
    COLLECTIVE = "collective"
    LOCKED = "locked"
    UNKNOWN = "unknown"


class Call(enum.StrEnum):
    """The decision."""

    SLOW = "slow"
    HUNG = "hung"


class Frame(Message, kw_only=False):
    """One Python frame."""

    function: Text
    file: Text
    line: Count

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def short(self) -> str:
        """Return the frame with its file's name alone."""
        return f"{self.function} ({self.file.rpartition('/')[2]}:{self.line})"


class Thread(Message):
    """One Python thread and its frames, the innermost first."""

    name: Text
    frames: tuple[Frame, ...]


class RankLook(Message):
    """One look at a rank: ``at`` is seconds of its node's own clock, sums are over all its processes.

    ``state`` is the kernel's letter for the training process, T when any process of the rank is stopped, empty when it is
    gone; ``stopped_pid`` is the stopped one. ``threads`` holds the training thread first, then the process's others; empty
    where ``problem`` is why there are no stacks. ``printed`` counts the lines that the rank has written. ``world_size`` is
    that of the process group that the training thread sets up.
    """

    rank: Count
    at: Number
    pid: Count = 0
    state: Text = ""
    stopped_pid: Count = 0
    cpu_seconds: Number = 0.0
    io_bytes: Count = 0
    wait: Wait = Wait.UNKNOWN
    wait_name: Text = ""
    threads: tuple[Thread, ...] = ()
    problem: Text = ""
    printed: Count = 0
    world_size: Count | None = None

    @property
    def place(self) -> str:
        """Return where the training thread is; empty where that is unknown."""
        return str(self.threads[0].frames[0]) if self.threads and self.threads[0].frames else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """Context of the decision: seconds of stillness and of a typical step, and whether waiting is distinguishable from work.

    ``certain``: all ranks on one machine, without a GPU. Elsewhere a wait of every rank may still be work (a slow link,
    queued kernels), and only time shows which.
    """

    still_seconds: float
    usual_seconds: float | None
    certain: bool

    @property
    def patient(self) -> bool:
        """Whether the stillness has lasted so long that no work can explain it."""
        return self.still_seconds >= max(PATIENT_SECONDS, PATIENT_STEPS * (self.usual_seconds or 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class HangFinding:
    """The decision, and the looks at its rank, or at all of them."""

    call: Call
    seen: Stillness

    @property
    def rank(self) -> int | None:
        """Return the rank concerned; None for all of them."""
        return self.seen.rank

    @property
    def stopped(self) -> bool:
        """Whether it is based on the kernel's report of a stopped process, which needs no waiting time."""
        return self.seen.sign is Sign.STOPPED


def collective_of(frames: Sequence[Frame]) -> str:
    """Return the collective that a thread is in, by its frames; empty when it is in none."""
    for frame in frames:
        if "/torch/" not in frame.file:
            return ""
        if frame.function == "_engine_run_backward":
            return "the exchange of gradients"
        if ("/torch/distributed/" in frame.file or "/nn/parallel/" in frame.file) and "wrapper" not in frame.function:
            return frame.function
    return ""


def standing(before: RankLook, after: RankLook) -> Standing:
    """Return the rank's activity from two looks, ``before`` and ``after``."""
    if "T" in (before.state, after.state):
        return Standing.STOPPED if before.state == after.state else Standing.WORKS
    if "t" in (before.state, after.state):
        return Standing.TRACED
    seconds = after.at - before.at
    if after.state in ("", "Z", "X") or before.pid != after.pid or seconds < LEAST_APART:
        return Standing.UNKNOWN
    idle = (
        after.cpu_seconds - before.cpu_seconds <= max(IDLE_SECONDS, IDLE_SHARE * seconds)
        and after.io_bytes - before.io_bytes <= IDLE_BYTES
    )
    if not after.threads or not before.threads:
        return Standing.UNKNOWN if idle else Standing.WORKS
    frames = after.threads[0].frames
    if before.threads[0].frames != frames:
        return Standing.WORKS
    if collective_of(frames):
        return Standing.COLLECTIVE
    if not idle:
        return Standing.SPINS
    if after.state == "D" or Wait.OUTSIDE in (before.wait, after.wait) or _helped(after):
        return Standing.OUTSIDE
    locked = before.wait is Wait.LOCK and after.wait is Wait.LOCK
    return Standing.LOCKED if locked else Standing.UNKNOWN


_LOCK_FILES: Final = ("threading.py", "queue.py", "/multiprocessing/queues.py", "/multiprocessing/synchronize.py")
_RESULT_FILES: Final = ("/concurrent/futures/", "/asyncio/")


def _helped(look: RankLook) -> bool:
    """Whether another thread, in no lock, may wake the training thread, or the latter waits for a future."""
    for thread in look.threads[1:]:
        innermost = thread.frames[0].file if thread.frames else ""
        if innermost and not innermost.endswith(_LOCK_FILES) and "/torch/" not in innermost:
            return True
    frames = look.threads[0].frames[:4]
    return any(part in frame.file for frame in frames for part in _RESULT_FILES)


def judge(pairs: Mapping[int, tuple[RankLook, RankLook]], ranks: Collection[int], how: Circumstances) -> HangFinding:
    """Decide hung or slow, from two looks at each of ``ranks``: the running ranks, or those that answered."""
    stands = {rank: standing(*pairs[rank]) for rank in sorted(pairs)}
    newest = {rank: pairs[rank][1] for rank in sorted(pairs)}
    stopped = _first(stands, Standing.STOPPED)
    if stopped is not None:
        pid = newest[stopped].stopped_pid
        return HangFinding(call=Call.HUNG, seen=Stillness(rank=stopped, sign=Sign.STOPPED, pid=pid))
    may_go_on = (
        (Standing.TRACED, Sign.TRACED),
        (Standing.WORKS, Sign.WORKS),
        (Standing.OUTSIDE, Sign.OUTSIDE),
    )
    for what, sign in may_go_on:
        rank = _first(stands, what)
        if rank is not None:
            waits = _waits(newest[rank]) if sign is Sign.OUTSIDE else ""
            return _slow(rank, sign, place=newest[rank].place, waits=waits)
    unknown = _first(stands, Standing.UNKNOWN)
    if unknown is not None:
        return _slow(unknown, Sign.UNKNOWN, said=newest[unknown].problem)
    missing = next((rank for rank in sorted(ranks) if rank not in stands), None)
    if missing is not None or not stands:
        return _slow(missing, Sign.UNSEEN)
    return _no_rank_works(stands, newest, how)


def _no_rank_works(stands: Mapping[int, Standing], looks: Mapping[int, RankLook], how: Circumstances) -> HangFinding:
    """Decide for ranks of which each waits in a lock or a collective, or spins without progress."""
    spinning = _first(stands, Standing.SPINS)
    places = Counter(look.place for look in looks.values())
    locked = [rank for rank, what in stands.items() if what is Standing.LOCKED]
    together = len(looks) > 1 and len(places) == 1  # a collective's own lock, under a call that leaves no frame
    if locked and not together:
        rank = min(locked, key=lambda r: (places[looks[r].place], r))
        others = tuple(sorted({collective_of(looks[r].threads[0].frames) for r in looks} - {""}))
        # Elsewhere a call may wait for a device or another machine in what looks like a lock: only Python's own locks count there.
        proven = how.certain or looks[rank].threads[0].frames[0].file.endswith(_LOCK_FILES)
        sure = how.patient or (proven and spinning is None)
        seen = Stillness(rank=rank, sign=Sign.LOCK, place=looks[rank].place, others=others)
        return HangFinding(call=Call.HUNG if sure else Call.SLOW, seen=seen)
    if (
        spinning is not None
    ):  # ranks that wait in a collective of NCCL spin too: the call has returned, and its result is not there yet
        return _slow(spinning, Sign.SPINS, place=looks[spinning].place)
    return HangFinding(call=Call.HUNG if how.certain or how.patient else Call.SLOW, seen=_together(looks))


def _together(looks: Mapping[int, RankLook]) -> Stillness:
    """Find the rank in another collective than the others, by their stacks: two calls of the same one cannot be told apart."""
    names = {rank: collective_of(look.threads[0].frames) for rank, look in looks.items()}
    distinct = Counter(names.values())
    rank = min(names, key=lambda r: (distinct[names[r]], r))
    if len(distinct) > 1:
        other = next(name for name in names.values() if name != names[rank])
        return Stillness(rank=rank, sign=Sign.MISMATCH, collective=names[rank], others=(other,) if other else ())
    first = min(looks)
    return Stillness(rank=None, sign=Sign.COLLECTIVE, collective=names[first], place=looks[first].place)


def _slow(rank: int | None, sign: Sign, *, place: str = "", said: str = "", waits: str = "") -> HangFinding:
    return HangFinding(call=Call.SLOW, seen=Stillness(rank=rank, sign=sign, place=place, said=said, waits=waits))


def _waits(look: RankLook) -> str:
    return DISK if look.state == "D" else TIMER if look.wait_name == TIMER or "nanosleep" in look.wait_name else ""


def _first(stands: Mapping[int, Standing], what: Standing) -> int | None:
    return next((rank for rank, found in stands.items() if found is what), None)


GATHERING: Final = frozenset({Sign.RENDEZVOUS, Sign.WORLD_SIZE})
SET_UP: Final = "init_process_group"
_FILE: Final = "/torch/distributed/distributed_c10d.py"


def in_set_up(frames: Sequence[Frame]) -> bool:
    """Whether a thread with these frames sets up its job's process group."""
    return any(frame.function == SET_UP and frame.file.endswith(_FILE) for frame in frames)


def gathering(pairs: Mapping[int, tuple[RankLook, RankLook]], num_ranks: int) -> Stillness | None:
    """Return what keeps the ranks from their process group, by two looks at each; None where none of them waits for it."""
    waiting = [rank for rank in sorted(pairs) if _waits_there(*pairs[rank])]
    if not waiting:
        return None
    sizes = {rank: size for rank in waiting if (size := getattr(pairs[rank][1], "world_size", None)) is not None}
    wrong = {rank: size for rank, size in sizes.items() if size != num_ranks}
    if wrong:
        first = min(wrong)
        rank = None if len(wrong) == num_ranks else first
        return Stillness(rank=rank, sign=Sign.WORLD_SIZE, world_size=wrong[first], num_ranks=num_ranks)
    missing = [rank for rank in range(num_ranks) if rank not in waiting]
    if any(rank in pairs and standing(*pairs[rank]) in (Standing.WORKS, Standing.SPINS) for rank in missing):
        return None  # it makes progress
    if not missing:
        return Stillness(rank=None, sign=Sign.RENDEZVOUS, num_ranks=num_ranks)
    place = pairs[missing[0]][1].place if missing[0] in pairs else ""
    return Stillness(rank=missing[0], sign=Sign.RENDEZVOUS, place=place, num_ranks=num_ranks)


def _waits_there(before: RankLook, after: RankLook) -> bool:
    if after.at - before.at < LEAST_APART or before.pid != after.pid or not (before.threads and after.threads):
        return False
    return before.threads[0].frames == after.threads[0].frames and in_set_up(after.threads[0].frames)
