"""The daemon's life cycle: reads its record, connects, runs its tasks and stops. ``bootstrap.py`` chooses its parts."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from orchestrator.spec.job import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from structlog.typing import FilteringBoundLogger

    from orchestrator.daemon.background import Background
    from orchestrator.daemon.recovery import Recovery
    from orchestrator.daemon.runtime_side import RuntimeSide
    from orchestrator.daemon.stopping import Shutdown, StopRequest


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
