"""Discrete events: jobs arrive and end, and after each the production scheduler decides (``scheduler.schedule``).

Free resources and the order of the queue are kept from event to event, so an event costs what it touches and one round
of placing. Starts take no time, and a preempted job continues from its last checkpoint; checkpoints are
``checkpoint_seconds`` apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.core.cluster import Free
from orchestrator.core.ids import JobId
from orchestrator.core.job.checkpoints import Checkpoints, Durable, Saved
from orchestrator.core.lifecycle.advance import advance
from orchestrator.core.lifecycle.fold import fold, submitted
from orchestrator.core.scheduler.placement import could_ever_fit, give_back, take
from orchestrator.core.scheduler.queues import Sharing
from orchestrator.core.scheduler.scheduler import Commands, Round, schedule
from orchestrator.core.simulation.lines import Waiting
from orchestrator.core.simulation.trace import Outcome, Ran, TraceJob, Usage
from orchestrator.spec.model import JobSpec, ResourcesSpec, WorkerResources

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job
    from orchestrator.core.simulation.policies import Policy

SAMPLES: Final = 500
CHECKPOINT_SECONDS: Final = 1800.0
SHARING: Final = Sharing()
_EPSILON: Final = 1e-9


@dataclass(slots=True)
class _Live:
    """A job that waits or runs."""

    job: TraceJob
    record: Job
    left: float
    started_at: float | None = None
    since: float = 0.0
    shares: tuple[str | None, ...] = ()
    starts: int = 0
    preemptions: int = 0
    lost: float = 0.0


class Cluster:
    """The free resources of the nodes, kept from event to event."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self.free = {node.id: Free.of(node) for node in nodes.values() if node.schedulable}
        self.gpus = sum(free.gpus for free in self.free.values())
        self.busy = 0.0
        self.pieces = 0.0

    def copy(self) -> dict[str, Free]:
        """Return a copy of the free resources for a round."""
        return {n: Free(f.cpus, f.idle_gpus, f.memory_bytes, dict(f.shares)) for n, f in self.free.items()}

    def take(self, job: Job, placed: Sequence[str], gpus: float) -> tuple[str | None, ...]:
        """Place a gang; a share of a GPU is taken where it leaves the least."""
        self._count(placed, -1)
        shares: list[str | None] = []
        for node_id in placed:
            known = self._fullest(node_id, gpus) if 0 < gpus < 1 else None
            shares += take(job, (node_id,), self.free, (known,))
        self._count(placed, 1)
        self.busy += gpus * len(placed)
        return tuple(shares)

    def give_back(self, job: Job, shares: Sequence[str | None], gpus: float) -> None:
        """Release a gang."""
        self._count(job.nodes, -1)
        give_back(job, job.nodes, shares, self.free)
        self._count(job.nodes, 1)
        self.busy -= gpus * len(job.nodes)

    def _fullest(self, node_id: str, gpus: float) -> str | None:
        fitting = {name: left for name, left in self.free[node_id].shares.items() if left >= gpus - _EPSILON}
        return min(fitting, key=fitting.__getitem__, default=None)

    def _count(self, placed: Sequence[str], sign: int) -> None:
        for node_id in set(placed):
            left = self.free[node_id].gpus
            if left < self.nodes[node_id].gpus - _EPSILON:
                self.pieces += sign * left


