"""Discrete events: jobs arrive and end, and after each the production scheduler decides (``scheduler.schedule``).

Free resources and the order of the queue are kept from event to event, so an event costs only its changes and one round
of placing. Starts take no time, and a preempted or moved job continues from its last checkpoint; checkpoints are
``checkpoint_seconds`` apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.core.scheduler.live import LiveJobs, Reasons
from orchestrator.core.scheduler.placement import could_ever_fit
from orchestrator.core.scheduler.queues import Sharing
from orchestrator.core.scheduler.room.holding import places_of
from orchestrator.core.scheduler.rounds.round import Round
from orchestrator.core.scheduler.scheduler import Commands, schedule
from orchestrator.core.simulation.cluster import Cluster, Live, RunningJobs
from orchestrator.core.simulation.lines import Waiting
from orchestrator.core.simulation.records import spec_of, started_record, stopped_record, submitted_record
from orchestrator.core.simulation.trace import Outcome, Ran, TraceJob, Usage
from orchestrator.core.states import StopPurpose

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.simulation.policies import Policy
    from orchestrator.spec.model import JobSpec

SAMPLES: Final = 500
CHECKPOINT_SECONDS: Final = 1800.0
SHARING: Final = Sharing()


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
        if policy.time_sharing is not None:
            sharing = replace(sharing, time_sharing=policy.time_sharing)
        if policy.consolidate:
            sharing = replace(sharing, consolidate=True)
        several = len({job.priority for job in trace}) > 1
        self._preempts = several or bool(sharing.queues) or sharing.time_sharing is not None
        self._stops = self._preempts or sharing.consolidate
        self._lines = Waiting(policy, sharing, nodes, self._trace[0].at if self._trace else 0.0)
        self._cluster = Cluster(nodes)
        self._running = RunningJobs(checkpoint_seconds)
        self._known = LiveJobs()
        self._specs: dict[tuple[int, float, int, str], tuple[JobSpec, bool]] = {}
        self._live: dict[JobId, Live] = {}
        self._wake_at: float | None = None
        self._ran: list[Ran] = []
        self._refused: list[TraceJob] = []

    def run(self) -> Outcome:
        """Run the whole trace."""
        usage = Usage()
        samples: list[tuple[float, float, int]] = []
        arrived, count = 0, len(self._trace)
        before = self._trace[0].at if self._trace else 0.0
        step = (self._trace[-1].at - before) / SAMPLES if self._trace else 0.0
        sample_at = before
        while (now := self._next(self._trace[arrived].at if arrived < count else None)) is not None:
            at, waiting = self._cluster, len(self._lines)
            usage.add(now - before, gpus=at.gpus, busy=at.busy, pieces=at.pieces, waiting=waiting > 0)
            if now >= sample_at:
                samples.append((now, at.busy, waiting))
                sample_at = now + step
            before = now
            while (live := self._running.ended(now)) is not None:
                self._end(live, now)
            while arrived < count and self._trace[arrived].at <= now:
                arrived += 1
                self._arrive(self._trace[arrived - 1], arrived)
            self._decide(now)
        return Outcome(ran=tuple(self._ran), refused=tuple(self._refused), usage=usage, samples=tuple(samples))

    def _next(self, arrival: float | None) -> float | None:
        """Return when something happens next; None when all is over."""
        end = self._running.next_end
        if arrival is None and end is None:
            return None
        first = arrival if end is None or (arrival is not None and arrival < end) else end
        return first if self._wake_at is None or first is None or first < self._wake_at else self._wake_at

    def _arrive(self, job: TraceJob, sequence: int) -> None:
        kind = (job.ranks, job.gpus, job.priority, job.queue)
        known = self._specs.get(kind)
        record = submitted_record(job, sequence, spec_of(job) if known is None else known[0])
        if known is None:
            known = self._specs[kind] = (record.spec, could_ever_fit(record, self._cluster.nodes))
        if not known[1]:
            self._refused.append(job)
            return
        self._live[record.id] = Live(job, record, job.seconds)
        self._lines.add(record, job.seconds)

    def _end(self, live: Live, now: float) -> None:
        self._release(live, now)
        del self._live[live.record.id]
        assert live.started_at is not None
        self._ran.append(
            Ran(
                job=live.job,
                started_at=live.started_at,
                ended_at=now,
                preemptions=live.preemptions,
                moves=live.moves,
                lost=live.lost,
            )
        )

    def _decide(self, now: float) -> None:
        self._wake_at = None
        while len(self._lines) and (self._preempts or not self._cluster.full):
            commands = self._round(now)
            moved: list[Live] = []
            for event in commands.events:
                live = self._live[event.job_id]
                if isinstance(event, ev.AttemptStarted):
                    self._start(live, event, now)
                elif isinstance(event, ev.StopRequested) and event.purpose is StopPurpose.MOVE:
                    self._leave(live, event, now)
                    moved.append(live)
                elif isinstance(event, ev.StopRequested):
                    self._preempt(live, event, now)
            for live in moved:
                self._arrive_there(live, now)
            if not commands.events:
                if self._stops and commands.wake_at is not None and commands.wake_at > now:
                    self._wake_at = commands.wake_at
                return

    def _round(self, now: float) -> Commands:
        commands = Commands(waiting=Reasons(self._known))
        queue, shares = self._lines.offered(now)
        free = self._cluster.free
        free.begin()
        round_ = Round(
            queue=queue,
            holding=self._running.holding,
            free=free,
            nodes=self._cluster.nodes,
            shares=shares,
            waiting=self._lines.queues(),
            brief=True,
            fits_ever=self._known.fits_ever,
            saves=self._running,
        )
        schedule(round_, now, commands)
        free.restore()
        return commands

    def _start(self, live: Live, event: ev.AttemptStarted, now: float) -> None:
        self._lines.remove(live.record, live.left)
        self._lines.started(live.record, now)
        self._begin(live, event, now)

    def _begin(self, live: Live, event: ev.AttemptStarted, now: float) -> None:
        live.shares = self._cluster.take(live.record, event.nodes, live.job.gpus)
        live.record = started_record(live.record, event, live.shares)
        self._running.start(live, now)

    def _preempt(self, live: Live, event: ev.StopRequested, now: float) -> None:
        live.preemptions += 1
        self._lines.ended(live.record, now)
        self._stop(live, event, now)
        self._lines.add(live.record, live.left)

    def _leave(self, live: Live, event: ev.StopRequested, now: float) -> None:
        live.moves += 1
        self._stop(live, event, now)

    def _arrive_there(self, live: Live, now: float) -> None:
        """Start a job that moves at once on the nodes that were kept for it."""
        job = live.record
        self._begin(
            live,
            ev.AttemptStarted(
                job_id=job.id, at=now, attempt=job.attempt_number + 1, gang=job.gang + 1, nodes=places_of(job)
            ),
            now,
        )

    def _stop(self, live: Live, event: ev.StopRequested, now: float) -> None:
        kept = self._running.kept(live, now)
        live.left -= kept
        live.lost += (now - live.since - kept) * live.job.all_gpus
        self._vacate(live)
        live.record = stopped_record(live.record, event)

    def _release(self, live: Live, now: float) -> None:
        self._lines.ended(live.record, now)
        self._vacate(live)

    def _vacate(self, live: Live) -> None:
        self._cluster.give_back(live.record, live.shares, live.job.gpus)
        self._running.drop(live)
