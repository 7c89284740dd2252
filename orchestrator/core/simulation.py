"""Discrete events: jobs arrive, end and save, and after each the daemon's scheduler decides (``scheduler.decide``).

Starts and stops take no time, and a preempted job continues from its last checkpoint; checkpoints are
``checkpoint_seconds`` apart in each attempt. Nothing is known of durations.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, floor, fsum
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core import events as ev
from orchestrator.core.cluster import EPSILON
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.advance import advance
from orchestrator.core.lifecycle.fold import fold, submitted
from orchestrator.core.scheduler.live_jobs import LiveJobs
from orchestrator.core.scheduler.placement import could_ever_fit, place, take
from orchestrator.core.scheduler.scheduler import State, decide
from orchestrator.core.scheduler.shares import Sharing, UseHistory
from orchestrator.spec.model import JobSpec, ResourcesSpec, WorkerResources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.job.record import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceJob:
    """A job of a trace: submitted at ``at``, running for ``seconds`` once it has ``ranks`` ranks of ``gpus`` GPUs each."""

    at: float
    seconds: float
    ranks: int = 1
    gpus: float = 1.0
    user: str = ""
    priority: int = 50
    queue: str = "default"

    @property
    def all_gpus(self) -> float:
        """GPUs of all ranks of the job."""
        return self.ranks * self.gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a job. ``lost`` is GPU time that it repeated because it was preempted, in seconds."""

    job: TraceJob
    started_at: float
    ended_at: float
    preemptions: int = 0
    lost: float = 0.0

    @property
    def wait(self) -> float:
        """Seconds from its submission to its first start."""
        return self.started_at - self.job.at

    @property
    def completion(self) -> float:
        """Seconds from its submission to its end."""
        return self.ended_at - self.job.at


