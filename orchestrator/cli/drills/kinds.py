"""The kinds of drills: the fault that each injects, and the budget of restarts that it is charged to."""

from __future__ import annotations

import enum
from typing import Final


class Kind(enum.StrEnum):
    """A kind of drill, as ``--kinds`` names it."""

    RANK = "rank"
    ACTOR = "actor"
    HANG = "hang"
    TEAR_CHECKPOINT = "tear-checkpoint"
    DAEMON = "daemon"
    AGENT = "agent"
    RAY = "ray"
    FILL_DISK = "fill-disk"


WHAT: Final = {
    Kind.RANK: "kills the training process of rank {rank}; the job continues from its newest checkpoint",
    Kind.ACTOR: "kills the actor of rank {rank}; the gang is started again and continues from its newest checkpoint on storage",
    Kind.AGENT: "kills the agent of the node of rank {rank}; Ray starts another, and all jobs keep running",
    Kind.RAY: "kills Ray's head; EVERY job of this daemon continues from its newest checkpoint on storage",
    Kind.FILL_DISK: "fills the disk of its checkpoints until a save has failed; the job keeps running and saves again",
    Kind.DAEMON: "kills the daemon and starts it again; all jobs keep running; submissions fail meanwhile",
    Kind.HANG: "stops rank {rank} without ending it; when the hang is detected, the job continues from its newest checkpoint",
    Kind.TEAR_CHECKPOINT: "destroys the newest checkpoint and kills the actor of rank {rank}; the job goes back to the one before",
}
IN_A_CAMPAIGN: Final = (Kind.RANK, Kind.ACTOR, Kind.HANG, Kind.TEAR_CHECKPOINT, Kind.DAEMON, Kind.AGENT)
"""The default kinds of a campaign: without those that fill a disk or end Ray for every job."""
FELT_BY_ALL: Final = frozenset({Kind.DAEMON, Kind.AGENT, Kind.RAY})
"""Kinds that affect other jobs of the daemon too."""
CHARGED_TO: Final = {
    Kind.RANK: "infra",
    Kind.ACTOR: "infra",
    Kind.TEAR_CHECKPOINT: "infra",
    Kind.RAY: "infra",
    Kind.HANG: "hang",
}
"""Failure class that the fault leads to; its budget of restarts is charged."""
