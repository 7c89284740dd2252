"""Sessions beside a running rank: commands with or without a terminal, its own terminal, connections to its ports.

Owned by the rank's actor; they end with the rank, with their client, or when polling stops. A command runs under a
keeper, like a rank: when the actor's process ends, the command's whole tree ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.ranks.rank_process import report_fault
from orchestrator.runtime.ranks.session_messages import (
    READ_BYTES,
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
    Terminal,
)
from orchestrator.runtime.ranks.terminal import (
    END_OF_INPUT,
    TERMINAL_VARIABLE,
    InputEnd,
    OutputEnd,
    RankTerminal,
    set_size,
)
from orchestrator.runtime.spawn.client import Exited

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.core.events import Exit
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.output import RankOutput
    from orchestrator.runtime.ranks.rank_events import AttemptFence, EventLog
    from orchestrator.runtime.ranks.rank_process import RankStarter
    from orchestrator.runtime.spawn.client import Lifeline

MAX_COMMANDS: Final = 16
MAX_CONNECTIONS: Final = 128
"""Most sessions at once beside one rank."""

LEASE_SECONDS: Final = 30.0
"""The daemon polls for output continuously; a session that is not polled for this long ends."""

SHELL: Final = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
_GRACE: Final = timedelta(seconds=2)
_END_SECONDS: Final = 10.0
_LEFT_OUT: Final = b"\r\n[orch] output was left out: this client reads too slowly\r\n"
_CONNECT_SECONDS: Final = 5.0

# A program in a session is not the rank: it must not write the rank's progress page, snapshots or error file.
_OF_THE_RANK: Final = ("ORCH_PROGRESS_PATH", "ORCH_SNAPSHOT_DIR", "ORCH_TERMINAL", "TORCHELASTIC_ERROR_FILE")


def session_environment(plan: RankPlan, request: CommandRequest) -> dict[str, str]:
    """Return the rank's environment for a command; without ``request.secrets``, no variable that holds one. Pure."""
    env = {name: value for name, value in plan.env.items() if name not in _OF_THE_RANK}
    if not request.secrets:
        hidden = [secret for secret in plan.secrets if secret]
        env = {name: value for name, value in env.items() if not any(secret in value for secret in hidden)}
    if request.terminal is not None:
        env["TERM"] = request.terminal.kind
    return env


class CommandSession:
    """A running command. ``ends`` are this side's descriptors: input, then one output (a terminal) or two."""

    def __init__(self, lifeline: Lifeline, ends: tuple[int, ...], *, terminal: bool) -> None:
        self._lifeline = lifeline
        self._terminal = terminal
        self._news = asyncio.Event()
        self._input = InputEnd(ends[0])
        self._outputs = [OutputEnd(end, self._news.set) for end in ends[1:]]
        self._exit: Exited | None = None
        self._reason = EndReason.EXITED
        self._gone = False
        self._following = asyncio.create_task(self._follow())

    @classmethod
    async def start(cls, starter: RankStarter, plan: RankPlan, request: CommandRequest) -> CommandSession:
        """Start the command through the node's fork server. Raises SessionRefusedError, ForkServerError."""
        argv = request.argv or SHELL
        spawn = SpawnRequest(
            mode="command",
            target=argv[0],
            args=argv[1:],
            cwd=plan.cwd,
            env=session_environment(plan, request),
            umask=plan.umask,
            secrets=plan.secrets,
        )
        ours, theirs = _terminal_ends(request.terminal) if request.terminal else _pipe_ends()
        try:
            spawned = await starter.command(spawn, *theirs)
        except BaseException:
            _close(ours)
            raise
        finally:
            _close(dict.fromkeys(theirs))
        if spawned is None:
            _close(ours)
            raise SessionRefusedError("the job is being stopped")
        return cls(spawned.lifeline, ours, terminal=request.terminal is not None)

    async def read(self, seconds: float) -> SessionOutput:
        """Return the output; wait for at most ``seconds`` until there is some."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not any(self._outputs) and not self._over:
                    self._news.clear()
                    await self._news.wait()
        texts = [output.take() for output in self._outputs]
        return SessionOutput(
            stdout=texts[0],
            stderr=texts[1] if len(texts) > 1 else b"",
            end=self._end if self._over and not any(texts) else None,
        )

    async def write(self, data: bytes) -> None:
        """Write input to the command; return when it was taken."""
        await self._input.write(data)

    async def end_input(self) -> None:
        """End the input."""
        if self._terminal:
            await self._input.write(END_OF_INPUT)
        else:
            self._input.close()

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size; the kernel notifies the command (SIGWINCH)."""
        if self._terminal and self._input.descriptor is not None:
            set_size(self._input.descriptor, rows, columns)

    def signal(self, number: int) -> None:
        """Send a signal to the command's process group."""
        self._lifeline.signal(number)

    async def close(self, reason: EndReason) -> None:
        """End the command: at once when its rank has ended, else by hanging up its terminal. No process of it is left."""
        if self._exit is None and not self._gone:
            self._reason = reason
            if reason is EndReason.RANK_ENDED:
                self._lifeline.kill()
            else:
                self._lifeline.signal(signal.SIGHUP)
                self._lifeline.stop(_GRACE)
        if not self._terminal:  # a terminal has one descriptor for both
            self._input.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await asyncio.shield(self._following)
        self._lifeline.close()  # a keeper that does not answer then kills the rest

    @property
    def _over(self) -> bool:
        return self._gone and all(output.over for output in self._outputs)

    @property
    def _end(self) -> SessionEnd:
        if self._reason is not EndReason.EXITED:
            return SessionEnd(reason=self._reason)
        if self._exit is None:  # its keeper was killed, and the command too
            return SessionEnd(reason=EndReason.EXITED, signal=int(signal.SIGKILL))
        return SessionEnd(reason=EndReason.EXITED, exit_code=self._exit.exit_code, signal=self._exit.signal)

    async def _follow(self) -> None:
        try:
            async for event in self._lifeline:
                if isinstance(event, Exited):
                    self._exit = event
        finally:
            self._gone = True
            self._input.close()
            self._lifeline.close()
            self._news.set()


