"""The store in memory: for tests, and for simulating a schedule. Has the contract of ``port.Store``, except for the disk."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from orchestrator.core.lifecycle.fold import submitted
from orchestrator.core.notices import notices_of
from orchestrator.core.states import JobState
from orchestrator.store.batch import by_job, finished_class, one_submission
from orchestrator.store.errors import (
    AmbiguousJobError,
    JobExistsError,
    JobNotFoundError,
    NamedByOthersError,
    StoreClosedError,
    VersionConflictError,
)
from orchestrator.store.port import (
    DamagedRecord,
    DiskStatus,
    FinishedCount,
    Found,
    JobFilter,
    StoredEvent,
    StoredNotice,
)
from orchestrator.store.sql.rows import replay
from orchestrator.store.verification import difference

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from orchestrator.clock import ClockReading
    from orchestrator.core import events as ev
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.lifecycle.fold import Change
    from orchestrator.core.notices import Notice
    from orchestrator.store.batch import JobChanges
    from orchestrator.store.port import StoredPlace, StoredQueueChange


class MemoryStore:
    """``port.Store`` in dictionaries. A call takes effect as a whole before it returns, or raises."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, Job] = {}
        self._events: dict[JobId, list[StoredEvent]] = {}
        self._finished: Counter[tuple[str, JobState, str]] = Counter()
        self._queue_changes: list[StoredQueueChange] = []
        self._places: dict[tuple[str, str], StoredPlace] = {}
        self._notices: dict[int, tuple[StoredNotice, float]] = {}
        self._untidied: dict[JobId, None] = {}
        self._clock: ClockReading | None = None
        self._last_notice = 0
        self._sequence = 0
        self._closed = False

    async def submit_all(self, events: Sequence[ev.JobSubmitted]) -> tuple[list[Job], bool]:
        """Accept the jobs of one submission, all or none; see ``port.Store.submit_all``."""
        self._check_open()
        known = [await self.accepted(event.uid, event.idempotency_key) for event in events]
        found = one_submission(events, known)
        if found is not None:
            return found, False
        for event in events:
            if event.job_id in self._jobs:
                raise JobExistsError(event.job_id)
        jobs = []
        for event in events:
            job = submitted(event, self._sequence + 1)
            self._sequence += 1
            self._jobs[job.id] = job
            self._events[job.id] = [StoredEvent(job.version, event)]
            self._note(notices_of(None, job, event.at))
            jobs.append(job)
        return jobs, True

    async def submit(self, event: ev.JobSubmitted) -> tuple[Job, bool]:
        """Accept a job; see ``port.Store.submit``."""
        (job,), created = await self.submit_all([event])
        return job, created

    async def matrix_jobs(self, matrix_id: str) -> list[Job]:
        """Return the jobs of a matrix, reruns included, in order of arrival."""
        self._check_open()
        return [job for job in self._jobs.values() if (cell := job.submission.matrix) and cell.matrix_id == matrix_id]

    def _named(self, reference: str, uid: int) -> tuple[str, int]:
        """Return the name in a reference, and the user whose job it is: the one before its slash, or ``uid``."""
        user, slash, name = reference.rpartition("/")
        if slash:
            uid = next((j.submission.uid for j in reversed(self._jobs.values()) if j.submission.user == user), -1)
        return name, uid

    def _refuse_names_of_others(self, name: str, own: int) -> None:
        """Raise NamedByOthersError if only users other than ``own`` have jobs or matrices of this name."""
        newest: dict[int, tuple[str, str]] = {}
        for job in reversed(self._jobs.values()):
            cell = job.submission.matrix
            if name in (job.name, None if cell is None else cell.name):
                found = job.id if cell is None or job.name == name else cell.matrix_id
                newest.setdefault(job.submission.uid, (job.submission.user, found))
        if newest and own not in newest:
            raise NamedByOthersError(name, list(newest.values()))

    async def find_matrix(self, reference: str, uid: int) -> str | None:
        """Return the id of the matrix that a reference of this user means; see ``port.Store.find_matrix``."""
        self._check_open()
        name, owner = self._named(reference, uid)
        cells = [(job, cell) for job in self._jobs.values() if (cell := job.submission.matrix)]
        ids = {cell.matrix_id for _, cell in cells}
        if reference in ids or reference in self._jobs:
            return reference if reference in ids else None
        own = [(job.submission.sequence, cell) for job, cell in cells if job.submission.uid == owner]
        named = max(((place, cell.matrix_id) for place, cell in own if cell.name == name), default=None)
        job = max(
            (j.submission.sequence for j in self._jobs.values() if (j.name, j.submission.uid) == (name, owner)),
            default=0,
        )
        if named is not None or job:
            return named[1] if named is not None and named[0] >= job else None
        self._refuse_names_of_others(reference, uid)
        found = sorted(i for i in ids if reference and i.startswith(reference))
        if not found or any(i.startswith(reference) for i in self._jobs):
            return None
        if len(found) > 1:
            raise AmbiguousJobError(reference, found)
        return found[0]

    async def append(self, changes: Sequence[Change], *, clock: ClockReading | None = None, moved: float = 0.0) -> None:
        """Write events and the records folded from them; see ``port.Store.append``."""
        self._check_open()
        if clock is not None:
            self._clock = clock
            self._notices = {number: (notice, at + moved) for number, (notice, at) in self._notices.items()}
        for of_job in [found for found in by_job(changes) if self._follows(found)]:
            after = of_job.after
            self._jobs[after.id] = after
            if of_job.ends:
                self._finished[after.spec.queue, after.state, finished_class(after)] += 1
                self._untidied[after.id] = None
            self._events[after.id] += [StoredEvent(c.after.version, c.event) for c in of_job.changes]
            self._note(of_job.notices())

    def _follows(self, of_job: JobChanges) -> bool:
        """Whether the changes follow from the stored record; False when they are already stored."""
        stored = self._get(of_job.before.id)
        if stored == of_job.after:
            return False
        if stored.version != of_job.before.version:
            raise VersionConflictError(stored.id, of_job.before.version)
        return True

    async def clock(self) -> ClockReading | None:
        """Return the newest reading of the daemon's clock; None before the first."""
        self._check_open()
        return self._clock

    async def load_live(self) -> list[Job]:
        """Return every job that is not terminal, in order of arrival."""
        self._check_open()
        return [job for job in self._jobs.values() if not job.state.is_terminal]

    async def job(self, job_id: JobId) -> Job:
        """Return one job. Raises JobNotFoundError."""
        self._check_open()
        return self._get(job_id)

    async def jobs(self, query: JobFilter) -> list[Job]:
        """Return the jobs that match, newest first."""
        self._check_open()
        found = [
            job
            for job in reversed(self._jobs.values())
            if (query.user is None or job.submission.user == query.user)
            and (not query.states or job.state.value in query.states)
            and (query.since is None or job.submission.submitted_at >= query.since)
            and (query.before is None or job.submission.sequence < query.before)
        ]
        return found[: query.limit]

    async def events(self, job_id: JobId, *, after: int = 0, limit: int = 1000) -> list[StoredEvent]:
        """Return a job's events with numbers above ``after``, oldest first. Raises JobNotFoundError."""
        self._check_open()
        self._get(job_id)
        return [e for e in self._events[job_id] if e.number > after][:limit]

    async def accepted(self, uid: int, idempotency_key: str) -> Job | None:
        """Return the job that this user submitted with this key; None without one, or for an empty key."""
        self._check_open()
        key = (uid, idempotency_key)
        return next(
            (
                j
                for j in self._jobs.values()
                if idempotency_key and (j.submission.uid, j.submission.idempotency_key) == key
            ),
            None,
        )

    async def find(self, reference: str, uid: int) -> Found:
        """Return the job that a reference of this user means; see ``port.Store.find``."""
        self._check_open()
        by_id = next((j for j in self._jobs.values() if j.id == reference), None)
        if by_id is not None:
            return Found(by_id, "id")
        name, owner = self._named(reference, uid)
        named = [j for j in self._jobs.values() if (j.name, j.submission.uid) == (name, owner)]
        if named:
            return Found(named[-1], "name", len(named) - 1)
        self._refuse_names_of_others(reference, uid)
        ids = sorted(i for i in self._jobs if reference and i.startswith(reference))
        if len(ids) > 1:
            raise AmbiguousJobError(reference, ids)
        if not ids:
            raise JobNotFoundError(reference)
        return Found(self._jobs[ids[0]], "prefix")

    async def state_counts(self) -> Mapping[JobState, int]:
        """Return the number of jobs by state, every state present."""
        self._check_open()
        found = Counter(job.state for job in self._jobs.values())
        return {state: found[state] for state in JobState}

    async def finished_counts(self) -> list[FinishedCount]:
        """Return the counts of jobs that ended since the store was created; pruning does not lower them."""
        self._check_open()
        return [FinishedCount(*key, count) for key, count in sorted(self._finished.items())]

    def _note(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            self._last_notice += 1
            self._notices[self._last_notice] = (StoredNotice(self._last_notice, notice, 0), 0.0)

    async def due_notices(self, now: float, each: int) -> tuple[list[StoredNotice], float | None]:
        """Return the notices due by ``now``; see ``port.Store.due_notices``."""
        self._check_open()
        waiting = sorted(self._notices.values(), key=lambda item: (item[1], item[0].number))
        queues: defaultdict[str, list[StoredNotice]] = defaultdict(list)
        due = [found for found, next_at in waiting if next_at <= now]
        for found in due:
            queues[found.notice.receiver].append(found)
        first = {found.number for queue in queues.values() for found in queue[:each]}
        later = min((next_at for _, next_at in waiting if next_at > now), default=None)
        return [found for found in due if found.number in first], later

    async def settle_notice(self, number: int, *, again_at: float | None) -> None:
        """Remove a delivered or abandoned notice, or schedule its next try."""
        self._check_open()
        found, _ = self._notices.pop(number, (None, 0.0))
        if found is not None and again_at is not None:
            self._notices[number] = (StoredNotice(number, found.notice, found.attempts + 1), again_at)

    async def places(self) -> list[StoredPlace]:
        """Return every restriction of a node or a GPU."""
        self._check_open()
        return [self._places[key] for key in sorted(self._places)]

    async def put_places(self, places: Sequence[StoredPlace]) -> None:
        """Store these restrictions of their places."""
        self._check_open()
        for place in places:
            self._places.pop((place.kind, place.name), None)
            if place.body is not None:
                self._places[place.kind, place.name] = place

    async def queue_changes(self) -> list[StoredQueueChange]:
        """Return every change of a queue, the oldest first."""
        self._check_open()
        return list(self._queue_changes)

    async def put_queue_change(self, change: StoredQueueChange) -> None:
        """Store a change of a queue."""
        self._check_open()
        self._queue_changes.append(change)

    async def damaged(self) -> list[DamagedRecord]:
        """Return no record: those in memory are not read."""
        self._check_open()
        return []

    async def archives(self) -> Mapping[str, str | None]:
        """Return the digest of each job's archive by the job's id."""
        self._check_open()
        return {job.id: job.submission.snapshot for job in self._jobs.values()}

    async def untidied(self) -> list[JobId]:
        """Return the terminal jobs whose leftovers are not yet removed, in order of arrival."""
        self._check_open()
        return sorted(self._untidied, key=lambda job_id: self._jobs[job_id].submission.sequence)

    async def tidied(self, job_ids: Sequence[JobId]) -> None:
        """Record that nothing is left of these jobs outside their directories."""
        self._check_open()
        for job_id in job_ids:
            self._untidied.pop(job_id, None)

    async def ended_before(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Return the terminal jobs that ended before ``older_than``, except those in ``keep``, the oldest first."""
        self._check_open()
        ended = [
            (j.ended_at, j.submission.sequence, j.id)
            for j in self._jobs.values()
            if j.state.is_terminal and j.ended_at is not None and j.id not in keep
        ]
        return [job_id for ended_at, _, job_id in sorted(ended) if ended_at < older_than]

    async def prune(self, older_than: float, keep: Collection[JobId] = frozenset()) -> list[JobId]:
        """Delete terminal jobs that ended before ``older_than``, except those in ``keep``; return their ids."""
        forgotten = await self.ended_before(older_than, keep)
        for job_id in forgotten:
            del self._jobs[job_id], self._events[job_id]
            self._untidied.pop(job_id, None)
        return forgotten

    async def verify(self) -> list[str]:
        """Return a sentence for each record that differs from the fold of its events."""
        self._check_open()
        wrong = {i: difference(j, replay(self._events[i], j.submission.sequence)) for i, j in self._jobs.items()}
        return [f"job {i}: its row differs from the fold of its events in {text}" for i, text in wrong.items() if text]

    async def answers(self) -> None:
        """Return at once: memory always answers while it is open."""
        self._check_open()

    def disk(self) -> DiskStatus:
        """Return ample space: memory has no disk."""
        return DiskStatus(free_bytes=2**62, reserve_present=True, trouble=None)

    def close(self) -> None:
        """Refuse later calls. May be called twice."""
        self._closed = True

    def _get(self, job_id: JobId) -> Job:
        if job_id not in self._jobs:
            raise JobNotFoundError(job_id)
        return self._jobs[job_id]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosedError("the store is closed: open it again")
