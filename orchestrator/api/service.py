"""The port between the HTTP application and the daemon: all requests to orch.

The application parses, authenticates the caller and renders; the service decides. For faults of a caller every method
raises errors of ``api.errors`` and no others. Two implementations: the daemon, and the in-memory one of
``api.server.testing``. The application checks that a caller may act on a job, and passes the caller on for the record.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from orchestrator.api.errors import BadRequestError
from orchestrator.api.protocol import PAGE

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from orchestrator.api.curve_views import CurveQuery, CurvesView, GpuHistoryView
    from orchestrator.api.files import FileReader
    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.queue_views import OutlookView, QueueShares, QueueView
    from orchestrator.api.requests import ActionRequest, NodeChange, ProfileRequest, QueueChange, SubmitRequest
    from orchestrator.api.spec_views import SpecDiff, SpecView
    from orchestrator.api.usage_views import EstimateQualityView, UsageReport
    from orchestrator.api.views import (
        ActionReply,
        CheckpointView,
        EventView,
        HealthView,
        JobView,
        LogLine,
        NodeActionReply,
        NodeView,
        PlanReply,
        PruneReply,
        ShutdownReply,
        StacksView,
        SubmitReply,
    )
    from orchestrator.core.ids import JobId
    from orchestrator.runtime.ranks.session_messages import SessionMessage, SessionOutput, SessionRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller: from peer credentials for the Unix socket; for TCP the daemon's owner, since the token is the owner's.

    ``channel`` is unix, tunnel (the socket, forwarded to a TCP port), tcp or page.
    """

    uid: int
    gid: int
    user: str
    is_owner: bool
    pid: int | None = None
    channel: str = "unix"

    @property
    def is_elsewhere(self) -> bool:
        """Whether the caller's paths are those of another machine."""
        return self.channel in {"tcp", "tunnel"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Conditions that a job must all meet; empty ``states`` means every state. Newest first, ``limit`` at most.

    ``before`` is the id of a job: only jobs that arrived earlier, for reading page by page.
    """

    user: str | None = None
    states: frozenset[str] = frozenset()
    since: float | None = None
    before: JobId | None = None
    limit: int = PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Selection of lines of a job's log.

    ``attempt`` None means the newest; ``tail`` keeps the last of the present lines; ``since`` keeps lines with
    ``at >= since`` (of every attempt when ``attempt`` is None, so that a follower can continue after an interruption);
    ``follow`` continues across restarts until the job has ended and all its output was sent. Of the lines that
    ``tail`` leaves, ``contains`` keeps those with that text, ignoring case.
    """

    rank: int | None = None
    attempt: int | None = None
    tail: int | None = None
    follow: bool = False
    since: float | None = None
    contains: str = ""

    def has(self, text: str) -> bool:
        """Return whether a line with this text matches ``contains``."""
        return not self.contains or self.contains.casefold() in text.casefold()

    def check(self, job_id: str, *, ranks: int, attempts: int) -> None:
        """Raise BadRequestError for a rank or an attempt that the job does not have.

        ``ranks`` is the maximum. A follower may wait for a future attempt.
        """
        if self.rank is not None and self.rank >= ranks:
            raise BadRequestError(
                f"{job_id} has no rank {self.rank}", hint=f"0 to {ranks - 1}" if ranks > 1 else "it has rank 0 alone"
            )
        if self.attempt is not None and self.attempt > attempts and not self.follow:
            hint = f"1 to {attempts}" if attempts > 1 else "it has had one" if attempts else "it has not started yet"
            raise BadRequestError(f"{job_id} has no attempt {self.attempt}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageQuery:
    """Grouping, wall times (None: from the first job, until now) and price of a GPU hour (None: the settings')."""

    by: tuple[str, ...] = ("user",)
    since: float | None = None
    until: float | None = None
    price: float | None = None


class NodeVerb(StrEnum):
    """A command on a node."""

    CORDON = "cordon"
    DRAIN = "drain"
    UNCORDON = "uncordon"


class SessionChannel(Protocol):
    """An open session beside a rank. Every method except ``close`` raises RefusedError when the rank is unreachable.

    ``read`` and ``send`` may run at the same time, each once.
    """

    async def read(self, seconds: float) -> SessionOutput:
        """Return the output; wait for some for at most ``seconds``. The last answer has an end."""
        ...

    async def send(self, message: SessionMessage) -> None:
        """Send a client's message; return when it was taken."""
        ...

    async def close(self) -> None:
        """End the session."""
        ...


class JobService(Protocol):
    """All requests of the API. Methods are called from one event loop and may run interleaved."""

    async def submit(self, request: SubmitRequest, caller: Caller) -> SubmitReply:
        """Accept a job; durable once this returns.

        The same idempotency key of the same caller with the same text returns the first reply's job with
        ``created=False``; with another text it raises RefusedError. A secret that the spec names and the request lacks
        leads to ``needs_secrets``, with nothing stored. Raises InvalidSpecError, DiskFullError, RefusedError.
        """
        ...

    async def plan(self, request: SubmitRequest, caller: Caller) -> PlanReply:
        """Check a submission and say where and when it would run; store nothing. Raises InvalidSpecError."""
        ...

    async def missing_pieces(self, digests: Sequence[str], size_bytes: int, caller: Caller) -> Sequence[str]:
        """Return the pieces of an upload of ``size_bytes`` that must be sent. Raises RefusedError over the limit."""
        ...

    async def put_piece(self, digest: str, data: bytes, caller: Caller) -> None:
        """Keep a piece of an upload. Raises BadRequestError for another content, RefusedError beyond the user's limit."""
        ...

    async def jobs(self, query: JobFilter) -> Sequence[JobView]:
        """Return the jobs that match the filter, newest first."""
        ...

    async def resolve(self, ref: str, caller: Caller) -> JobId:
        """Return the id that ``ref`` means: an id, a unique prefix of one, a name (the caller's newest job), or USER/NAME.

        Raises NoSuchJobError; AmbiguousReferenceError, with the candidates as problems.
        """
        ...

    async def job(self, job_id: JobId) -> JobView:
        """Return one job. Raises NoSuchJobError."""
        ...

    async def events(
        self, job_id: JobId, after: int, *, limit: int = PAGE, tail: int | None = None
    ) -> Sequence[EventView]:
        """Return the job's history, oldest first: the first ``limit`` of sequence greater than ``after``.

        With ``tail``, only those that are among the last ``tail`` of the whole history.
        """
        ...

    async def spec(self, job_id: JobId) -> SpecView:
        """Return what the job runs, as resolved at submission."""
        ...

    async def diff(self, before: JobId, after: JobId) -> SpecDiff:
        """Return the differences of two jobs: keys, interpreter, git commit, files of the archive."""
        ...

    async def curves(self, job_id: JobId, query: CurveQuery) -> CurvesView:
        """Return the curves that the job recorded, downsampled for charts; a bounded part of the records is read."""
        ...

    async def gpu_history(self, uuids: Sequence[str], query: CurveQuery) -> GpuHistoryView:
        """Return the history of GPUs and the jobs on them, as far as jobs recorded it."""
        ...

    async def act(self, job_id: JobId, request: ActionRequest, caller: Caller) -> ActionReply:
        """Run a command on a job; durable once this returns.

        A command whose goal is reached or in progress succeeds; one that the job's state excludes raises RefusedError.
        """
        ...

    async def find_matrix(self, ref: str, caller: Caller) -> str | None:
        """Return the id of the matrix that ``ref`` means: an id, a unique prefix, or a name that no newer job of the user has.

        Returns None for a job. Raises AmbiguousReferenceError.
        """
        ...

    async def matrix(self, matrix_id: str) -> MatrixView:
        """Return a matrix and its jobs. Raises NotFoundError."""
        ...

    async def act_on_matrix(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        """Run a command on each job of a matrix to which it applies; durable once this returns. Raises RefusedError if there is none."""
        ...

    async def profile(self, job_id: JobId, request: ProfileRequest) -> bytes:
        """Return a torch.profiler trace of a running job's next steps: a Chrome trace, gzipped JSON.

        Raises RefusedError: the job does not run, does not use the training system, or did not run the steps in time.
        """
        ...

    async def stacks(self, job_id: JobId, rank: int | None) -> StacksView:
        """Return the stacks of a running job's ranks, or of one; also written to the ranks' logs.

        Raises RefusedError: the job does not run. BadRequestError: it has no such rank.
        """
        ...

    async def open_session(self, job_id: JobId, rank: int, request: SessionRequest, caller: Caller) -> SessionChannel:
        """Start a command beside a rank of a running job, or open a connection to a port of its node.

        Raises RefusedError: the job does not run, or nothing listens there. BadRequestError: it has no such rank.
        """
        ...

    async def job_files(self, job_id: JobId) -> FileReader:
        """Return the job's outputs and checkpoints."""
        ...

    def logs(self, job_id: JobId, query: LogQuery) -> AsyncGenerator[Sequence[LogLine], None]:
        """Yield lines of the job's log, oldest first, in batches of at most about a thousand as they arrive.

        Closing the generator releases its resources. It must tolerate cancellation between two batches.
        """
        ...

    async def checkpoints(self, job_id: JobId, *, verify: bool) -> Sequence[CheckpointView]:
        """Return the job's checkpoints, newest first; ``verify`` reads every byte and fills ``valid`` and ``problem``."""
        ...

    async def nodes(self) -> Sequence[NodeView]:
        """Return every node of the cluster, by name."""
        ...

    async def gpus(self, max_age_seconds: float = 0.0) -> Sequence[Mapping[str, Any]]:
        """Return every GPU of every node: rows as of ``gpu.view.GpuRow``, with values at most that old."""
        ...

    async def node_action(self, node: str, verb: NodeVerb, caller: Caller) -> NodeActionReply:
        """Cordon, drain or uncordon a node, by id or name. Raises NoSuchNodeError, RefusedError."""
        ...

    async def change_node(self, node: str, change: NodeChange, caller: Caller) -> NodeActionReply:
        """Change labels and reservations of a node, by id or name; durable once this returns. Raises NoSuchNodeError, BadRequestError, DiskFullError."""
        ...

    async def queue_shares(self) -> QueueShares:
        """Return the order of waiting jobs, and the shares of queues and users."""
        ...

    async def outlook(self, job_id: JobId | None) -> OutlookView:
        """Return when a job is expected to start and why; with None, the starts of the queue's first jobs."""
        ...

    async def set_queue(self, name: str, change: QueueChange, caller: Caller) -> QueueView:
        """Change or create a queue; durable once this returns. Raises BadRequestError, DiskFullError."""
        ...

    async def usage(self, query: UsageQuery) -> UsageReport:
        """Return what jobs used in a time range. Raises BadRequestError."""
        ...

    async def estimate_quality(self) -> EstimateQualityView:
        """Return how accurate estimates of the time left were."""
        ...

    def change_version(self) -> int:
        """Return the change counter: it grows with every change of any job, progress included; restarts may reset it."""
        ...

    async def wait_change(self, after: int, timeout_seconds: float, job_ids: frozenset[JobId] = frozenset()) -> int:
        """Return the counter after a change of one of ``job_ids`` (empty: any), or at the timeout.

        A counter lower than ``after`` (of an earlier daemon) returns at once. Changes of progress may be combined to one a second per job.
        """
        ...

    async def health(self) -> HealthView:
        """Return the daemon's own state; also before it is ready."""
        ...

    def shutdown(self, *, stop_jobs: bool, caller: Caller) -> ShutdownReply:
        """Begin to stop the daemon and return; with ``stop_jobs``, jobs save and return to the queue first."""
        ...

    async def prune(self, *, older_than_seconds: float, dry_run: bool) -> PruneReply:
        """Remove files and records of jobs that ended more than ``older_than_seconds`` ago."""
        ...
