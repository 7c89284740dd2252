"""The sessions beside one rank: opened while it runs, ended with it, or when no client polls any more."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.ranks.launch.start import RankStarter
from orchestrator.runtime.ranks.sessions.attached import AttachSession, attach
from orchestrator.runtime.ranks.sessions.command import CommandSession
from orchestrator.runtime.ranks.sessions.messages import (
    AttachRequest,
    CommandRequest,
    EndOfInput,
    EndReason,
    Input,
    Leave,
    PortRequest,
    SessionEnd,
    SessionMessage,
    SessionOutput,
    SessionRefusedError,
    SessionRequest,
    Signal,
    Size,
)
from orchestrator.runtime.ranks.sessions.port import PortSession

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from orchestrator.runtime.ranks.event_log import EventLog
    from orchestrator.runtime.ranks.fence import AttemptFence
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.sessions.rank_terminal import RankTerminal

MOST_COMMANDS: Final = 16
MOST_CONNECTIONS: Final = 128
"""Most sessions at once beside one rank."""

LEASE_SECONDS: Final = 30.0
"""The daemon polls for output continuously; a session that is not polled for this long ends."""

Session = CommandSession | PortSession | AttachSession


class RankSessions:
    """Sessions of one rank, with its ``fence`` and ``log``. ``begin`` is called with the plan of each start."""

    def __init__(
        self,
        fence: AttemptFence,
        log: EventLog,
        node_dir: Path,
        start_fork_server: Callable[[RankPlan], Awaitable[None]],
        *,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self._fence, self._log = fence, log
        self._node_dir = node_dir
        self._start_fork_server = start_fork_server
        self._lease_seconds = lease_seconds
        self._plan: RankPlan | None = None
        self.terminal: RankTerminal | None = None
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._opening = 0
        self._leases: dict[int, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, plan: RankPlan, terminal: RankTerminal | None) -> None:
        """Open sessions beside the process of ``plan``, which has this terminal, from now on."""
        self._close_terminal()
        self._plan, self.terminal = plan, terminal

    @property
    def interactive(self) -> bool:
        """Whether the rank runs on a terminal."""
        return self.terminal is not None and self.terminal.interactive

    @property
    def idle(self) -> bool:
        """Whether there is no session and no terminal, not even an ended one that a client may still read."""
        return not (self._sessions or self._opening or self._ending or self.terminal)

    async def open(self, attempt: int, request: SessionRequest) -> int:
        """Open a session and return its number. Raises SessionRefusedError."""
        self._fence.refuse_older(attempt)
        plan = self._plan
        if plan is None or plan.attempt != attempt or attempt != self._fence.attempt or not self._log.running:
            raise SessionRefusedError("the rank does not run", "`orch status` shows the job's state")
        self._refuse_too_many(request)
        self._opening += 1
        try:
            session = await self._start(plan, request)
        finally:
            self._opening -= 1
        if not self._log.running or attempt != self._fence.attempt:
            await session.close(EndReason.RANK_ENDED)
            raise SessionRefusedError("the rank has ended", "`orch status` says how")
        number = next(self._numbers)
        self._sessions[number] = session
        self._renew(number)
        return number

    async def read(self, number: int, seconds: float) -> SessionOutput:
        """Return a session's output; wait for at most ``seconds`` until there is some. The last answer has an end."""
        session = self._sessions.get(number)
        if session is None:
            return SessionOutput(end=SessionEnd(reason=EndReason.ABANDONED))
        self._stop_lease(number)
        try:
            output = await session.read(seconds)
        finally:
            self._renew(number)
        if output.end is not None:
            await self.close(number)
        elif output.stdout or output.stderr:
            self._use()
        return output

    async def send(self, number: int, message: SessionMessage) -> None:
        """Send a client's message to a session; an ended one drops it. Return when it was taken."""
        session = self._sessions.get(number)
        if session is None:
            return
        self._use()
        match message:
            case Input():
                await session.write(message.data)
            case EndOfInput():
                await session.end_input()
            case Size():
                session.resize(message.rows, message.columns)
            case Signal():
                session.signal(message.number)
            case Leave():
                await self.close(number)

    async def close(self, number: int, reason: EndReason = EndReason.ABANDONED) -> None:
        """End a session; no process of it is left on return."""
        session = self._sessions.pop(number, None)
        self._stop_lease(number)
        if session is not None:
            await session.close(reason)

    async def rank_ended(self) -> None:
        """End every session; on return their GPU and other memory is free. Readers get the reason."""
        sessions = list(self._sessions.values())
        for session in sessions:
            if isinstance(session, AttachSession):
                session.finish(self._log.exit)
        await asyncio.gather(*(session.close(EndReason.RANK_ENDED) for session in sessions), return_exceptions=True)
        self._close_terminal()

    async def _start(self, plan: RankPlan, request: SessionRequest) -> Session:
        if isinstance(request, AttachRequest):
            return attach(self.terminal, request, has_secrets=any(plan.secrets))
        if not isinstance(request, CommandRequest):
            return await PortSession.start(request)
        starter = RankStarter(
            plan,
            self._node_dir,
            start_fork_server=self._start_fork_server,
            is_called_off=lambda: self._fence.called_off >= plan.attempt or not self._log.running,
        )
        return await CommandSession.start(starter, plan, request)

    def _refuse_too_many(self, request: SessionRequest) -> None:
        ports = isinstance(request, PortRequest)
        most = MOST_CONNECTIONS if ports else MOST_COMMANDS
        there = sum(isinstance(session, PortSession) == ports for session in self._sessions.values())
        if there + self._opening >= most:
            what = "connections" if ports else "commands and clients"
            raise SessionRefusedError(f"the rank has {there} {what} already, as many as it may", "end one of them")

    def _close_terminal(self) -> None:
        if self.terminal is not None:
            self.terminal.close()
            self.terminal = None

    def _use(self) -> None:
        if self.terminal is not None:
            self.terminal.use()

    def _renew(self, number: int) -> None:
        self._stop_lease(number)
        if number in self._sessions:
            loop = asyncio.get_running_loop()
            self._leases[number] = loop.call_later(self._lease_seconds, self._expire, number)

    def _stop_lease(self, number: int) -> None:
        lease = self._leases.pop(number, None)
        if lease is not None:
            lease.cancel()

    def _expire(self, number: int) -> None:
        task = asyncio.create_task(self.close(number))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
