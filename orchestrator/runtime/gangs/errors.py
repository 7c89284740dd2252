"""What Ray's errors mean for a gang: an actor that is lost, one that is out of reach for now, or a fault of ours."""

from __future__ import annotations

from orchestrator.runtime.ranks.runtime_env import ERROR_CHARACTERS


class GangLostError(Exception):
    """An actor of the gang is gone for good; the gang must be released and the job placed anew."""

    def __init__(self, rank: int | None, reason: str, *, node_lost: bool = False) -> None:
        self.rank, self.reason, self.node_lost = rank, reason, node_lost
        super().__init__(reason)


def as_lost(rank: int, error: BaseException) -> GangLostError | None:
    """The loss that an error of Ray means; None when it may pass."""
    from ray.exceptions import (
        ActorDiedError,
        ActorUnavailableError,
        ActorUnschedulableError,
        RuntimeEnvSetupError,
    )

    if isinstance(error, ActorUnavailableError):
        return None
    if isinstance(error, ActorDiedError):
        text = str(error)
        node_lost = "its node has died" in text
        what = "its node died" if node_lost else "its actor died"
        return GangLostError(rank, f"rank {rank}: {what}", node_lost=node_lost)
    if isinstance(error, RuntimeEnvSetupError):
        said = " ".join(str(error).split())[-ERROR_CHARACTERS:]
        return GangLostError(rank, f"runtime_env could not be installed for rank {rank}: {said}")
    if isinstance(error, ActorUnschedulableError):
        return GangLostError(rank, f"rank {rank} could not be placed: {error}")
    return None


def is_away(error: BaseException) -> bool:
    """Whether the error says that an actor or its node does not answer, which the next try may find changed."""
    from ray.exceptions import RayError, RayTaskError

    return isinstance(error, TimeoutError) or (isinstance(error, RayError) and not isinstance(error, RayTaskError))
