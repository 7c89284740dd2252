"""The terminal of one start of a rank: in an interactive job all of its input and output, else its debugger's.

A rank of another job has the null device as its input. Its ``pdb`` opens this terminal by its path while it waits for a
command (``forkserver/launch.py``) and holds an advisory lock on it meanwhile, so the kernel shows whether the
rank is at a breakpoint, also when the rank is killed there. Descriptors are read and written without blocking, with
bounded buffers: a slow reader delays only its writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
import time
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.observation import TerminalSeen
from orchestrator.runtime.ranks.session_messages import READ_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.runtime.ranks.session_messages import Terminal

_CHUNK: Final = 64 * 1024


class OutputEnd:
    """Collects the output of ``descriptor``, which it owns; ``woken`` is called at new output, and at its end."""

    def __init__(self, descriptor: int, woken: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor
        self._woken = woken
        self._data = bytearray()
        self._reading = False
        self._resume()

    @property
    def over(self) -> bool:
        """Whether all output has arrived."""
        return self._descriptor is None

    def __bool__(self) -> bool:
        return bool(self._data)

    def take(self) -> bytes:
        """Return the collected output once; the writer may continue."""
        data = bytes(self._data)
        self._data.clear()
        self._resume()
        return data

    def close(self) -> None:
        """Stop reading."""
        self._pause()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._woken()

    def _resume(self) -> None:
        if self._descriptor is not None and not self._reading:
            asyncio.get_running_loop().add_reader(self._descriptor, self._ready)
            self._reading = True

    def _pause(self) -> None:
        if self._descriptor is not None and self._reading:
            asyncio.get_running_loop().remove_reader(self._descriptor)
        self._reading = False

    def _ready(self) -> None:
        assert self._descriptor is not None
        try:
            data = os.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return
        except OSError:  # a terminal whose programs have ended
            data = b""
        if not data:
            self.close()
            return
        self._data += data
        if len(self._data) >= READ_BYTES:
            self._pause()
        self._woken()


class InputEnd:
    """Writes to ``descriptor``, which it owns, as fast as the other side reads. One writer at a time."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor
        self._waiting: asyncio.Event | None = None

    @property
    def descriptor(self) -> int | None:
        """The descriptor; None once it is closed."""
        return self._descriptor

    async def write(self, data: bytes) -> None:
        """Write all of ``data``; drop what a closed reader does not take."""
        rest = memoryview(data)
        while rest and self._descriptor is not None:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                await self._writable(self._descriptor)
            except OSError:
                self.close()

    def close(self) -> None:
        """Send end of file to the reader."""
        if self._descriptor is None:
            return
        if self._waiting is not None:
            asyncio.get_running_loop().remove_writer(self._descriptor)
            self._waiting.set()
        os.close(self._descriptor)
        self._descriptor = None

    async def _writable(self, descriptor: int) -> None:
        loop = asyncio.get_running_loop()
        waiting = self._waiting = asyncio.Event()
        loop.add_writer(descriptor, waiting.set)
        try:
            await waiting.wait()
        finally:
            self._waiting = None
            if self._descriptor is not None:
                loop.remove_writer(descriptor)


def set_size(descriptor: int, rows: int, columns: int) -> None:
    """Set the size of a terminal, where it is still open."""
    with contextlib.suppress(OSError):
        fcntl.ioctl(descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))


UNATTENDED_SECONDS: Final = 600.0
"""Time that a rank waits at a breakpoint with no client attached before its debugger's input ends."""
BUSY_SHARE: Final = 0.05
"""Processes that use this share of a core or more are not idle."""


