"""The launch plan of one rank of one attempt, as the daemon sends it to the rank's actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.ranks.logs import LogLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.checkpoint.external.watched_glob import WatchSettings
    from orchestrator.checkpoint.repository.persister import StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """Directory of the ranks' snapshots in shared memory, and settings for writing them to storage."""

    directory: str
    settings: StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan(SpawnRequest):
    """Everything that one rank of one attempt needs to start: the request for its process, and its other settings.

    ``record`` follows from job, attempt and rank.
    """

    job_id: str
    attempt: int
    rank: int
    record: Mapping[str, Any] = field(init=False, repr=False)
    python: str
    fork_socket: str
    log_dir: str
    exit_record: str
    page: str
    previous_step: int
    runtime_env: tuple[str, ...] = ()
    snapshots: SnapshotPlan | None = None
    watch: WatchSettings | None = None
    progress_pattern: str = ""
    log_policies: tuple[tuple[str, str], ...] = ()
    log_limits: LogLimits = field(default_factory=LogLimits)
    idle_seconds: float | None = None
    """The rank runs on a terminal, and is idle after this long; None: the job is not interactive."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "record", {"job": self.job_id, "attempt": self.attempt, "rank": self.rank})
