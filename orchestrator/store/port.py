"""The port of the store: its requests and its guarantees.

Two implementations: ``sqlite.SqliteStore``, and ``memory.MemoryStore`` for tests and simulation; one contract suite
runs against both. A store decides and folds nothing: the daemon's loop folds, the store checks versions and writes. All
methods except opening and closing are asynchronous; one process at a time holds a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from orchestrator.clock import ClockReading
    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.core.notices import Notice
    from orchestrator.core.states import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Conditions that all hold for a job. Empty ``states`` means every state; ``since`` is a wall time of submission.

    ``before`` is a sequence: only jobs that arrived earlier, for reading page by page.
    """

    user: str | None = None
    states: frozenset[str] = frozenset()
    since: float | None = None
    before: int | None = None
    limit: int = 1000


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An event and its number within its job: 1 is the submission; the number is the job's version after it."""

    number: int
    event: ev.Event


@dataclass(frozen=True, slots=True)
class Found:
    """The job that a reference means. ``others`` counts older jobs of the same name, if it was a name."""

    job: Job
    by: Literal["id", "name", "prefix"]
    others: int = 0


@dataclass(frozen=True, slots=True)
class FinishedCount:
    """Number of jobs of a queue that ended in a state with a failure class ("" for none). Never decreases."""

    queue: str
    state: JobState
    failure_class: str
    count: int


@dataclass(frozen=True, slots=True)
class StoredNotice:
    """A notice that is not yet delivered, its number, and the number of tries."""

    number: int
    notice: Notice
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlace:
    """The restriction of a node (``kind`` node, its id) or a GPU (gpu, its UUID); ``body`` is JSON-ready, None for no restriction."""

    kind: str
    name: str
    body: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQueueChange:
    """A queue's state from wall time ``at`` on (``body``, JSON-ready), and the user who changed it."""

    name: str
    body: Mapping[str, Any]
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class DamagedRecord:
    """A job whose stored record cannot be read; ``rebuilt``: it is read from its events instead, otherwise it is set aside."""

    job_id: str
    reason: str
    rebuilt: bool


class DiskTrouble(StrEnum):
    """Why nothing new can be written to the disk under the home."""

    FULL = "full"
    NO_INODES = "no_inodes"
    FAILING = "failing"
    READ_ONLY = "read_only"


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """The disk under the store: bytes free for this user, whether the reserve exists, why no submission is accepted."""

    free_bytes: int
    reserve_present: bool
    trouble: DiskTrouble | None

    @property
    def accepts_submissions(self) -> bool:
        """Whether new jobs are accepted."""
        return self.trouble is None


