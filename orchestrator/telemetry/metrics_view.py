"""The source of the daemon's metrics: one frozen view of everything, taken at each scrape.

Plain values in base units, so that a test can construct a view. Nothing here depends on the metric format or reads the
daemon: the daemon fills the view in. None, or a missing key, means unknown, and leads to no series, never to a 0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.telemetry.histogram import Counts


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
