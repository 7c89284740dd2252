"""Faults as data. A schedule is a tuple of times (of the agenda) and faults; ``injection.py`` carries them out.

``job`` is a job's id. A fault without its target changes nothing, so that any schedule can be run and shrunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

_SIGKILL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """End of a rank's process: an exit code or a signal, the exception of its script, the steps that it reported."""

    code: int | None = None
    signal: int | None = None
    error_type: str = ""
    error_message: str = ""
    log_tail: tuple[str, ...] = ()
    last_step: int | None = None
    total_steps: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDies:
    """A rank's process ends."""

    job: str
    rank: int
    exit: Exit = Exit(signal=_SIGKILL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHangs:
    """A rank's process makes no progress, does not end by itself, and ignores SIGTERM."""

    job: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSeen:
    """A rank gets a SIGTERM that orch has not sent, and ends; ``machine``: every process on its node gets one."""

    job: str
    rank: int
    exit_code: int = 0
    machine: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorDies:
    """A rank's actor dies, and its process with it."""

    job: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """Ray declares a node dead. ``cut_off``: its ranks run until their lease ends; else they end with it."""

    node: str
    cut_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReturns:
    """A lost node returns, empty, once its cut-off ranks have ended."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A node stops answering while Ray still counts it as alive. Its ranks run."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswers:
    """A silent node answers again, first the calls made meanwhile."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLost:
    """Ray's head dies, and with it every actor and every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A GPU drops out of a node; a rank that uses it dies."""

    node: str
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLost:
    """The next ``count`` answers about a job get lost, though the orders are carried out."""

    job: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRepeated:
    """The next ``count`` answers about a job arrive twice."""

    job: str
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Each message to or from a node takes ``seconds`` longer."""

    node: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """All writes fail: checkpoints, and (where the store reads ``MemoryCluster.disk_full``) the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFreed:
    """The disk has space again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBroken:
    """The newest checkpoint of a job on storage is torn."""

    job: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSteps:
    """The wall clock of the daemon's machine steps by ``seconds``."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """From now on the clock of a node is ``seconds`` ahead."""

    node: str
    seconds: float


Fault: TypeAlias = (
    RankDies
    | RankHangs
    | StopSeen
    | ActorDies
    | NodeLost
    | NodeReturns
    | NodeSilent
    | NodeAnswers
    | HeadLost
    | GpuLost
    | ReplyLost
    | ReplyRepeated
    | Slow
    | DiskFull
    | DiskFreed
    | CheckpointBroken
    | ClockSteps
    | ClockSkew
)

Schedule: TypeAlias = tuple[tuple[float, Fault], ...]
