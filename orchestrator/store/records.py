"""What the store takes and returns: queries, stored things by number, and the disk."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
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
