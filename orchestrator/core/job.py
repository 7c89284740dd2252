"""A job's record: what its events say, as one frozen value. ``fold.py`` makes it from the events."""

from __future__ import annotations

# The annotations are read when the program runs, by codec.py and conformance.py.
from collections.abc import Mapping  # noqa: TC003
from dataclasses import dataclass, field

from orchestrator.core import events as ev  # noqa: TC001
from orchestrator.core.attempt import Attempt, Exit, Stop  # noqa: TC001
from orchestrator.core.ids import JobId  # noqa: TC001
from orchestrator.core.past_attempts import Past
from orchestrator.core.states import JobState  # noqa: TC001
from orchestrator.spec.model import ElasticWorkers, JobSpec

MAX_WORKERS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job's whole record. ``sequence`` is its place of arrival; ``version`` counts its events.

    ``attempts`` are the last ones, see ``past.KEPT_ATTEMPTS``; ``past`` counts those before them.
    ``checkpoint_step`` and ``checkpoint_at`` are those of the newest checkpoint, which may lie in the memory of a rank
    actor; ``checkpoint_path``, ``durable_step`` and ``durable_at`` are those of the newest on storage. ``not_before``
    is a back-off; until ``fenced_until`` ranks of a lost gang may still run somewhere. ``unusable`` (not stored) names what
    was replaced by defaults when the record was read.
    """

    id: JobId
    sequence: int
    version: int
    name: str
    spec: JobSpec
    user: str
    uid: int
    submitted_at: float
    idempotency_key: str
    python: str
    path: str
    work_dir: str
    snapshot: str
    resume_from: str | None
    rerun_of: str | None
    priority: int
    state: JobState
    state_since: float
    reason: str
    attempts: tuple[Attempt, ...] = ()
    past: Past = field(default_factory=Past)
    gang: int = 0
    gang_open: bool = False
    gang_lost: bool = False
    nodes: tuple[str, ...] = ()
    seats: tuple[ev.Seat, ...] = ()
    attempt_live: bool = False
    pids: tuple[int, ...] = ()
    exits: tuple[Exit, ...] = ()
    succeeded: bool = False
    retry: bool = False
    keep_gang: bool = False
    not_before: float = 0.0
    stop: Stop | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    no_progress: int = 0
    checkpoint_step: int = 0
    checkpoint_at: float | None = None
    checkpoint_path: str = ""
    checkpoint_digest: str = ""
    durable_step: int = 0
    durable_at: float | None = None
    fenced_until: float = 0.0
    failure: ev.Failure | None = None
    degraded: bool = False
    notes: tuple[str, ...] = ()
    ended_at: float | None = None
    exit_code: int | None = None
    story: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()

    @property
    def num_workers(self) -> int:
        """Ranks of the current or last attempt; before the first, the fewest that it may have."""
        workers = self.spec.resources.num_workers
        if isinstance(workers, int):
            return workers
        return self.attempts[-1].ranks if self.attempts else self.least_workers

    @property
    def least_workers(self) -> int:
        """The fewest ranks that the next attempt may have."""
        return self._size[0]

    @property
    def most_workers(self) -> int:
        """The most ranks that the next attempt may have."""
        return self._size[1]

    @property
    def _size(self) -> tuple[int, int]:
        match self.spec.resources.num_workers:
            case ElasticWorkers() as elastic:
                return elastic.min, elastic.max
            case int(workers):
                return workers, workers
            case _:  # auto: whatever is free when it first starts, and from then on the same
                first = self.past.first_ranks or (self.attempts[0].ranks if self.attempts else None)
                return (first, first) if first else (1, MAX_WORKERS)

    @property
    def is_elastic(self) -> bool:
        """Its number of ranks may change from attempt to attempt."""
        return isinstance(self.spec.resources.num_workers, ElasticWorkers)

    @property
    def grow_after(self) -> float:
        """Seconds that an attempt of an elastic job runs before it may be stopped to grow."""
        workers = self.spec.resources.num_workers
        return workers.grow_after.total_seconds() if isinstance(workers, ElasticWorkers) else 0.0

    @property
    def attempt(self) -> Attempt | None:
        """The current or last attempt."""
        return self.attempts[-1] if self.attempts else None

    @property
    def attempt_number(self) -> int:
        """Number of the current or last attempt; 0 before the first."""
        return self.attempts[-1].number if self.attempts else 0

    @property
    def left_early(self) -> tuple[Exit, ...]:
        """The ranks that ended, however, after a request to stop that orch had not sent, and before their last step.

        A rank that reports no steps has come to its last one when another has.
        """
        finished = any(e.finished for e in self.exits)
        return tuple(e for e in self.exits if self._asked_from_outside(e) and not self._completed(e, finished=finished))

    def _asked_from_outside(self, ended: Exit) -> bool:
        return ended.stop_seen_at is not None and (self.stop is None or ended.stop_seen_at < self.stop.at)

    def _completed(self, ended: Exit, *, finished: bool) -> bool:
        return ended.ok and (ended.finished or (finished and ended.last_step is None))

    @property
    def ended_well(self) -> bool:
        """Every rank ended with 0, and none because it was asked to."""
        return len(self.exits) == self.num_workers and all(e.ok for e in self.exits) and not self.left_early

    @property
    def whole(self) -> Past:
        """The counters over all attempts, the listed ones included."""
        return self.past.add_all(self.attempts)

    @property
    def started_at(self) -> float | None:
        """When all ranks of an attempt were up for the first time."""
        if self.past.running_at is not None:
            return self.past.running_at
        return next((a.running_at for a in self.attempts if a.running_at is not None), None)
