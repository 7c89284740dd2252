"""A job's record: the state after its events, as one frozen value. ``fold.py`` computes it from the events.

``Job.phase`` holds what exists only in some states; the state follows from it. The properties below
need no knowledge of the phases: each has a value for every phase, empty where there is none.

Each phase holds what exists in it alone, so that no other combination can be represented: a waiting job has no gang; a stop exists
only while a job drains; a job restarts in its gang only while no part of the gang is lost; only a failed job ends with a failure.

A job may restart thousands of times, and its record is rewritten with every event. So the record lists the last ``KEPT_ATTEMPTS``
attempts, and has only counters of earlier ones. The events have every attempt in full.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, TypeAlias, overload

import msgspec
from msgspec.structs import replace

from orchestrator.core import events as ev
from orchestrator.core.codec import Integer, Number, Record, Text, Time, from_plain, use_form
from orchestrator.core.errors import BrokenRuleError
from orchestrator.core.facts.fact import Fact
from orchestrator.core.ids import JobId
from orchestrator.core.states import AttemptState, JobState, StopPurpose
from orchestrator.spec.model import ElasticWorkers

if TYPE_CHECKING:
    from orchestrator.core.events import Exit
    from orchestrator.spec.model import JobSpec
else:
    JobSpec = Any  # stored.py converts it: it has a form of its own


class Exits(Sequence["ev.Exit"]):
    """Ends of ranks of the current attempt, in the order of the reports; at most one end of each rank.

    It is immutable: ``and_then`` returns another one, in constant time, because both share one list of which each shows
    its own part.
    """

    __slots__ = ("_index", "_length", "_shared")

    def __init__(self, exits: Iterable[ev.Exit] = ()) -> None:
        self._index: dict[int, int] = {}
        self._shared: list[ev.Exit] = []
        for each in exits:
            if self._index.setdefault(each.rank, len(self._shared)) == len(self._shared):
                self._shared.append(each)
        self._length = len(self._shared)

    def has(self, rank: int) -> bool:
        """Whether the rank's end is included."""
        return self._index.get(rank, self._length) < self._length

    def and_then(self, end: ev.Exit) -> Exits:
        """Return these, and the end of a rank that is not included yet."""
        if self._length and self._length == len(self._shared):
            longer = object.__new__(Exits)
            longer._index, longer._shared = self._index, self._shared
        else:  # the list has another end after this part of it
            longer = Exits(self)
        longer._index[end.rank] = len(longer._shared)
        longer._shared.append(end)
        longer._length = self._length + 1
        return longer

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[ev.Exit]:
        return islice(self._shared, self._length)

    @overload
    def __getitem__(self, index: int) -> ev.Exit: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ev.Exit, ...]: ...
    def __getitem__(self, index: int | slice) -> ev.Exit | tuple[ev.Exit, ...]:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Exits | tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"Exits({list(self)!r})"


class Attempt(Record):
    """One attempt, current or past. ``ranks`` is its size: that of an elastic job may change between attempts.

    ``progressed``: it has saved a checkpoint that is newer than its first one.
    """

    number: Integer
    gang: Integer
    state: AttemptState
    started_at: Time
    running_at: Time | None = None
    ended_at: Time | None = None
    first_step_at: Time | None = None
    first_step: Integer | None = None
    steps_lost: Integer = 0
    start_step: Integer = 0
    checkpoint_step: Integer = 0
    failure: ev.Failure | None = None
    ranks: Integer = 0
    progressed: bool = False


class Stop(Record):
    """A requested stop."""

    purpose: StopPurpose
    by: Fact
    at: Time
    deadline: Time


use_form(Exits, tuple, lambda ends: Exits(from_plain(tuple[ev.Exit, ...], ends)))


KEPT_ATTEMPTS: Final = 10
"""How many attempts a record lists, the current one included; `orch status JOB` shows as many."""


