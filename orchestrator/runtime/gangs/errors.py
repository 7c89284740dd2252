"""Classifies Ray's errors for a gang: an actor is lost, an actor is out of reach for now, or orch has a fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core.facts.faults import ActorLost, ActorNotPlaced, EnvironmentFailed, NodeLost, RecordRestored
from orchestrator.runtime.ranks.rank_events import StaleAttemptError
from orchestrator.runtime.remote import InvalidMessageError

if TYPE_CHECKING:
    from orchestrator.core.facts.faults import GangFault


ERROR_CHARACTERS: Final = 600


class GangLostError(Exception):
    """An actor of the gang has ended for good; the gang must be released and the job placed again."""

    def __init__(self, cause: GangFault, *, node_lost: bool = False) -> None:
        self.cause, self.node_lost = cause, node_lost
        super().__init__(repr(cause))


class NodeGoneError(LookupError):
    """A node has no agent any more; its jobs are placed again."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        super().__init__(f"node {node_id[:12]} is gone")


class NodeFilesError(Exception):
    """A node's disk cannot read or write a job's files because of ``reason``: free space there, or drain the node."""

    def __init__(self, node_id: str, cause: OSError) -> None:
        self.node_id = node_id
        self.reason = f"{cause.strerror or cause}" + (f": {cause.filename}" if cause.filename else "")
        super().__init__(f"node {node_id[:12]}: {self.reason}")


def as_lost(rank: int, error: BaseException) -> GangLostError | None:
    """Return the loss that an error of Ray means; None when it may be temporary."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        ActorUnschedulableError,
        RuntimeEnvSetupError,
    )

    if isinstance(error, ActorUnavailableError):
        return None
    if isinstance(error, InvalidMessageError):  # its process may run what a job has put there: end it with its gang
        return GangLostError(ActorLost(rank=rank))
    if isinstance(error, StaleAttemptError):  # the actor is ahead of the record
        return GangLostError(RecordRestored(rank=rank))
    if isinstance(error, ActorDiedError):
        node_lost = "its node has died" in str(error)  # Ray's own words: the exception has no field for it
        return GangLostError(NodeLost(rank=rank) if node_lost else ActorLost(rank=rank), node_lost=node_lost)
    if isinstance(error, RuntimeEnvSetupError):
        text = " ".join(str(error).split())[-ERROR_CHARACTERS:]
        return GangLostError(EnvironmentFailed(rank=rank, said=text))
    if isinstance(error, ActorUnschedulableError):
        return GangLostError(ActorNotPlaced(rank=rank, said=str(error)[:ERROR_CHARACTERS]))
    return None


def is_away(error: BaseException) -> bool:
    """Whether the error means that an actor or its node does not answer; the next try may succeed."""
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, TimeoutError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError))
