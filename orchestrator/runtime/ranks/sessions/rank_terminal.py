"""The terminal of one start of a rank: in an interactive job all of its input and output, else its debugger's.

A rank of another job has the null device as its input. Its ``pdb`` opens this terminal by its path while it waits for a
command (``forkserver/interpreter.py``) and holds an advisory lock on it meanwhile, so the kernel shows whether the
rank is at a breakpoint, also when the rank is killed there.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from orchestrator.core.diagnosis.observation import TerminalSeen
from orchestrator.runtime.ranks.sessions.attention import UNATTENDED_SECONDS, Breakpoint, Use
from orchestrator.runtime.ranks.sessions.descriptors import OutputEnd
from orchestrator.runtime.ranks.sessions.pty_ends import PtyEnds

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.runtime.ranks.sessions.messages import Terminal

TERMINAL_VARIABLE: Final = "ORCH_TERMINAL"
KEPT_BYTES: Final = 64 * 1024
"""Size of the newest output that is kept; a client gets it when it attaches."""
_END_OF_INPUT: Final = b"\x04"


class RankTerminal:
    """An open terminal. ``idle_seconds``: the job is interactive, and idle after this time; None: it is not.

    ``note`` writes a line into the rank's log. ``clock`` gives monotonic seconds.
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
        self._ends = PtyEnds()
        self._use = None if idle_seconds is None else Use(idle_seconds, clock)
        self._breakpoint = Breakpoint(unattended_seconds, clock)
        self._debugger = OutputEnd(self._ends.reader(), self._from_debugger) if self._use is None else None
        self._viewers: set[Callable[[bytes], None]] = set()
        self._kept = bytearray()
        self.newest = TerminalSeen(rank=rank, interactive=self.interactive)
        self.number = 0

    @property
    def interactive(self) -> bool:
        """Whether it is the rank's own standard input and output."""
        return self._use is not None

    @property
    def path(self) -> str:
        """The path of the rank's end."""
        return self._ends.path

    @property
    def theirs(self) -> int:
        """The rank's end."""
        return self._ends.theirs

    def reader(self) -> int:
        """Return a new descriptor of the rank's output, for its log; the caller owns it."""
        return self._ends.reader()

    def started(self) -> None:
        """Close this side's copy of an interactive rank's end: the output then ends with the rank."""
        if self.interactive:
            self._ends.close_theirs()

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
        """Write input; return when the rank, or its debugger, has room for it."""
        self.use()
        await self._ends.write(data)

    async def end_input(self) -> None:
        """End the input of an interactive rank; a debugger stays, for the next client."""
        if self.interactive:
            await self.write(_END_OF_INPUT)

    def resize(self, terminal: Terminal) -> None:
        """Set the terminal's size."""
        self._ends.resize(terminal)

    def use(self) -> None:
        """Record that the rank is in use."""
        if self._use is not None:
            self._use.note()

    def look(self, cpu_seconds: float | None, now: float) -> None:
        """Check whether the rank is idle, by its processes' ``cpu_seconds``, or at a breakpoint. ``now`` is wall time."""
        at_prompt = not self.interactive and self._ends.is_locked()
        if self._breakpoint.is_abandoned(at_prompt=at_prompt, attended=bool(self._viewers), now=now):
            self._ends.write_now(_END_OF_INPUT)
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
        self._ends.close()

    def _from_debugger(self) -> None:
        if self._debugger is not None and (data := self._debugger.take()):
            self.show(data)
