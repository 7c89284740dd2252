"""Faults as data. A schedule is a tuple of times (of the agenda) and faults.

``job`` is a job's id. ``inject`` carries a fault out now; without its target it changes nothing, so that any schedule
can be run and shrunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias

from orchestrator.core.facts import faults as causes
from orchestrator.core.ids import JobId
from orchestrator.core.states import StopScope
from orchestrator.runtime.memory.cluster import KILLED, Exit

if TYPE_CHECKING:
    from orchestrator.runtime.memory.cluster import MemoryCluster

_RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankDies:
    """A rank's process ends."""

    job: str
    rank: int
    exit: Exit = KILLED

    def inject(self, cluster: MemoryCluster) -> None:
        process = cluster.processes.of_rank(JobId(self.job), self.rank)
        if process is not None:
            process.end(self.exit)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHangs:
    """A rank's process makes no progress, does not end by itself, and ignores SIGTERM."""

    job: str
    rank: int

    def inject(self, cluster: MemoryCluster) -> None:
        process = cluster.processes.of_rank(JobId(self.job), self.rank)
        if process is not None:
            process.hangs = True


@dataclass(frozen=True, slots=True, kw_only=True)
class StopSeen:
    """A rank gets a SIGTERM that orch has not sent, and ends; ``machine``: every process on its node gets one."""

    job: str
    rank: int
    exit_code: int = 0
    machine: bool = False

    def inject(self, cluster: MemoryCluster) -> None:
        process = cluster.processes.of_rank(JobId(self.job), self.rank)
        if process is None:
            return
        if not self.machine:
            process.terminate(exit_code=self.exit_code, scope=StopScope.RANK)
            return
        for other in [p for p in cluster.processes if p.actor.node is process.actor.node]:
            other.terminate(exit_code=self.exit_code, scope=StopScope.MACHINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorDies:
    """A rank's actor dies, and its process with it."""

    job: str
    rank: int

    def inject(self, cluster: MemoryCluster) -> None:
        gang = cluster.gangs.get(JobId(self.job))
        if gang is not None and self.rank < len(gang.actors) and gang.actors[self.rank].node.alive:
            gang.actors[self.rank].die(causes.ActorLost(rank=self.rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """Ray declares a node dead. ``cut_off``: its ranks run until their lease ends; else they end with it."""

    node: str
    cut_off: bool = False

    def inject(self, cluster: MemoryCluster) -> None:
        node = cluster.nodes.get(self.node)
        if node is not None and node.alive:
            cluster.lose_node(node, cut_off=self.cut_off)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReturns:
    """A lost node returns, empty, once its cut-off ranks have ended."""

    node: str

    def inject(self, cluster: MemoryCluster) -> None:
        node = cluster.nodes.get(self.node)
        if node is None or node.alive:
            return
        if any(p.actor.node is node for p in cluster.processes):
            cluster.agenda.after(_RETRY_SECONDS, partial(self.inject, cluster))
            return
        node.alive = True
        node.held.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSilent:
    """A node stops answering while Ray still counts it as alive. Its ranks run."""

    node: str

    def inject(self, cluster: MemoryCluster) -> None:
        node = cluster.nodes.get(self.node)
        if node is not None and node.alive:
            node.silent = True


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswers:
    """A silent node answers again, first the calls made meanwhile."""

    node: str

    def inject(self, cluster: MemoryCluster) -> None:
        node = cluster.nodes.get(self.node)
        if node is None:
            return
        node.silent = False
        waiting, node.waiting = node.waiting, []
        for deliver in waiting:
            deliver()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLost:
    """Ray's head dies, and with it every actor and every rank."""

    def inject(self, cluster: MemoryCluster) -> None:
        for gang in list(cluster.gangs.values()):
            for actor in gang.actors:
                actor.die(causes.HeadLost(rank=actor.rank), kill=actor.node.alive)
            cluster.remove(gang.job_id, gang.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuLost:
    """A GPU drops out of a node; a rank that uses it dies."""

    node: str
    index: int

    def inject(self, cluster: MemoryCluster) -> None:
        node = cluster.nodes.get(self.node)
        if node is None or not 0 <= self.index < int(node.node.gpus):
            return
        node.lost.add(self.index)
        for process in [p for p in cluster.processes if p.actor.node is node and self.index in p.actor.gpus]:
            process.end(Exit(code=1, error_type="RuntimeError", error_message="CUDA error: device not found"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyLost:
    """The next ``count`` answers about a job get lost, though the orders are carried out."""

    job: str
    count: int = 1

    def inject(self, cluster: MemoryCluster) -> None:
        cluster.network.lost[self.job] += self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRepeated:
    """The next ``count`` answers about a job arrive twice."""

    job: str
    count: int = 1

    def inject(self, cluster: MemoryCluster) -> None:
        cluster.network.repeated[self.job] += self.count


@dataclass(frozen=True, slots=True, kw_only=True)
class Slow:
    """Each message to or from a node takes ``seconds`` longer."""

    node: str
    seconds: float

    def inject(self, cluster: MemoryCluster) -> None:
        if self.node in cluster.nodes:
            cluster.nodes[self.node].slow = self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFull:
    """All writes fail: checkpoints, and (where the store reads ``MemoryCluster.disk_full``) the record."""

    def inject(self, cluster: MemoryCluster) -> None:
        cluster.disk_full = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskFreed:
    """The disk has space again."""

    def inject(self, cluster: MemoryCluster) -> None:
        cluster.disk_full = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointBroken:
    """The newest checkpoint of a job on storage is torn."""

    job: str

    def inject(self, cluster: MemoryCluster) -> None:
        cluster.checkpoints.break_newest(JobId(self.job))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSteps:
    """The wall clock of the daemon's machine steps by ``seconds``."""

    seconds: float

    def inject(self, cluster: MemoryCluster) -> None:
        cluster.wall_ahead += self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSkew:
    """From now on the clock of a node is ``seconds`` ahead."""

    node: str
    seconds: float

    def inject(self, cluster: MemoryCluster) -> None:
        if self.node in cluster.nodes:
            cluster.nodes[self.node].clock_ahead = self.seconds


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


def schedule(cluster: MemoryCluster, faults: Schedule) -> None:
    """Inject each fault at its time."""
    for when, fault in faults:
        cluster.agenda.at(when, partial(fault.inject, cluster))
