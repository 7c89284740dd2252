"""Injects faults into a cluster in memory."""

from __future__ import annotations

from functools import partial, singledispatch
from typing import TYPE_CHECKING

from orchestrator.core.facts.gangs import ActorLost, HeadLost
from orchestrator.core.ids import JobId
from orchestrator.core.states import StopScope
from orchestrator.runtime.memory import faults as f

if TYPE_CHECKING:
    from orchestrator.runtime.memory.cluster import MemoryCluster

_RETRY_SECONDS = 1.0


def inject(cluster: MemoryCluster, fault: f.Fault) -> None:
    """Inject ``fault`` now; do nothing without its target."""
    _inject(fault, cluster)


def schedule(cluster: MemoryCluster, faults: f.Schedule) -> None:
    """Inject each fault at its time."""
    for when, fault in faults:
        cluster.agenda.at(when, partial(inject, cluster, fault))


@singledispatch
def _inject(fault: f.Fault, _cluster: MemoryCluster) -> None:
    raise TypeError(f"{fault!r} is not a fault")


@_inject.register(f.RankDies)
def _(fault: f.RankDies, cluster: MemoryCluster) -> None:
    process = cluster.processes.one(JobId(fault.job), fault.rank)
    if process is not None:
        process.end(fault.exit)


@_inject.register(f.RankHangs)
def _(fault: f.RankHangs, cluster: MemoryCluster) -> None:
    process = cluster.processes.one(JobId(fault.job), fault.rank)
    if process is not None:
        process.hangs = True


@_inject.register(f.StopSeen)
def _(fault: f.StopSeen, cluster: MemoryCluster) -> None:
    process = cluster.processes.one(JobId(fault.job), fault.rank)
    if process is None:
        return
    if not fault.machine:
        process.terminate(exit_code=fault.exit_code, scope=StopScope.RANK)
        return
    for other in [p for p in cluster.processes if p.actor.node is process.actor.node]:
        other.terminate(exit_code=fault.exit_code, scope=StopScope.MACHINE)


@_inject.register(f.ActorDies)
def _(fault: f.ActorDies, cluster: MemoryCluster) -> None:
    gang = cluster.gangs.get(JobId(fault.job))
    if gang is not None and fault.rank < len(gang.actors) and gang.actors[fault.rank].node.alive:
        gang.actors[fault.rank].die(ActorLost(rank=fault.rank))


@_inject.register(f.NodeLost)
def _(fault: f.NodeLost, cluster: MemoryCluster) -> None:
    node = cluster.nodes.get(fault.node)
    if node is not None and node.alive:
        cluster.lose_node(node, cut_off=fault.cut_off)


@_inject.register(f.NodeReturns)
def _(fault: f.NodeReturns, cluster: MemoryCluster) -> None:
    node = cluster.nodes.get(fault.node)
    if node is None or node.alive:
        return
    if any(p.actor.node is node for p in cluster.processes):
        cluster.agenda.after(_RETRY_SECONDS, partial(inject, cluster, fault))
        return
    node.alive = True
    node.held.clear()


@_inject.register(f.NodeSilent)
def _(fault: f.NodeSilent, cluster: MemoryCluster) -> None:
    node = cluster.nodes.get(fault.node)
    if node is not None and node.alive:
        node.silent = True


@_inject.register(f.NodeAnswers)
def _(fault: f.NodeAnswers, cluster: MemoryCluster) -> None:
    node = cluster.nodes.get(fault.node)
    if node is None:
        return
    node.silent = False
    waiting, node.waiting = node.waiting, []
    for deliver in waiting:
        deliver()


@_inject.register(f.HeadLost)
def _(_fault: f.HeadLost, cluster: MemoryCluster) -> None:
    for gang in list(cluster.gangs.values()):
        for actor in gang.actors:
            actor.die(HeadLost(rank=actor.rank), kill=actor.node.alive)
        cluster.remove(gang.job_id, gang.number)


@_inject.register(f.GpuLost)
def _(fault: f.GpuLost, cluster: MemoryCluster) -> None:
    node = cluster.nodes.get(fault.node)
    if node is None or not 0 <= fault.index < int(node.node.gpus):
        return
    node.lost.add(fault.index)
    for process in [p for p in cluster.processes if p.actor.node is node and fault.index in p.actor.gpus]:
        process.end(f.Exit(code=1, error_type="RuntimeError", error_message="CUDA error: device not found"))


@_inject.register(f.ReplyLost)
def _(fault: f.ReplyLost, cluster: MemoryCluster) -> None:
    cluster.network.lost[fault.job] += fault.count


@_inject.register(f.ReplyRepeated)
def _(fault: f.ReplyRepeated, cluster: MemoryCluster) -> None:
    cluster.network.repeated[fault.job] += fault.count


@_inject.register(f.Slow)
def _(fault: f.Slow, cluster: MemoryCluster) -> None:
    if fault.node in cluster.nodes:
        cluster.nodes[fault.node].slow = fault.seconds


@_inject.register(f.DiskFull)
def _(_fault: f.DiskFull, cluster: MemoryCluster) -> None:
    cluster.disk_full = True


@_inject.register(f.DiskFreed)
def _(_fault: f.DiskFreed, cluster: MemoryCluster) -> None:
    cluster.disk_full = False


@_inject.register(f.CheckpointBroken)
def _(fault: f.CheckpointBroken, cluster: MemoryCluster) -> None:
    cluster.checkpoints.break_newest(JobId(fault.job))


@_inject.register(f.ClockSteps)
def _(fault: f.ClockSteps, cluster: MemoryCluster) -> None:
    cluster.wall_ahead += fault.seconds


@_inject.register(f.ClockSkew)
def _(fault: f.ClockSkew, cluster: MemoryCluster) -> None:
    if fault.node in cluster.nodes:
        cluster.nodes[fault.node].clock_ahead = fault.seconds
