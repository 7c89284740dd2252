"""Creates the daemon of a home from its parts: the only module that chooses implementations.

Parts get their collaborators in their constructors, and functions for collaborators that are created later. Nothing
here decides anything, and no part imports this module.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.api.server.audit import AuditLog
from orchestrator.daemon.changes import Changes
from orchestrator.daemon.curves import Curves
from orchestrator.daemon.daemon import Background, Daemon, Recovery, RuntimeSide
from orchestrator.daemon.estimates import EstimateRecord, Estimates
from orchestrator.daemon.findings import FindingWatch, senses_of
from orchestrator.daemon.gpus import GpuReserving, GpuTable, GpuWatch, JobBalances, known_conditions
from orchestrator.daemon.health import DaemonHealth, Endpoints, readiness_of
from orchestrator.daemon.job_processes import JobReports, JobTrackers
from orchestrator.daemon.jobs.hangs import Attendance, HangWatch
from orchestrator.daemon.jobs.prerequisites import still_needed
from orchestrator.daemon.jobs.progress import ProgressIntake, ProgressTable
from orchestrator.daemon.jobs.tidying import Tidying, read_secrets
from orchestrator.daemon.loop import Loop, decided_jobs, live_jobs
from orchestrator.daemon.metrics import Metering, MetricsSource
from orchestrator.daemon.nodes.care import (
    ForkServers,
    HeadCare,
    IdleWorkers,
    LoopNodes,
    NodeCare,
    NodeHealth,
    can_start_more,
)
from orchestrator.daemon.nodes.quarantine import NodeQuarantine
from orchestrator.daemon.nodes.requests import NodeActions, NodeQueries
from orchestrator.daemon.requests.actions import JobActions
from orchestrator.daemon.requests.files import JobSpecs
from orchestrator.daemon.requests.matrices import BestValues, Matrices
from orchestrator.daemon.requests.pruning import Pruning
from orchestrator.daemon.requests.queues import Queues
from orchestrator.daemon.requests.ranks import JobSessions, RankInspection
from orchestrator.daemon.requests.reader import JobReader, LiveFacts
from orchestrator.daemon.requests.submissions import Submissions
from orchestrator.daemon.requests.usage import Usage
from orchestrator.daemon.searches import Searches
from orchestrator.daemon.sharing import SharingState, sharing_of
from orchestrator.daemon.stopping import Shutdown, StopRequest
from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
from orchestrator.daemon.web_hooks import Notifier
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.exporters.actor import ExporterAccess
from orchestrator.runtime.exporters.exporters import Exporters, gpu_evidence
from orchestrator.runtime.gangs.gangs import ray_gangs
from orchestrator.runtime.gangs.job_files import JobFiles
from orchestrator.runtime.gangs.launching import LaunchSettings
from orchestrator.runtime.nodes.directories import page_directory, placement_group_name
from orchestrator.runtime.pools import Pools
from orchestrator.runtime.ranks.logs import LogLimits
from orchestrator.runtime.spawn.environment import inheritable_environment
from orchestrator.store.store import Store
from orchestrator.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.api.launch import ServeOptions
    from orchestrator.api.views import JobView
    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.gangs.gangs import Gangs
    from orchestrator.runtime.gangs.rank_rpc import GangCalls
    from orchestrator.spec.settings import Settings
    from orchestrator.train.script.progress_reading import ProgressSnapshot


class Service:
    """Implements ``api.service.JobService``; each method is the part's own."""

    def __init__(
        self,
        *,
        submissions: Submissions,
        reader: JobReader,
        specs: JobSpecs,
        actions: JobActions,
        matrices: Matrices,
        queues: Queues,
        usage: Usage,
        curves: Curves,
        inspection: RankInspection,
        sessions: JobSessions,
        nodes: NodeQueries,
        node_actions: NodeActions,
        changes: Changes,
        health: DaemonHealth,
        pruning: Pruning,
        shutdown: Shutdown,
    ) -> None:
        self.submit = submissions.submit
        self.plan = submissions.plan
        self.missing_pieces = submissions.missing_pieces
        self.put_piece = submissions.put_piece
        self.jobs = reader.jobs
        self.resolve = reader.resolve
        self.job = reader.job
        self.events = reader.events
        self.logs = reader.logs
        self.checkpoints = reader.checkpoints
        self.spec = specs.spec
        self.diff = specs.diff
        self.job_files = specs.files
        self.act = actions.act
        self.find_matrix = matrices.find
        self.matrix = matrices.matrix
        self.act_on_matrix = matrices.act
        self.queue_shares = queues.shares
        self.outlook = queues.outlook
        self.set_queue = queues.change
        self.usage = usage.report
        self.estimate_quality = usage.estimate_quality
        self.curves = curves.curves
        self.gpu_history = curves.gpu_history
        self.profile = inspection.profile
        self.stacks = inspection.stacks
        self.open_session = sessions.open
        self.nodes = nodes.views
        self.gpus = nodes.gpus
        self.node_action = node_actions.act
        self.change_node = node_actions.change
        self.change_version = changes.current
        self.wait_change = changes.wait
        self.health = health.view
        self.prune = pruning.prune
        self.shutdown = shutdown.begin


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


