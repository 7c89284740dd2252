"""The daemon's own metrics, created from a `Snapshot` at each scrape: no value is counted twice or stale.

Names, labels, types and texts come from the catalogue. A job has series while it has a live attempt and for 15 minutes
after, so their number follows the running jobs and not all past ones; names that scripts report are capped. Closed sets
(states, classes, phases) are exported with their zeros, since `increase()` misses the first event of a series that
begins with 1.

This module must not access the daemon, the store or a clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

from orchestrator import catalogue as c
from orchestrator.core import events as ev
from orchestrator.core.goodput import Phase
from orchestrator.core.states import FailureClass, JobState, StopPurpose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from prometheus_client.metrics_core import Metric as Family

    from orchestrator.catalogue import Metric


LINGER_SECONDS: Final = 900.0
"""Time for which a job keeps its series after its last attempt, so that alerts and users see its end."""
MAX_JOBS: Final = 2000
"""At most this many jobs have series; live ones come first, then those that ended last."""
MAX_METRICS: Final = 64
"""At most this many names of one script's metrics are exported, in alphabetical order, so that the choice is stable."""

Row = tuple[tuple[str, ...], float | None]


class DaemonCollector(Collector):
    """Exports what `take` returns. `take` runs in the thread of the scrape and must be fast."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._take = take

    def collect(self) -> Iterator[Family]:
        """Yield one family for each metric of the catalogue that the daemon owns."""
        snapshot = self._take()
        yield from _job_families(chosen(snapshot))
        yield from _total_families(snapshot)
        yield from _daemon_families(snapshot)

    def describe(self) -> Iterable[Family]:
        """Return nothing: a registry would otherwise collect everything just to learn names."""
        return ()


def registry(take: Callable[[], Snapshot]) -> CollectorRegistry:
    """Return a registry of the daemon's metrics alone: without the client library's own, which are about Python."""
    made = CollectorRegistry(auto_describe=False)
    made.register(DaemonCollector(take))
    return made


def render(metrics: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the page of metrics and its media type, in the format that the scraper's Accept header prefers."""
    encode, content_type = choose_encoder(accept)
    return encode(metrics), content_type


def chosen(snapshot: Snapshot) -> list[JobSeries]:
    """Return the jobs that have series now."""
    young = [
        job
        for job in snapshot.series
        if job.live or (job.ended_at is not None and snapshot.at - job.ended_at <= LINGER_SECONDS)
    ]
    young.sort(key=lambda job: (not job.live, -(job.ended_at or 0.0), job.job_id))
    return young[:MAX_JOBS]


def _family(metric: Metric, rows: Iterable[Row]) -> Family:
    labels = list(metric.labels)
    if metric.type == "counter":
        family: CounterMetricFamily | GaugeMetricFamily = CounterMetricFamily(
            metric.name.removesuffix("_total"), metric.help, labels=labels
        )
    else:
        family = GaugeMetricFamily(metric.name, metric.help, labels=labels)
    for values, value in rows:
        if value is not None:
            family.add_metric(values, float(value))
    return family


def _histogram(metric: Metric, rows: Iterable[tuple[tuple[str, ...], Counts]]) -> Family:
    family = HistogramMetricFamily(metric.name, metric.help, labels=list(metric.labels))
    for values, counts in rows:
        family.add_metric(values, [(bound, float(count)) for bound, count in counts.buckets], counts.total)
    return family


def _job_families(jobs: list[JobSeries]) -> Iterator[Family]:
    yield _family(c.JOB_INFO, (((j.job_id, j.name, j.user, j.queue), 1.0) for j in jobs))
    yield _family(c.JOB_GPU, (((j.job_id, uuid, str(rank)), 1.0) for j in jobs for uuid, rank in j.seats))
    yield _family(c.JOB_GPUS, (((j.job_id,), j.gpus) for j in jobs if j.gpus))
    yield _family(
        c.JOB_STATE, (((j.job_id, state.value), float(j.state == state.value)) for j in jobs for state in JobState)
    )
    yield from _progress_families(jobs)
    yield from _health_families(jobs)
    yield _family(
        c.JOB_GPU_TIME,
        (((j.job_id, p.value), j.gpu_seconds.get(p.value, 0.0)) for j in jobs if j.gpu_seconds for p in Phase),
    )
    yield _family(
        c.FINDING, (((kind, j.job_id, *subject), 1.0) for j in jobs for kind, *subject in sorted(set(j.findings)))
    )
    yield _family(
        c.JOB_EVENT_TIMESTAMP, (((j.job_id, event), at) for j in jobs for event, at in sorted(j.events.items()))
    )


