"""A simulated world: nodes, gangs, processes, and the facts that they send; carries effects out as the runtime would.

It keeps its own books of who really runs where, and refuses what must never be: a process of a second attempt beside
one of the first, a GPU given away twice, an attempt launched again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from orchestrator.core import events as ev
from orchestrator.core.effects import Ensure, KillRanks, ReleaseGang, StopRanks
from tests.unit.core.builders import T0, node, seats

if TYPE_CHECKING:
    from orchestrator.core.cluster import Node
    from orchestrator.core.effects import Effect
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job

LEASE_SECONDS = 20.0  # how long ranks of a node that was cut off may go on


@dataclass(slots=True)
class Process:
    """A rank's process. One on a node that was cut off ends itself at ``dies_at``."""

    job_id: JobId
    attempt: int
    rank: int
    gang: int
    node_id: str
    dies_at: float | None = None


class World:
    """What really is."""

    def __init__(self) -> None:
        self.now = T0
        self.nodes: dict[str, Node] = {"a": node("a", gpus=4, cpus=16), "b": node("b", gpus=2, cpus=16)}
        self.gangs: dict[tuple[JobId, int], tuple[str, ...]] = {}
        self.broken: set[tuple[JobId, int]] = set()
        self.processes: list[Process] = []
        self.launched: set[tuple[JobId, int]] = set()
        self.stubborn: set[JobId] = set()
        self.outbox: list[ev.Event] = []
        self.history: list[ev.Event] = []

    def tell(self, fact: ev.Event) -> None:
        """Send a fact; the daemon gets it when it is delivered."""
        self.outbox.append(fact)
        self.history.append(fact)

    def pass_time(self, seconds: float) -> None:
        """Time passes; ranks that were cut off for their lease end themselves."""
        self.now += seconds
        self.processes = [p for p in self.processes if p.dies_at is None or p.dies_at > self.now]

    def running(self) -> list[Process]:
        """Processes that can still be reached, in a fixed order."""
        reachable = [p for p in self.processes if p.dies_at is None]
        return sorted(reachable, key=lambda p: (p.job_id, p.attempt, p.rank))

    def end_process(
        self, process: Process, *, exit_code: int | None = None, signal: int | None = None, error: str = ""
    ) -> None:
        """A process ends, and its actor says so."""
        self.processes.remove(process)
        self.tell(
            ev.RankExited(
                job_id=process.job_id,
                at=self.now,
                attempt=process.attempt,
                rank=process.rank,
                exit_code=exit_code,
                signal=signal,
                error_type="RuntimeError" if error else "",
                error_message=error,
            )
        )

    def lose_actor(self, process: Process, *, told: bool) -> None:
        """The rank's actor dies and takes the process along; its exit may be known (``told``) or not."""
        if told:
            self.end_process(process, signal=9)
        else:
            self.processes.remove(process)
        self._lose_gang((process.job_id, process.gang), process.rank, "a rank actor died", 0.0)

    def lose_node(self, node_id: str, *, cut_off: bool) -> None:
        """The node dies; or is cut off, and its ranks go on until their lease is over."""
        self.nodes[node_id] = replace(self.nodes[node_id], alive=False)
        for process in [p for p in self.processes if p.node_id == node_id]:
            if cut_off:
                process.dies_at = self.now + LEASE_SECONDS
            else:
                self.processes.remove(process)
        until = self.now + LEASE_SECONDS if cut_off else 0.0
        for key in [key for key, placed in self.gangs.items() if node_id in placed]:
            self._lose_gang(key, None, f"node {node_id} died", until)

    def can_return(self, node_id: str) -> bool:
        """The node is away, and nothing of before runs on it any more."""
        return not self.nodes[node_id].alive and all(p.node_id != node_id for p in self.processes)

    def return_node(self, node_id: str) -> None:
        """The node is back, empty."""
        self.nodes[node_id] = replace(self.nodes[node_id], alive=True)

    def carry_out(self, effect: Effect, job: Job) -> None:
        """Do one step of what the record wants; doing it again does the next, or nothing."""
        match effect:
            case Ensure():
                self._ensure(job)
            case StopRanks():
                if job.id not in self.stubborn or self.now >= effect.deadline:
                    self._end_ranks(job, exit_code=0)
            case KillRanks():
                self._end_ranks(job, signal=9)
            case ReleaseGang():
                self._release(job.id, effect.gang)

    def _lose_gang(self, key: tuple[JobId, int], rank: int | None, reason: str, not_before: float) -> None:
        if key in self.broken and not not_before:
            return
        self.broken.add(key)
        job_id, gang = key
        self.tell(ev.GangLost(job_id=job_id, at=self.now, gang=gang, rank=rank, reason=reason, not_before=not_before))

    def _ensure(self, job: Job) -> None:
        key = (job.id, job.gang)
        if key not in self.gangs:
            self._place(job)
        elif (job.id, job.attempt_number) not in self.launched and key not in self.broken:
            self._launch(job)

    def _place(self, job: Job) -> None:
        key = (job.id, job.gang)
        assert len(job.nodes) == job.num_workers, "a gang is whole"
        self.gangs[key] = job.nodes
        for node_id, held in Counter(n for placed in self.gangs.values() for n in placed).items():
            assert held <= self.nodes[node_id].gpus, f"the GPUs of {node_id} are given away twice"
        if not all(self.nodes[n].alive for n in job.nodes):
            self._lose_gang(key, None, "a node was gone before the gang was placed", 0.0)
        else:
            self.tell(ev.GangPlaced(job_id=job.id, at=self.now, gang=job.gang, seats=seats(job, job.nodes)))

    def _launch(self, job: Job) -> None:
        alive = [p for p in self.processes if p.job_id == job.id]
        assert not alive, f"attempt {job.attempt_number} starts beside {alive}"
        self.launched.add((job.id, job.attempt_number))
        for rank, node_id in enumerate(job.nodes):
            self.processes.append(Process(job.id, job.attempt_number, rank, job.gang, node_id))
        pids = tuple(range(1, job.num_workers + 1))
        self.tell(ev.AttemptRunning(job_id=job.id, at=self.now, attempt=job.attempt_number, pids=pids))

    def _end_ranks(self, job: Job, *, exit_code: int | None = None, signal: int | None = None) -> None:
        mine = [p for p in self.running() if p.job_id == job.id]
        for process in mine:
            self.end_process(process, exit_code=exit_code, signal=signal)
        if not mine and not any(p.job_id == job.id for p in self.processes):
            self.launched.add((job.id, job.attempt_number))  # an attempt that was stopped early is never launched
            self.tell(ev.AttemptGone(job_id=job.id, at=self.now, attempt=job.attempt_number))

    def _release(self, job_id: JobId, gang: int) -> None:
        self.processes = [p for p in self.processes if p.job_id != job_id or p.dies_at is not None]
        self.gangs.pop((job_id, gang), None)
        self.tell(ev.GangReleased(job_id=job_id, at=self.now, gang=gang))
