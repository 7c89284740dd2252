"""The daemon's background tasks. The failure of a supervised one ends the daemon; all end with it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from structlog.typing import FilteringBoundLogger

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
