"""A command beside a running rank: in its directory and environment, with its own terminal or with pipes.

It runs under a keeper, like a rank: when this object's process ends, the command's whole tree ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import termios
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.ranks.sessions.descriptors import InputEnd, OutputEnd
from orchestrator.runtime.ranks.sessions.messages import (
    CommandRequest,
    EndReason,
    SessionEnd,
    SessionOutput,
    SessionRefusedError,
    Terminal,
)
from orchestrator.runtime.spawn.lifeline import Exited

if TYPE_CHECKING:
    from orchestrator.runtime.ranks.launch.start import RankStarter
    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.spawn.lifeline import Lifeline

SHELL: Final = ("/bin/sh", "-c", "command -v bash >/dev/null && exec bash; exec sh")
_GRACE: Final = timedelta(seconds=2)
_END_SECONDS: Final = 10.0
_END_OF_INPUT: Final = b"\x04"

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
            await self._input.write(_END_OF_INPUT)
        else:
            self._input.close()

    def resize(self, rows: int, columns: int) -> None:
        """Set the terminal's size; the kernel notifies the command (SIGWINCH)."""
        if self._terminal and self._input.descriptor is not None:
            _set_size(self._input.descriptor, rows, columns)

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
    _set_size(ours, terminal.rows, terminal.columns)
    return (ours, os.dup(ours)), (theirs, theirs, theirs)


def _pipe_ends() -> tuple[tuple[int, ...], tuple[int, int, int]]:
    (their_in, our_in), (our_out, their_out), (our_err, their_err) = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
    return (our_in, our_out, our_err), (their_in, their_out, their_err)


def _close(descriptors: object) -> None:
    for descriptor in descriptors:  # type: ignore[attr-defined]  # a tuple, or a dictionary's keys
        os.close(descriptor)


def _set_size(descriptor: int, rows: int, columns: int) -> None:
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