class Past(Record):
    """Counters over some attempts of a job, from its first one on. Times are seconds since the epoch.

    ``ordered_at`` is when the first attempt was ordered, ``running_at`` when all ranks of one were up for the first time.
    ``recoveries`` counts attempts that reached a new step after one that failed, ``recovery_seconds`` is what they took
    from the failure to that step, all together; ``ran_seconds`` is how long all ranks were up.
    """

    attempts: Integer = 0
    first_ranks: Integer = 0
    most_ranks: Integer = 0
    ordered_at: Time | None = None
    running_at: Time | None = None
    first_step_at: Time | None = None
    steps_lost: Integer = 0
    recoveries: Integer = 0
    recovery_seconds: Number = 0.0
    ran_seconds: Number = 0.0

    def add(self, attempt: Attempt, following: Attempt | None) -> Past:
        """Return the counters with the next attempt, and with the recovery from it by ``following``."""
        took = None if following is None else recovery_seconds(attempt, following)
        return replace(
            self,
            attempts=self.attempts + 1,
            first_ranks=self.first_ranks or attempt.ranks,
            most_ranks=max(self.most_ranks, attempt.ranks),
            ordered_at=attempt.started_at if self.ordered_at is None else self.ordered_at,
            running_at=attempt.running_at if self.running_at is None else self.running_at,
            first_step_at=attempt.first_step_at if self.first_step_at is None else self.first_step_at,
            steps_lost=self.steps_lost + attempt.steps_lost,
            recoveries=self.recoveries + (took is not None),
            recovery_seconds=self.recovery_seconds + (took or 0.0),
            ran_seconds=self.ran_seconds + running_seconds(attempt, attempt.ended_at),
        )

    def add_all(self, attempts: tuple[Attempt, ...]) -> Past:
        """Return the counters with these attempts, which are the job's last."""
        past = self
        for number, attempt in enumerate(attempts, start=1):
            past = past.add(attempt, attempts[number] if number < len(attempts) else None)
        return past


def running_seconds(attempt: Attempt, until: float | None) -> float:
    """Return how long all ranks of an attempt were up, up to ``until`` if it has not ended."""
    ended = until if attempt.ended_at is None else attempt.ended_at
    return 0.0 if attempt.running_at is None or ended is None else max(0.0, ended - attempt.running_at)


def recovery_seconds(failed: Attempt, following: Attempt) -> float | None:
    """Return the seconds from an attempt's failure to the first new step of the next one; None without either."""
    if failed.failure is None or failed.ended_at is None or following.first_step_at is None:
        return None
    return max(0.0, following.first_step_at - failed.ended_at)  # not by the same clock, if that stepped in between


def shorten(past: Past, attempts: tuple[Attempt, ...]) -> tuple[Past, tuple[Attempt, ...]]:
    """Move attempts beyond ``KEPT_ATTEMPTS`` to the counters."""
    while len(attempts) > KEPT_ATTEMPTS:
        past, attempts = past.add(attempts[0], attempts[1]), attempts[1:]
    return past, attempts


class Saved(Record):
    """A complete checkpoint, perhaps only in the memory of a rank actor."""

    step: Integer
    at: Time


class Durable(Record):
    """A checkpoint on storage. ``digest`` is that of the newest file that the script wrote by itself; "" without one.

    ``every`` are the seconds since the one before it, which the same attempt wrote; None for the first.
    """

    step: Integer
    at: Time
    path: Text
    digest: Text = ""
    every: Number | None = None


