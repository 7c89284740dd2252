"""One process of a rank, from its start to the end of its tree: its lifeline, its keeper, and their messages.

When the actor's own process dies, the lifeline closes and the keeper kills everything below it. When a keeper is killed,
this object ends its tree (``rank_locks``).
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.forkserver import holder
from orchestrator.runtime.ranks.process.exits import report_fault
from orchestrator.runtime.spawn.lifeline import ErrorRaised, Exited, Gone, KeeperLost, Started
from orchestrator.runtime.spawn.rank_locks import end_remains

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from orchestrator.runtime.forkserver.holder import Identity
    from orchestrator.runtime.ranks.event_log import EventLog
    from orchestrator.runtime.ranks.evidence.exit_evidence import ExitEvidence
    from orchestrator.runtime.ranks.output.output import RankOutput
    from orchestrator.runtime.ranks.process.exits import ExitTeller
    from orchestrator.runtime.spawn.lifeline import Event, Lifeline

_REMAINS_SECONDS: Final = 10.0
_REMAINS_AGAIN_SECONDS: Final = 1.0
_MOST_FAULTS: Final = 100
_SIGKILL: Final = 9


class RankProcess:
    """One process. ``lock`` is the path of the rank's lock, by which a lost keeper's tree is found.

    ``before_gone`` ends what was started beside the rank, before the rank counts as ended.
    """

    def __init__(
        self,
        lifeline: Lifeline,
        keeper_pid: int,
        lock: Path,
        *,
        log: EventLog,
        output: RankOutput,
        evidence: ExitEvidence,
        exits: ExitTeller,
        before_gone: Callable[[], Awaitable[None]],
    ) -> None:
        self._lifeline = lifeline
        self._keeper = holder.identity_of(keeper_pid)
        self._lock = lock
        self._log = log
        self._output = output
        self._evidence = evidence
        self._exits = exits
        self._before_gone = before_gone
        self._following = asyncio.create_task(self._follow())

    def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL to the whole tree after the grace."""
        self._lifeline.stop(timedelta(seconds=grace_seconds))

    def hang_up(self) -> None:
        """Send SIGHUP: an interactive shell ignores SIGTERM."""
        self._lifeline.signal(signal.SIGHUP)

    def kill(self) -> None:
        """Send SIGKILL to the whole tree, ordered before this returns."""
        self._lifeline.kill()

    async def end(self) -> None:
        """Kill the tree; return when no process of it is left, nor its keeper."""
        self.kill()
        await self._following

    async def _follow(self) -> None:
        """Follow the process until its end, which is reported even if something fails before it."""
        faults = 0
        while True:
            try:
                event = await self._lifeline.next_event()
            except Exception as error:  # an invalid message: the next may be valid
                faults += 1
                report_fault("a message of the keeper was left out", error)
                if faults < _MOST_FAULTS:
                    continue
                self._lifeline.close()  # an order to the keeper to kill everything
                event = None
            if await self._take(event or KeeperLost(at=time.time())):
                break
        self._evidence.close()
        await self._output.close()
        self._lifeline.close()
        await _ended(self._keeper)

    async def _take(self, event: Event) -> bool:
        """Process one event of the keeper; return whether it was the last."""
        try:
            return await self._report(event)
        except Exception as error:
            report_fault("an event of the keeper was left out", error)
            last = isinstance(event, Gone | KeeperLost)
            if last:
                self._log.add(kind="gone", at=time.time())
            return last

    async def _report(self, event: Event) -> bool:
        match event:
            case Started():
                self._evidence.started(event.pid)
                self._log.add(kind="started", at=event.at, pid=event.pid, cold=event.cold)
            case ErrorRaised():
                self._exits.error = event
            case Exited():
                await self._exits.report(event)
            case Gone() | KeeperLost():
                if not self._log.exited:
                    lost = Exited(exit_code=None, signal=_SIGKILL, cause=None, record_error=None, at=event.at)
                    await self._exits.report(lost)
                if isinstance(event, KeeperLost):
                    await self._end_remains()
                await self._before_gone()
                self._log.add(kind="gone", at=max(event.at, time.time()))
                return True
        return False

    async def _end_remains(self) -> None:
        """End the tree of a killed keeper; return when its memory is free."""
        while True:
            if await asyncio.to_thread(end_remains, self._lock, _REMAINS_SECONDS):
                return
            await asyncio.sleep(_REMAINS_AGAIN_SECONDS)  # another process holds the lock and ends it


async def _ended(process: Identity | None) -> None:
    """Return when the process has ended."""
    if process is None:
        return
    try:
        handle = os.pidfd_open(process.pid)
    except OSError:  # nothing has that number any more
        return
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    try:
        if holder.identity_of(process.pid) == process:
            loop.add_reader(handle, told.set)
            await told.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
