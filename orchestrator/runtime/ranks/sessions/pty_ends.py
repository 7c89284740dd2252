"""Both ends of a new terminal: this side's, and the rank's."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import struct
import termios
from typing import TYPE_CHECKING

from orchestrator.runtime.ranks.sessions.descriptors import InputEnd

if TYPE_CHECKING:
    from orchestrator.runtime.ranks.sessions.messages import Terminal


class PtyEnds:
    """An open terminal. ``theirs`` is the rank's end, -1 once it is closed here; ``path`` names it."""

    def __init__(self) -> None:
        self._ours, self.theirs = os.openpty()
        self.path = os.ttyname(self.theirs)
        self._input = InputEnd(os.dup(self._ours))
        self._writing = asyncio.Lock()

    def reader(self) -> int:
        """Return a new descriptor of what the rank writes; the caller owns it."""
        return os.dup(self._ours)

    def close_theirs(self) -> None:
        """Close this side's copy of the rank's end: what is read then ends with the rank."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    async def write(self, data: bytes) -> None:
        """Write input; return when there was room for it. Several clients may write."""
        async with self._writing:
            await self._input.write(data)

    def write_now(self, data: bytes) -> None:
        """Write input where there is room for it."""
        if self._input.descriptor is not None:
            with contextlib.suppress(OSError):
                os.write(self._input.descriptor, data)

    def resize(self, terminal: Terminal) -> None:
        """Set the terminal's size; the kernel notifies the rank (SIGWINCH)."""
        if self._input.descriptor is not None:
            size = struct.pack("HHHH", terminal.rows, terminal.columns, 0, 0)
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._input.descriptor, termios.TIOCSWINSZ, size)

    def is_locked(self) -> bool:
        """Whether another process holds a lock on the rank's end."""
        if self.theirs < 0:
            return False
        try:
            fcntl.flock(self.theirs, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self.theirs, fcntl.LOCK_UN)
        return False

    def close(self) -> None:
        """Close all descriptors."""
        self._input.close()
        self.close_theirs()
        if self._ours >= 0:
            os.close(self._ours)
            self._ours = -1