class Checkpoints(Record):
    """The newest checkpoint of a job, and the newest on storage, often the same. Raises ValueError for the second alone.

    ``step`` and ``at`` are those of the newest, the others of the newest on storage; steps are 0, times
    None and the path is empty before the first.
    """

    newest: Saved | None = None
    durable: Durable | None = None

    def __post_init__(self) -> None:
        if self.newest is None and self.durable is not None:
            raise ValueError("a job with a checkpoint on storage has a newest checkpoint")

    @property
    def without_memory(self) -> Checkpoints:
        """Return what is left when the actors with the newest one in memory are gone."""
        if self.durable is None:
            return Checkpoints()
        return replace(self, newest=Saved(step=self.durable.step, at=self.durable.at))

    @property
    def step(self) -> int:
        """Return the step of the newest, which may be in the memory of a rank actor."""
        return self.newest.step if self.newest is not None else 0

    @property
    def at(self) -> float | None:
        """Return when the newest was saved."""
        return self.newest.at if self.newest is not None else None

    @property
    def path(self) -> str:
        """Return the path of the newest on storage."""
        return self.durable.path if self.durable is not None else ""

    @property
    def digest(self) -> str:
        """Return the digest of the newest on storage, where the script wrote it by itself."""
        return self.durable.digest if self.durable is not None else ""

    @property
    def durable_step(self) -> int:
        """Return the step of the newest on storage."""
        return self.durable.step if self.durable is not None else 0

    @property
    def durable_every(self) -> float | None:
        """Return the seconds between the newest two on storage."""
        return self.durable.every if self.durable is not None else None

    @property
    def durable_at(self) -> float | None:
        """Return when the newest on storage was saved."""
        return self.durable.at if self.durable is not None else None


class _Actors(Record, tag_field="kind"):
    """``nodes`` has an entry for each rank; ``seats`` are known when every actor has answered.

    ``pids`` are those of the attempt's processes by rank, empty until all are up, and None when no process is left.
    ``degraded``: a node does not answer.
    """

    nodes: tuple[Text, ...]
    seats: tuple[ev.RankPlacement, ...] = ()
    pids: tuple[Integer, ...] | None = ()
    degraded: bool = False


class Gang(_Actors):
    """The actors and GPUs that a job holds."""


class LostGang(_Actors):
    """A gang that has lost an actor or a node: no attempt starts in it again."""


class Hold(StrEnum):
    """The state of the gang that a job holds."""

    NOTHING = "nothing"
    PROCESSES = "processes"
    """A whole gang, with processes of the current attempt that may still exist."""
    ACTORS = "actors"
    """A whole gang without processes."""
    LOST = "lost gang"
    """A gang with a lost part."""
    FILES = "files"
    """No gang; logs and outputs of the released one are not yet collected."""


def hold_of(phase: Phase) -> Hold:
    """Return what a job in this phase holds."""
    gang = phase.gang if isinstance(phase, Holding) else None
    if gang is None:
        return Hold.FILES if isinstance(phase, Holding) and phase.files_on else Hold.NOTHING
    if isinstance(gang, LostGang):
        return Hold.LOST
    return Hold.ACTORS if gang.pids is None else Hold.PROCESSES


class Pending(Record, tag_field="phase"):
    """The job waits for a gang. ``failure``, here and below, is that of the last failed attempt."""

    state: ClassVar[JobState] = JobState.PENDING
    not_before: Time = 0.0
    failure: ev.Failure | None = None


class Suspended(Record, tag_field="phase"):
    """The job is paused: it holds nothing, and waits for a resume."""

    state: ClassVar[JobState] = JobState.SUSPENDED
    failure: ev.Failure | None = None


NO_EXITS = Exits()


class Holding(Record, tag_field="phase"):
    """Common part of the current attempt's phases: its gang, None once released, and how its ranks ended so far.

    ``files_on``: the nodes of a released gang, one for each rank, until its files are collected. Nothing follows before that.
    ``attempt_states`` are the possible states of the current attempt in the phase.
    """

    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset(AttemptState)
    gang: Gang | LostGang | None
    files_on: tuple[str, ...] = ()
    exits: Exits = NO_EXITS
    failure: ev.Failure | None = None

    @property
    def left_early(self) -> tuple[Exit, ...]:
        """Return the ranks that ended, in any way, after a request to stop that orch had not sent, before their last step.

        A rank that reports no steps has reached its last one when another has.
        """
        finished = any(e.finished for e in self.exits)
        return tuple(e for e in self.exits if self._asked_from_outside(e) and not e.completed(others=finished))

    def ended_well(self, ranks: int) -> bool:
        """Whether each of ``ranks`` ranks ended with 0, and none because of a request."""
        return len(self.exits) == ranks and all(e.ok for e in self.exits) and not self.left_early

    def _asked_from_outside(self, ended: Exit) -> bool:
        return ended.stop_seen_at is not None


