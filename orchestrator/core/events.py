"""All events of a job, as frozen records. ``stored.py`` writes and reads them for the store.

An event is written before its effects are carried out. Events are small and versioned by their names: a changed meaning
gets a new name, so that old records always fold to the same meaning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.core.codec import Integer, Kind, Number, Record, Text, Time
from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.reasons import NotRetried
from orchestrator.core.facts.submissions import GitState as GitState  # noqa: PLC0414
from orchestrator.core.facts.submissions import LeftOut as LeftOut  # noqa: PLC0414
from orchestrator.core.facts.submissions import MatrixCell as MatrixCell  # noqa: PLC0414
from orchestrator.core.facts.submissions import Prerequisite as Prerequisite  # noqa: PLC0414
from orchestrator.core.ids import JobId
from orchestrator.core.states import EndOrder, FailureClass, JobState, OutOf, StopPurpose, StopScope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.spec.model import JobSpec
else:
    JobSpec = Any  # stored.py converts it: rank actors have events, and import no spec


class RankPlacement(Record):
    """One rank's place: node, GPUs (UUIDs in the order of its ids) and its actor's process id."""

    rank: Integer
    node_id: Text
    node_name: Text
    gpu_ids: tuple[Text, ...]
    gpu_uuids: tuple[Text, ...]
    actor_pid: Integer


class Failure(Record):
    """Details of an attempt's failure: class, cause, the first failing rank, that rank's last ``step`` and last lines.

    ``refusal`` is why it is not retried. ``policy`` is the action of the job's log policy that matches, ``policy_note``
    the note about those.
    """

    failure_class: FailureClass
    cause: Fact
    rank: Integer | None = None
    exit_code: Integer | None = None
    signal: Integer | None = None
    log_tail: tuple[Text, ...] = ()
    policy: Text = ""
    policy_note: Fact | None = None
    refusal: Fact | None = None
    step: Integer | None = None

    @property
    def code(self) -> str:
        """The cause's code."""
        return self.cause.code

    @property
    def reason(self) -> Fact:
        """The cause, and the refusal where there is one."""
        return self.cause if self.refusal is None else NotRetried(cause=self.cause, refusal=self.refusal)

    def sentence(self) -> str:
        """Return what happened, where, and why it is not retried."""
        return self.reason.sentence()

    def advice(self, job_id: str = "JOB") -> str:
        """Return what a user can do about it, with the note about the job's log policies; empty for nothing."""
        note = self.policy_note.sentence() if self.policy_note else ""
        return "; ".join(filter(None, (self.cause.advice(job_id), note)))


class MemoryUse(Record):
    """Memory of its node that a rank's process tree used, and whether the kernel killed a process of it for that."""

    used_bytes: Integer
    """Peak of the whole tree as its control group counted it, or of the rank's process alone if that is more."""
    limit_bytes: Integer | None = None
    """Limit of its control group; None without a group or a limit."""
    killed: OutOf | None = None


class Exit(Record):
    """End of a rank's process. ``at`` is when the kernel reported it; ``error_at`` when its exception had left the script.

    ``evidence`` is from the kernel and the GPU's driver; ``policy`` is the action (fail, restart) of the job's first
    log policy that matches its output, ``policy_note`` a note about that. ``missing_file`` is the file that a
    FileNotFoundError names, ``left_out_by`` the ignore file that excluded it from the job's copy. ``stop_seen_at`` is
    when the rank noticed a request to stop, whether orch had sent it or not; None: never, or unknown. ``last_step`` and
    ``total_steps`` are what it, or its output, had reported. ``ordered`` is the daemon's last order before the end; None:
    the process ended by itself. These times are by the clock of the rank's node: no decision compares them with the
    daemon's. ``heard_at`` is by the daemon's clock: when it learnt of the end; the fold sets it.
    """

    rank: Integer
    exit_code: Integer | None
    signal: Integer | None
    at: Time
    error_type: Text = ""
    error_message: Text = ""
    error_at: Time | None = None
    log_tail: tuple[Text, ...] = ()
    evidence: tuple[Fact, ...] = ()
    policy: Text = ""
    policy_note: Fact | None = None
    missing_file: Text = ""
    left_out_by: Text = ""
    stop_seen_at: Time | None = None
    stop_scope: StopScope | None = None
    last_step: Integer | None = None
    total_steps: Integer | None = None
    memory: MemoryUse | None = None
    ordered: EndOrder | None = None
    heard_at: Time = 0.0

    @property
    def ok(self) -> bool:
        """Whether the rank ended with exit code 0."""
        return self.exit_code == 0

    @property
    def failed_at(self) -> float:
        """Return when the failure was first seen: the exception if there was one, else the death. Others may have failed of it earlier."""
        return self.error_at if self.error_at is not None else self.at

    @property
    def finished(self) -> bool:
        """Whether the rank had reported its last step."""
        return self.last_step is not None and self.total_steps is not None and self.last_step >= self.total_steps

    def completed(self, *, others: bool) -> bool:
        """Whether the rank did all of its work; ``others``: another rank of its attempt had reported its last step."""
        return self.ok and (self.finished or (others and self.last_step is None))


class Event(Record, tag_field="kind"):
    """Common fields of all events: the job, the wall time in seconds since the epoch, and what caused it."""

    kind = Kind()

    job_id: JobId
    at: Time
    cause: Text = ""