def build(settings: Settings, options: ServeOptions, environ: Mapping[str, str], umask: int) -> Parts:
    """Return a daemon of this home on Ray that has only opened the store. Ranks get ``umask``. Raises StoreError."""
    ground = _ground(settings)

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
    base_env = _inherited(environ, settings.pass_env, ground.log)
    runtime = _runtime(ground, loop, options, base_env, umask, reported=reported, head_lost=head_lost)
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


def _inherited(environ: Mapping[str, str], passed: Sequence[str], log: FilteringBoundLogger) -> dict[str, str]:
    """Return the variables that jobs inherit from the daemon's environment; log the names of the others."""
    found = inheritable_environment(environ, passed)
    if left_out := sorted(environ.keys() - found.keys()):
        log.info("environment.left_out", names=left_out, hint="ORCH_PASS_ENV names variables that jobs get, too")
    return found


def _ground(settings: Settings) -> Ground:
    log, stop, now, pools = get_logger("orch.daemon"), StopRequest(), time.time(), Pools()
    return Ground(
        settings=settings,
        log=log,
        store=Store.open(settings.paths.store, reserve=settings.paths.reserve, reserve_bytes=settings.reserve_bytes),
        metering=Metering(settings, now),
        background=Background(stop.now, log),
        endpoints=Endpoints(home=str(settings.home), started_at=now),
        stop=stop,
        changes=Changes(int(now * 1000)),
        pools=pools,
        under_way=SubmissionsUnderWay(settings.paths, pools.submissions),
    )


def _runtime(
    ground: Ground,
    loop: Loop,
    options: ServeOptions,
    base_env: dict[str, str],
    umask: int,
    *,
    reported: Callable[[JobId, int, int, ProgressSnapshot], None],
    head_lost: Callable[[], None],
) -> Runtime:
    """Return the runtime. ``reported`` gets the newest report of a rank, ``head_lost`` is called when the cluster's head has died."""
    settings, decided = ground.settings, decided_jobs(loop)
    cluster = Cluster(
        settings.paths,
        ClusterOptions(address=options.ray_address or None, simulate_gpus=options.simulate_gpus),
        on_lost=head_lost,
        own_groups=lambda: {placement_group_name(j.id, j.gang) for j in decided() if j.gang_open},
    )
    access = ExporterAccess(
        address=settings.exporter_address,
        ports=settings.exporter_ports,
        token=options.read_token(),
        processes=settings.exporter_processes,
    )
    exporters = Exporters(cluster.ray, cluster.nodes, access)
    limits = LogLimits(max_bytes=settings.log_max_bytes, keep_files=settings.log_keep_files)
    pool = ground.pools.outputs
    files = JobFiles(cluster.nodes, settings.paths, limits, outputs_max_bytes=settings.outputs_max_bytes, pool=pool)
    launches = LaunchSettings(
        paths=settings.paths,
        page_dir=page_directory(cluster.site.namespace),
        base_env=base_env,
        log_limits=limits,
        umask=umask,
    )
    gangs, calls = ray_gangs(
        cluster,
        launches,
        files,
        secrets_of=lambda job: read_secrets(settings.paths, job.id),
        previous_step=ground.book.previous_step,
        gpu_evidence=lambda uuids: gpu_evidence(exporters, uuids),
        post=loop.post,
        progress=reported,
        pool=ground.pools.starts,
        log=ground.log,
    )
    return Runtime(cluster=cluster, exporters=exporters, files=files, gangs=gangs, calls=calls)
