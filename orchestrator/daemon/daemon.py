"""The daemon's life cycle: reads its record, connects, runs its tasks and stops. ``bootstrap.py`` chooses its parts."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import TYPE_CHECKING, Any, Final

from orchestrator.spec.job import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress import ProgressIntake
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.care import ForkServers, NodeCare
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.daemon.stopping import Shutdown, StopRequest
    from orchestrator.runtime.cluster.cluster import Cluster
    from orchestrator.runtime.exporters.exporters import Exporters
    from orchestrator.runtime.gangs.gangs import Gangs
    from orchestrator.store.store import Store


class Recovery:
    """Restores state. ``history`` are called with each event of live jobs that have had an attempt, and its record.

    Their data (accounts, strikes, annotations) begin with an attempt. Reading the events of jobs that wait takes half a millisecond of processor time each.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        *,
        intake: ProgressIntake,
        quarantine: NodeQuarantine,
        history: Sequence[Callable[[Job, Event], object]],
        log: FilteringBoundLogger,
    ) -> None:
        self._loop = loop
        self._store = store
        self._intake = intake
        self._quarantine = quarantine
        self._history = history
        self._log = log

    async def run(self) -> None:
        """Read the live jobs and their data. Nothing here concerns a job that has ended: the daemon does not answer yet."""
        gc.disable()  # a long queue is read once and stays: collections need not walk it, neither now nor later
        try:
            await self._loop.load()
            gc.freeze()
        finally:
            gc.enable()
        await self._intake.resume()
        self._quarantine.restore(await self._store.places())
        for job_id in list(self._loop.jobs.begun):
            try:
                async for record, event in self._store.every_record(job_id):
                    for observe in self._history:
                        observe(record, event)
            except Exception:  # an error of one job: the others need the daemon
                self._log.exception("daemon.history_not_replayed", job=job_id)
        self._log.info("daemon.loaded", live_jobs=len(self._loop.jobs))


class RuntimeSide:
    """Starts and stops what runs on nodes. ``jobs`` are the live ones."""

    def __init__(
        self,
        cluster: Cluster,
        gangs: Gangs,
        exporters: Exporters,
        nodes: NodeCare,
        fork_servers: ForkServers,
        jobs: Callable[[], Collection[Job]],
    ) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._gangs = gangs
        self._exporters = exporters
        self._nodes = nodes
        self._fork_servers = fork_servers

    @property
    def address(self) -> str:
        """Return the cluster's address."""
        return self._cluster.address

    async def connect(self) -> None:
        """Find or start the cluster; its nodes are known, and gangs of no live job ended, on return. Raises ClusterError."""
        await self._cluster.start()
        await self._nodes.refresh()
        await self._gangs.survey(self._jobs())

    async def prepare(self) -> None:
        """Prepare the machine of an embedded cluster for its first job; on a shared cluster, do nothing."""
        if self._cluster.site.embedded:
            await self._fork_servers.warm()

    async def settle(self) -> None:
        """Start the exporters, then as many idle workers as they took for the first job."""
        await self._exporters.refresh()
        await self._cluster.warm()

    async def abandon(self) -> None:
        """End what a failed start has begun."""
        await self._gangs.close()
        await self._cluster.abandon()

    async def detach(self) -> None:
        """Stop watching gangs; they continue to run."""
        await self._gangs.close()

    async def stop(self, *, stop_head: bool) -> None:
        """Disconnect from the cluster."""
        await self._cluster.stop(stop_head=stop_head)


TASKS_END_SECONDS: Final = 10.0


class Background:
    """Starts and ends tasks. ``on_failure`` is called once ``failure`` holds a supervised task's error.

    ``uncancelled`` are tasks that did not end when they were cancelled.
    """

    def __init__(
        self,
        on_failure: Callable[[], None],
        log: FilteringBoundLogger,
        *,
        end_seconds: float = TASKS_END_SECONDS,
    ) -> None:
        self._on_failure = on_failure
        self._log = log
        self._end_seconds = end_seconds
        self._tasks: set[asyncio.Task[Any]] = set()
        self.failure: BaseException | None = None
        self.uncancelled: set[asyncio.Task[Any]] = set()

    def supervise(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task for the daemon's lifetime."""
        task: asyncio.Task[Any] = asyncio.create_task(coroutine, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a task that is cancelled with the daemon."""
        task: asyncio.Task[Any] = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def end(self) -> None:
        """Cancel every task and wait for them; those that do not end in time are logged and abandoned."""
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            _, self.uncancelled = await asyncio.wait(self._tasks, timeout=self._end_seconds)
            for task in self.uncancelled:
                self._log.error("daemon.task_does_not_end", task=task.get_name())

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._log.error("daemon.task_failed", task=task.get_name(), exc_info=error)
            self.failure = error
            self._on_failure()


class Daemon:
    """Runs one home. ``start`` returns when jobs are accepted and placed; ``run`` when a stop is requested.

    ``tasks`` run from the moment when gangs can be placed, ``settle`` writes what is only in memory, ``close`` releases the home.
    """

    def __init__(
        self,
        *,
        recovery: Recovery,
        runtime: RuntimeSide,
        background: Background,
        tasks: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
        stop: StopRequest,
        shutdown: Shutdown,
        ready: asyncio.Event,
        settle: Callable[[], None],
        close: Callable[[], None],
        log: FilteringBoundLogger,
    ) -> None:
        self._recovery = recovery
        self._runtime = runtime
        self._background = background
        self._tasks = tasks
        self._request = stop
        self._shutdown = shutdown
        self._ready = ready
        self._settle = settle
        self._close = close
        self._log = log
        self._deciding = self._abandoned = False

    async def start(self) -> None:
        """Read the store, connect to the cluster, begin deciding; ready when gangs can be placed. Raises ClusterError."""
        began = time.monotonic()
        await self._recovery.run()
        await asyncio.gather(self._runtime.connect(), asyncio.to_thread(prepare))
        self._deciding = True
        for name, task in self._tasks.items():
            self._background.supervise(task(), name)
        await self._runtime.prepare()
        self._ready.set()
        self._background.spawn(self._runtime.settle())
        self._log.info("daemon.ready", seconds=round(time.monotonic() - began, 3), ray=self._runtime.address)

    async def start_unless_stopped(self) -> None:
        """Like ``start``, but a request to stop interrupts it. A failed start leaves nothing behind.

        Raises ClusterError.
        """
        starting = asyncio.create_task(self.start(), name="start")
        stopping = asyncio.create_task(self._request.wait())
        try:
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done() and (self._deciding or self._request.stop_jobs):
                await asyncio.wait({starting})  # gangs may be placed already: it stops like a ready daemon
            if not starting.done():
                self._log.info("daemon.start_cut_short")
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
        await self._runtime.abandon()
        self._close()
        self._abandoned = True

    async def run(self) -> None:
        """Run until a stop is requested. Raises a background task's error."""
        if self._abandoned:
            return
        await self._request.wait()
        if self._background.failure is None and self._request.stop_jobs:
            await self._shutdown.drain()
        await self._stop()
        if self._background.failure is not None:
            raise self._background.failure

    def stop(self) -> None:
        """Stop; jobs continue."""
        self._request.now()

    async def _stop(self) -> None:
        busy = bool(self._shutdown.holding())
        await self._background.end()
        await self._runtime.detach()
        self._settle()
        await self._runtime.stop(stop_head=not busy and self._background.failure is None)
        self._close()
