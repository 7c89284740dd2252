"""Counts for the daemon's own metrics: the goodput ledger, latencies, and the metrics view of a scrape.

The loop passes every event and the ranks' progress; only ``view`` and ``watch_lag`` read a clock.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import socket
import time
from collections import Counter, deque
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator import __version__, catalogue, clock
from orchestrator.api.server.read_app import MetricsPage
from orchestrator.api.views import TargetGroup
from orchestrator.core import events as ev
from orchestrator.core.facts.findings import Finding
from orchestrator.core.goodput import GoodputLedger, Phase
from orchestrator.core.states import JobState
from orchestrator.daemon.gpus import known_conditions
from orchestrator.daemon.nodes.requests import gpu_states
from orchestrator.spec.model import JobSpec
from orchestrator.telemetry.collectors import (
    LINGER_SECONDS,
    MAX_JOBS,
    DaemonFacts,
    Disk,
    Histogram,
    JobSeries,
    Snapshot,
    mark_of,
    registry,
    render,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.gpus import JobBalances
    from orchestrator.daemon.health import Readiness
    from orchestrator.daemon.jobs.hangs import HangWatch
    from orchestrator.daemon.jobs.progress import JobProgress, ProgressTable
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.gpu.load import Balance
    from orchestrator.runtime.cluster.nodes import NodeRegistry
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.spec.settings import Settings
    from orchestrator.store.records import FinishedCount
    from orchestrator.store.store import Store
    from orchestrator.train.script.progress_reading import ProgressSnapshot


LAG_SECONDS: Final = 1.0
LAGS_KEPT: Final = 15
"""The maximum of this many is shown, so that Prometheus, which scrapes every 15 seconds, does not miss it."""


class Metering:
    """Counts events, latencies and goodput for the daemon's metrics."""

    def __init__(self, settings: Settings, started_at: float) -> None:
        self._settings = settings
        self._started_at = started_at
        self._ledger = GoodputLedger()
        self._queue_wait: dict[str, Histogram] = {}
        self._scheduling = Histogram(catalogue.SCHEDULING)
        self._submission = Histogram(catalogue.SUBMISSION)
        self._ended: dict[JobId, Job] = {}
        self._events: dict[JobId, dict[str, float]] = {}
        self.commit_failures = 0
        self._lags: deque[float] = deque(maxlen=LAGS_KEPT)

    def observe(self, job: Job, event: ev.Event) -> None:
        """Count a written event; ``job`` is the record after it."""
        self._ledger.observe(job, event)
        mark = mark_of(event)
        if mark is not None:
            name, at = mark
            self._events.setdefault(job.id, {})[name.value] = at
        if isinstance(event, ev.AttemptStarted) and event.attempt == 1:
            wait = self._queue_wait.setdefault(job.spec.queue, Histogram(catalogue.QUEUE_WAIT))
            wait.observe(max(0.0, event.at - job.submission.submitted_at))
        if job.state.is_terminal:
            self._ended[job.id] = _without_files(job)
        self._forget(event.at - LINGER_SECONDS)

    def _forget(self, before: float) -> None:
        """Drop the jobs that ended before, and all but the newest MAX_JOBS: they have no series any more."""
        while self._ended:
            job_id, job = next(iter(self._ended.items()))
            if len(self._ended) <= MAX_JOBS and (job.ended_at or 0.0) >= before:
                break
            del self._ended[job_id]
            self._events.pop(job_id, None)
            self._ledger.forget(job_id)

    def progress(self, job: Job, attempt: int, rank: int, snapshot: ProgressSnapshot) -> None:
        """Count a rank's report."""
        if rank == 0 and snapshot.step is not None and snapshot.last_report_at is not None and not snapshot.guessed:
            self._ledger.progress(
                job.id,
                attempt=attempt,
                step=snapshot.step,
                at=snapshot.last_report_at,
                saves=snapshot.saves,
                save_seconds=snapshot.save_seconds,
            )

    def decided(self, seconds: float) -> None:
        """Record the duration of one decision of the scheduler."""
        self._scheduling.observe(seconds)

    def commit_failed(self) -> None:
        """Count a failed transaction of the store."""
        self.commit_failures += 1

    async def watch_lag(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Measure how late the event loop wakes up, until cancelled."""
        while True:
            pause = LAG_SECONDS
            due = clock() + pause
            await sleep(pause)
            self._lags.append(max(0.0, clock() - due))

    def submitted(self, seconds: float) -> None:
        """Record the duration of one submission, from its arrival to its durable acknowledgement."""
        self._submission.observe(seconds)

    def view(
        self,
        *,
        live: Collection[Job],
        nodes: Collection[Node],
        finished: Sequence[FinishedCount],
        progress: Mapping[JobId, JobProgress],
        balances: Mapping[JobId, Balance],
        gpu_states: Mapping[tuple[str, str], int],
        hang_suspected: Callable[[JobId], bool | None] = lambda _: None,
    ) -> Snapshot:
        """Return the present metrics view."""
        now = clock.now()
        reading = self._ledger.read(now)
        jobs = [*(j for j in live if j.attempts), *self._ended.values()]  # others have no series
        counts: Counter[tuple[str, str]] = Counter()
        waiting_since: dict[str, float] = {}
        for job in live:
            queue, submitted_at = job.spec.queue, job.submission.submitted_at
            counts[queue, job.state.value] += 1
            if job.state is JobState.PENDING and submitted_at < waiting_since.get(queue, math.inf):
                waiting_since[queue] = submitted_at
        known = {queue for queue, _ in counts} | {j.spec.queue for j in jobs} | {f.queue for f in finished}
        queues = sorted({"default"} | known)
        return Snapshot(
            at=now,
            daemon=self._facts(nodes),
            series=[
                self._series(
                    j,
                    progress.get(j.id),
                    balances.get(j.id),
                    reading.jobs.get(j.id, {}),
                    suspected=hang_suspected(j.id),
                )
                for j in jobs
            ],
            queues=queues,
            jobs=counts,
            finished={(f.queue, f.state.value, f.failure_class): f.count for f in finished},
            gpus=gpu_states,
            nodes=_node_states(nodes),
            oldest_pending_seconds={
                queue: now - waiting_since[queue] if queue in waiting_since else 0.0 for queue in queues
            },
            gpu_seconds={(queue, phase.value): seconds for (queue, phase), seconds in reading.phases.items()},
            gpu_seconds_uncommitted=reading.uncommitted,
            queue_wait={queue: histogram.counts() for queue, histogram in self._queue_wait.items()},
            scheduling=self._scheduling.counts(),
            submission=self._submission.counts(),
        )

    def _facts(self, nodes: Collection[Node]) -> DaemonFacts:
        home = self._settings.home
        usage = shutil.disk_usage(home)
        name = next((n.name for n in nodes), socket.gethostname())
        return DaemonFacts(
            version=__version__,
            node=name,
            started_at=self._started_at,
            loop_lag_seconds=max(self._lags, default=None),
            commit_failures=self.commit_failures,
            disks=(Disk(node=name, path=str(home), free_bytes=usage.free, size_bytes=usage.total),),
        )

    def _series(
        self,
        job: Job,
        progress: JobProgress | None,
        balance: Balance | None,
        seconds: Mapping[Phase, float],
        *,
        suspected: bool | None,
    ) -> JobSeries:
        leader = progress.leader if progress else None
        holds = job.gang_open
        ranks = progress.ranks if progress else {}
        heard = [s.last_report_at for s in ranks.values() if s.last_report_at is not None] if holds else []
        seats = tuple((uuid, seat.rank) for seat in job.seats for uuid in seat.gpu_uuids) if holds else ()
        spreads = balance.spreads if balance else ()
        return JobSeries(
            job_id=job.id,
            name=job.name,
            user=job.submission.user,
            queue=job.spec.queue,
            state=job.state.value,
            live=holds,
            ended_at=job.ended_at or (job.attempts[-1].ended_at if job.attempts else None),
            seats=seats,
            gpus=len({uuid for uuid, _ in seats}),  # ranks may share a GPU
            step=leader.step if leader else None,
            progress=leader.step / leader.total_steps if leader and leader.step and leader.total_steps else None,
            samples=leader.samples if leader else None,
            tokens=leader.tokens if leader else None,
            mfu=leader.metrics.get("mfu") if leader else None,
            metrics=leader.metrics if leader else {},
            rank_step_seconds={
                rank: median(s.recent_step_seconds) for rank, s in ranks.items() if s.recent_step_seconds
            },
            heartbeat_at=min(heard, default=None),
            hang_suspected=suspected if job.state is JobState.RUNNING else None,
            restarts=job.restarts,
            balance_cv={s.quantity.value: s.cv for s in spreads},
            balance_min_per_median={
                s.quantity.value: s.min_per_median for s in spreads if s.min_per_median is not None
            },
            silent_gpus=len(balance.silent) if balance else None,
            gpu_seconds={phase.value: value for phase, value in seconds.items()},
            checkpoint_at=job.checkpoints.at,
            checkpoint_interval_seconds=save_interval(job, leader) if leader and holds else None,
            events=dict(self._events.get(job.id, {})),
            findings=[
                (one.kind, "" if one.rank is None else str(one.rank), one.gpu_uuid, one.node)
                for one in job.findings
                if isinstance(one, Finding)
            ],
        )


def _without_files(job: Job) -> Job:
    """Return an ended job's record with what its series need of its spec, which may be large."""
    spec = job.spec
    small = JobSpec(name=spec.name, entrypoint=spec.entrypoint, queue=spec.queue, resources=spec.resources)
    return replace(job, submission=replace(job.submission, spec=small, matrix=None))


def save_interval(job: Job, leader: ProgressSnapshot) -> float | None:
    """Return the job's intended seconds between two saves; None where its script decides."""
    wanted = job.spec.checkpoint.interval
    if isinstance(wanted, timedelta):
        return wanted.total_seconds()
    steps = wanted if isinstance(wanted, int) else leader.checkpoint.interval_steps
    return steps * leader.step_seconds if steps and leader.step_seconds else None


def _node_states(nodes: Collection[Node]) -> Mapping[str, int]:
    counts = {"ready": 0, "cordoned": 0, "draining": 0, "unreachable": 0}
    for node in nodes:
        counts["unreachable" if not (node.alive and node.reachable) else "cordoned" if node.cordoned else "ready"] += 1
    return counts


class MetricsSource:
    """Content of the reading listener: the daemon's metrics, health, and the exporters to scrape. Changes nothing.

    Implements ``api.read_app.ReadSource``.
    """

    def __init__(
        self,
        metering: Metering,
        *,
        loop: Loop,
        store: Store,
        book: ProgressTable,
        balances: JobBalances,
        hangs: HangWatch,
        known: NodeRegistry,
        exporters: Exporters,
        quarantine: NodeQuarantine,
        readiness: Readiness,
    ) -> None:
        self._metering = metering
        self._loop = loop
        self._store = store
        self._book = book
        self._balances = balances
        self._hangs = hangs
        self._known = known
        self._exporters = exporters
        self._quarantine = quarantine
        self._readiness = readiness

    async def metrics(self, accept: str) -> MetricsPage:
        """Return every metric of the daemon."""
        snapshot = await self._view()
        return MetricsPage(*await asyncio.to_thread(render, registry(lambda: snapshot), accept))

    async def _view(self) -> Snapshot:
        jobs = self._loop.jobs
        begun = jobs.begun.values()
        conditions = known_conditions(self._known, self._exporters, self._quarantine.quarantined_gpus, driver=True)
        return self._metering.view(
            live=jobs.values(),
            nodes=list(self._loop.nodes.values()),
            finished=await self._store.finished_counts(),
            progress=self._book.all(),
            balances=self._balances.raw,
            gpu_states=gpu_states(begun, self._known.reports, self._exporters, self._quarantine.cordoned, conditions),
            hang_suspected=self._hangs.suspected,
        )

    async def targets(self) -> Sequence[TargetGroup]:
        """Return the exporter of every GPU, with its node; also those that do not answer, so that Prometheus sees them fail."""
        exporters = self._exporters
        await exporters.ask()  # an exporter restarted by Ray has another address
        return [
            TargetGroup(
                targets=(place.url.removeprefix("http://").partition("/")[0],),
                labels={"__meta_orch_node": place.node, "__meta_orch_gpu_uuid": uuid},
            )
            for uuid, place in sorted(exporters.places.items())
        ]

    async def not_ready(self) -> Sequence[str]:
        """Return why no job can be accepted and placed now."""
        return await self._readiness.problems()