def _progress_families(jobs: list[JobSeries]) -> Iterator[Family]:
    def one(metric: Metric, value: Callable[[JobSeries], float | None]) -> Family:
        return _family(metric, (((j.job_id,), value(j)) for j in jobs))

    yield one(c.JOB_STEP, lambda j: j.step)
    yield one(c.JOB_PROGRESS, lambda j: j.progress)
    yield one(c.JOB_SAMPLES, lambda j: j.samples)
    yield one(c.JOB_TOKENS, lambda j: j.tokens)
    yield one(c.JOB_MFU, lambda j: j.mfu)
    yield _family(
        c.JOB_METRIC, (((j.job_id, name), j.metrics[name]) for j in jobs for name in sorted(j.metrics)[:MAX_METRICS])
    )
    yield _family(
        c.JOB_RANK_STEP,
        (((j.job_id, str(rank)), seconds) for j in jobs for rank, seconds in sorted(j.rank_step_seconds.items())),
    )


def _health_families(jobs: list[JobSeries]) -> Iterator[Family]:
    def one(metric: Metric, value: Callable[[JobSeries], float | None]) -> Family:
        return _family(metric, (((j.job_id,), value(j)) for j in jobs))

    yield one(c.JOB_HEARTBEAT_TIMESTAMP, lambda j: j.heartbeat_at)
    yield one(c.JOB_HANG_SUSPECTED, lambda j: j.hang_suspected)
    yield _family(
        c.JOB_RESTARTS, (((j.job_id, k.value), j.restarts.get(k.value, 0)) for j in jobs for k in FailureClass)
    )
    yield _family(
        c.JOB_GPU_BALANCE_CV, _finite(((j.job_id, q), v) for j in jobs for q, v in sorted(j.balance_cv.items()))
    )
    yield _family(
        c.JOB_GPU_BALANCE_MIN_PER_MEDIAN,
        _finite(((j.job_id, q), v) for j in jobs for q, v in sorted(j.balance_min_per_median.items())),
    )
    yield one(c.JOB_GPU_SILENT, lambda j: j.silent_gpus)
    yield one(c.JOB_CHECKPOINT_TIMESTAMP, lambda j: j.checkpoint_at)
    yield one(c.JOB_CHECKPOINT_INTERVAL, lambda j: j.checkpoint_interval_seconds)


def _finite(rows: Iterable[Row]) -> Iterator[Row]:
    """Return rows with a value; a balance that cannot be computed is absent and not NaN."""
    return ((labels, value) for labels, value in rows if value is not None and math.isfinite(value))


def _total_families(snapshot: Snapshot) -> Iterator[Family]:
    queues = sorted(
        {*snapshot.queues, *(queue for queue, _ in snapshot.jobs), *(queue for queue, *_ in snapshot.finished)}
    )
    alive = [state.value for state in JobState if not state.is_terminal]
    yield _family(c.JOBS, (((q, s), snapshot.jobs.get((q, s), 0)) for q in queues for s in alive))
    yield _family(
        c.JOBS_FINISHED, ((key, snapshot.finished.get(key, 0)) for q in queues for key in _endings(q, snapshot))
    )
    yield _family(c.GPUS, ((key, count) for key, count in sorted(snapshot.gpus.items())))
    yield _family(c.NODES, (((state,), count) for state, count in sorted(snapshot.nodes.items())))
    yield _family(c.QUEUE_OLDEST_PENDING, (((q,), snapshot.oldest_pending_seconds.get(q, 0.0)) for q in queues))
    yield _family(
        c.GPU_SECONDS, (((q, p.value), snapshot.gpu_seconds.get((q, p.value), 0.0)) for q in queues for p in Phase)
    )
    yield _family(c.GPU_SECONDS_UNCOMMITTED, (((q,), snapshot.gpu_seconds_uncommitted.get(q, 0.0)) for q in queues))
    yield _histogram(c.QUEUE_WAIT, (((q,), counts) for q, counts in sorted(snapshot.queue_wait.items())))
    for metric, counts in ((c.SCHEDULING, snapshot.scheduling), (c.SUBMISSION, snapshot.submission)):
        yield _histogram(metric, () if counts is None else (((), counts),))


def _endings(queue: str, snapshot: Snapshot) -> list[tuple[str, str, str]]:
    """Return the labels of all ways in which a job of the queue can end; those of another version's states are kept."""
    known = [(queue, JobState.SUCCEEDED.value, ""), (queue, JobState.CANCELLED.value, "")]
    known += [(queue, JobState.FAILED.value, kind.value) for kind in FailureClass]
    return known + sorted(key for key in snapshot.finished if key[0] == queue and key not in known)


