"""The daemon: wires store, loop, cluster and gangs together, and keeps them going. The one place that picks implementations."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api import views as v
from orchestrator.api.errors import DaemonStoppingError, DiskFullError
from orchestrator.api.service import NodeVerb
from orchestrator.core import events as ev
from orchestrator.core.scheduler.scheduler import request_stop
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.changes import Changes
from orchestrator.daemon.gpus.watch import GpuWatch
from orchestrator.daemon.jobs.hangs import HangWatch
from orchestrator.daemon.jobs.progress import ProgressBook
from orchestrator.daemon.jobs.secrets import read_secrets
from orchestrator.daemon.jobs.tidying import Tidying
from orchestrator.daemon.loop import Loop
from orchestrator.daemon.metrics.metering import Metering
from orchestrator.daemon.nodes.quarantine import NodeTrust
from orchestrator.daemon.nodes.views import gpu_states, node_view
from orchestrator.daemon.notify.notifier import Notifier
from orchestrator.daemon.readiness import readiness_of
from orchestrator.runtime.cluster.cluster import Cluster, ClusterOptions
from orchestrator.runtime.deadline import within
from orchestrator.runtime.exporters.actor import ExporterAccess
from orchestrator.runtime.exporters.exporters import Exporters
from orchestrator.runtime.exporters.gpu_evidence import gpu_evidence
from orchestrator.runtime.gangs.gangs import Gangs
from orchestrator.runtime.gangs.job_files import JobFiles
from orchestrator.runtime.gangs.rank_rpc import GangCalls
from orchestrator.runtime.names import placement_group_name
from orchestrator.runtime.pools import Pools
from orchestrator.runtime.ranks.logs import LogLimits
from orchestrator.spec.job import prepare
from orchestrator.store.errors import StoreError
from orchestrator.store.paging import every_record
from orchestrator.store.sqlite import SqliteStore
from orchestrator.telemetry.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from orchestrator.api.launch import ServeOptions
    from orchestrator.core.cluster import Node
    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.daemon.jobs.progress import JobProgress
    from orchestrator.runtime.nodes.agent import NodeGpu
    from orchestrator.spec.settings import Settings
    from orchestrator.telemetry.metrics_view import Snapshot
    from orchestrator.train.script.progress_facts import ProgressSnapshot

REFRESH_SECONDS: Final = 10.0
SHARED_REFRESH_SECONDS: Final = 2.0  # on somebody's cluster nodes come and go, and others take what was free
FORK_SERVER_SECONDS: Final = 60.0
NODE_CHECK_SECONDS: Final = 150.0
HEAD_RETRY_SECONDS: Final = 2.0
TIDY_SECONDS: Final = 60.0
DRAIN_WAIT_SECONDS: Final = 1.0
TASKS_END_SECONDS: Final = 10.0
WARM_LATER_SECONDS: Final = 0.3
MAX_WARM_WORKERS: Final = 8
REMEMBER_ENDED: Final = 1000


class Daemon:
    """Runs one home. ``start`` returns when jobs are taken and placed; ``run`` when told to stop. Ranks get ``umask``."""

    tasks_end_seconds: float = TASKS_END_SECONDS

    def __init__(self, settings: Settings, options: ServeOptions, environ: Mapping[str, str], umask: int) -> None:
        self.settings = settings
        self.options = options
        self.started_at = time.time()
        self.log = get_logger("orch.daemon")
        self.changes = Changes(int(time.time() * 1000))
        self.ready = asyncio.Event()
        self.read_address = self.prometheus_url = self.alertmanager_url = ""
        self.store = SqliteStore.open(
            settings.paths.store, reserve=settings.paths.reserve, reserve_bytes=settings.reserve_bytes
        )
        self.pools = Pools()
        self._progress = ProgressBook()
        self.metering = Metering(settings, self.started_at)
        self._remembered: list[JobId] = []
        self._problems: dict[str, str] = {}
        self._trust = NodeTrust()
        self.notifier = Notifier(self.store, settings.home / "notify.key", self.log)
        self._warmed_for: dict[JobId, int] = {}
        self._warm_nodes: set[str] = set()
        self._have_nodes = asyncio.Event()
        self._head_gone = asyncio.Event()
        self._stopping = asyncio.Event()
        self._stop_jobs = False
        self._deciding = self.abandoned = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self.deaf_tasks: set[asyncio.Task[Any]] = set()  # those that did not end when they were told to
        self._failure: BaseException | None = None
        self.loop = Loop(
            store=self.store,
            runtime=lambda: self.gangs if self.cluster.connected else None,
            on_change=self._changed,
            on_end=self._ended,
            on_event=self._observed,
            on_decision=self.metering.decided,
            on_write_failed=self.metering.commit_failed,
            log=self.log,
        )
        self.cluster = Cluster(
            settings.paths,
            ClusterOptions(address=options.ray_address or None, simulate_gpus=options.simulate_gpus),
            on_lost=self._head_lost,
            own_groups=lambda: {placement_group_name(j.id, j.gang) for j in self.loop.decided.values() if j.gang_open},
        )
        self.tidying = Tidying(self.store, settings.paths, self.cluster.namespace, self.log)
        self.exporters = Exporters(self.cluster, self._exporter_access())
        self.gpus = GpuWatch(self.cluster, self.exporters, settings.paths, self._jobs, self._progress.of, self.log)
        self.gangs, self.calls = self._make_gangs(environ, umask)
        self.readiness = readiness_of(self._not_ready, self.store.answers, self._loop_turns)
        self.hangs = HangWatch(jobs=self._jobs, looker=self.calls, command=self.loop.command, log=self.log)

    def _jobs(self) -> Collection[Job]:
        """The live jobs; the loop replaces its dictionary when it has read the store."""
        return self.loop.jobs.values()

    def _exporter_access(self) -> ExporterAccess:
        return ExporterAccess(
            address=self.settings.exporter_address,
            ports=self.settings.exporter_ports,
            token=self.options.read_token(),
            processes=self.settings.exporter_processes,
        )

    def _make_gangs(self, environ: Mapping[str, str], umask: int) -> tuple[Gangs, GangCalls]:
        limits = LogLimits(max_bytes=self.settings.log_max_bytes, keep_files=self.settings.log_keep_files)
        gangs = Gangs(
            cluster=self.cluster,
            paths=self.settings.paths,
            base_env=dict(environ),
            secrets_of=lambda job: read_secrets(self.settings.paths, job.id),
            log_limits=limits,
            files=JobFiles(
                self.cluster,
                self.settings.paths,
                limits,
                outputs_max_bytes=self.settings.outputs_max_bytes,
                pool=self.pools.outputs,
            ),
            pool=self.pools.starts,
            post=self.loop.post,
            progress=self._take_progress,
            previous_step=self._progress.previous_step,
            rank_umask=umask,
            gpu_evidence=lambda uuids: gpu_evidence(self.exporters, uuids),
            log=self.log,
        )
        return gangs, GangCalls(gangs)

    # -- life

    async def start(self) -> None:
        """Read the store, begin deciding, connect to Ray; ready when gangs can be placed. Raises ClusterError."""
        await self.loop.load()
        await self.tidying.at_start()
        begun = [(j, self.settings.paths.metrics(j.id)) for j in self.loop.jobs.values() if j.attempts]
        await asyncio.to_thread(self._progress.resume, begun)
        self._trust.restore(await self.store.places())
        await self._replay_ledger()
        self.log.info("daemon.loaded", live_jobs=len(self.loop.jobs), home=str(self.settings.home))
        await asyncio.gather(self.cluster.start(), asyncio.to_thread(prepare))
        await self._refresh()
        self._deciding = True
        self._supervise(self.loop.run(), "loop")
        self._supervise(self.notifier.run(), "notify")
        self._supervise(self._keep_refreshing(), "nodes")
        self._supervise(self._keep_head(), "head")
        self._supervise(self.gpus.run(), "gpus")
        self._supervise(self.metering.watch_lag(), "lag")
        self._supervise(self._look_after_nodes(), "trust")
        self._supervise(self.hangs.run(), "hangs")
        if self.cluster.embedded:
            await self._warm_fork_servers()
        self.ready.set()
        self._spawn(self._settle())
        self.log.info("daemon.ready", seconds=round(time.time() - self.started_at, 3), ray=self.cluster.address)

    async def _settle(self) -> None:
        """The exporters take what idle workers there are: the first job is to find some, too."""
        await self.exporters.refresh()
        await self.cluster.warm()

    async def _replay_ledger(self) -> None:
        """What live jobs' GPUs did before this daemon: their events tell it again."""
        for job_id in list(self.loop.jobs):
            try:
                async for record, event in every_record(self.store, job_id):
                    self.metering.observe(record, event)
                    self._trust.observe(record, event)
            except Exception:  # of one job: the others need their daemon
                self.log.exception("daemon.history_not_replayed", job=job_id)

    def _observed(self, job: Job, event: ev.Event) -> None:
        self.metering.observe(job, event)
        self.gpus.observe(event)
        if self._trust.observe(job, event):
            self.log.warning("node.avoided", job=job.id)
            self._set_nodes(dict(self.loop.nodes))
        self._spawn(self._save_trust())
        if isinstance(event, ev.GangReleased) and self._trust.avoided_gpus:
            self._spawn(self._hold_gpus())

    def _to_hold(self) -> dict[str, tuple[str, NodeGpu, int]]:
        """GPUs that are lost or avoided, and that no gang is on: their node, and how many GPUs it has."""
        bad = self._trust.avoided_gpus
        used = {u for j in self.loop.decided.values() if j.gang_open for s in j.seats for u in s.gpu_uuids}
        wanted: dict[str, tuple[str, NodeGpu, int]] = {}
        for node_id, report in self.cluster.reports.items():
            lost = self.cluster.lost_gpus.get(node_id, ())
            for gpu in (*(g for g in report.gpus if g.uuid in bad), *lost):
                if gpu.uuid not in used:
                    wanted[gpu.uuid] = (node_id, gpu, len(report.gpus) + len(lost))
        return wanted

    async def _hold_gpus(self) -> None:
        """Have Ray hand out no GPU that is lost or avoided."""
        if self.cluster.connected and await self.cluster.holds.keep(self._to_hold()):
            self.log.warning("gpus.held", gpus=sorted(self.cluster.holds.held))
            await self._refresh()

    async def _save_trust(self) -> None:
        """Write what is held against nodes and GPUs; what cannot be written now is tried again with the next look."""
        places = self._trust.unsaved()
        try:
            await self.store.put_places(places)
        except StoreError as error:
            self._trust.keep(places)
            self.log.warning("trust.not_saved", error=str(error))

    async def _check_node(self, node_id: str) -> tuple[str, ...]:
        agent = self.cluster.agent_for(node_id)
        if agent is None:
            return ("its agent does not answer",)
        try:
            problems: tuple[str, ...] = await within(NODE_CHECK_SECONDS, agent.check.remote())
        except TimeoutError:
            return (f"its check took longer than {NODE_CHECK_SECONDS:g} s",)
        except Exception as error:
            return (f"its check did not end: {error}",)
        return problems

    async def _look_after_nodes(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            if self.cluster.connected and await self._trust.look(self._check_node):
                self._set_nodes(dict(self.loop.nodes))
            await self._save_trust()
            with contextlib.suppress(Exception):  # of Ray, while it comes and goes: the next look tries again
                await self._hold_gpus()

    async def picture(self) -> Snapshot:
        """Everything that the metrics show, now."""
        return self.metering.picture(
            live=list(self.loop.jobs.values()),
            nodes=list(self.loop.nodes.values()),
            finished=await self.store.finished_counts(),
            progress=self._progress.all(),
            balances=self.gpus.raw_balances,
            gpu_states=gpu_states(self.loop.jobs.values(), self.cluster.reports, self.exporters, self._trust.cordoned),
            hang_suspected=self.hangs.suspected,
        )

    def _supervise(self, coroutine: Any, name: str) -> None:
        """A background task whose failure stops the daemon loudly."""
        task: asyncio.Task[Any] = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.log.error("daemon.task_failed", task=task.get_name(), exc_info=error)
            self._failure = error
            self._stopping.set()

    async def start_unless_stopped(self) -> None:
        """Like ``start``, but cut short by a request to stop. Nothing that a start which did not come up began is left.

        Raises ClusterError.
        """
        starting = asyncio.create_task(self.start(), name="start")
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done() and (self._deciding or self._stop_jobs):
                await asyncio.wait({starting})  # gangs may be placed already: it stops as one that is ready does
            if not starting.done():
                self.log.info("daemon.start_cut_short")
                starting.cancel()
                await asyncio.wait({starting})
            if starting.cancelled() or starting.exception() is not None:
                await self._abandon()
            if not starting.cancelled():
                await starting
        finally:
            stopping.cancel()

    async def _abandon(self) -> None:
        if self._deciding:
            await self._stop()
            return
        await self.gangs.close()
        await self.cluster.abandon()
        self.store.close()
        self.abandoned = True

    async def run(self) -> None:
        """Until told to stop. Raises what a background task died of."""
        if self.abandoned:
            return
        await self._stopping.wait()
        if self._failure is None and self._stop_jobs:
            await self._drain_all()
        await self._stop()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Stop; jobs run on."""
        self._stopping.set()

    async def begin_shutdown(self, *, stop_jobs: bool, by: str) -> v.ShutdownReply:
        """Answer what will happen, then stop."""
        holding = tuple(j.id for j in self.loop.decided.values() if j.gang_open)
        self.log.info("daemon.stopping", by=by, stop_jobs=stop_jobs, jobs=len(holding))
        self._stop_jobs = stop_jobs
        asyncio.get_running_loop().call_later(0.05, self._stopping.set)
        return v.ShutdownReply(running=() if stop_jobs else holding, stopped=holding if stop_jobs else ())

    def refuse_when_stopping(self) -> None:
        """Raise DaemonStoppingError once the daemon is on its way out."""
        if self._stopping.is_set():
            raise DaemonStoppingError("the daemon is shutting down")

    async def _drain_all(self) -> None:
        """Every running job saves and goes back to the queue; nothing new is placed meanwhile."""
        self.loop.set_nodes({})
        for job_id in [j.id for j in self.loop.decided.values() if j.gang_open]:
            await self.loop.command(lambda job_id=job_id: self._preempt(job_id))  # type: ignore[misc]  # mypy cannot infer a default's type
        version = self.changes.version
        while any(j.gang_open for j in self.loop.decided.values()) and self._failure is None:
            version = await self.changes.wait(version, DRAIN_WAIT_SECONDS, frozenset())

    def _preempt(self, job_id: JobId) -> Sequence[ev.Event]:
        job = self.loop.decided.get(job_id)
        return request_stop(job, StopPurpose.PREEMPT, "orch down --stop-jobs", time.time()) if job else []

    async def _stop(self) -> None:
        busy = any(j.gang_open for j in self.loop.decided.values())
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            _, self.deaf_tasks = await asyncio.wait(self._tasks, timeout=self.tasks_end_seconds)
            for task in self.deaf_tasks:
                self.log.error("daemon.task_does_not_end", task=task.get_name())
        await self.gangs.close()
        for job_id in self._progress.all():
            self._progress.settle(job_id, self.settings.paths.metrics(job_id))
        await self.cluster.stop(stop_head=not busy and self._failure is None)
        self.pools.close()
        self.store.close()

    # -- the cluster

    async def _keep_refreshing(self) -> None:
        tidied = 0.0
        while True:
            await asyncio.sleep(REFRESH_SECONDS if self.cluster.embedded else SHARED_REFRESH_SECONDS)
            if not self.cluster.embedded and time.monotonic() - tidied > TIDY_SECONDS:
                tidied = time.monotonic()
                self._spawn(self.gangs.files.tidy(set(self.loop.jobs)))
            if self.cluster.connected:
                try:
                    await self._refresh()
                    self._problems.pop("nodes", None)
                except Exception as error:
                    self._problems["nodes"] = f"the cluster's nodes could not be listed: {error}"

    async def _refresh(self) -> None:
        nodes = await self.cluster.refresh()
        self._set_nodes(nodes)
        self.gangs.note_reach(self.loop.jobs.values())
        if not self.cluster.embedded:  # one slow node of many holds nobody up
            self._spawn(self._warm_fork_servers())
        if self.ready.is_set():
            await self.exporters.refresh()

    def _set_nodes(self, nodes: dict[str, Node]) -> None:
        marked = self._trust.mark(nodes)
        if self._stop_jobs and self._stopping.is_set():
            return
        self.loop.set_nodes(marked)
        if any(n.alive for n in marked.values()):
            self._have_nodes.set()

    async def wait_for_nodes(self, seconds: float) -> None:
        """Until the cluster's nodes are known. Raises DaemonStoppingError when they do not come."""
        try:
            async with asyncio.timeout(seconds):
                await self._have_nodes.wait()
        except TimeoutError as error:
            raise DaemonStoppingError("the cluster has not come up; `orch doctor` looks for the reason") from error

    async def _warm_fork_servers(self) -> None:
        async def warm(agent: Any) -> None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(FORK_SERVER_SECONDS):
                    await agent.fork_server.remote(sys.executable)

        # A head that only coordinates has no CPUs: no rank ever goes there.
        takes_ranks = {node.id for node in self.loop.nodes.values() if node.cpus > 0}
        cold = (self.cluster.agents.keys() & takes_ranks) - self._warm_nodes
        self._warm_nodes = (self._warm_nodes & self.cluster.agents.keys()) | cold
        await asyncio.gather(*(warm(self.cluster.agents[node_id]) for node_id in cold))

    def _head_lost(self) -> None:
        self.log.error("ray.head_lost", address=self.cluster.address)
        self._problems["ray"] = "Ray's head died and is being started again"
        self._have_nodes.clear()
        self.loop.set_nodes({})  # nothing is placed on what is not there
        self.gangs.forget_all()
        self.cluster.holds.forget_all()
        self.exporters.forget_all()
        self._head_gone.set()

    async def _keep_head(self) -> None:
        """Start Ray's head again whenever it has died, as often as it takes."""
        while True:
            await self._head_gone.wait()
            self._head_gone.clear()
            try:
                await self.cluster.restart()
                await self._refresh()
                await self._warm_fork_servers()
            except Exception as error:  # whatever Ray says while it comes up: the next try may go better
                self._problems["ray"] = str(error) or type(error).__name__
                self.log.exception("ray.restart_failed")
                self._head_gone.set()
                await asyncio.sleep(HEAD_RETRY_SECONDS)
            if not self._head_gone.is_set():
                self._problems.pop("ray", None)
                self.loop.wake()

    async def blind_nodes(self, storage_path: str) -> list[str]:
        """Names of nodes that share neither the home nor this directory. Raises OSError: this machine cannot write it."""
        apart = [node_id for node_id, report in self.cluster.reports.items() if not report.home_shared]
        blind = await self.gangs.files.blind(storage_path, apart) if apart else []
        return [f"{self.cluster.reports[node_id].hostname} ({node_id[:12]})" for node_id in blind]

    def simulated_gpus(self) -> int:
        """How many of the cluster's GPUs are simulated."""
        return sum(len(r.gpus) for r in self.cluster.reports.values() if any(g.simulated for g in r.gpus))

    async def _loop_turns(self) -> None:
        if self.ready.is_set():
            await self.loop.command(list)

    def _not_ready(self) -> list[str]:
        """What is known to be in the way of jobs, without asking."""
        if self.ready.is_set():
            return self.problems()
        return [*self.problems(), "the daemon still starts"]

    def problems(self) -> list[str]:
        """What is wrong with the daemon, for people."""
        found = list(self._problems.values())
        if self.loop.blocked_by_disk:
            found.append(f"decisions cannot be written: {self.loop.blocked_by_disk}")
        return found + self.pools.problems()

    def node_views(self) -> list[v.NodeView]:
        """Every node, by name."""
        views = [
            node_view(
                node,
                self.cluster.reports.get(node.id),
                self.loop.jobs.values(),
                self.loop.nodes,
                lost=self.cluster.lost_gpus.get(node.id, ()),
                bad=self._trust.avoided_gpus,
            )
            for node in self.loop.nodes.values()
        ]
        return sorted(views, key=lambda n: (n.name, n.id))

    @property
    def avoided_gpus(self) -> Mapping[str, str]:
        """What is held against GPUs, by UUID."""
        return self._trust.avoided_gpus

    async def node_action(self, node: Node, verb: NodeVerb, by: str) -> v.NodeActionReply:
        """Cordon, drain or uncordon."""
        moved: tuple[JobId, ...] = ()
        if verb is NodeVerb.UNCORDON:
            self._trust.forgive(node.id)
        else:
            self._trust.cordon(node.id, node.name, by)
        places = self._trust.unsaved()
        try:
            await self.store.put_places(places)
        except StoreError as error:
            self._trust.keep(places)
            raise DiskFullError(f"{verb} holds for now, but could not be written: {error}") from error
        self._set_nodes(dict(self.loop.nodes))
        self._spawn(self._hold_gpus())
        if verb is NodeVerb.DRAIN:
            moved = tuple(j.id for j in self.loop.decided.values() if j.gang_open and node.id in j.nodes)
            for job_id in moved:
                await self.loop.command(lambda job_id=job_id: self._move_away(job_id, by))  # type: ignore[misc]  # mypy cannot infer a default's type
        state = {NodeVerb.CORDON: "CORDONED", NodeVerb.DRAIN: "DRAINING", NodeVerb.UNCORDON: "READY"}[verb]
        message = f"{len(moved)} job(s) save and move away" if moved else f"{node.name} is {state.lower()}"
        return v.NodeActionReply(node=node.name, state=state, message=message, jobs=moved)

    def _move_away(self, job_id: JobId, by: str) -> Sequence[ev.Event]:
        job = self.loop.decided.get(job_id)
        return request_stop(job, StopPurpose.PREEMPT, f"{by} drains its node", time.time()) if job else []

    # -- jobs

    def progress_of(self, job_id: JobId) -> JobProgress | None:
        """The job's newest progress."""
        return self._progress.of(job_id)

    async def recall_progress(self, jobs: Collection[Job]) -> None:
        """Have ``progress_of`` know what these jobs reported to earlier daemons."""
        unknown = {j.id: self.settings.paths.metrics(j.id) for j in jobs if not self._progress.knows(j.id)}
        if unknown:
            await asyncio.to_thread(self._progress.recall, unknown)

    def _take_progress(self, job_id: JobId, attempt: int, rank: int, snapshot: ProgressSnapshot) -> None:
        job = self.loop.jobs.get(job_id)
        if job is None:
            return
        self.metering.progress(job_id, attempt, rank, snapshot)
        self.hangs.progress(job, attempt, rank, snapshot)
        events = self._progress.take(job, attempt, rank, snapshot, self.settings.paths.metrics(job_id))
        if any(getattr(event, "code", "") == "unusable_report" for event in events):
            self.log.warning("rank.unusable_report", job=job_id, rank=rank, fields=snapshot.unusable)
        self.changes.touch(job_id)
        if events:
            self.loop.post(events)

    def _changed(self, job: Job) -> None:
        if job.spec.notify:
            self.notifier.wake()
        self.changes.touch(job.id)
        if job.seats and self._warmed_for.get(job.id) != job.gang:
            self._warmed_for[job.id] = job.gang
            self._spawn(self._warm_later(job.num_workers))

    async def _warm_later(self, workers: int) -> None:
        """A gang has used idle workers up: have as many made again, once the start that they would compete with is over."""
        await asyncio.sleep(WARM_LATER_SECONDS)
        await self.cluster.warm(min(workers, MAX_WARM_WORKERS))

    def _ended(self, job: Job) -> None:
        self._warmed_for.pop(job.id, None)
        self._progress.settle(job.id, self.settings.paths.metrics(job.id))
        self.tidying.drop_secrets(job.id)
        self._spawn(self.tidying.after([job.id]))
        self._remembered.append(job.id)
        for job_id in self._remembered[:-REMEMBER_ENDED]:
            self._progress.forget(job_id)
        del self._remembered[:-REMEMBER_ENDED]

    def _spawn(self, coroutine: Any) -> None:
        task: asyncio.Task[Any] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