@dataclass(slots=True)
class Usage:
    """GPU time in seconds: all of it, busy, idle while jobs waited, and the part of that on partly used nodes."""

    total: float = 0.0
    busy: float = 0.0
    idle_while_waiting: float = 0.0
    in_pieces: float = 0.0

    def add(self, seconds: float, *, gpus: float, busy: float, pieces: float, waiting: bool) -> None:
        """Count a span in which nothing changed."""
        self.total += seconds * gpus
        self.busy += seconds * busy
        if waiting:
            self.idle_while_waiting += seconds * (gpus - busy)
            self.in_pieces += seconds * pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A whole simulation: each job in order of its end, those that can never fit, and (time, busy GPUs, waiting jobs) over time."""

    ran: tuple[Ran, ...]
    refused: tuple[TraceJob, ...]
    usage: Usage
    samples: tuple[tuple[float, float, int], ...]


SHORT_SECONDS: Final = 10.0
"""Jobs count as at least this long in slowdowns, so that the shortest do not determine the mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, median and 99th percentile."""

    mean: float
    median: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of some values; zeros without any."""
        if not values:
            return cls(mean=0.0, median=0.0, p99=0.0)
        found = sorted(values)
        return cls(mean=fsum(found) / len(found), median=_quantile(found, 0.5), p99=_quantile(found, 0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a policy on a trace. Times in seconds; ratios 0-1.

    ``utilization`` is the share of GPU time that was used, ``idle_while_waiting`` the share that was idle although jobs waited,
    ``fragmentation`` the part of that which lay on partly used nodes. ``fairness`` is Jain's index over users' mean speed: the
    time that their jobs ran per time from submission to end.
    """

    jobs: int
    refused: int
    completion: Spread
    wait: Spread
    slowdown: Spread
    utilization: float
    idle_while_waiting: float
    fragmentation: float
    fairness: float
    preemptions: int
    lost_gpu_seconds: float
    makespan: float

    def to_json(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        spreads = {
            name: {"mean": spread.mean, "median": spread.median, "p99": spread.p99}
            for name, spread in (
                ("completion_seconds", self.completion),
                ("wait_seconds", self.wait),
                ("slowdown", self.slowdown),
            )
        }
        return {
            "jobs": self.jobs,
            "refused": self.refused,
            **spreads,
            "utilization": self.utilization,
            "idle_while_waiting": self.idle_while_waiting,
            "fragmentation": self.fragmentation,
            "fairness": self.fairness,
            "preemptions": self.preemptions,
            "lost_gpu_seconds": self.lost_gpu_seconds,
            "makespan_seconds": self.makespan,
        }


def figures_of(outcome: Outcome) -> Figures:
    """Return the figures of one simulation."""
    ran, usage = outcome.ran, outcome.usage
    return Figures(
        jobs=len(ran),
        refused=len(outcome.refused),
        completion=Spread.of([one.completion for one in ran]),
        wait=Spread.of([one.wait for one in ran]),
        slowdown=Spread.of([_slowdown(one) for one in ran]),
        utilization=_share(usage.busy, usage.total),
        idle_while_waiting=_share(usage.idle_while_waiting, usage.total),
        fragmentation=_share(usage.in_pieces, usage.idle_while_waiting),
        fairness=_fairness(ran),
        preemptions=sum(one.preemptions for one in ran),
        lost_gpu_seconds=fsum(one.lost for one in ran),
        makespan=max((one.ended_at for one in ran), default=0.0) - min((one.job.at for one in ran), default=0.0),
    )


def _slowdown(one: Ran) -> float:
    return max(1.0, one.completion / max(one.job.seconds, SHORT_SECONDS))


def _fairness(ran: Sequence[Ran]) -> float:
    """Return Jain's index: 1 when all users fare equally, 1/n when one of n has everything."""
    times: dict[str, list[float]] = {}
    for one in ran:
        sums = times.setdefault(one.job.user, [0.0, 0.0])
        sums[0] += one.job.seconds
        sums[1] += one.completion
    speeds = [_share(running, whole) for running, whole in times.values()]
    squares = fsum(speed * speed for speed in speeds)
    return _share(fsum(speeds) ** 2, len(speeds) * squares) if squares else 1.0


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[max(0, ceil(share * len(ordered)) - 1)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


SAMPLES: Final = 500
CHECKPOINT_SECONDS: Final = 1800.0
POLICIES: Final = ("orch", "fifo")
"""``orch`` is the daemon's scheduler; with ``fifo``, jobs start in order of arrival, and none overtakes another."""
_SHARING: Final = Sharing()


@dataclass(slots=True)
class _Live:
    """A job that waits or runs, and the seconds that are ``left`` of it; ``since`` is when its attempt began."""

    job: TraceJob
    left: float
    started_at: float | None = None
    since: float = 0.0
    starts: int = 0
    preemptions: int = 0
    lost: float = 0.0


class Simulation:
    """One run of a trace on some nodes under a policy. It is also when its jobs save, as the scheduler's ``Saves``."""

    def __init__(
        self,
        trace: Iterable[TraceJob],
        nodes: Mapping[str, Node],
        policy: str,
        *,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        sharing: Sharing = _SHARING,
    ) -> None:
        self._trace = sorted(trace, key=lambda job: job.at)
        self._nodes = nodes
        self._every = checkpoint_seconds
        self._sharing = sharing
        self._jobs = LiveJobs()
        self._queue: deque[Job] | None = deque() if policy == "fifo" else None
        self._live: dict[JobId, _Live] = {}
        self._ends: list[tuple[float, JobId, int]] = []
        self._use = UseHistory(sharing.half_life)
        self._past = self._use.view()
        self._specs: dict[tuple[int, float, int, str], tuple[JobSpec, bool]] = {}
        self._busy = 0.0
        self._wake_at: float | None = None
        self._ran: list[Ran] = []
        self._refused: list[TraceJob] = []

    def run(self) -> Outcome:
        """Run the whole trace."""
        usage, samples = Usage(), list[tuple[float, float, int]]()
        arrived, count = 0, len(self._trace)
        gpus = sum(node.gpus for node in self._nodes.values() if node.schedulable)
        before = sample_at = self._trace[0].at if self._trace else 0.0
        step = (self._trace[-1].at - before) / SAMPLES if self._trace else 0.0
        while (now := self._next(self._trace[arrived].at if arrived < count else None)) is not None:
            waiting = len(self._jobs.waiting)
            pieces = self._pieces() if waiting else 0.0
            usage.add(now - before, gpus=gpus, busy=self._busy, pieces=pieces, waiting=waiting > 0)
            if now >= sample_at:
                samples.append((now, self._busy, waiting))
                sample_at = now + step
            before = now
            while self._ends and self._ends[0][0] <= now:
                _, job_id, starts = heappop(self._ends)
                if job_id in self._live and self._live[job_id].starts == starts:  # else it was preempted since
                    self._end(job_id, now)
            while arrived < count and self._trace[arrived].at <= now:
                arrived += 1
                self._arrive(self._trace[arrived - 1], arrived)
            self._decide(now)
        return Outcome(ran=tuple(self._ran), refused=tuple(self._refused), usage=usage, samples=tuple(samples))

    def saved_at(self, job: Job, now: float) -> float | None:
        """Return when a job's newest checkpoint was saved."""
        since = self._live[job.id].since
        kept = self._kept(now - since)
        return since + kept if kept else None

    def next_at(self, job: Job, now: float) -> float | None:
        """Return when its next one is saved."""
        since = self._live[job.id].since
        return since + self._kept(now - since) + self._every

    def _kept(self, seconds: float) -> float:
        """Return the part of an attempt that its newest checkpoint covers."""
        return floor(seconds / self._every + EPSILON) * self._every

    def _next(self, arrival: float | None) -> float | None:
        """Return when something happens next; None when all is over."""
        times = [at for at in (arrival, self._ends[0][0] if self._ends else None) if at is not None]
        if times and self._wake_at is not None:
            times.append(self._wake_at)
        return min(times, default=None)

    def _pieces(self) -> float:
        """Return the free GPUs of nodes that are partly used."""
        free = self._jobs.free(self._nodes)
        return sum(left.gpus for i, left in free.items() if left.gpus < self._nodes[i].gpus - EPSILON)

    def _arrive(self, job: TraceJob, sequence: int) -> None:
        kind = (job.ranks, job.gpus, job.priority, job.queue)
        spec, fits = self._specs.get(kind, (None, True))
        if spec is None:
            worker = WorkerResources(gpu=float(job.gpus), cpu=0.0)
            resources = ResourcesSpec(num_workers=job.ranks, resources_per_worker=worker)
            spec = JobSpec(
                name="simulated",
                entrypoint="simulated",
                resources=resources,
                priority=job.priority,
                queue=job.queue,
            )
        record = _submitted(job, sequence, spec)
        if kind not in self._specs:
            fits = could_ever_fit(record, self._nodes)
            self._specs[kind] = spec, fits
        if not fits:
            self._refused.append(job)
            return
        self._live[record.id] = _Live(job, job.seconds)
        self._jobs[record.id] = record
        if self._queue is not None:
            self._queue.append(record)

    def _end(self, job_id: JobId, now: float) -> None:
        live, job = self._live.pop(job_id), self._jobs.pop(job_id)
        self._use.released(job, now)
        self._past = self._use.view()
        self._busy -= live.job.all_gpus
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
        self._wake_at = None
        while self._jobs.waiting:
            events, wake_at = self._decision(now)
            for event in events:
                if isinstance(event, ev.AttemptStarted):
                    self._start(event)
                elif isinstance(event, ev.StopRequested):
                    self._preempt(event)
            if not events:
                self._wake_at = wake_at if wake_at is not None and wake_at > now else None
                return

    def _decision(self, now: float) -> tuple[Sequence[ev.Event], float | None]:
        if self._queue is None:
            commands = decide(
                State(
                    jobs=self._jobs, nodes=self._nodes, sharing=self._sharing, past=self._past, saves=self, brief=True
                ),
                now,
            )
            return commands.events, commands.wake_at
        job = self._queue[0]
        where = place(job, self._jobs.free(self._nodes), self._nodes)
        if where is None:
            return (), None
        self._queue.popleft()
        return (ev.AttemptStarted(job_id=job.id, at=now, attempt=1, gang=1, nodes=where),), None

    def _start(self, event: ev.AttemptStarted) -> None:
        live, job, now = self._live[event.job_id], self._jobs[event.job_id], event.at
        live.since, live.starts = now, live.starts + 1
        live.started_at = now if live.started_at is None else live.started_at
        shares = self._shares(job, event.nodes)
        job = fold(job, event)
        if shares:
            job = fold(job, _placed(job, shares, now))
        job = fold(job, ev.AttemptRunning(job_id=job.id, at=now, attempt=job.attempt_number, pids=()))
        self._jobs[job.id] = job
        self._use.observe(job, event)
        self._past = self._use.view()
        self._busy += live.job.all_gpus
        heappush(self._ends, (now + live.left, job.id, live.starts))

    def _shares(self, job: Job, nodes: Sequence[str]) -> list[str]:
        """Return the GPU of each rank of a job with parts of GPUs: the fullest with room; nothing for other jobs."""
        gpus = job.spec.resources.resources_per_worker.gpu
        if not 0 < gpus < 1:
            return []
        free = self._jobs.free(self._nodes)
        free.begin()
        found: list[str] = []
        for node_id in nodes:
            fitting = {name: left for name, left in free[node_id].shares.items() if left >= gpus - EPSILON}
            found += [
                name or ""
                for name in take(job, (node_id,), free, (min(fitting, key=fitting.__getitem__, default=None),))
            ]
        free.restore()
        return found

    def _preempt(self, event: ev.StopRequested) -> None:
        live, job, now = self._live[event.job_id], self._jobs[event.job_id], event.at
        kept = self._kept(now - live.since)
        live.left -= kept
        live.lost += (now - live.since - kept) * live.job.all_gpus
        live.preemptions += 1
        live.starts += 1
        job = fold(job, event)
        job = fold(job, ev.AttemptGone(job_id=job.id, at=now, attempt=job.attempt_number))
        released = ev.GangReleased(job_id=job.id, at=now, gang=job.gang)
        job = fold(job, released)
        self._use.observe(job, released)
        self._past = self._use.view()
        self._busy -= live.job.all_gpus
        for step in advance(job, now).events:
            job = fold(job, step)
        self._jobs[job.id] = job


def _submitted(job: TraceJob, sequence: int, spec: JobSpec) -> Job:
    """Return the record of a job that waits."""
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


def _placed(job: Job, shares: Sequence[str], now: float) -> ev.GangPlaced:
    seats = tuple(
        ev.RankPlacement(rank=rank, node_id=node, node_name=node, gpu_ids=(share,), gpu_uuids=(), actor_pid=0)
        for rank, (node, share) in enumerate(zip(job.nodes, shares, strict=True))
    )
    return ev.GangPlaced(job_id=job.id, at=now, gang=job.gang, seats=seats)
