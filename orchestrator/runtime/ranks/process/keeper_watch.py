"""Makes sure that a keeper ends its tree: a stopped keeper is continued, and killed if that does not help.

A keeper reports its end at once. This watches it only when an end is due and does not come: after an order to stop and
its grace, after an order to kill, after the death of its process, and after its last report.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.forkserver import holder
from orchestrator.runtime.spawn.rank_remains import is_stopped, signal_process

if TYPE_CHECKING:
    from orchestrator.runtime.forkserver.holder import Identity

LATE_SECONDS: Final = 2.0
"""Time that an end may be overdue before the keeper is continued."""

_LOOK_SECONDS: Final = 1.0
_LOOKS_WHEN_STOPPED: Final = 3
_LOOKS_WHEN_SILENT: Final = 60  # it writes the exit record first, which may take long on a busy disk


class KeeperWatch:
    """Watches one keeper, from its start to its end, in the running loop."""

    def __init__(self, pid: int) -> None:
        self._keeper = holder.identity_of(pid)
        self._process: Identity | None = None
        self._handle = -1
        self._due: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def watch(self, pid: int) -> None:
        """Watch the keeper's process with this number: its death makes the end due."""
        self._process = holder.identity_of(pid)
        try:
            self._handle = os.pidfd_open(pid)
        except OSError:  # already dead
            self.expect_end(0.0)
            return
        asyncio.get_running_loop().add_reader(self._handle, self._process_ended)

    def _process_ended(self) -> None:
        self._forget_process()
        self.expect_end(0.0)

    def expect_end(self, seconds: float) -> None:
        """Set the due time of the end to ``seconds`` from now; an earlier due time stays."""
        loop = asyncio.get_running_loop()
        at = loop.time() + seconds + LATE_SECONDS
        if self._keeper is None or self._task is not None or (self._due is not None and self._due.when() <= at):
            return
        if self._due is not None:
            self._due.cancel()
        self._due = loop.call_at(at, self._late)

    def _late(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._end_keeper(), name="hasten-keeper")

    async def _end_keeper(self) -> None:
        """Continue the keeper; kill it when it stays stopped, or does not report the death of its process."""
        assert self._keeper is not None
        stopped = silent = 0
        while signal_process(self._keeper, signal.SIGCONT):
            await asyncio.sleep(_LOOK_SECONDS)
            stopped = stopped + 1 if is_stopped(self._keeper.pid) else 0
            silent = silent + 1 if self._process is not None and not self._process.lives() else 0
            if stopped >= _LOOKS_WHEN_STOPPED or silent >= _LOOKS_WHEN_SILENT:
                signal_process(self._keeper, signal.SIGKILL)
                return

    async def ended(self) -> None:
        """Return when the keeper has ended, after its last message; continue or kill one that is stopped."""
        if self._keeper is None:
            return
        try:
            handle = os.pidfd_open(self._keeper.pid)
        except OSError:  # nothing has that number any more
            return
        try:
            if holder.identity_of(self._keeper.pid) == self._keeper:
                self.expect_end(0.0)
                await _readable(handle)
        finally:
            os.close(handle)

    def _forget_process(self) -> None:
        if self._handle >= 0:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = -1

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._forget_process()
        if self._due is not None:
            self._due.cancel()
        if self._task is not None:
            self._task.cancel()
        self._due = self._task = None


async def _readable(handle: int) -> None:
    """Return when a process's descriptor shows that the process has ended."""
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, told.set)
    try:
        await told.wait()
    finally:
        loop.remove_reader(handle)