class Store(Protocol):
    """The durable record of jobs. A call that returned has its changes on disk; a call that raised stored nothing.

    A caller that is cancelled while it waits cannot see whether its write was done: it repeats the call, which is
    safe because both writing calls are idempotent.
    """

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job; return its record and whether it is new.

        The same uid with the same non-empty ``idempotency_key`` gets the first job and False. Raises
        IdempotencyConflictError when that job differs in spec, archive or origin, JobExistsError when the id is
        taken, DiskFullError when space is short.
        """
        ...

    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        """Accept the jobs of one submission, all or none; return their records and whether they are new.

        Each event has its own key. Where the user has submitted all of them, the first jobs are returned. Raises what ``submit``
        raises, IdempotencyConflictError also where only some of the keys were used before.
        """
        ...

    async def append(self, changes: Sequence[Change], *, clock: ClockReading | None = None, moved: float = 0.0) -> None:
        """Write events and the records folded from them, and a reading of the daemon's clock, all or none.

        ``moved``: by how many seconds the clock was moved since the last reading; the due times of notices move with it.

        The first change of each job follows from the stored version, every other one from its predecessor. Raises
        VersionConflictError, with BrokenChainError for changes that do not follow one another; JobNotFoundError;
        DiskFullError when even the reserve is used up. Changes that are already stored are not written again.
        """
        ...

    async def clock(self) -> ClockReading | None:
        """Return the newest reading of the daemon's clock; None before the first."""
        ...

    async def load_live(self) -> list[Job]:
        """Return every job that is not terminal, in order of arrival.

        Here and in every other list, a job whose record is damaged is rebuilt from its events, and left out where that is impossible.
        """
        ...

    async def job(self, job_id: JobId) -> Job:
        """Return one job. Raises JobNotFoundError; UnreadableRecordError for one that is set aside."""
        ...

    async def damaged(self) -> list[DamagedRecord]:
        """Read every record; return those that are damaged. Their rows and events stay as they are."""
        ...

    async def archives(self) -> Mapping[str, str | None]:
        """Return the digest of each job's archive, empty for a job without one, by the job's id; None where it is unknown."""
        ...

    async def jobs(self, query: JobFilter) -> list[Job]:
        """Return the jobs that match, newest first."""
        ...

    async def events(self, job_id: JobId, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return a job's events with numbers above ``after``, oldest first. Raises JobNotFoundError."""
        ...

    async def accepted(self, uid: int, idempotency_key: str) -> Job | None:
        """Return the job that this user submitted with this key; None without one, or for an empty key."""
        ...

    async def find(self, reference: str, uid: int) -> Found:
        """Return the job with this id, else the user's newest with this name, else the only one whose id starts with it.

        ``USER/NAME`` is the newest of that name of another user. Raises JobNotFoundError, NamedByOthersError where only other
        users have the name, and AmbiguousJobError.
        """
        ...

    async def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival; none where there is no such matrix."""
        ...

    async def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix with this id, else of the user's newest with this name, else of the only one whose id starts with it.

        None where the reference means a job: its id, a name whose newest job is of no such matrix, or a prefix of its id.
        ``USER/NAME`` and NamedByOthersError as for ``find``. Raises AmbiguousJobError where several matrices and no job start with it.
        """
        ...

    async def state_counts(self) -> Mapping[JobState, int]:
        """Return the number of jobs by state, every state present; finished ones until they are pruned."""
        ...

    async def finished_counts(self) -> list[FinishedCount]:
        """Return the counts of jobs that ended since the store was created; pruning does not lower them."""
        ...

    async def due_notices(self, now: float, each: int) -> tuple[list[StoredNotice], float | None]:
        """Return the notices due by ``now`` (wall time), at most ``each`` of a receiver, and when the next becomes due.

        ``submit`` and ``append`` write notices together with their transitions.
        """
        ...

    async def settle_notice(self, number: int, *, again_at: float | None) -> None:
        """Remove a delivered or abandoned notice (None), or schedule its next try at a wall time."""
        ...

    async def places(self) -> list[StoredPlace]:
        """Return every restriction of a node or a GPU."""
        ...

    async def put_places(self, places: Sequence[StoredPlace]) -> None:
        """Replace the restrictions of these places, all or none. A body of None removes a restriction."""
        ...

    async def queue_changes(self) -> list[StoredQueueChange]:
        """Return every change of a queue, the oldest first."""
        ...

    async def put_queue_change(self, change: StoredQueueChange) -> None:
        """Store a change of a queue."""
        ...

    async def untidied(self) -> list[JobId]:
        """Return the terminal jobs whose leftovers are not yet removed, in order of arrival.

        ``append`` notes a job here in the transaction that ends it.
        """
        ...

    async def tidied(self, job_ids: Sequence[JobId]) -> None:
        """Record that nothing is left of these jobs outside their directories. Unknown ids change nothing."""
        ...

    async def ended_before(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Return the terminal jobs that ended before this wall time, except those in ``keep``, the oldest first: what ``prune`` would delete."""
        ...

    async def prune(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Delete terminal jobs that ended before this wall time and their events, never those in ``keep``; return their ids."""
        ...

    async def verify(self) -> list[str]:
        """Return the errors found in the store, one sentence each: damage, or rows that differ from the fold of their events."""
        ...

    async def answers(self) -> None:
        """Return once a read and a write have completed; changes nothing."""
        ...

    def disk(self) -> DiskStatus:
        """Return the state of the disk; recreates the reserve when there is space for it."""
        ...

    def close(self) -> None:
        """Finish pending requests, then close the store. May be called twice."""
        ...
