"""All events of a job, as frozen facts. ``job_record.py`` has their JSON form for the store.

An event is written before its effects are carried out. Events are small and versioned by their names: a changed meaning
gets a new name, so that old records always fold to the same meaning.
"""

from __future__ import annotations

# codec.py and conformance.py read the annotations at run time.
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from orchestrator.core.facts.fact import Fact  # noqa: TC001
from orchestrator.core.facts.reasons import NotRetried
from orchestrator.core.facts.submissions import GitState as GitState  # noqa: PLC0414, TC001  # named with their event
from orchestrator.core.facts.submissions import LeftOut as LeftOut  # noqa: PLC0414, TC001
from orchestrator.core.facts.submissions import MatrixCell as MatrixCell  # noqa: PLC0414, TC001
from orchestrator.core.facts.submissions import Prerequisite as Prerequisite  # noqa: PLC0414, TC001
from orchestrator.core.ids import JobId  # noqa: TC001
from orchestrator.core.states import EndOrder, FailureClass, JobState, OutOf, StopPurpose, StopScope  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.spec.model import (
        JobSpec,
    )  # job_record.py sets the annotation: rank actors have events, and no spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One rank's place: node, GPUs (UUIDs in the order of its ids) and its actor's process id."""

    rank: int
    node_id: str
    node_name: str
    gpu_ids: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    actor_pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Details of an attempt's failure: class, cause, the first failing rank, that rank's last ``step`` and last lines.

    ``refusal`` is why it is not retried. ``policy`` is the action of the job's log policy that matches, ``policy_note``
    the note about those.
    """

    failure_class: FailureClass
    cause: Fact
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    log_tail: tuple[str, ...] = ()
    policy: str = ""
    policy_note: Fact | None = None
    refusal: Fact | None = None
    step: int | None = None

    @property
    def code(self) -> str:
        """The cause's code."""
        return self.cause.code

    @property
    def reason(self) -> Fact:
        """The cause, and the refusal where there is one."""
        return self.cause if self.refusal is None else NotRetried(cause=self.cause, refusal=self.refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Memory of its node that a rank's process tree used, and whether the kernel killed a process of it for that."""

    used_bytes: int
    """Peak of the whole tree as its control group counted it, or of the rank's process alone if that is more."""
    limit_bytes: int | None = None
    """Limit of its control group; None without a group or a limit."""
    killed: OutOf | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End of a rank's process. ``at`` is when the kernel reported it; ``error_at`` when its exception was raised.

    ``evidence`` is from the kernel and the GPU's driver; ``policy`` is the action (fail, restart) of the job's first
    log policy that matches its output, ``policy_note`` a note about that. ``missing_file`` is the file that a
    FileNotFoundError names, ``left_out_by`` the ignore file that excluded it from the job's copy. ``stop_seen_at`` is
    when the rank noticed a request to stop, whether orch had sent it or not; None: never, or unknown. ``last_step`` and
    ``total_steps`` are what it, or its output, had reported. ``ordered`` is the daemon's last order before the end; None:
    the process ended by itself. These times are by the clock of the rank's node: no decision compares them with the
    daemon's. ``heard_at`` is by the daemon's clock: when it learnt of the end; the fold sets it.
    """

    rank: int
    exit_code: int | None
    signal: int | None
    at: float
    error_type: str = ""
    error_message: str = ""
    error_at: float | None = None
    log_tail: tuple[str, ...] = ()
    evidence: tuple[Fact, ...] = ()
    policy: str = ""
    policy_note: Fact | None = None
    missing_file: str = ""
    left_out_by: str = ""
    stop_seen_at: float | None = None
    stop_scope: StopScope | None = None
    last_step: int | None = None
    total_steps: int | None = None
    memory: MemoryUse | None = None
    ordered: EndOrder | None = None
    heard_at: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the rank ended with exit code 0."""
        return self.exit_code == 0

    @property
    def failed_at(self) -> float:
        """Return when the failure began: the exception if there was one, else the death."""
        return self.error_at if self.error_at is not None else self.at

    @property
    def finished(self) -> bool:
        """Whether the rank had reported its last step."""
        return self.last_step is not None and self.total_steps is not None and self.last_step >= self.total_steps

    def completed(self, *, others: bool) -> bool:
        """Whether the rank did all of its work; ``others``: another rank of its attempt had reported its last step."""
        return self.ok and (self.finished or (others and self.last_step is None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Common fields of all events: the job, the wall time in seconds since the epoch, and what caused it."""

    kind: ClassVar[str] = ""
    job_id: JobId
    at: float
    cause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(Event):
    """A job was accepted."""

    kind: ClassVar[str] = "job_submitted"
    name: str
    spec: JobSpec
    user: str
    uid: int
    idempotency_key: str
    python: str
    path: str
    work_dir: str
    snapshot: str
    resume_from: str | None = None
    rerun_of: str | None = None
    left_out: LeftOut | None = None
    git: GitState | None = None
    prerequisites: tuple[Prerequisite, ...] = ()
    matrix: MatrixCell | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptStarted(Event):
    """An attempt was ordered: ranks on ``nodes`` (one entry per rank) in gang ``gang``."""

    kind: ClassVar[str] = "attempt_started"
    attempt: int
    gang: int
    nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPlaced(Event):
    """Every actor of the gang answered and reported its GPUs."""

    kind: ClassVar[str] = "gang_placed"
    gang: int
    seats: tuple[Seat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRunning(Event):
    """Every rank's process is up; ``pids`` by rank."""

    kind: ClassVar[str] = "attempt_running"
    attempt: int
    pids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited(Event):
    """A rank's process ended, and the daemon learnt of it. It is stored with the fields of ``exit`` beside ``attempt`` (``stored.job_record``)."""

    kind: ClassVar[str] = "rank_exited"
    attempt: int
    exit: Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksAsked(Event):
    """Ranks have left after a request to stop that orch had not sent: the others are asked to follow, and killed at ``deadline``."""

    kind: ClassVar[str] = "ranks_asked"
    attempt: int
    reason: Fact
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GangLost(Event):
    """An actor or a node of the gang is lost; the gang cannot be used again."""

    kind: ClassVar[str] = "gang_lost"
    gang: int
    rank: int | None
    reason: Fact
    not_before: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed(Event):
    """The attempt failed: the reason, whether another follows, and its earliest start."""

    kind: ClassVar[str] = "attempt_failed"
    attempt: int
    failure: Failure
    failed_at: float
    retry: bool
    keep_gang: bool
    not_before: float


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSucceeded(Event):
    """Every rank of the attempt ended with exit code 0."""

    kind: ClassVar[str] = "attempt_succeeded"
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptGone(Event):
    """All processes of the attempt ended."""

    kind: ClassVar[str] = "attempt_gone"
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GangReleased(Event):
    """The gang's actors and its placement group are removed; with ``files``, its logs and outputs are not yet collected."""

    kind: ClassVar[str] = "gang_released"
    gang: int
    files: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesCollected(Event):
    """What a released gang has left on its nodes is in the home, or is given up; notes of the job say what is missing."""

    kind: ClassVar[str] = "files_collected"
    gang: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GangAbandoned(Event):
    """The daemon's owner gives up a gang whose end nothing confirms: its job is cancelled, whatever its ranks have done."""

    kind: ClassVar[str] = "gang_abandoned"
    gang: int
    by: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """The job must stop: SIGTERM now, SIGKILL at ``deadline``."""

    kind: ClassVar[str] = "stop_requested"
    purpose: StopPurpose
    by: Fact
    deadline: float


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRequeued(Event):
    """The job returns to the queue, at its old place, not before ``not_before``."""

    kind: ClassVar[str] = "job_requeued"
    reason: Fact
    not_before: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSuspended(Event):
    """The job is paused: it holds nothing, and waits for a resume."""

    kind: ClassVar[str] = "job_suspended"
    by: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResumed(Event):
    """A suspended job goes back to the queue."""

    kind: ClassVar[str] = "job_resumed"
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFinished(Event):
    """The job has reached a terminal state."""

    kind: ClassVar[str] = "job_finished"
    state: JobState
    reason: Fact
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on storage (or, with an empty path, in the memory of its rank actor).

    ``digest`` is set for files that the script writes by itself: their content and ``at``, the time of writing,
    determine which is newer, not their names.
    """

    kind: ClassVar[str] = "checkpoint_saved"
    attempt: int
    step: int
    path: str
    digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep(Event):
    """The first new optimizer step of an attempt: one that no earlier attempt had reported.

    ``step_at`` is when the rank did it; ``steps_lost`` is how many known steps were repeated.
    """

    kind: ClassVar[str] = "first_step"
    attempt: int
    step: int
    step_at: float
    steps_lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobUpdated(Event):
    """A user changed a setting of the job."""

    kind: ClassVar[str] = "job_updated"
    by: str
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNoted(Event):
    """A note that changes no state: a quarantined checkpoint, an unreachable node."""

    kind: ClassVar[str] = "job_noted"
    note: Fact
    degraded: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingOpened(Event):
    """Diagnosis found something wrong with the attempt."""

    kind: ClassVar[str] = "finding_opened"
    attempt: int
    finding: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingClosed(Event):
    """A finding is over. The end of an attempt closes its findings without this event."""

    kind: ClassVar[str] = "finding_closed"
    attempt: int
    finding: Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStepped(Event):
    """The daemon's clock moved by ``seconds``, and with it what the job's record measures or awaits.

    ``unmeasured`` seconds have passed, by the wall clock alone, between two boots of the daemon's machine: they are not
    counted as the job's.
    """

    kind: ClassVar[str] = "clock_stepped"
    seconds: float
    unmeasured: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterAttemptsFound(Event):
    """Attempts and gangs up to these numbers exist that the record does not know: the store was restored from an older copy.

    They are ended, and their numbers are not used again.
    """

    kind: ClassVar[str] = "later_attempts_found"
    attempt: int
    gang: int


EVENTS: Mapping[str, type[Event]] = {
    cls.kind: cls
    for cls in (
        JobSubmitted,
        AttemptStarted,
        GangPlaced,
        AttemptRunning,
        RankExited,
        RanksAsked,
        GangLost,
        AttemptFailed,
        AttemptSucceeded,
        AttemptGone,
        GangReleased,
        FilesCollected,
        GangAbandoned,
        StopRequested,
        JobRequeued,
        JobSuspended,
        JobResumed,
        JobFinished,
        CheckpointSaved,
        FirstStep,
        JobUpdated,
        JobNoted,
        FindingOpened,
        FindingClosed,
        ClockStepped,
        LaterAttemptsFound,
    )
}