class Simulation:
    """One run of a trace on some nodes under a policy."""

    def __init__(
        self,
        trace: Sequence[TraceJob],
        nodes: Mapping[str, Node],
        policy: Policy,
        *,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        sharing: Sharing = SHARING,
    ) -> None:
        self._trace = sorted(trace, key=lambda job: job.at)
        self._policy = policy
        self._checkpoint_seconds = checkpoint_seconds
        self._preempts = len({job.priority for job in trace}) > 1 or bool(sharing.queues)
        self._lines = Waiting(policy, sharing, nodes, self._trace[0].at if self._trace else 0.0)
        self._cluster = Cluster(nodes)
        self._specs: dict[tuple[int, float, int, str], tuple[JobSpec, bool]] = {}
        self._live: dict[JobId, _Live] = {}
        self._running: dict[JobId, _Live] = {}
        self._ends: list[tuple[float, JobId, int]] = []
        self._ran: list[Ran] = []
        self._refused: list[TraceJob] = []

    def run(self) -> Outcome:
        """Run the whole trace."""
        usage = Usage()
        samples: list[tuple[float, float, int]] = []
        arrived = 0
        before = self._trace[0].at if self._trace else 0.0
        step = (self._trace[-1].at - before) / SAMPLES if self._trace else 0.0
        while arrived < len(self._trace) or self._ends:
            arrival = self._trace[arrived].at if arrived < len(self._trace) else float("inf")
            now = min(arrival, self._ends[0][0]) if self._ends else arrival
            self._measure(usage, now - before)
            if not samples or now >= samples[-1][0] + step:
                samples.append((now, self._cluster.busy, len(self._lines)))
            before = now
            self._end(now)
            while arrived < len(self._trace) and self._trace[arrived].at <= now:
                arrived += 1
                self._arrive(self._trace[arrived - 1], arrived)
            self._decide(now)
        return Outcome(ran=tuple(self._ran), refused=tuple(self._refused), usage=usage, samples=tuple(samples))

    def _measure(self, usage: Usage, seconds: float) -> None:
        at = self._cluster
        usage.add(seconds, gpus=at.gpus, busy=at.busy, pieces=at.pieces, waiting=len(self._lines) > 0)

    def _arrive(self, job: TraceJob, sequence: int) -> None:
        kind = (job.ranks, job.gpus, job.priority, job.queue)
        known = self._specs.get(kind)
        record = _submit(job, sequence, _spec(job) if known is None else known[0])
        if known is None:
            known = self._specs[kind] = (record.spec, could_ever_fit(record, self._cluster.nodes))
        if not known[1]:
            self._refused.append(job)
            return
        live = self._live[record.id] = _Live(job, record, job.seconds)
        self._enqueue(live)

    def _enqueue(self, live: _Live) -> None:
        self._lines.add(live.record, live.left)

    def _end(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            _, job_id, starts = heappop(self._ends)
            live = self._running.get(job_id)
            if live is None or live.starts != starts:
                continue  # preempted since
            self._release(live, now)
            del self._live[job_id]
            assert live.started_at is not None
            self._ran.append(
                Ran(
                    job=live.job,
                    started_at=live.started_at,
                    ended_at=now,
                    preemptions=live.preemptions,
                    lost=live.lost,
                )
            )

    def _decide(self, now: float) -> None:
        while len(self._lines) and (self._preempts or self._cluster.busy < self._cluster.gpus - _EPSILON):
            commands = Commands()
            holding = self._holding(now)
            queue, shares = self._lines.offered(now)
            schedule(
                Round(
                    queue=queue,
                    holding=holding,
                    free=self._cluster.copy(),
                    nodes=self._cluster.nodes,
                    shares=shares,
                    waiting=self._lines.queues(),
                    brief=True,
                ),
                now,
                commands,
            )
            for event in commands.events:
                if isinstance(event, ev.AttemptStarted):
                    self._start(self._live[event.job_id], event, now)
                elif isinstance(event, ev.StopRequested):
                    self._preempt(self._live[event.job_id], event, now)
            if not commands.events:
                return

    def _holding(self, now: float) -> list[Job]:
        """Return the running jobs; with their newest checkpoints where one of them may be preempted."""
        if not self._preempts:
            return []
        for live in self._running.values():
            saved = live.since + self._kept(live, now)
            if saved > live.since:
                checkpoints = Checkpoints(
                    newest=Saved(step=1, at=saved), durable=Durable(step=1, at=saved, path="simulated")
                )
                live.record = replace(live.record, checkpoints=checkpoints)
        return [live.record for live in self._running.values()]

    def _kept(self, live: _Live, now: float) -> float:
        """Return the seconds of the current attempt that its newest checkpoint covers."""
        return (now - live.since) // self._checkpoint_seconds * self._checkpoint_seconds

    def _start(self, live: _Live, event: ev.AttemptStarted, now: float) -> None:
        job_id = live.record.id
        self._lines.remove(live.record, live.left)
        live.shares = self._cluster.take(live.record, event.nodes, live.job.gpus)
        record = fold(live.record, event)
        self._lines.started(live.record, now)
        if live.job.gpus < 1:
            record = fold(record, _placed(record, live.shares, now))
        live.record = fold(record, ev.AttemptRunning(job_id=job_id, at=now, attempt=record.attempt_number, pids=()))
        live.since = now
        live.started_at = now if live.started_at is None else live.started_at
        live.starts += 1
        self._running[job_id] = live
        heappush(self._ends, (now + live.left, job_id, live.starts))

    def _preempt(self, live: _Live, event: ev.StopRequested, now: float) -> None:
        kept = self._kept(live, now)
        live.left -= kept
        live.lost += (now - live.since - kept) * live.job.all_gpus
        live.preemptions += 1
        self._release(live, now)
        record = fold(live.record, event)
        record = fold(record, ev.AttemptGone(job_id=record.id, at=now, attempt=record.attempt_number))
        record = fold(record, ev.GangReleased(job_id=record.id, at=now, gang=record.gang))
        for step in advance(record, now).events:
            record = fold(record, step)
        live.record = record
        self._enqueue(live)

    def _release(self, live: _Live, now: float) -> None:
        self._lines.ended(live.record, now)
        self._cluster.give_back(live.record, live.shares, live.job.gpus)
        del self._running[live.record.id]


def _spec(job: TraceJob) -> JobSpec:
    worker = WorkerResources(gpu=float(job.gpus), cpu=0.0)
    resources = ResourcesSpec(num_workers=job.ranks, resources_per_worker=worker)
    return JobSpec(
        name="simulated", entrypoint="simulated", resources=resources, priority=job.priority, queue=job.queue
    )


def _submit(job: TraceJob, sequence: int, spec: JobSpec) -> Job:
    event = ev.JobSubmitted(
        job_id=JobId(f"{sequence:09}"),
        at=job.at,
        name=spec.name,
        spec=spec,
        user=job.user,
        uid=0,
        idempotency_key="",
        python="",
        path="",
        work_dir="",
        snapshot="",
    )
    return submitted(event, sequence)


def _placed(job: Job, shares: Sequence[str | None], now: float) -> ev.GangPlaced:
    seats = tuple(
        ev.Seat(rank=rank, node_id=node, node_name=node, gpu_ids=(share or "",), gpu_uuids=(), actor_pid=0)
        for rank, (node, share) in enumerate(zip(job.nodes, shares, strict=True))
    )
    return ev.GangPlaced(job_id=job.id, at=now, gang=job.gang, seats=seats)
