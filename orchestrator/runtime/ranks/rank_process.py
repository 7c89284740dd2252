"""One process of a rank, from its start to the end of its tree: its lifeline, its keeper, their messages, its exit.

When the actor's own process dies, the lifeline closes and the keeper kills everything below it. When a keeper is killed, ``RankProcess`` ends its tree (``spawn/rank_locks.py``). Must not know attempts other than its own.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from orchestrator.core.events import Exit
from orchestrator.runtime.deadline import process_ended
from orchestrator.runtime.forkserver import holder
from orchestrator.runtime.ranks.exit_evidence import (
    StopFacts,
    memory_use,
    order_of,
    port_evidence,
    stop_facts,
    was_killed,
)
from orchestrator.runtime.ranks.output import match_policies
from orchestrator.runtime.spawn.lifeline import ErrorRaised, Exited, Gone, KeeperLost, Started
from orchestrator.runtime.spawn.rank_locks import end_remains

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from orchestrator.core.facts.fact import Fact
    from orchestrator.runtime.forkserver.holder import Identity
    from orchestrator.runtime.ranks.exit_evidence import ExitEvidence
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.output import RankOutput
    from orchestrator.runtime.ranks.rank_checkpoints import RankCheckpoints
    from orchestrator.runtime.ranks.rank_events import EventLog
    from orchestrator.runtime.spawn.lifeline import Event, Lifeline

_REMAINS_SECONDS: Final = 10.0
_REMAINS_AGAIN_SECONDS: Final = 1.0
_MAX_FAULTS: Final = 100


class ExitReporter:
    """Reports the exit of one process. ``error`` is the exception that its script raised, if it was reported."""

    def __init__(
        self,
        log: EventLog,
        output: RankOutput,
        evidence: ExitEvidence,
        checkpoints: RankCheckpoints,
        plan: RankPlan,
    ) -> None:
        self._plan = plan
        self._log = log
        self._output = output
        self._evidence = evidence
        self._checkpoints = checkpoints
        self.error: ErrorRaised | None = None

    async def report(self, event: Exited) -> None:
        """Report the exit."""
        await self._checkpoints.ended(well=event.exit_code == 0)
        try:
            self._output.drain()
        except Exception as error:
            report_fault("the rank's last output was left out", error)
        await self._add(event)

    async def _add(self, event: Exited) -> None:
        failed = event.exit_code != 0
        error = self.error if failed else None
        tail = self._output.tail if failed else ()
        text = "\n".join((*tail, f"{error.type}: {error.message}" if error else ""))
        policy: str = ""
        note: Fact | None = None
        evidence: tuple[Fact, ...] = ()
        try:
            policy, note = await match_policies(self._plan.log_policies, text) if failed else ("", None)
            evidence = self._evidence.facts() if failed else ()
        except Exception as fault:
            report_fault("evidence of the exit's cause was left out", fault)
        stop = await self._stop_facts(event)
        use = memory_use(event.memory, machine=self._evidence.killed_by_kernel(event, evidence)) if failed else None
        end = Exit(
            rank=self._plan.rank,
            at=event.at,
            exit_code=event.exit_code,
            signal=event.signal,
            error_type=error.type if error else "",
            error_message=error.message if error else "",
            error_at=error.at if error else None,
            log_tail=tail,
            evidence=evidence,
            policy=policy,
            policy_note=note,
            missing_file=error.missing_file if error else "",
            stop_seen_at=stop.stop_seen_at,
            stop_scope=stop.stop_scope,
            last_step=stop.last_step,
            total_steps=stop.total_steps,
            memory=use,
            ordered=order_of(event.cause),
        )
        self._log.add(kind="exited", at=event.at, exit=await self._with_port(end))

    async def _with_port(self, end: Exit) -> Exit:
        """Add evidence of what holds the port that the rank could not bind."""
        try:
            taken = await asyncio.to_thread(port_evidence, end, self._plan.env)
        except Exception as fault:
            report_fault("the process that holds the rank's port was left out", fault)
            return end
        return end if taken is None else replace(end, evidence=(*end.evidence, taken))

    async def _stop_facts(self, event: Exited) -> StopFacts:
        """Return whether the rank was asked to stop, and its last steps: those in its output where it reported none."""
        facts = partial(stop_facts, ended_at=event.at, killed=was_killed(event))
        stop = facts(event.ending)
        if event.cause is not None or stop.stop_seen_at is None or stop.last_step is not None:
            return stop
        try:
            return facts(event.ending, await self._output.last_progress())
        except Exception as error:
            report_fault("the step of the rank's last output was left out", error)
            return stop


def report_fault(what: str, error: Exception) -> None:
    """Log the fault in the actor's own log, with its traceback."""
    sys.stderr.write(f"{what}: {''.join(traceback.format_exception(error))}\n")


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
        exits: ExitReporter,
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
                if faults < _MAX_FAULTS:
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
                    lost = Exited(exit_code=None, signal=signal.SIGKILL, cause=None, record_error=None, at=event.at)
                    await self._exits.report(lost)
                if isinstance(event, KeeperLost):
                    await self._end_remains()
                await self._before_gone()
                self._output.end_lines()  # the actor may be ended as soon as this is reported
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
    if holder.identity_of(process.pid) == process:
        await process_ended(handle)
    else:
        os.close(handle)
