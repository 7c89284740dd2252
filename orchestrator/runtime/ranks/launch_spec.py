"""What one rank of one attempt needs to start, as the daemon hands it to the rank's actor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from orchestrator.runtime.ranks.logs import LogLimits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.checkpoint.external.watched_glob import WatchSettings
    from orchestrator.checkpoint.repository.persister import StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotPlan:
    """Where the ranks leave snapshots in shared memory, and how they are kept on storage."""

    directory: str
    settings: StoreSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """Everything that one rank of one attempt needs to start. ``env`` is its complete environment.

    ``umask`` is that of a plain start; None: the one that the fork server has.
    """

    job_id: str
    attempt: int
    rank: int
    mode: str
    target: str
    args: tuple[str, ...]
    python_options: tuple[str, ...]
    cwd: str
    env: Mapping[str, str] = field(repr=False)
    threads: int | None
    cold: bool
    python: str
    fork_socket: str
    log_dir: str
    exit_record: str
    page: str
    previous_step: int
    memory_bytes: int | None = None
    runtime_env: tuple[str, ...] = ()
    snapshots: SnapshotPlan | None = None
    watch: WatchSettings | None = None
    progress_pattern: str = ""
    log_policies: tuple[tuple[str, str], ...] = ()
    secrets: tuple[str, ...] = field(default=(), repr=False)
    umask: int | None = None
    log_limits: LogLimits = field(default_factory=LogLimits)