class Use:
    """Time of a rank's last use. ``clock`` gives monotonic seconds."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float]) -> None:
        self._limit_seconds, self._clock = limit_seconds, clock
        self._used_at = clock()
        self._cpu: tuple[float, float] | None = None

    def note(self) -> None:
        """Record a use now: something was typed or printed, here or in a session beside the rank."""
        self._used_at = self._clock()

    def is_idle(self, cpu_seconds: float | None) -> bool:
        """Whether the rank was not used for the limit. ``cpu_seconds``: CPU time of its processes so far, if known."""
        now = self._clock()
        if cpu_seconds is not None and (self._cpu is None or cpu_seconds != self._cpu[0]):
            if self._cpu is None or cpu_seconds - self._cpu[0] >= BUSY_SHARE * (now - self._cpu[1]):
                self._used_at = now
            self._cpu = (cpu_seconds, now)
        return now - self._used_at >= self._limit_seconds


class Breakpoint:
    """Time at which a rank stopped at a breakpoint (``stopped_at``, wall time; None: at none), and time without a client."""

    def __init__(self, limit_seconds: float, clock: Callable[[], float]) -> None:
        self._limit_seconds, self._clock = limit_seconds, clock
        self._unattended_since = clock()
        self.stopped_at: float | None = None

    def left(self) -> None:
        """Record that a client has detached."""
        self._unattended_since = self._clock()

    def is_abandoned(self, *, at_prompt: bool, attended: bool, now: float) -> bool:
        """Record the state at wall time ``now``; return whether the rank has waited for a client for the limit.

        After that, it returns True again only when the limit has passed once more.
        """
        clock = self._clock()
        if not at_prompt:
            self.stopped_at = None
            return False
        if self.stopped_at is None:
            self.stopped_at, self._unattended_since = now, clock
        if attended:
            self._unattended_since = clock
        if clock - self._unattended_since < self._limit_seconds:
            return False
        self._unattended_since = clock
        return True


TERMINAL_VARIABLE: Final = "ORCH_TERMINAL"
KEPT_BYTES: Final = 64 * 1024
"""Size of the newest output that is kept; a client gets it when it attaches."""
END_OF_INPUT: Final = b"\x04"


class RankTerminal:
    """An open terminal. ``idle_seconds``: the job is interactive, and idle after this time; None: it is not.

    ``theirs`` is the rank's end, -1 once it is closed here; ``path`` names it. ``note`` writes a line into the rank's
    log. ``clock`` gives monotonic seconds.
    """

    def __init__(
        self,
        rank: int,
        *,
        idle_seconds: float | None,
        note: Callable[[str], None],
        unattended_seconds: float = UNATTENDED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank, self._note = rank, note
        self._ours, self.theirs = os.openpty()
        self.path = os.ttyname(self.theirs)
        self._input = InputEnd(os.dup(self._ours))
        self._writing = asyncio.Lock()
        self._use = None if idle_seconds is None else Use(idle_seconds, clock)
        self._breakpoint = Breakpoint(unattended_seconds, clock)
        self._debugger = OutputEnd(self.reader(), self._from_debugger) if self._use is None else None
        self._viewers: set[Callable[[bytes], None]] = set()
        self._kept = bytearray()
        self.newest = TerminalSeen(rank=rank, interactive=self.interactive)
        self.number = 0

    @property
    def interactive(self) -> bool:
        """Whether it is the rank's own standard input and output."""
        return self._use is not None

    def reader(self) -> int:
        """Return a new descriptor of the rank's output; the caller owns it."""
        return os.dup(self._ours)

    def started(self) -> None:
        """Close this side's copy of an interactive rank's end: the output then ends with the rank."""
        if self.interactive:
            self._close_theirs()

    def show(self, data: bytes) -> None:
        """Pass output of the rank to attached clients, and keep the newest."""
        self.use()
        self._kept += data
        del self._kept[:-KEPT_BYTES]
        for viewer in tuple(self._viewers):
            viewer(data)

    def attach(self, viewer: Callable[[bytes], None]) -> bytes:
        """Call ``viewer`` with all further output; return the newest output so far."""
        self._viewers.add(viewer)
        self.use()
        return bytes(self._kept)

    def detach(self, viewer: Callable[[bytes], None]) -> None:
        """Stop calling ``viewer``."""
        self._viewers.discard(viewer)
        self._breakpoint.left()

    async def write(self, data: bytes) -> None:
        """Write input; return when the rank, or its debugger, has room for it. Several clients may write."""
        self.use()
        async with self._writing:
            await self._input.write(data)

    async def end_input(self) -> None:
        """End the input of an interactive rank; a debugger stays, for the next client."""
        if self.interactive:
            await self.write(END_OF_INPUT)

    def resize(self, terminal: Terminal) -> None:
        """Set the terminal's size; the kernel notifies the rank (SIGWINCH)."""
        if self._input.descriptor is not None:
            set_size(self._input.descriptor, terminal.rows, terminal.columns)

    def use(self) -> None:
        """Record that the rank is in use."""
        if self._use is not None:
            self._use.note()

    def look(self, cpu_seconds: float | None, now: float) -> None:
        """Check whether the rank is idle, by its processes' ``cpu_seconds``, or at a breakpoint. ``now`` is wall time."""
        at_prompt = not self.interactive and self._is_locked()
        if self._breakpoint.is_abandoned(at_prompt=at_prompt, attended=bool(self._viewers), now=now):
            if self._input.descriptor is not None:
                with contextlib.suppress(OSError):
                    os.write(self._input.descriptor, END_OF_INPUT)
            self._note(
                f"[orch] rank {self._rank} was at a breakpoint with no client attached for too long; its debugger's input has ended"
            )
        seen = TerminalSeen(
            rank=self._rank,
            interactive=self.interactive,
            attached=len(self._viewers),
            idle=self._use is not None and self._use.is_idle(cpu_seconds),
            stopped_at=self._breakpoint.stopped_at,
        )
        if seen != self.newest:
            self.newest, self.number = seen, self.number + 1

    def close(self) -> None:
        """Close all descriptors."""
        if self._debugger is not None:
            self._debugger.close()
        self._input.close()
        self._close_theirs()
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1

    def _close_theirs(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def _is_locked(self) -> bool:
        """Whether another process holds a lock on the rank's end."""
        if self.theirs < 0:
            return False
        try:
            fcntl.flock(self.theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.theirs, fcntl.LOCK_UN)
        return False

    def _from_debugger(self) -> None:
        if self._debugger is not None and (data := self._debugger.take()):
            self.show(data)
