"""Supervises one rank of a gang: starts its process through the fork server, ends it, and keeps its events.

A plain asyncio object, so that it works in a Ray actor (``actor.py``) and without Ray. It decides nothing: the daemon
does. Every event of the process is numbered and can be requested again (``feed``), so a restarted daemon misses
nothing.

Fencing: every call names its attempt; an older one is refused. A process tree holds an advisory lock per job and rank on
its node (through its keeper), so a second tree cannot start before the first has ended.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.event_log import SENT_WITH_END_SECONDS, EventLog
from orchestrator.runtime.ranks.evidence.exit_evidence import ExitEvidence
from orchestrator.runtime.ranks.feed import RankFeed
from orchestrator.runtime.ranks.fence import AttemptFence
from orchestrator.runtime.ranks.inspection import RankInspection
from orchestrator.runtime.ranks.launch.record_room import make_room
from orchestrator.runtime.ranks.launch.rendezvous import Rendezvous
from orchestrator.runtime.ranks.launch.start import RankStarter
from orchestrator.runtime.ranks.logs import log_path
from orchestrator.runtime.ranks.output.output import RankOutput
from orchestrator.runtime.ranks.process.exits import ExitTeller
from orchestrator.runtime.ranks.process.rank_process import RankProcess
from orchestrator.runtime.ranks.rank_checkpoints import RankCheckpoints
from orchestrator.runtime.ranks.rank_progress import PROGRESS_SECONDS, RankProgress
from orchestrator.runtime.ranks.sessions.opening import with_terminal
from orchestrator.runtime.ranks.sessions.sessions import RankSessions
from orchestrator.runtime.spawn.rank_locks import rank_lock_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.checkpoint.repository.status import PersisterStatus
    from orchestrator.runtime.ranks.launch_spec import RankPlan


class _Node(NamedTuple):
    """The node's directory for this daemon, and how to start a fork server in it."""

    directory: Path
    start_fork_server: Callable[[RankPlan], Awaitable[None]]


