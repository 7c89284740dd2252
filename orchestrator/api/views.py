"""API views: frozen records and their JSON form, used by daemon and client.

Views carry no behaviour beyond their JSON form. ``*_at`` is seconds since the Unix epoch (UTC), ``*_seconds`` a duration, ``*_bytes`` a
size, ratios are 0 to 1. ``from_json`` ignores keys that a newer daemon added and refuses a missing one. Only the standard library is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.api.curve_views import TrackerView
from orchestrator.api.log_line import LogLine as LogLine  # noqa: PLC0414  # readers of views import it from here
from orchestrator.api.matrix_views import CombinationView, MatrixCellView
from orchestrator.api.queue_views import NodeActionReply as NodeActionReply  # noqa: PLC0414
from orchestrator.api.queue_views import PlannedRank as PlannedRank  # noqa: PLC0414  # readers of views import it from here
from orchestrator.api.queue_views import ReservationView as ReservationView  # noqa: PLC0414
from orchestrator.api.spec_views import LeftOutView as LeftOutView  # noqa: PLC0414
from orchestrator.api.spec_views import RankStacksView as RankStacksView  # noqa: PLC0414
from orchestrator.api.spec_views import StacksView as StacksView  # noqa: PLC0414
from orchestrator.api.spec_views import ThreadView as ThreadView  # noqa: PLC0414
from orchestrator.api.view import NESTED
from orchestrator.api.view import View as View  # noqa: PLC0414  # readers of views import it from here

TERMINAL_STATES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptView(View):
    """One attempt of a job."""

    number: int
    state: str
    started_at: float
    running_at: float | None = None
    ended_at: float | None = None
    failure_class: str | None = None
    reason: str = ""
    fact: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView(View):
    """Place of one rank: its node, its GPUs (empty for ``gpu: 0``) and the process id of the training process.

    ``step_seconds`` is its usual step time, ``own_seconds`` the part of it that is not spent waiting for other ranks.
    """

    rank: int
    node: str
    gpu_uuids: tuple[str, ...] = ()
    pid: int | None = None
    step_seconds: float | None = None
    own_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingView(View):
    """Finding of diagnosis about a job: ``kind``, and the rank and GPU that it is about (neither: the whole job).

    ``since`` is the start of its figures. ``severity`` is critical or warning, ``confidence`` certain, likely or
    possible. ``sentence`` and ``advice`` are for people, ``fact`` has the figures, ``runbook`` names the documentation.
    """

    kind: str
    sentence: str
    severity: str = "warning"
    confidence: str = "likely"
    rank: int | None = None
    gpu_uuid: str = ""
    node: str = ""
    since: float = 0.0
    advice: str = ""
    runbook: str = ""
    fact: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressView(View):
    """Newest progress that the training process reported; ``eta_*`` and ``fraction`` are set if a total is known.

    The bounds contain the time left with 95 %, None if it is too early. A metric that is not a finite number is None.
    """

    step: int | None = None
    total_steps: int | None = None
    epoch: int | None = None
    phase: str | None = None
    fraction: float | None = None
    steps_per_second: float | None = None
    eta_seconds: float | None = None
    eta_low_seconds: float | None = None
    eta_high_seconds: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    updated_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRef(View):
    """Newest complete checkpoint, from which a restart would continue."""

    step: int
    at: float | None = None
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureView(View):
    """Failure of a job: a sentence with the cause, the first failing rank, the end of its log, what to do.

    ``code`` and ``fact``, an object with a ``kind``, are the cause for programs; ``refusal`` is the fact that prevented
    another attempt.
    """

    failure_class: str
    sentence: str
    code: str = ""
    fact: dict[str, Any] | None = None
    refusal: dict[str, Any] | None = None
    rank: int | None = None
    log_tail: tuple[str, ...] = ()
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingsView(View):
    """Duration of each phase; ``recovery_seconds`` is of the attempts that the view lists and that reached a new step.

    ``recoveries`` and ``recovery_seconds_total`` are over all attempts.
    """

    queued_seconds: float | None = None
    submit_to_first_step_seconds: float | None = None
    recovery_seconds: tuple[float, ...] = ()
    recoveries: int = 0
    recovery_seconds_total: float = 0.0
    steps_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView(View):
    """A job, for people and programs.

    ``resources`` is the spec's: ``num_workers``, ``resources_per_worker`` (gpu, cpu, memory, gpu_model) and ``placement_strategy``. ``attempts`` are the last ten, ``attempt`` is the number of the newest; `orch events` has all. ``job_id`` is ``id`` again, under the name that every other answer uses. ``version`` grows with every change of its state. ``fact`` is ``reason`` for programs: an object with a ``kind``.
    ``findings`` are open now, the gravest first. ``stall`` says for how long a running job has made no step, and what its ranks are doing. ``report`` is the page that was written when the job ended; lists of jobs leave it and ``trackers`` out.
    """

    id: str
    name: str
    user: str
    uid: int
    queue: str
    priority: int
    state: str
    reason: str
    reason_code: str = ""
    fact: dict[str, Any] | None = None
    submitted_at: float
    started_at: float | None = None
    ended_at: float | None = None
    attempt: int = 0
    attempts: tuple[AttemptView, ...] = ()
    restarts: int = 0
    restarts_by_class: dict[str, int] = field(default_factory=dict)
    num_workers: int = 1
    gpus: tuple[RankView, ...] = ()
    resources: dict[str, Any] = field(default_factory=dict)
    progress: ProgressView | None = None
    checkpoint: CheckpointRef | None = None
    quarantined: tuple[str, ...] = ()
    degraded: bool = False
    exit_code: int | None = None
    failure: FailureView | None = None
    timings: TimingsView = field(default_factory=TimingsView)
    working_dir: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    log_dir: str = ""
    outputs_dir: str = ""
    report: str = ""
    trackers: tuple[TrackerView, ...] = ()
    balance: dict[str, Any] | None = None
    findings: tuple[FindingView, ...] = ()
    stall: str = ""
    depends_on: dict[str, str] = field(default_factory=dict)
    version: int = 0
    job_id: str = ""
    matrix: MatrixCellView | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "job_id", self.id)

    @property
    def is_terminal(self) -> bool:
        """Whether the job has ended and will not change any more."""
        return self.state in TERMINAL_STATES

    @property
    def per_worker(self) -> dict[str, Any]:
        """Resources of each rank: gpu, cpu, and what else was requested."""
        found = self.resources.get("resources_per_worker")
        return found if isinstance(found, dict) else {}

    @property
    def gpu_count(self) -> float:
        """GPUs that the job holds or, before it runs, requests; a rank with a share of one counts as that share."""
        asked = float(self.per_worker.get("gpu") or 0.0)
        held = sum(len(rank.gpu_uuids) for rank in self.gpus)
        return held * (min(asked, 1.0) if asked else 1.0) if held else asked * self.num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class JobList(View):
    """Jobs, newest first, and the daemon's change counter from before they were read (for ``wait_change``).

    ``more``: the page is full, so there may be older ones; request them with ``before`` the last one's id.
    """

    version: int
    jobs: tuple[JobView, ...]
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView(View):
    """One line of a job's history; ``sequence`` counts up within the job, ``body`` holds the event's own fields."""

    sequence: int
    at: float
    kind: str
    attempt: int | None = None
    summary: str = ""
    cause: str = ""
    body: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventList(View):
    """A job's history, oldest first.

    ``more``: the page is full, so there may be later ones; request them with ``after`` the last one's sequence.
    """

    events: tuple[EventView, ...]
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeReply(View):
    """The daemon's change counter."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointView(View):
    """A checkpoint. ``valid`` is None unless verification was requested; ``problem`` says what is broken.

    ``location`` is ``disk``, ``incomplete`` while it is written, or ``memory`` for the newest snapshot of a live job
    that is not on storage yet: it has no path, and is lost with the node. ``score`` is the metric that the job's
    ``checkpoint.score_attribute`` names; ``is_best`` says that no other has a better one. ``at`` is 0 if unknown.
    """

    step: int
    at: float
    path: str
    attempt: int | None = None
    location: str = "disk"
    size_bytes: int | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    score: float | None = None
    is_best: bool = False
    valid: bool | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointList(View):
    """A job's checkpoints, newest first."""

    checkpoints: tuple[CheckpointView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView(View):
    """One GPU of a node and the rank that holds it.

    ``condition`` is ok, failing, quarantined or lost; ``causes`` are facts, ``problem`` is the first, the gravest, as a sentence.
    """

    uuid: str
    index: int
    model: str = ""
    memory_total_bytes: int | None = None
    job_id: str | None = None
    rank: int | None = None
    healthy: bool = True
    problem: str = ""
    condition: str = "ok"
    causes: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView(View):
    """A node.

    ``state``: READY, CORDONED (no new jobs), QUARANTINED (ranks kept failing there), RESERVED (for its maintenance, now), DRAINING (moves its jobs away) or
    UNREACHABLE. ``fact`` is why it is QUARANTINED. ``agent_pid`` is a process of that node.
    """

    id: str
    name: str
    state: str
    reason: str = ""
    fact: dict[str, Any] | None = None
    address: str = ""
    cpus_total: float = 0.0
    cpus_free: float = 0.0
    gpus_total: float = 0.0
    gpus_free: float = 0.0
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    gpus: tuple[GpuView, ...] = ()
    jobs: tuple[str, ...] = ()
    agent_pid: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    reservations: tuple[ReservationView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeList(View):
    """Every node of the cluster, by name."""

    nodes: tuple[NodeView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthView(View):
    """State of the daemon: whether it accepts jobs, its identity, its resources. ``problems`` have a remedy each.

    ``memory_limits`` is the control group below which ranks on the daemon's node are limited to
    ``resources_per_worker.memory``; empty: the daemon cannot create groups there; None: it did not report one.
    """

    ready: bool
    version: str
    protocol: int
    pid: int
    owner: str
    started_at: float
    home: str = ""
    ray_address: str = ""
    simulated_gpus: int = 0
    read_address: str = ""
    prometheus_url: str = ""
    alertmanager_url: str = ""
    prometheus_password_file: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    gpus_total: float = 0.0
    gpus_free: float = 0.0
    problems: tuple[str, ...] = ()
    page_address: str = ""
    memory_limits: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuList(View):
    """Every GPU of every node, with its newest values and holders: rows as ``gpu.view.GpuRow`` writes them."""

    gpus: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitReply(View):
    """An accepted job, or the first job of a matrix; ``created`` is false if the idempotency key was known already.

    With ``needs_secrets`` nothing was stored: send the same request again with the values of those names.
    """

    job_id: str | None
    created: bool
    state: str | None
    notes: tuple[str, ...] = ()
    needs_secrets: tuple[str, ...] = ()
    left_out: LeftOutView | None = None
    job_ids: tuple[str, ...] = ()
    matrix_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOutcome(View):
    """The reply to one of several submissions, or the problem document for which it was refused."""

    reply: SubmitReply | None = None
    problem: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOutcomes(View):
    """Results of submissions that were sent together, in their order; none depends on another."""

    outcomes: tuple[SubmitOutcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReply(View):
    """Preview of a submission. ``starts``: ``now``, ``later`` (queued first, for ``reason``) or ``never``.

    ``expected_start`` is the expected start of a job that waits, if that is known.
    """

    name: str
    queue: str
    starts: str
    reason: str
    num_workers: int = 1
    seats: tuple[PlannedRank, ...] = ()
    ahead: tuple[str, ...] = ()
    expected_start: float | None = None
    python: str = ""
    working_dir: str = ""
    snapshot_files: int = 0
    snapshot_bytes: int = 0
    left_out: LeftOutView | None = None
    notes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    combinations: tuple[CombinationView, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditEntry(View):
    """A request that changed something or was to. ``source`` is the channel, and the process or address; ``result`` is ok or an error's code."""

    at: float
    user: str
    uid: int | None
    source: str
    action: str
    job: str
    result: str
    status: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditList(View):
    """The last entries of the audit log, the oldest first."""

    entries: tuple[AuditEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionReply(View):
    """Result of an action. ``job_id`` is the job, the new one of ``rerun``, or a matrix's id with its ``job_ids``."""

    job_id: str
    state: str
    message: str
    job_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShutdownReply(View):
    """The daemon stops; ``running`` jobs continue without it; ``stopped`` ones saved and returned to the queue."""

    running: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneLeft(View):
    """An ended job of which files could not be removed; its record stays."""

    job_id: str
    directory: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneReply(View):
    """Ended jobs of which records, logs, working copies and checkpoints were (or would be) removed, and freed bytes.

    ``kept`` are directories and URLs of removed jobs' checkpoints below ``checkpoint.storage_path``: they stay.
    ``left`` are jobs that are not removed because files of theirs could not be.
    """

    removed: tuple[str, ...] = ()
    freed_bytes: int = 0
    dry_run: bool = False
    kept: tuple[str, ...] = ()
    left: tuple[PruneLeft, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGroup(View):
    """One entry of Prometheus's HTTP service discovery."""

    targets: tuple[str, ...]
    labels: dict[str, str] = field(default_factory=dict)


NESTED.update(
    {
        JobView: {
            "attempts": AttemptView,
            "gpus": RankView,
            "progress": ProgressView,
            "checkpoint": CheckpointRef,
            "failure": FailureView,
            "timings": TimingsView,
            "findings": FindingView,
            "trackers": TrackerView,
            "matrix": MatrixCellView,
        },
        JobList: {"jobs": JobView},
        AuditList: {"entries": AuditEntry},
        EventList: {"events": EventView},
        CheckpointList: {"checkpoints": CheckpointView},
        NodeList: {"nodes": NodeView},
        NodeView: {"gpus": GpuView, "reservations": ReservationView},
        PlanReply: {"seats": PlannedRank, "left_out": LeftOutView, "combinations": CombinationView},
        SubmitOutcome: {"reply": SubmitReply},
        SubmitOutcomes: {"outcomes": SubmitOutcome},
        SubmitReply: {"left_out": LeftOutView},
        PruneReply: {"left": PruneLeft},
    }
)
