"""The port of the durable record: what the daemon may ask of a store, and what it may rely on.

Two implementations: ``sqlite.SqliteStore``, and ``memory.MemoryStore`` for tests and simulation; one contract suite
runs against both. A store decides and folds nothing: the daemon's loop folds, the store checks versions and keeps. Everything is asynchronous but opening
and closing; one process at a time holds a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.core.notices import Notice
    from orchestrator.core.states import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs: all conditions hold. Empty ``states`` means every state; ``since`` is a wall time of submission.

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
    """What a reference led to. ``others`` counts older jobs of the same name, when it was a name."""

    job: Job
    by: Literal["id", "name", "prefix"]
    others: int = 0


@dataclass(frozen=True, slots=True)
class FinishedCount:
    """How many jobs of a queue ended in a state, and of which failure class ("" for none). Never goes down."""

    queue: str
    state: JobState
    failure_class: str
    count: int


@dataclass(frozen=True, slots=True)
class StoredNotice:
    """A notice that is still to be told, its number, and how often that was tried."""

    number: int
    notice: Notice
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPlace:
    """What is held against a node (``kind`` node, its id) or a GPU (gpu, its UUID); ``body`` is JSON-ready, None nothing."""

    kind: str
    name: str
    body: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredQueueChange:
    """A queue as it is from wall time ``at`` on (``body``, JSON-ready), and the user who changed it."""

    name: str
    body: Mapping[str, Any]
    by: str
    at: float


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """The disk under the store: bytes free for this user, whether the reserve is there, whether submissions are taken."""

    free_bytes: int
    reserve_present: bool
    accepts_submissions: bool


class Store(Protocol):
    """The durable record of jobs. What a call returned is on the disk; what it raised for is not, in no part.

    A caller that is cancelled while it waits does not know whether its write was done: ask again, both writing calls
    are idempotent.
    """

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job: its record and whether it is new.

        The same uid with the same non-empty ``idempotency_key`` gets the first job and False. Raises
        IdempotencyConflictError when that job differs in spec, snapshot or origin, JobExistsError when the id is
        taken, DiskFullError when space is short.
        """
        ...

    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        """Accept the jobs of one submission, all or none: their records and whether they are new.

        Each event has a key of its own. Where the user has submitted all of them, the first jobs are the answer. Raises what ``submit``
        raises, IdempotencyConflictError also where only some of the keys are known.
        """
        ...

    async def append(self, changes: Sequence[Change]) -> None:
        """Write events and the records that they were folded to, all or none.

        The first change of each job follows from the stored version, each other one from the change before it. Raises
        VersionConflictError, with BrokenChainError for changes that do not follow one another; JobNotFoundError;
        DiskFullError when not even the reserve is left. Changes that are stored already are not written again.
        """
        ...

    async def load_live(self) -> list[Job]:
        """Every job that is not terminal, in order of arrival."""
        ...

    async def job(self, job_id: JobId) -> Job:
        """One job. Raises JobNotFoundError."""
        ...

    async def jobs(self, query: JobFilter) -> list[Job]:
        """Jobs that match, newest first."""
        ...

    async def events(self, job_id: JobId, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Events of a job with numbers above ``after``, oldest first. Raises JobNotFoundError."""
        ...

    async def accepted(self, uid: int, idempotency_key: str) -> Job | None:
        """The job that this user submitted with this key; None when there is none, or the key is empty."""
        ...

    async def find(self, reference: str) -> Found:
        """The job with this id, else the newest with this name, else the only one whose id begins so.

        Raises JobNotFoundError and AmbiguousJobError.
        """
        ...

    async def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """The jobs of a matrix, reruns included, in order of arrival; none where there is no such matrix."""
        ...

    async def find_matrix(self, reference: str) -> str | None:
        """The id of the matrix with this id, else of the newest with this name, else of the only one whose id begins so.

        None where the reference means a job: its id, a name whose newest job is of no such matrix, or the beginning of its id.
        Raises AmbiguousJobError where several matrices and no job begin so.
        """
        ...

    async def state_counts(self) -> Mapping[JobState, int]:
        """Jobs by state, every state present; finished ones until they are pruned."""
        ...

    async def finished_counts(self) -> list[FinishedCount]:
        """Jobs that ended since the store was made; pruning does not lower them."""
        ...

    async def due_notices(self, now: float, limit: int) -> tuple[list[StoredNotice], float | None]:
        """Notices to be told by ``now`` (wall time), at most ``limit``, and when the first of all waiting ones is due.

        Notices are written by ``submit`` and ``append`` together with the transitions that they tell of.
        """
        ...

    async def settle_notice(self, number: int, *, again_at: float | None) -> None:
        """A notice was told or given up (None), or is to be tried again at a wall time."""
        ...

    async def places(self) -> list[StoredPlace]:
        """Everything that is held against nodes and GPUs."""
        ...

    async def put_places(self, places: Sequence[StoredPlace]) -> None:
        """Hold these against their places from now on, in place of what was; all or none. A body of None: nothing any more."""
        ...

    async def queue_changes(self) -> list[StoredQueueChange]:
        """Every change of a queue, the oldest first."""
        ...

    async def put_queue_change(self, change: StoredQueueChange) -> None:
        """A queue is so from now on."""
        ...

    async def untidied(self) -> list[JobId]:
        """Terminal jobs whose leftovers were not told to be removed, in order of arrival.

        ``append`` notes a job here in the transaction that ends it.
        """
        ...

    async def tidied(self, job_ids: Sequence[JobId]) -> None:
        """Nothing is left of these jobs outside their directories. Unknown ids change nothing."""
        ...

    async def ended_before(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Terminal jobs that ended before this wall time but those to ``keep``, the oldest first: what ``prune`` would forget."""
        ...

    async def prune(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Forget terminal jobs that ended before this wall time, with their events; never a live one, nor one to ``keep``. Their ids."""
        ...

    async def verify(self) -> list[str]:
        """What is wrong with the record, one sentence each: damage, or rows that differ from the fold of their events."""
        ...

    async def answers(self) -> None:
        """Return when reading and writing have each had a turn; nothing is changed."""
        ...

    def disk(self) -> DiskStatus:
        """How the disk stands; makes the reserve again when there is space for it."""
        ...

    def close(self) -> None:
        """Finish what was asked, then let go of the store. May be called twice."""
        ...
