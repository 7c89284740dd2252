"""Faults of a gang, its node or all of its ranks that make it unusable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from orchestrator.core.facts.fact import Fact
from orchestrator.core.facts.words import of_rank, span


@dataclass(frozen=True, slots=True, kw_only=True)
class GangFault(Fact):
    """Base of a gang's faults; ``rank`` is the first affected one, where known."""

    failure_code: ClassVar[str] = "gang_lost"
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorLost(GangFault):
    """The actor of a rank died."""

    kind: ClassVar[str] = "actor_lost"

    def sentence(self) -> str:
        return of_rank(self.rank, "its actor died")


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorMissing(GangFault):
    """The actor of a rank is missing for an unknown reason."""

    kind: ClassVar[str] = "actor_missing"

    def sentence(self) -> str:
        return f"the actor of rank {self.rank} is gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesTaken(GangFault):
    """Other users of the Ray cluster hold the resources of the gang."""

    kind: ClassVar[str] = "resources_taken"

    def sentence(self) -> str:
        return "other users of the Ray cluster hold the resources planned for its gang"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost(GangFault):
    """The node of a rank died, or is missing; ``node`` is its id where known."""

    kind: ClassVar[str] = "node_lost"
    node: str = ""

    def sentence(self) -> str:
        if self.rank is None:
            return f"node {self.node[:12]} is gone" if self.node else "a node that it was to run on is gone"
        return of_rank(self.rank, "its node died")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLost(GangFault):
    """Ray's head died."""

    kind: ClassVar[str] = "head_lost"

    def sentence(self) -> str:
        return "Ray's head died"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentFailed(GangFault):
    """Ray could not install the job's runtime_env; ``said`` is the end of its installer's output."""

    kind: ClassVar[str] = "environment_failed"
    said: str

    def sentence(self) -> str:
        return f"runtime_env could not be installed for rank {self.rank}: {self.said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorNotPlaced(GangFault):
    """Ray could not place the actor of a rank; ``said`` is its error."""

    kind: ClassVar[str] = "actor_not_placed"
    said: str

    def sentence(self) -> str:
        return f"rank {self.rank} could not be placed: {self.said}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUnseen(GangFault):
    """The directory that the job saves to is not visible on a node."""

    kind: ClassVar[str] = "storage_unseen"
    node: str
    storage_path: str

    def sentence(self) -> str:
        return of_rank(
            self.rank,
            f"node {self.node[:12]} does not see checkpoint.storage_path ({self.storage_path}), so what is saved there would be"
            " lost with it; mount the directory there, or drain the node",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FilesNotSent(GangFault):
    """The job's working copy could not be written to a rank's node; ``said`` is the system's error, ``host`` the node's name."""

    kind: ClassVar[str] = "files_not_sent"
    node: str
    said: str
    host: str = ""

    def sentence(self) -> str:
        return of_rank(
            self.rank,
            f"the working copy could not be written to node {self.host or self.node[:12]} ({self.said}); make room there, or drain the node",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRestored(GangFault):
    """Later attempts than the job's record knows exist, up to number ``attempt`` where known: the store is an older copy."""

    kind: ClassVar[str] = "record_restored"
    attempt: int | None = None

    def sentence(self) -> str:
        upto = "" if self.attempt is None else f", up to attempt {self.attempt}"
        return f"the store was restored from an older copy: what runs of later attempts is ended{upto}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppedUnplaced(GangFault):
    """The job was stopped before its gang was placed."""

    kind: ClassVar[str] = "stopped_unplaced"

    def sentence(self) -> str:
        return "it was stopped before its gang was placed"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupTimeout(Fact):
    """The ranks did not come up within health.startup_timeout."""

    kind: ClassVar[str] = "startup_timeout"
    limit_seconds: float

    def sentence(self) -> str:
        limit = span(self.limit_seconds)
        return f"its ranks did not come up within health.startup_timeout ({limit})"


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxDuration(Fact):
    """The job ran for longer than its max_duration."""

    kind: ClassVar[str] = "max_duration"
    limit_seconds: float

    def sentence(self) -> str:
        return f"exceeded max_duration ({span(self.limit_seconds)})"
