"""Faults of a gang, its node or all of its ranks that make it unusable."""

from __future__ import annotations

from typing import ClassVar

from orchestrator.core.codec import Integer, Number, Text
from orchestrator.core.facts.fact import FactRecord
from orchestrator.core.facts.words import of_rank, span


class GangFault(FactRecord):
    """Base of a gang's faults; ``rank`` is the first affected one, where known."""

    failure_code: ClassVar[str] = "gang_lost"
    rank: Integer | None = None


class ActorLost(GangFault, tag="actor_lost"):
    """The actor of a rank died."""

    def sentence(self) -> str:
        return of_rank(self.rank, "its actor died")


class ActorMissing(GangFault, tag="actor_missing"):
    """The actor of a rank is missing for an unknown reason."""

    def sentence(self) -> str:
        return f"the actor of rank {self.rank} is gone"


class ResourcesTaken(GangFault, tag="resources_taken"):
    """Other users of the Ray cluster hold the resources of the gang."""

    def sentence(self) -> str:
        return "other users of the Ray cluster hold the resources planned for its gang"


class NodeLost(GangFault, tag="node_lost"):
    """The node of a rank died, or is missing; ``node`` is its id where known."""

    node: Text = ""

    def sentence(self) -> str:
        if self.rank is None:
            return f"node {self.node[:12]} is gone" if self.node else "a node that it was to run on is gone"
        return of_rank(self.rank, "its node died")


class HeadLost(GangFault, tag="head_lost"):
    """Ray's head died."""

    def sentence(self) -> str:
        return "Ray's head died"


class EnvironmentFailed(GangFault, tag="environment_failed"):
    """Ray could not install the job's runtime_env; ``said`` is the end of its installer's output."""

    said: Text

    def sentence(self) -> str:
        return f"runtime_env could not be installed for rank {self.rank}: {self.said}"


class ActorNotPlaced(GangFault, tag="actor_not_placed"):
    """Ray could not place the actor of a rank; ``said`` is its error."""

    said: Text

    def sentence(self) -> str:
        return f"rank {self.rank} could not be placed: {self.said}"


class StorageUnseen(GangFault, tag="storage_unseen"):
    """The directory that the job saves to is not visible on a node."""

    node: Text
    storage_path: Text

    def sentence(self) -> str:
        return of_rank(
            self.rank,
            f"node {self.node[:12]} does not see checkpoint.storage_path ({self.storage_path}), so what is saved there would be"
            " lost with it; mount the directory there, or drain the node",
        )


class FilesNotSent(GangFault, tag="files_not_sent"):
    """The job's working copy could not be written to a rank's node; ``said`` is the system's error, ``host`` the node's name."""

    node: Text
    said: Text
    host: Text = ""

    def sentence(self) -> str:
        return of_rank(
            self.rank,
            f"the working copy could not be written to node {self.host or self.node[:12]} ({self.said}); make room there, or drain the node",
        )


class RecordRestored(GangFault, tag="record_restored"):
    """Later attempts than the job's record knows exist, up to number ``attempt`` where known: the store is an older copy."""

    attempt: Integer | None = None

    def sentence(self) -> str:
        upto = "" if self.attempt is None else f", up to attempt {self.attempt}"
        return f"the store was restored from an older copy: what runs of later attempts is ended{upto}"


class StoppedUnplaced(GangFault, tag="stopped_unplaced"):
    """The job was stopped before its gang was placed."""

    def sentence(self) -> str:
        return "it was stopped before its gang was placed"


class StartupTimeout(FactRecord, tag="startup_timeout"):
    """The ranks did not come up within health.startup_timeout."""

    limit_seconds: Number

    def sentence(self) -> str:
        limit = span(self.limit_seconds)
        return f"its ranks did not come up within health.startup_timeout ({limit})"


class MaxDuration(FactRecord, tag="max_duration"):
    """The job ran for longer than its max_duration."""

    limit_seconds: Number

    def sentence(self) -> str:
        return f"exceeded max_duration ({span(self.limit_seconds)})"