class JobSubmitted(Event, tag="job_submitted"):
    """A job was accepted. ``spec_bytes`` is what its job.yaml takes in the store, see ``stored.spec_bytes``."""

    name: Text
    spec: JobSpec
    user: Text
    uid: Integer
    idempotency_key: Text
    python: Text
    path: Text
    work_dir: Text
    snapshot: Text
    resume_from: Text | None = None
    rerun_of: Text | None = None
    left_out: LeftOut | None = None
    git: GitState | None = None
    prerequisites: tuple[Prerequisite, ...] = ()
    matrix: MatrixCell | None = None
    spec_bytes: Integer = 0


class AttemptStarted(Event, tag="attempt_started"):
    """An attempt was ordered: ranks on ``nodes`` (one entry per rank) in gang ``gang``."""

    attempt: Integer
    gang: Integer
    nodes: tuple[Text, ...]


class GangPlaced(Event, tag="gang_placed"):
    """Every actor of the gang answered and reported its GPUs."""

    gang: Integer
    seats: tuple[RankPlacement, ...]


class AttemptRunning(Event, tag="attempt_running"):
    """Every rank's process is up; ``pids`` by rank."""

    attempt: Integer
    pids: tuple[Integer, ...]


class RankExited(Event, tag="rank_exited"):
    """A rank's process ended, and the daemon learnt of it."""

    attempt: Integer
    exit: Exit


class RanksAsked(Event, tag="ranks_asked"):
    """Ranks have left after a request to stop that orch had not sent: the others are asked to follow, and killed at ``deadline``."""

    attempt: Integer
    reason: Fact
    deadline: Time


class GangLost(Event, tag="gang_lost"):
    """An actor or a node of the gang is lost; the gang cannot be used again."""

    gang: Integer
    rank: Integer | None
    reason: Fact
    not_before: Time = 0.0


class AttemptFailed(Event, tag="attempt_failed"):
    """The attempt failed: the reason, whether another follows, and its earliest start."""

    attempt: Integer
    failure: Failure
    failed_at: Time
    retry: bool
    keep_gang: bool
    not_before: Time


class AttemptSucceeded(Event, tag="attempt_succeeded"):
    """Every rank of the attempt ended with exit code 0."""

    attempt: Integer


class AttemptGone(Event, tag="attempt_gone"):
    """All processes of the attempt ended."""

    attempt: Integer


class GangReleased(Event, tag="gang_released"):
    """The gang's actors and its placement group are removed; with ``files``, its logs and outputs are not yet collected."""

    gang: Integer
    files: bool = False


class FilesCollected(Event, tag="files_collected"):
    """What a released gang has left on its nodes is in the home, or is given up; notes of the job say what is missing."""

    gang: Integer


class GangAbandoned(Event, tag="gang_abandoned"):
    """The daemon's owner gives up a gang whose end nothing confirms: its job is cancelled, whatever its ranks have done."""

    gang: Integer
    by: Fact


class StopRequested(Event, tag="stop_requested"):
    """The job must stop: SIGTERM now, SIGKILL at ``deadline``."""

    purpose: StopPurpose
    by: Fact
    deadline: Time


class JobRequeued(Event, tag="job_requeued"):
    """The job returns to the queue, at its old place, not before ``not_before``."""

    reason: Fact
    not_before: Time = 0.0


class JobSuspended(Event, tag="job_suspended"):
    """The job is paused: it holds nothing, and waits for a resume."""

    by: Fact


class JobResumed(Event, tag="job_resumed"):
    """A suspended job goes back to the queue."""

    by: Text


class JobFinished(Event, tag="job_finished"):
    """The job has reached a terminal state."""

    state: JobState
    reason: Fact
    exit_code: Integer | None = None


class CheckpointSaved(Event, tag="checkpoint_saved"):
    """A checkpoint is complete on storage (or, with an empty path, in the memory of its rank actor).

    ``digest`` is set for files that the script writes by itself: their content and ``at``, the time of writing,
    determine which is newer, not their names.
    """

    attempt: Integer
    step: Integer
    path: Text
    digest: Text = ""


class FirstStep(Event, tag="first_step"):
    """The first new optimizer step of an attempt: one that no earlier attempt had reported.

    ``step_at`` is when the rank did it; ``steps_lost`` is how many known steps were repeated.
    """

    attempt: Integer
    step: Integer
    step_at: Time
    steps_lost: Integer


class JobUpdated(Event, tag="job_updated"):
    """A user changed a setting of the job."""

    by: Text
    priority: Integer


class JobNoted(Event, tag="job_noted"):
    """A note that changes no state: a quarantined checkpoint, an unreachable node."""

    note: Fact
    degraded: bool | None = None


class FindingOpened(Event, tag="finding_opened"):
    """Diagnosis found something wrong with the attempt."""

    attempt: Integer
    finding: Fact


class FindingClosed(Event, tag="finding_closed"):
    """A finding is over. The end of an attempt closes its findings without this event."""

    attempt: Integer
    finding: Fact


class ClockStepped(Event, tag="clock_stepped"):
    """The daemon's clock moved by ``seconds``, and with it what the job's record measures or awaits.

    ``unmeasured`` seconds have passed, by the wall clock alone, between two boots of the daemon's machine: they are not
    counted as the job's.
    """

    seconds: Number
    unmeasured: Number = 0.0


class LaterAttemptsFound(Event, tag="later_attempts_found"):
    """Attempts and gangs up to these numbers exist that the record does not know: the store was restored from an older copy.

    They are ended, and their numbers are not used again.
    """

    attempt: Integer
    gang: Integer


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
