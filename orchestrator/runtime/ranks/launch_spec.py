"""The launch plan of one rank of one attempt, as the daemon sends it to the rank's actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from orchestrator.runtime.forkserver.request import SpawnRequest
from orchestrator.runtime.ranks.logs import LogLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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

    def __getstate__(self) -> tuple[Any, ...]:
        values: tuple[Any, ...] = _pickled(self)
        return values if self.idle_seconds is None else (*values, self.idle_seconds)

    def __setstate__(self, state: Sequence[Any]) -> None:
        object.__setattr__(self, "idle_seconds", None)
        # A later version's plan has more values, which come last.
        for name, value in zip((*_PICKLED, "idle_seconds"), state, strict=False):
            object.__setattr__(self, name, value)
        self.__post_init__()


# An actor of an earlier version, in which a job's gang may start again, unpacks a plan's values in this order.
_PICKLED = (
    *(
        "job_id",
        "attempt",
        "rank",
        "mode",
        "target",
        "args",
        "python_options",
        "cwd",
        "env",
        "threads",
        "cold",
        "python",
    ),
    *(
        "fork_socket",
        "log_dir",
        "exit_record",
        "page",
        "previous_step",
        "memory_bytes",
        "runtime_env",
        "snapshots",
        "watch",
    ),
    *("progress_pattern", "log_policies", "secrets", "umask", "log_limits"),
)
_pickled = attrgetter(*_PICKLED)  # faster than a loop over the names, for each of a thousand ranks
