"""Nodes, gangs, processes and checkpoints in memory. All of it outlives the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from orchestrator.clock import SteadyClock
from orchestrator.core.facts.faults import ActorMissing, ActorNotPlaced, NodeLost, StoppedUnplaced
from orchestrator.core.scheduler.placement import rank_size
from orchestrator.runtime.gangs.errors import GangLostError
from orchestrator.runtime.memory.network import Agenda, Network
from orchestrator.runtime.memory.nodes import Checkpoints, MemoryNode, Saved, UnsafeOrderError, path_of
from orchestrator.runtime.memory.ranks import MemoryActor, Process, Processes, Script
from orchestrator.runtime.ranks.rank_events import FENCE_SECONDS, LEASE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job

_FIRST_PID = 100


@dataclass(slots=True)
class MemoryGang:
    """A gang's actors by rank. It exists as a whole, or not at all."""

    job_id: JobId
    number: int
    actors: list[MemoryActor] = field(default_factory=list)


class MemoryCluster:
    """Nodes, and what runs on them. ``script_of`` gives the script of a job's ranks.

    Time passes in ``step`` and ``run_until`` only; ``now`` is the time, which no clock's step changes. Faults are
    injected by ``faults.py``. An order that must never be given (a GPU twice, two attempts at once) raises
    UnsafeOrderError where it arrives.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        now: float = 0.0,
        script_of: Callable[[JobId], Script] = lambda _: Script(),
        latency: float = 0.0,
    ) -> None:
        self.agenda = Agenda(now)
        self.network = Network(self.agenda, latency)
        self.nodes = {node.id: MemoryNode(node) for node in nodes}
        self.gangs: dict[JobId, MemoryGang] = {}
        self.checkpoints = Checkpoints()
        self.script_of = script_of
        self.processes = Processes(self.agenda, self._process_ended, script_of, self._process_started)
        self.disk_full = False
        self.wall_ahead = 0.0
        self.boots = 0
        self.connected = True
        self._actors = 0

    # -- time

    def now(self) -> float:
        """Return the wall time."""
        return self.agenda.now

    def clock(self) -> SteadyClock:
        """Return a new clock for a daemon, whose wall clock steps with ``wall_ahead``; ``boots`` counts its machine's boots."""
        return SteadyClock(
            wall=lambda: self.now() + self.wall_ahead, elapsed=self.now, boot=lambda: f"boot-{self.boots}"
        )

    def step(self, until: float) -> bool:
        """Run the next action that is due by ``until``; False when there is none."""
        return self.agenda.step(until)

    def run_until(self, until: float) -> int:
        """Run every action that is due by ``until``, which becomes the current time."""
        return self.agenda.run_until(until)

    # -- nodes

    async def refresh(self) -> dict[str, Node]:
        """Return every node, as the scheduler sees it."""
        return self.views()

    def views(self) -> dict[str, Node]:
        """Return every node, as the scheduler sees it."""
        return {node_id: node.view() for node_id, node in self.nodes.items()}

    @property
    def silent(self) -> set[str]:
        """Return the nodes that do not answer though they count as alive."""
        return {node_id for node_id, node in self.nodes.items() if node.silent and node.alive}

    # -- gangs

    def find_or_create(self, job: Job, *, create: bool) -> MemoryGang:
        """Return the job's gang; ``create`` creates one that was never placed. Raises GangLostError."""
        gang = self.gangs.get(job.id)
        if gang is not None and gang.number == job.gang:
            return gang
        if job.seats:
            raise GangLostError(ActorMissing(rank=0))
        if not create:
            raise GangLostError(StoppedUnplaced())
        if gang is not None:
            raise UnsafeOrderError(f"gang {job.gang} of {job.id} is placed beside gang {gang.number}")
        if not all(node_id in self.nodes and self.nodes[node_id].alive for node_id in job.nodes):
            raise GangLostError(NodeLost(), node_lost=True)
        return self._create(job)

    def _create(self, job: Job) -> MemoryGang:
        cpus, gpus, _ = rank_size(job)
        gang = MemoryGang(job.id, job.gang)
        for rank, node_id in enumerate(job.nodes):
            node, holder = self.nodes[node_id], (job.id, job.gang, rank)
            hold = node.take(holder, gpus, cpus)
            if hold is None:
                self._free(gang)
                raise GangLostError(ActorNotPlaced(rank=rank, said=f"node {node_id} has no GPUs for it"))
            self._actors += 1
            gang.actors.append(
                MemoryActor(
                    job_id=job.id,
                    gang=job.gang,
                    rank=rank,
                    pid=_FIRST_PID + self._actors,
                    gpus=hold.gpus,
                    node=node,
                    agenda=self.agenda,
                    processes=self.processes,
                )
            )
        self.gangs[job.id] = gang
        return gang

    def abandon(self, job_id: JobId) -> None:
        """Count what the job's gang holds as held by another program."""
        for node in self.nodes.values():
            node.abandoned |= {holder for holder in node.held if holder[0] == job_id}

    def remove(self, job_id: JobId, number: int) -> None:
        """End the gang's actors and their processes, and free what they hold. Idempotent."""
        gang = self.gangs.get(job_id)
        if gang is None or gang.number != number:
            return
        del self.gangs[job_id]
        for actor in gang.actors:
            actor.die(ActorMissing(rank=actor.rank), kill=actor.node.alive)
        self._free(gang)

    def _free(self, gang: MemoryGang) -> None:
        for actor in gang.actors:
            if actor.process is None or not actor.process.alive:
                actor.node.held.pop((gang.job_id, gang.number, actor.rank), None)

    def latest_attempts(self) -> dict[JobId, int]:
        """Return the highest attempt of each job that has started a process, as its directories show it."""
        return dict(self.processes.latest)

    def flush(self, job_id: JobId, number: int) -> Saved | None:
        """Write the snapshot in a gang's memory to storage; None when there is none, or the disk is full."""
        gang = self.gangs.get(job_id)
        if gang is None or gang.number != number or self.disk_full:
            return None
        return self.checkpoints.flush(job_id, number, self.now())

    def forget(self, job_id: JobId) -> None:
        """Drop the data that only restarts of an ended job would need."""
        self.network.forget(job_id)
        self.processes.forget(job_id)

    def gone_from(self, job_id: JobId, node_id: str) -> bool:
        """Whether no process of the job is left on a node, as its agent sees it."""
        return all(p.actor.node.node.id != node_id for p in self.processes.of(job_id))

    def fenced_at(self, node_id: str) -> float | None:
        """Return when a dead node can run nothing more; None when the node is alive."""
        node = self.nodes[node_id]
        return None if node.alive else node.died_at + FENCE_SECONDS

    # -- losses, saves and ends

    def lose_node(self, node: MemoryNode, *, cut_off: bool) -> None:
        """Make the node dead for all other programs; with ``cut_off`` its processes run until their lease ends."""
        node.alive, node.silent, node.died_at = False, False, self.agenda.now
        for actor in [a for gang in self.gangs.values() for a in gang.actors if a.node is node]:
            actor.die(NodeLost(rank=actor.rank, node=node.node.id), node_lost=True, kill=not cut_off)
        for process in [p for p in self.processes if p.actor.node is node]:
            self.agenda.after(LEASE_SECONDS, process.kill)
        waiting, node.waiting = node.waiting, []
        for deliver in waiting:
            deliver()

    def _process_started(self, process: Process) -> float:
        """Schedule the saves of rank 0. Returns how far into its script the process begins, in seconds."""
        began = self.checkpoints.resume(process.job_id, process.gang)
        every = process.script.save_every
        if every is not None and process.rank == 0:
            self.agenda.after(every, partial(self._save_again, process, began + every, every))
        return began

    def _save_again(self, process: Process, step: float, every: float) -> None:
        if process.alive and not process.hangs:
            self.save(process, int(step), durable=True)
            self.agenda.after(every, partial(self._save_again, process, step + every, every))

    def save(self, process: Process, step: int, *, durable: bool) -> None:
        """Save at ``step``: to storage, or into the memory of the gang."""
        if process.actor.dead is None and not (durable and self.disk_full):
            path = path_of(process.job_id, process.attempt, step) if durable else ""
            saved = Saved(attempt=process.attempt, gang=process.gang, step=step, at=process.actor.clock, path=path)
            self.checkpoints.keep(process.job_id, saved)
            process.actor.add(saved)

    def _process_ended(self, process: Process) -> None:
        gang = self.gangs.get(process.job_id)
        if gang is None or gang.number != process.gang:
            process.actor.node.held.pop((process.job_id, process.gang, process.rank), None)