class RankSupervisor:
    """Supervises the rank: ``feed`` answers polls, ``inspection`` inspects its processes, ``sessions`` run beside it.

    ``start_fork_server`` is called when no fork server answers on the plan's socket.
    """

    def __init__(
        self,
        *,
        job_id: str,
        rank: int,
        node_dir: Path,
        start_fork_server: Callable[[RankPlan], Awaitable[None]],
        progress_seconds: float = PROGRESS_SECONDS,
        sent_with_end_seconds: float = SENT_WITH_END_SECONDS,
    ) -> None:
        self._node = _Node(node_dir, start_fork_server)
        self._serial = asyncio.Lock()
        self._fence = AttemptFence(job_id, rank)
        self._log = EventLog(self._fence, sent_with_end_seconds=sent_with_end_seconds)
        self._rendezvous = Rendezvous()
        self._progress = RankProgress(seconds=progress_seconds)
        self._checkpoints = RankCheckpoints(self._progress.newest_step)
        self._evidence = ExitEvidence()
        self._process: RankProcess | None = None
        self.inspection = RankInspection(rank, self._fence, self._log, self._progress)
        self.sessions = RankSessions(self._fence, self._log, node_dir, start_fork_server)
        self.feed = RankFeed(
            self._fence, self._log, self._progress, self._checkpoints, self._evidence, lambda: self.sessions.terminal
        )

    @property
    def attempt(self) -> int:
        """The attempt that the supervisor is prepared for; 0 before the first."""
        return self._fence.attempt

    @property
    def launched(self) -> int:
        """The newest attempt that started its process, or was cancelled before; 0 before the first."""
        return self._fence.launched

    @property
    def port(self) -> int | None:
        """The rendezvous port, if this rank serves it."""
        return self._rendezvous.port

    @property
    def highest_step(self) -> int:
        """The highest step that any attempt reported here."""
        return self._progress.highest_step

    async def prepare(self, attempt: int, serve_on: str | None) -> int | None:
        """Prepare for ``attempt``: kill what is left of an older one; none of its processes is left on return.

        With ``serve_on``, an address of this node, the attempt's rendezvous socket is bound there; returns its port.
        """
        async with self._serial:
            self._fence.refuse_older(attempt)
            if attempt > self._fence.attempt:
                await self._begin(attempt)
                if serve_on is not None:
                    self._rendezvous.bind(serve_on)
            return self.port

    async def _begin(self, attempt: int) -> None:
        self._rendezvous.retire()
        await self._clear()
        self._fence.attempt = attempt
        self._log.begin()
        self._progress.close()

    async def launch(self, plan: RankPlan) -> None:
        """Start the rank's process, once per attempt; do nothing for a repeated call or a cancelled attempt."""
        async with self._serial:
            self._fence.refuse_older(plan.attempt)
            if self._fence.launched < plan.attempt:
                await self._launch_rank(plan)
            if self._process is not None:
                await self._rendezvous.serve(_starter(plan, self._node, self._fence))

    async def _launch_rank(self, plan: RankPlan) -> None:
        self._progress.open(plan.page)
        self._checkpoints.begin(plan)
        make_room(Path(plan.exit_record))
        masker = self._log.masker = Masker(plan.secrets)
        output = self._progress.output = RankOutput(
            log_path(Path(plan.log_dir), plan.attempt, plan.rank),
            masker=masker,
            limits=plan.log_limits,
            progress_pattern=plan.progress_pattern,
            previous_step=plan.previous_step,
        )
        self._evidence.begin()
        plan, terminal = with_terminal(plan, output)
        self.sessions.begin(plan, terminal)
        spawned = await _starter(plan, self._node, self._fence).rank(output, terminal)
        if spawned is None:
            return
        self._fence.launched = plan.attempt
        self._process = RankProcess(
            spawned.lifeline,
            spawned.keeper_pid,
            rank_lock_path(self._node.directory, plan.job_id, plan.rank),
            log=self._log,
            output=output,
            evidence=self._evidence,
            exits=ExitTeller(self._log, output, self._evidence, self._checkpoints, plan),
            before_gone=self.sessions.rank_ended,
        )

    async def stop(self, attempt: int, grace_seconds: float) -> None:
        """Send SIGTERM now, and SIGKILL to the whole tree after the grace; ``gone`` follows as an event."""
        await self._call_off(attempt)
        if self._process is not None:
            self._process.stop(max(grace_seconds, 0.0))
            if self.sessions.interactive:
                self._process.hang_up()
        self._progress.request_stop()  # last: the keeper must know of the order before the rank can end because of it

    async def kill(self, attempt: int) -> None:
        """Send SIGKILL to the whole tree now; ``gone`` follows as an event."""
        await self._call_off(attempt)
        self.kill_now()

    def kill_now(self) -> None:
        """Order SIGKILL to the whole tree before this returns, for a caller that is about to end its process."""
        if self._process is not None:
            self._process.kill()

    async def _call_off(self, attempt: int) -> None:
        """Prevent ``attempt`` from starting; if it was not launched, it counts as ended."""
        self._fence.refuse_older(attempt)
        self._fence.called_off = max(self._fence.called_off, attempt)
        async with self._serial:  # a launch in progress either starts the process or fails first
            self._fence.refuse_older(attempt)
            if attempt > self._fence.attempt:
                await self._begin(attempt)
            if self._fence.launched < attempt:
                self._fence.launched = attempt
                self._log.add(kind="gone", at=time.time())

    async def flush(self, seconds: float) -> PersisterStatus | None:
        """Write the newest snapshot to storage; return the result, or None where there are no snapshots."""
        return await self._checkpoints.flush(seconds, self._log.masker)

    async def retire(self) -> tuple[str, ...]:
        """Kill every process of the rank and close everything, for good; return what cannot be closed yet."""
        async with self._serial:
            await self._clear()
            self._progress.close()
            await self._checkpoints.close()
            going_on = {"a session": not self.sessions.idle, "a store": self._rendezvous.retiring}
            return tuple(name for name, there in going_on.items() if there)

    async def _clear(self) -> None:
        if self._process is not None:
            await self._process.end()
            self._process = None
        self._rendezvous.close()


def _starter(plan: RankPlan, node: _Node, fence: AttemptFence) -> RankStarter:
    return RankStarter(
        plan,
        node.directory,
        start_fork_server=node.start_fork_server,
        is_called_off=lambda: fence.called_off >= plan.attempt,
    )