class Starting(Holding):
    """The gang is placed, and its ranks are launched."""

    state: ClassVar[JobState] = JobState.STARTING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.STARTING})


class Running(Holding):
    """Every rank is up."""

    state: ClassVar[JobState] = JobState.RUNNING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.RUNNING})


class Leaving(Holding):
    """Ranks have left after a request to stop that orch had not sent; the others have until ``deadline`` to follow."""

    state: ClassVar[JobState] = JobState.RUNNING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.RUNNING})
    deadline: Time


class Finishing(Holding):
    """Every rank ended with 0; the gang must be released. Raises ValueError for a gang with processes."""

    state: ClassVar[JobState] = JobState.RUNNING
    attempt_states: ClassVar[frozenset[AttemptState]] = frozenset({AttemptState.SUCCEEDED})

    def __post_init__(self) -> None:
        if self.gang is not None and self.gang.pids is not None:
            raise ValueError("a job whose ranks all ended with 0 has no processes")


_FAILED_ATTEMPT = frozenset({AttemptState.FAILED, AttemptState.PREEMPTED, AttemptState.LOST})


class Restarting(Holding):
    """The attempt failed; the next one starts in the same gang, once the processes have ended, not before ``not_before``."""

    state: ClassVar[JobState] = JobState.RECOVERING
    attempt_states: ClassVar[frozenset[AttemptState]] = _FAILED_ATTEMPT
    gang: Gang
    failure: ev.Failure
    not_before: Time


class Replacing(Holding):
    """The attempt failed; once its gang is released the job is placed again, not before ``not_before``."""

    state: ClassVar[JobState] = JobState.RECOVERING
    attempt_states: ClassVar[frozenset[AttemptState]] = _FAILED_ATTEMPT
    failure: ev.Failure
    not_before: Time


class GivingUp(Holding):
    """The attempt failed and is not retried; once its gang is released the job has failed."""

    state: ClassVar[JobState] = JobState.RECOVERING
    attempt_states: ClassVar[frozenset[AttemptState]] = _FAILED_ATTEMPT
    failure: ev.Failure


class Draining(Holding):
    """Ranks have time to save; the stop's purpose determines what follows the gang's release."""

    state: ClassVar[JobState] = JobState.DRAINING
    stop: Stop

    def _asked_from_outside(self, ended: Exit) -> bool:
        return ended.stop_seen_at is not None and ended.ordered is None


class Succeeded(Record, tag_field="phase"):
    """Every rank ended with exit code 0."""

    state: ClassVar[JobState] = JobState.SUCCEEDED
    exit_code: ClassVar[int] = 0
    failure: ClassVar[None] = None


class Failed(Record, tag_field="phase"):
    """The end of a job that is not retried, or that never had an attempt and so may have no failure of one."""

    state: ClassVar[JobState] = JobState.FAILED
    exit_code: Integer | None
    failure: ev.Failure | None


class Cancelled(Record, tag_field="phase"):
    """The job ended at a user's request."""

    state: ClassVar[JobState] = JobState.CANCELLED
    exit_code: ClassVar[None] = None
    failure: ClassVar[None] = None


Recovering: TypeAlias = Restarting | Replacing | GivingUp
HoldingPhase: TypeAlias = Starting | Running | Leaving | Finishing | Recovering | Draining
Ended: TypeAlias = Succeeded | Failed | Cancelled
Phase: TypeAlias = Pending | Suspended | HoldingPhase | Ended

ENDED: tuple[type[Succeeded], type[Failed], type[Cancelled]] = (Succeeded, Failed, Cancelled)


MAX_WORKERS = 10_000
_NO_CHECKPOINTS = Checkpoints()


class Size(NamedTuple):
    """The fewest and the most ranks that an attempt may have."""

    least: int
    most: int


_size = lru_cache(1024)(Size)
"""Cached, because the scheduler reads sizes all the time and there are few different ones."""


