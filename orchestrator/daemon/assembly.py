"""Assembles a daemon from its parts, for any runtime.

Parts get their collaborators in their constructors, and functions for collaborators that are created later. Nothing
here decides anything, and no part imports this module.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.api.server.audit import AuditLog
from orchestrator.daemon.curves import Curves
from orchestrator.daemon.daemon import Daemon, Recovery, RuntimeSide
from orchestrator.daemon.estimates import EstimateRecord, Estimates
from orchestrator.daemon.findings import FindingWatch, senses_of
from orchestrator.daemon.gpus import GpuReserving, GpuTable, GpuWatch, JobBalances, known_conditions
from orchestrator.daemon.health import DaemonHealth, Endpoints, readiness_of
from orchestrator.daemon.job_reports import JobReports
from orchestrator.daemon.job_trackers import JobTrackers
from orchestrator.daemon.jobs.attendance import Attendance
from orchestrator.daemon.jobs.hangs import HangWatch
from orchestrator.daemon.jobs.prerequisites import still_needed
from orchestrator.daemon.jobs.progress import ProgressIntake, ProgressTable
from orchestrator.daemon.jobs.tidying import Tidying
from orchestrator.daemon.loop import Loop, decided_jobs, live_jobs
from orchestrator.daemon.metrics import MetricsSource
from orchestrator.daemon.nodes.actions import NodeActions
from orchestrator.daemon.nodes.care import HeadCare, LoopNodes, NodeCare, NodeHealth
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.nodes.queries import NodeQueries
from orchestrator.daemon.nodes.warming import ForkServers, IdleWorkers, can_start_more
from orchestrator.daemon.requests.actions import JobActions
from orchestrator.daemon.requests.files import JobSpecs
from orchestrator.daemon.requests.matrices import BestValues, Matrices
from orchestrator.daemon.requests.pruning import Pruning
from orchestrator.daemon.requests.queues import Queues
from orchestrator.daemon.requests.ranks import JobSessions, RankInspection
from orchestrator.daemon.requests.reader import JobReader, LiveFacts
from orchestrator.daemon.requests.submissions import Submissions
from orchestrator.daemon.requests.usage import Usage
from orchestrator.daemon.search.searches import Searches
from orchestrator.daemon.service import Service
from orchestrator.daemon.sharing import SharingState, sharing_of
from orchestrator.daemon.stopping import Shutdown, StopRequest
from orchestrator.daemon.web_hooks import Notifier

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.api.views import JobView
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.changes import Changes
    from orchestrator.daemon.daemon import Background
    from orchestrator.daemon.metrics import Metering
    from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
    from orchestrator.runtime.cluster.cluster import Cluster
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.gangs.gangs import Gangs
    from orchestrator.runtime.gangs.job_files import JobFiles
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.runtime.pools import Pools
    from orchestrator.spec.settings import Settings
    from orchestrator.store.port import Store
    from orchestrator.train.script.progress_reading import ProgressSnapshot


class JobObservers:
    """The loop's listeners. ``watchers`` see each event with the record after it; ``spawn`` runs a background task."""

    def __init__(
        self,
        *,
        changes: Changes,
        notifier: Notifier,
        idle_workers: IdleWorkers,
        intake: ProgressIntake,
        tidying: Tidying,
        reports: JobReports,
        trackers: JobTrackers,
        searches: Searches,
        watchers: Sequence[Callable[[Job, Event], None]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._changes = changes
        self._notifier = notifier
        self._idle_workers = idle_workers
        self._intake = intake
        self._tidying = tidying
        self.reports = reports
        self.trackers = trackers
        self.searches = searches
        self._watchers = watchers
        self._spawn = spawn

    def observed(self, job: Job, event: Event) -> None:
        """Handle a written event."""
        for watch in self._watchers:
            watch(job, event)

    def changed(self, job: Job) -> None:
        """Handle a changed record."""
        if job.spec.notify:
            self._notifier.wake()
        self._changes.touch(job.id)
        self._idle_workers.changed(job)
        self.trackers.changed(job)
        self.searches.changed(job)

    def ended(self, job: Job) -> None:
        """Handle a job's end."""
        self._idle_workers.ended(job.id)
        self._intake.ended(job.id)
        self.trackers.ended(job)  # before its secrets go
        self._tidying.drop_secrets(job.id)
        self._spawn(self._tidying.after([job.id]))
        self.reports.ended(job)
        self.searches.changed(job)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Parts of an assembled daemon that ``orch serve`` uses."""

    daemon: Daemon
    service: Service
    reading: MetricsSource
    background: Background
    endpoints: Endpoints
    pools: Pools
    audit: AuditLog
    close: Callable[[], None]
    log: FilteringBoundLogger


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """Collaborators of every other part."""

    settings: Settings
    log: FilteringBoundLogger
    store: Store
    metering: Metering
    background: Background
    endpoints: Endpoints
    stop: StopRequest
    changes: Changes
    pools: Pools
    under_way: SubmissionsUnderWay
    book: ProgressTable = field(default_factory=ProgressTable)
    quarantine: NodeQuarantine = field(default_factory=NodeQuarantine)
    problems: dict[str, str] = field(default_factory=dict)
    ready: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """The parts that run on nodes."""

    cluster: Cluster
    exporters: Exporters
    files: JobFiles
    gangs: Gangs
    calls: GangCalls


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """The parts that handle nodes and their GPUs."""

    known: LoopNodes
    care: NodeCare
    fork_servers: ForkServers
    head: HeadCare
    reserving: GpuReserving
    health: NodeHealth
    gpus: GpuWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """The parts that follow jobs."""

    hangs: HangWatch
    findings: FindingWatch
    intake: ProgressIntake
    tidying: Tidying
    observers: JobObservers
    notifier: Notifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """The daemon's functions that a runtime calls.

    ``decided`` returns live jobs, ``post`` takes events, ``reported`` the newest report of a rank (job, attempt, rank),
    ``head_lost`` is called when the cluster's head has died.
    """

    decided: Callable[[], Collection[Job]]
    post: Callable[[Sequence[Event]], None]
    reported: Callable[[JobId, int, int, ProgressSnapshot], None]
    head_lost: Callable[[], None]


def assemble(ground: Ground, make_runtime: Callable[[Hooks], Runtime]) -> Parts:
    """Return a daemon on the runtime that ``make_runtime`` returns."""

    # Earlier parts call later ones through these functions.
    def changed(job: Job) -> None:
        jobs.observers.changed(job)

    def ended(job: Job) -> None:
        jobs.observers.ended(job)

    def observed(job: Job, event: Event) -> None:
        jobs.observers.observed(job, event)

    def head_lost() -> None:
        nodes.head.lost()

    def reported(job_id: JobId, attempt: int, rank: int, snapshot: ProgressSnapshot) -> None:
        jobs.intake.take(job_id, attempt, rank, snapshot)

    loop = Loop(
        store=ground.store,
        runtime=lambda: runtime.gangs if runtime.cluster.ray.connected else None,
        on_change=changed,
        on_end=ended,
        on_event=observed,
        on_decision=ground.metering.decided,
        on_write_failed=ground.metering.commit_failed,
        shares=SharingState(sharing_of(ground.settings)),
        log=ground.log,
    )
    runtime = make_runtime(Hooks(decided=decided_jobs(loop), post=loop.post, reported=reported, head_lost=head_lost))
    nodes = _nodes(ground, loop, runtime)
    jobs = _jobs(ground, loop, runtime, nodes)
    return _parts(ground, loop, runtime, nodes, jobs)


def _nodes(ground: Ground, loop: Loop, runtime: Runtime) -> Nodes:
    cluster, exporters, spawn, log = runtime.cluster, runtime.exporters, ground.background.spawn, ground.log
    quarantine, known = ground.quarantine, LoopNodes(loop, ground.quarantine, ground.stop)
    fork_servers = ForkServers(lambda: cluster.nodes.agents, lambda: list(loop.nodes.values()))

    async def after_refresh() -> None:
        runtime.gangs.report_reachability(loop.jobs.begun.values())
        if not cluster.site.embedded:  # a slow node must not delay others
            spawn(fork_servers.warm())
        if ground.ready.is_set():
            await exporters.refresh()

    care = NodeCare(
        cluster,
        known,
        after=after_refresh,
        tidy=lambda: runtime.files.tidy(set(loop.jobs)),
        spawn=spawn,
        problems=ground.problems,
    )
    reserving = GpuReserving(
        cluster.ray,
        cluster.nodes,
        cluster.holds,
        jobs=decided_jobs(loop),
        conditions=lambda: known_conditions(cluster.nodes, exporters, quarantine.quarantined_gpus, driver=False),
        refresh=care.refresh,
        log=log,
    )
    head = HeadCare(
        cluster,
        forget=(known.forget, runtime.gangs.forget_all, cluster.holds.forget_all, exporters.forget_all),
        prepare=(care.refresh, fork_servers.warm),
        wake=loop.wake,
        problems=ground.problems,
        log=log,
    )
    health = NodeHealth(
        quarantine, ground.store, cluster.ray, cluster.nodes, known, reserve=reserving.reserve, spawn=spawn, log=log
    )
    gpus = GpuWatch(cluster.ray, cluster.nodes, exporters, ground.settings.paths, live_jobs(loop), JobBalances(), log)
    return Nodes(
        known=known, care=care, fork_servers=fork_servers, head=head, reserving=reserving, health=health, gpus=gpus
    )


def _jobs(ground: Ground, loop: Loop, runtime: Runtime, nodes: Nodes) -> Jobs:
    settings, log, spawn, live = ground.settings, ground.log, ground.background.spawn, live_jobs(loop)
    held = Attendance(jobs=live, terminals=runtime.calls.terminals, command=loop.command, spawn=spawn, now=loop.now)
    hangs = HangWatch(jobs=live, inspector=runtime.calls, command=loop.command, attend=held.attend, log=log)
    senses = senses_of(nodes.gpus, ground.book, hangs, runtime.exporters, runtime.calls)
    findings = FindingWatch(senses, jobs=live, post=loop.post, log=log)
    desk = Estimates(EstimateRecord.of(settings.home))
    intake = ProgressIntake(
        ground.book,
        settings.paths,
        jobs=lambda: loop.jobs,
        followers=(ground.metering.progress, hangs.progress, desk.follow),
        estimates=desk,
        post=loop.post,
        changes=ground.changes,
        pool=ground.pools.records,
        log=log,
    )
    tidying = Tidying(ground.store, settings.paths, runtime.cluster.site.namespace, ground.pools.tidying, log)
    notifier = Notifier(ground.store, settings.home / "notify.key", log, docs_url=settings.docs_url)
    observers = JobObservers(
        changes=ground.changes,
        notifier=notifier,
        idle_workers=IdleWorkers(runtime.cluster.warm, spawn, useful=lambda: can_start_more(loop.decided, loop.nodes)),
        intake=intake,
        tidying=tidying,
        reports=JobReports(ground.store, settings.paths, log),
        trackers=JobTrackers(ground.store, settings.paths, log),
        searches=Searches(loop, ground.store, settings, ground.pools.submissions, ground.under_way, log),
        watchers=(desk.observe, ground.metering.observe, nodes.health.observe, lambda _, e: nodes.gpus.observe(e)),
        spawn=spawn,
    )
    return Jobs(hangs=hangs, findings=findings, intake=intake, tidying=tidying, observers=observers, notifier=notifier)


def _parts(ground: Ground, loop: Loop, runtime: Runtime, nodes: Nodes, jobs: Jobs) -> Parts:
    shutdown = Shutdown(ground.stop, loop, ground.changes, lambda: ground.background.failure is not None, ground.log)
    known, blind = runtime.cluster.nodes, runtime.files.unable_to_read
    table = GpuTable(known, runtime.exporters, live_jobs(loop))
    queries = NodeQueries(known, loop, ground.quarantine, runtime.exporters, blind=blind, rows=table.rows)
    health = DaemonHealth(
        loop,
        ground.store,
        ground.pools,
        known=ground.problems,
        ready=ground.ready,
        endpoints=ground.endpoints,
        ray_address=lambda: runtime.cluster.address,
        ray_problem=lambda: runtime.cluster.ray.problem,
        simulated_gpus=queries.simulated_gpus,
    )
    readiness = readiness_of(health.not_ready, ground.store.answers, health.loop_turns)
    reading = MetricsSource(
        ground.metering,
        loop=loop,
        store=ground.store,
        book=ground.book,
        balances=nodes.gpus.balances,
        hangs=jobs.hangs,
        known=runtime.cluster.nodes,
        exporters=runtime.exporters,
        quarantine=ground.quarantine,
        readiness=readiness,
    )
    pruning = Pruning(
        ground.store,
        ground.settings.paths,
        ground.pools.removals,
        lambda: still_needed(loop.jobs.values()),
        ground.under_way,
    )

    async def look_after_start() -> None:
        """Find damaged records, and remove what an ended daemon left; nothing waits for this."""
        try:
            health.damaged = await ground.store.damaged()
            for record in health.damaged:
                ground.log.warning(
                    "store.record_damaged", job=record.job_id, reason=record.reason, rebuilt=record.rebuilt
                )
            await pruning.at_start()
        except Exception:
            ground.log.exception("daemon.not_looked_after_start")

    return Parts(
        daemon=_daemon(ground, loop, runtime, nodes, jobs, shutdown, look_after_start),
        service=_service(ground, loop, runtime, nodes, jobs, (queries, health, shutdown, pruning)),
        reading=reading,
        background=ground.background,
        endpoints=ground.endpoints,
        pools=ground.pools,
        audit=AuditLog(ground.settings.paths.audit, ground.pools.audit, ground.problems),
        close=ground.store.close,
        log=ground.log,
    )


def _daemon(
    ground: Ground,
    loop: Loop,
    runtime: Runtime,
    nodes: Nodes,
    jobs: Jobs,
    shutdown: Shutdown,
    look_after_start: Callable[[], Coroutine[Any, Any, None]],
) -> Daemon:
    tasks: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
        "loop": loop.run,
        "notify": jobs.notifier.run,
        "nodes": nodes.care.run,
        "head": nodes.head.run,
        "gpus": nodes.gpus.run,
        "lag": ground.metering.watch_lag,
        "trust": nodes.health.run,
        "hangs": jobs.hangs.run,
        "findings": jobs.findings.run,
        "reports": jobs.observers.reports.run,
        "trackers": jobs.observers.trackers.run,
        "searches": jobs.observers.searches.run,
        "tidying": lambda: jobs.tidying.once(ground.ready),
        "leftovers": look_after_start,
    }

    def close() -> None:
        ground.pools.close()
        ground.store.close()

    return Daemon(
        recovery=Recovery(
            loop,
            ground.store,
            intake=jobs.intake,
            quarantine=ground.quarantine,
            history=(ground.metering.observe, ground.quarantine.observe, loop.shares.observe_idle),
            log=ground.log,
        ),
        runtime=RuntimeSide(
            runtime.cluster,
            runtime.gangs,
            runtime.exporters,
            nodes.care,
            nodes.fork_servers,
            lambda: list(loop.jobs.values()),
        ),
        background=ground.background,
        tasks=tasks,
        stop=ground.stop,
        shutdown=shutdown,
        ready=ground.ready,
        settle=jobs.intake.settle,
        close=close,
        log=ground.log,
    )


def _service(
    ground: Ground,
    loop: Loop,
    runtime: Runtime,
    nodes: Nodes,
    jobs: Jobs,
    own: tuple[NodeQueries, DaemonHealth, Shutdown, Pruning],
) -> Service:
    (queries, health, shutdown, pruning), known = own, nodes.known
    settings, store, gpus, spawn = ground.settings, ground.store, nodes.gpus, ground.background.spawn
    files = ground.pools.files
    live = LiveFacts(balances=gpus.balances.latest, stall=jobs.hangs.stall, findings=jobs.findings.current)
    reader = JobReader(loop, store, settings.paths, ground.pools, jobs.intake, live, docs_url=settings.docs_url)
    submissions = Submissions(
        loop,
        store,
        settings,
        admission=ground.stop,
        nodes=known,
        counter=ground.metering,
        blind_to=queries.blind_to,
        resume_path=reader.checkpoint_path,
        pool=ground.pools.submissions,
        under_way=ground.under_way,
    )
    actions = JobActions(loop, reader, submissions, settings, end_collection=runtime.gangs.end_collection)
    return Service(
        submissions=submissions,
        reader=reader,
        specs=JobSpecs(store, settings.paths, files),
        matrices=Matrices(
            loop, store, reader, actions, BestValues(settings.paths.metrics), jobs.observers.searches, files
        ),
        queues=Queues(loop, store, ground.pools.outlook, lambda job: _eta(reader.view(job))),
        usage=Usage(loop, store, settings.paths, files, settings.gpu_hour_price, EstimateRecord.of(settings.home)),
        inspection=RankInspection(reader.record, runtime.calls),
        sessions=JobSessions(reader.record, runtime.calls, ground.log),
        curves=Curves(settings.paths, ground.pools.records),
        actions=actions,
        pruning=pruning,
        nodes=queries,
        node_actions=NodeActions(loop, ground.quarantine, store, known, reserve=nodes.reserving.reserve, spawn=spawn),
        changes=ground.changes,
        health=health,
        shutdown=shutdown,
    )


def _eta(job: JobView) -> float | None:
    """Return the seconds that a running job still needs, by its own progress."""
    return job.progress.eta_seconds if job.progress is not None else None