def _daemon_families(snapshot: Snapshot) -> Iterator[Family]:
    facts = snapshot.daemon
    yield _family(c.DAEMON_INFO, (((facts.version, facts.node), 1.0),))
    yield _family(c.DAEMON_START_TIMESTAMP, (((), facts.started_at),))
    yield _family(c.DAEMON_LOOP_LAG, (((), facts.loop_lag_seconds),))
    yield _family(c.STORE_COMMIT_FAILURES, (((), facts.commit_failures),))
    yield _family(c.DISK_FREE, (((d.node, d.path), d.free_bytes) for d in facts.disks))
    yield _family(c.DISK_SIZE, (((d.node, d.path), d.size_bytes) for d in facts.disks))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSeries:
    """Values of one job.

    `live` says that it has a live attempt (or holds a gang that is being released); `ended_at` is when its last attempt
    ended. `seats` are (gpu_uuid, rank) of the GPUs that it holds now, empty once it holds none: a GPU that was given to
    another job must not be counted for this one. `findings` are (kind, rank, gpu_uuid, node) of those that are open. `gpus` is the number of GPUs that it holds; 0 yields no series, like empty `seats`.
    """

    job_id: str
    name: str
    user: str
    queue: str
    state: str
    live: bool
    ended_at: float | None = None
    seats: tuple[tuple[str, int], ...] = ()
    gpus: int = 0
    step: int | None = None
    progress: float | None = None
    samples: int | None = None
    tokens: int | None = None
    mfu: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    rank_step_seconds: Mapping[int, float] = field(default_factory=dict)
    heartbeat_at: float | None = None
    hang_suspected: bool | None = None
    restarts: Mapping[str, int] = field(default_factory=dict)
    balance_cv: Mapping[str, float] = field(default_factory=dict)
    balance_min_per_median: Mapping[str, float] = field(default_factory=dict)
    silent_gpus: int | None = None
    gpu_seconds: Mapping[str, float] = field(default_factory=dict)
    checkpoint_at: float | None = None
    checkpoint_interval_seconds: float | None = None
    events: Mapping[str, float] = field(default_factory=dict)
    findings: Sequence[tuple[str, str, str, str]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A filesystem that the daemon writes to."""

    node: str
    path: str
    free_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonFacts:
    """Values of the daemon itself. `commit_failures` is counted since its start."""

    version: str
    node: str
    started_at: float
    loop_lag_seconds: float | None = None
    commit_failures: int = 0
    disks: Sequence[Disk] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All values at wall time `at`.

    `queues` names all queues, so that empty ones show 0. Keys: `jobs` (queue, state), `finished` (queue, state,
    failure class or ""), `gpus` (node, state), `gpu_seconds` (queue, phase). `jobs` counts jobs that have not ended.
    """

    at: float
    daemon: DaemonFacts
    series: Sequence[JobSeries] = ()
    queues: Sequence[str] = ("default",)
    jobs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    finished: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    gpus: Mapping[tuple[str, str], int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    oldest_pending_seconds: Mapping[str, float] = field(default_factory=dict)
    gpu_seconds: Mapping[tuple[str, str], float] = field(default_factory=dict)
    gpu_seconds_uncommitted: Mapping[str, float] = field(default_factory=dict)
    queue_wait: Mapping[str, Counts] = field(default_factory=dict)
    scheduling: Counts | None = None
    submission: Counts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A histogram at a moment: (upper bound, number of values up to it), `+Inf` last, and the sum of all values."""

    buckets: tuple[tuple[str, int], ...]
    total: float


class Histogram:
    """Counts values of one series of a histogram metric. Not thread-safe: the daemon's loop owns it."""

    def __init__(self, metric: Metric) -> None:
        if metric.type != "histogram":
            raise ValueError(f"{metric.name} is a {metric.type}: only histograms have buckets, see catalogue.py")
        self._bounds = metric.buckets
        self._counts = [0] * (len(metric.buckets) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value, in the metric's unit."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def counts(self) -> Counts:
        """Return the counts so far."""
        so_far, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        return Counts(buckets=tuple(buckets), total=self._total)


class AnnotationKind(StrEnum):
    """The kind of an event, in the boards' terms."""

    START = "start"
    CHECKPOINT = "checkpoint"
    FAILURE = "failure"
    RECOVERY = "recovery"
    PREEMPTION = "preemption"


def mark_of(event: ev.Event) -> tuple[AnnotationKind, float] | None:
    """Return the annotation of an event, and its wall time; None for most events."""
    match event:
        case ev.AttemptRunning():
            return AnnotationKind.START, event.at
        case ev.CheckpointSaved():
            return AnnotationKind.CHECKPOINT, event.at
        case ev.AttemptFailed():
            return AnnotationKind.FAILURE, event.failed_at
        case ev.FirstStep() if event.attempt > 1:
            return AnnotationKind.RECOVERY, event.step_at
        case ev.StopRequested() if event.purpose is StopPurpose.PREEMPT:
            return AnnotationKind.PREEMPTION, event.at
        case _:
            return None
