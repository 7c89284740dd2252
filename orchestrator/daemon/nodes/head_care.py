"""Restarts Ray's head after its death, and makes every part drop what died with it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.deadline import OvertakenError, unless

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.runtime.cluster.cluster import Cluster

HEAD_RETRY_SECONDS: Final = 2.0


class HeadCare:
    """Care of the head. ``forget`` are called after its death; ``prepare`` prepares a new one; ``wake`` wakes the loop.

    ``problems`` reports errors to users.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        forget: Sequence[Callable[[], None]],
        prepare: Sequence[Callable[[], Awaitable[None]]],
        wake: Callable[[], None],
        problems: dict[str, str],
        log: FilteringBoundLogger,
        retry_seconds: float = HEAD_RETRY_SECONDS,
    ) -> None:
        self._cluster = cluster
        self._forget = forget
        self._prepare = prepare
        self._wake = wake
        self._problems = problems
        self._log = log
        self._retry_seconds = retry_seconds
        self._gone = asyncio.Event()

    def lost(self) -> None:
        """Record the head's death."""
        self._log.error("ray.head_lost", address=self._cluster.address)
        self._problems["ray"] = "Ray's head died and is being started again"
        for forget in self._forget:
            forget()
        self._gone.set()

    async def run(self) -> None:
        """Restart the head whenever it has died, with as many tries as it takes."""
        while True:
            await self._gone.wait()
            self._gone.clear()
            try:
                await self._cluster.restart()
                with contextlib.suppress(OvertakenError):  # it died too: calls to it may never return
                    await unless(self._gone, self._prepare_all())
            except Exception as error:  # any error of a starting Ray: the next try may succeed
                self._problems["ray"] = str(error) or type(error).__name__
                self._log.exception("ray.restart_failed")
                self._gone.set()
                await asyncio.sleep(self._retry_seconds)
            if not self._gone.is_set():
                self._problems.pop("ray", None)
                self._wake()

    async def _prepare_all(self) -> None:
        for prepare in self._prepare:
            await prepare()