class Submission(Record):
    """A user's request, and its origin; immutable. ``sequence`` is the job's place of arrival, ``spec_bytes`` what its job.yaml takes in the store."""

    id: JobId
    sequence: Integer
    name: Text
    spec: JobSpec
    user: Text
    uid: Integer
    submitted_at: Time
    idempotency_key: Text
    python: Text
    path: Text
    work_dir: Text
    snapshot: Text
    resume_from: Text | None
    rerun_of: Text | None
    prerequisites: tuple[ev.Prerequisite, ...] = ()
    matrix: ev.MatrixCell | None = None
    spec_bytes: Integer = 0


class Job(Record):
    """A job's whole record. ``version`` counts its events. Raises BrokenRuleError for a phase that its attempts contradict.

    ``attempts`` are the last ones, see ``past_attempts.KEPT_ATTEMPTS``; ``past`` counts those before them. Until
    ``fenced_until`` ranks of a lost gang may still run somewhere. ``max_duration`` counts from ``limit_since``: when all
    ranks were first up, by the present clock. ``later_attempt`` and ``later_gang`` are the highest numbers that were used
    before the store was restored from an older copy. ``findings`` are those that are open.
    """

    submission: Submission
    version: Integer
    priority: Integer
    phase: Phase
    state_since: Time
    reason: Fact
    attempts: tuple[Attempt, ...] = ()
    past: Past = msgspec.field(default_factory=Past)
    restarts: Mapping[Text, Integer] = msgspec.field(default_factory=dict)
    no_progress: Integer = 0
    checkpoints: Checkpoints = _NO_CHECKPOINTS
    fenced_until: Time = 0.0
    limit_since: Time | None = None
    later_attempt: Integer = 0
    later_gang: Integer = 0
    notes: tuple[Fact, ...] = ()
    findings: tuple[Fact, ...] = ()
    story: tuple[Text, ...] = ()

    def __post_init__(self) -> None:
        phase = self.phase
        if isinstance(phase, Holding) and not (self.attempts and self.attempts[-1].state in phase.attempt_states):
            attempt = self.attempts[-1].state if self.attempts else "no attempt"
            raise BrokenRuleError(self.id, f"{type(phase).__name__} with {attempt}", self.story)

    # -- what was submitted --------------------------------------------------------------------------------------------

    @property
    def id(self) -> JobId:
        """The job's id."""
        return self.submission.id

    @property
    def name(self) -> str:
        """The name that its user gave it."""
        return self.submission.name

    @property
    def spec(self) -> JobSpec:
        """Its job.yaml."""
        return self.submission.spec

    # -- its phase -----------------------------------------------------------------------------------------------------

    @property
    def state(self) -> JobState:
        """Its state."""
        return self.phase.state

    @property
    def held(self) -> Gang | LostGang | None:
        """The gang that it holds."""
        return self.phase.gang if isinstance(self.phase, Holding) else None

    @property
    def gang_open(self) -> bool:
        """Whether it holds a gang, complete or not."""
        return self.held is not None

    @property
    def gang_lost(self) -> bool:
        """Whether a part of its gang is lost."""
        return isinstance(self.held, LostGang)

    @property
    def attempt_live(self) -> bool:
        """Whether processes of the current attempt may still exist."""
        return self.held is not None and self.held.pids is not None

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank of the gang."""
        return self.held.nodes if self.held is not None else ()

    @property
    def files_on(self) -> tuple[str, ...]:
        """The node of each rank of the released gang whose files are not yet collected."""
        return self.phase.files_on if isinstance(self.phase, Holding) else ()

    @property
    def file_nodes(self) -> tuple[str, ...]:
        """The node of each rank of the gang, or of the released one whose files are not yet collected."""
        return self.nodes or self.files_on

    @property
    def seats(self) -> tuple[ev.RankPlacement, ...]:
        """The place of each rank of the gang, once its actors have answered."""
        return self.held.seats if self.held is not None else ()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the current attempt by rank, once all are up."""
        return (self.held.pids or ()) if self.held is not None else ()

    @property
    def degraded(self) -> bool:
        """Whether a node of the gang does not answer."""
        return self.held is not None and self.held.degraded

    @property
    def exits(self) -> Exits:
        """Ends of ranks of the current attempt."""
        return self.phase.exits if isinstance(self.phase, Holding) else NO_EXITS

    @property
    def succeeded(self) -> bool:
        """Whether every rank of the current attempt ended with 0; the rest must be released."""
        return isinstance(self.phase, Holding) and self.attempts[-1].state is AttemptState.SUCCEEDED

    @property
    def stop(self) -> Stop | None:
        """The stop for which it drains."""
        return self.phase.stop if isinstance(self.phase, Draining) else None

    @property
    def not_before(self) -> float:
        """The earliest start of an attempt: a back-off, or ranks of a lost gang that may still run."""
        if isinstance(self.phase, Pending | Restarting | Replacing):
            return self.phase.not_before
        return self.fenced_until

    @property
    def failure(self) -> ev.Failure | None:
        """Failure of the last failed attempt; for an ended job, the failure that ended it."""
        return self.phase.failure

    @property
    def ended_at(self) -> float | None:
        """Time at which it ended; None before."""
        return self.state_since if isinstance(self.phase, ENDED) else None

    @property
    def exit_code(self) -> int | None:
        """Its final exit code."""
        return self.phase.exit_code if isinstance(self.phase, ENDED) else None

    # -- its ranks -----------------------------------------------------------------------------------------------------

    @property
    def elastic(self) -> ElasticWorkers | None:
        """The range of its number of ranks, if that may change from attempt to attempt."""
        workers = self.spec.resources.num_workers
        return workers if isinstance(workers, ElasticWorkers) else None

    @property
    def size(self) -> Size:
        """The possible numbers of ranks of the next attempt."""
        workers = self.spec.resources.num_workers
        if isinstance(workers, int):
            return _size(workers, workers)
        if isinstance(workers, ElasticWorkers):
            return _size(workers.min, workers.max)
        # auto: as advised, else the free number at the first start; then fixed
        first = self.past.first_ranks or (self.attempts[0].ranks if self.attempts else None)
        auto = self.spec.resources.auto
        return _size(first, first) if first else _size(*(auto.bounds if auto else (1, MAX_WORKERS)))

    @property
    def num_workers(self) -> int:
        """Ranks of the current or last attempt; before the first, the minimum."""
        workers = self.spec.resources.num_workers
        if isinstance(workers, int):
            return workers
        return self.attempts[-1].ranks if self.attempts else self.size.least

    # -- its attempts --------------------------------------------------------------------------------------------------

    @property
    def attempt(self) -> Attempt | None:
        """The current or last attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def attempt_number(self) -> int:
        """Number of the current or last attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0

    @property
    def gang(self) -> int:
        """Number of the current or last gang; 0 before the first."""
        return self.attempts[-1].gang if self.attempts else 0

    @property
    def next_attempt(self) -> int:
        """Number of the next attempt."""
        return max(self.attempt_number, self.later_attempt) + 1

    @property
    def next_gang(self) -> int:
        """Number of the next gang."""
        return max(self.gang, self.later_gang) + 1

    @property
    def left_early(self) -> tuple[Exit, ...]:
        """The ranks of the current attempt that ended after a request to stop that orch had not sent, see ``Holding``."""
        return self.phase.left_early if isinstance(self.phase, Holding) else ()

    @property
    def ended_well(self) -> bool:
        """Whether every rank of the current attempt ended with 0, and none because of a request."""
        return isinstance(self.phase, Holding) and self.phase.ended_well(self.num_workers)

    @property
    def whole(self) -> Past:
        """The counters over all attempts, the listed ones included."""
        return self.past.add_all(self.attempts)

    @property
    def started_at(self) -> float | None:
        """Time at which all ranks of an attempt were up for the first time; None before."""
        if self.past.running_at is not None:
            return self.past.running_at
        return next((a.running_at for a in self.attempts if a.running_at is not None), None)