def _terminal_ends(terminal: Terminal) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """Open a new terminal: this side's input and output, and the command's three descriptors."""
    ours, theirs = os.openpty()
    set_size(ours, terminal.rows, terminal.columns)
    return (ours, os.dup(ours)), (theirs, theirs, theirs)


def _pipe_ends() -> tuple[tuple[int, ...], tuple[int, int, int]]:
    (their_in, our_in), (our_out, their_out), (our_err, their_err) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
    return (our_in, our_out, our_err), (their_in, their_out, their_err)


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class PortSession:
    """Bytes from and to an open connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._reason: EndReason | None = None
        self._closing = asyncio.Event()

    @classmethod
    async def start(cls, request: PortRequest) -> PortSession:
        """Connect. Raises SessionRefusedError where nothing listens."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection("localhost", request.port, limit=READ_BYTES)
        except OSError as error:  # TimeoutError is one
            raise SessionRefusedError(
                f"nothing answers on port {request.port} of the rank's node ({error.strerror or 'no answer in time'})",
                "does the job listen there, on localhost, and on the node of this rank (--rank)?",
            ) from error
        return cls(reader, writer)

    async def read(self, seconds: float) -> SessionOutput:
        """Return received bytes; wait for at most ``seconds`` until there are some."""
        reading = asyncio.ensure_future(self._reader.read(READ_BYTES))
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait([reading, closing], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._reason is not None:
                return SessionOutput(end=SessionEnd(reason=self._reason))
            if not reading.done():
                return SessionOutput()  # a cancelled StreamReader.read loses nothing
            data = b"" if reading.exception() else reading.result()
            return SessionOutput(stdout=data, end=None if data else SessionEnd(reason=EndReason.EXITED))
        finally:
            for task in (reading, closing):
                task.cancel()
            await asyncio.gather(reading, closing, return_exceptions=True)

    async def write(self, data: bytes) -> None:
        """Send bytes; return when the other side takes them."""
        with contextlib.suppress(OSError):  # the reader gets the end
            self._writer.write(data)
            await self._writer.drain()

    async def end_input(self) -> None:
        """End this side's stream; the other side may still answer."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def resize(self, rows: int, columns: int) -> None:
        """Do nothing: there is no terminal."""

    def signal(self, number: int) -> None:
        """Do nothing: there is no process."""

    async def close(self, reason: EndReason) -> None:
        """Close the connection."""
        self._reason = self._reason or reason
        self._closing.set()
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_CONNECT_SECONDS):
                await self._writer.wait_closed()


class AttachSession:
    """Input to, and output from, a rank's terminal. If a slow client leaves too much output unread, the oldest is dropped."""

    def __init__(self, terminal: RankTerminal, request: AttachRequest) -> None:
        self._terminal, self._kind = terminal, "" if request.terminal is None else request.terminal.kind
        self._news = asyncio.Event()
        self._end: SessionEnd | None = None
        if request.terminal is not None:
            terminal.resize(request.terminal)
        self._data = bytearray(terminal.attach(self._take))

    async def read(self, seconds: float) -> SessionOutput:
        """Return the output; wait for at most ``seconds`` until there is some."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not self._data and self._end is None:
                    self._news.clear()
                    await self._news.wait()
        data = bytes(self._data)
        self._data.clear()
        return SessionOutput(stdout=data, end=self._end)

    async def write(self, data: bytes) -> None:
        """Write input to the terminal."""
        await self._terminal.write(data)

    async def end_input(self) -> None:
        """End the input."""
        await self._terminal.end_input()

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size."""
        if self._kind:
            self._terminal.resize(Terminal(rows=rows, columns=columns, kind=self._kind))

    def signal(self, number: int) -> None:
        """Do nothing: a terminal turns keys into signals, and a client that leaves does not end the rank."""

    def finish(self, exited: Exit | None) -> None:
        """End the session with the exit of the rank."""
        code, signal = (None, None) if exited is None else (exited.exit_code, exited.signal)
        self._over(SessionEnd(reason=EndReason.EXITED, exit_code=code, signal=signal))

    async def close(self, reason: EndReason) -> None:
        """Detach from the terminal, and end the session."""
        self._over(SessionEnd(reason=reason))

    def _over(self, end: SessionEnd) -> None:
        self._terminal.detach(self._take)
        self._end = self._end or end
        self._news.set()

    def _take(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > READ_BYTES:
            self._data[: len(self._data) - READ_BYTES // 2] = _LEFT_OUT
        self._news.set()


def attach(terminal: RankTerminal | None, request: AttachRequest, *, has_secrets: bool) -> AttachSession:
    """Attach to a rank's terminal. Raises SessionRefusedError."""
    if terminal is None:
        raise SessionRefusedError("the rank has no terminal: its node could not open one", "its log says why")
    if has_secrets and not request.secrets:
        raise SessionRefusedError("the rank has secrets of its user, which its terminal could show", "ask its user")
    return AttachSession(terminal, request)


def with_terminal(plan: RankPlan, output: RankOutput) -> tuple[RankPlan, RankTerminal | None]:
    """Return the plan with its terminal's path, and the terminal; None where the node has none left and none is needed.

    Raises OSError for an interactive job.
    """
    try:
        terminal = RankTerminal(plan.rank, idle_seconds=plan.idle_seconds, note=lambda line: output.note([line]))
    except OSError as error:
        if plan.idle_seconds is not None:
            raise
        report_fault("the rank has no terminal for a debugger", error)
        return plan, None
    if terminal.interactive:
        output.show(terminal.show)
        return plan, terminal
    output.show(lambda data: terminal.show(data.replace(b"\n", b"\r\n")))  # as a terminal ends lines
    return replace(plan, env={**plan.env, TERMINAL_VARIABLE: terminal.path}), terminal


Session = CommandSession | PortSession | AttachSession


class RankSessions:
    """Sessions of one rank, with its ``fence`` and ``log``. ``begin`` is called at each start of the rank."""

    def __init__(self, fence: AttemptFence, log: EventLog, *, lease_seconds: float = LEASE_SECONDS) -> None:
        self._fence, self._log = fence, log
        self._lease_seconds = lease_seconds
        self._plan: RankPlan | None = None
        self._starter: RankStarter | None = None
        self.terminal: RankTerminal | None = None
        self._numbers = itertools.count(1)
        self._sessions: dict[int, Session] = {}
        self._opening = 0
        self._leases: dict[int, asyncio.TimerHandle] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, plan: RankPlan, starter: RankStarter, terminal: RankTerminal | None) -> None:
        """Open sessions beside the process of ``plan``, which has this terminal; ``starter`` starts their commands."""
        self._close_terminal()
        self._plan, self._starter, self.terminal = plan, starter, terminal

    @property
    def interactive(self) -> bool:
        """Whether the rank runs on a terminal."""
        return self.terminal is not None and self.terminal.interactive

    async def open(self, attempt: int, request: SessionRequest) -> int:
        """Open a session and return its number. Raises SessionRefusedError."""
        self._fence.refuse_older(attempt)
        plan, starter = self._plan, self._starter
        if (
            plan is None
            or starter is None
            or plan.attempt != attempt
            or attempt != self._fence.attempt
            or not self._log.running
        ):
            raise SessionRefusedError("the rank does not run", "`orch status` shows the job's state")
        self._refuse_too_many(request)
        self._opening += 1
        try:
            session = await self._start(plan, starter, request)
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

    async def _start(self, plan: RankPlan, starter: RankStarter, request: SessionRequest) -> Session:
        match request:
            case AttachRequest():
                return attach(self.terminal, request, has_secrets=any(plan.secrets))
            case PortRequest():
                return await PortSession.start(request)
            case CommandRequest():
                return await CommandSession.start(starter, plan, request)

    def _refuse_too_many(self, request: SessionRequest) -> None:
        ports = isinstance(request, PortRequest)
        most = MAX_CONNECTIONS if ports else MAX_COMMANDS
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
