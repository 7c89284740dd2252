"""Faults of a gang, its node or all of its ranks that make it unusable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.core.facts.fact import Fact


@dataclass(frozen=True, slots=True, kw_only=True)
class GangFault(Fact):
    """Base of a gang's faults; ``rank`` is the first affected one, where known."""

    failure_code: ClassVar[str] = "gang_lost"
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLost(GangFault):
    """The actor of a rank died."""

    kind: ClassVar[str] = "actor_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorMissing(GangFault):
    """The actor of a rank is missing for an unknown reason."""

    kind: ClassVar[str] = "actor_missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesTaken(GangFault):
    """Other users of the Ray cluster hold the resources of the gang."""

    kind: ClassVar[str] = "resources_taken"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(GangFault):
    """The node of a rank died, or is missing; ``node`` is its id where known."""

    kind: ClassVar[str] = "node_lost"
    node: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLost(GangFault):
    """Ray's head died."""

    kind: ClassVar[str] = "head_lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFailed(GangFault):
    """Ray could not install the job's runtime_env; ``said`` is the end of its installer's output."""

    kind: ClassVar[str] = "environment_failed"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorNotPlaced(GangFault):
    """Ray could not place the actor of a rank; ``said`` is its error."""

    kind: ClassVar[str] = "actor_not_placed"
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUnseen(GangFault):
    """The directory that the job saves to is not visible on a node."""

    kind: ClassVar[str] = "storage_unseen"
    node: str
    storage_path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesNotSent(GangFault):
    """The job's working copy could not be written to a rank's node; ``said`` is the system's error, ``host`` the node's name."""

    kind: ClassVar[str] = "files_not_sent"
    node: str
    said: str
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRestored(GangFault):
    """Later attempts than the job's record knows exist, up to number ``attempt`` where known: the store is an older copy."""

    kind: ClassVar[str] = "record_restored"
    attempt: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedUnplaced(GangFault):
    """The job was stopped before its gang was placed."""

    kind: ClassVar[str] = "stopped_unplaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTimeout(Fact):
    """The ranks did not come up within health.startup_timeout."""

    kind: ClassVar[str] = "startup_timeout"
    limit_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxDuration(Fact):
    """The job ran for longer than its max_duration."""

    kind: ClassVar[str] = "max_duration"
    limit_seconds: float
