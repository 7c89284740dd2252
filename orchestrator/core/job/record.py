"""A job's record: the state after its events, as one frozen value. ``fold.py`` computes it from the events.

``Job.phase`` (``phases.py``) holds what exists only in some states; the state follows from it. The properties below
need no knowledge of the phases: each has a value for every phase, empty where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from orchestrator.core import events as ev
from orchestrator.core.codec import Integer, Record, Text, Time
from orchestrator.core.errors import BrokenRuleError
from orchestrator.core.facts.fact import Fact
from orchestrator.core.ids import JobId
from orchestrator.core.job.attempt import Attempt, Exits, Past, Stop
from orchestrator.core.job.checkpoints import Checkpoints
from orchestrator.core.job.phases import (
    ENDED,
    NO_EXITS,
    Draining,
    Gang,
    Holding,
    LostGang,
    Pending,
    Phase,
    Replacing,
    Restarting,
)
from orchestrator.core.states import AttemptState, JobState
from orchestrator.spec.model import ElasticWorkers

if TYPE_CHECKING:
    from orchestrator.core.events import Exit
    from orchestrator.spec.model import JobSpec
else:
    JobSpec = Any  # stored.py converts it: it has a form of its own

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
    def seats(self) -> tuple[ev.Seat, ...]:
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
