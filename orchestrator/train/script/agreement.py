"""Two agreements between the ranks of one node, through a page of shared memory instead of a collective; and the requests to stop.

- When to save: rank 0 decides, the others follow at the same step (save_schedule.py).
- When to stop: the first rank that receives a stop proposes the next step, so that no rank leaves its neighbours
  alone in a collective.

Both rely on synchronous training: a rank can pass the collectives of step n + 1 only after every other rank has
finished its loop's body of step n. Each call costs a few hundred nanoseconds and no system call.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.private_files import make_private

if TYPE_CHECKING:
    from types import FrameType

_PREFIX = "board-"
_WORD = struct.Struct("<Q")
_SAVE_LAST, _SAVE_NEXT, _STOP = 0, 64, 128  # on separate cache lines; a step is stored plus one, 0 means none
_PATIENCE_SECONDS = 5.0  # for ranks that do not train in step: then each stops independently
_PATIENCE_CALLS = 5


class ShmAgreement:
    """The page of one run's ranks. ``run`` must be equal on all of them and differ between runs."""

    def __init__(self, directory: str | os.PathLike[str], run: str) -> None:
        """Raises OSError when the page cannot be created."""
        folder = make_private(Path(directory))
        path = folder / f"{_PREFIX}{run}"
        for other in folder.glob(f"{_PREFIX}*"):
            if other != path:
                other.unlink(missing_ok=True)  # of an ended run
        self._handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(self._handle, 0, mmap.PAGESIZE)  # keeps what another rank has already written
            self._page = mmap.mmap(self._handle, mmap.PAGESIZE)
        except OSError:
            os.close(self._handle)
            raise

    def publish_save(self, *, last: int, upcoming: int | None) -> None:
        """Publish that rank 0 saves at step ``last`` (-1: never yet), and again at the first step from ``upcoming`` on."""
        self._set(_SAVE_LAST, last + 1)
        self._set(
            _SAVE_NEXT, 0 if upcoming is None else upcoming + 1
        )  # second: a rank that sees this one also sees the other

    def saves_at(self, step: int) -> bool:
        """Return whether rank 0 saves at ``step``, or will when it reaches it; for the other ranks."""
        upcoming = self._get(_SAVE_NEXT)
        return self._get(_SAVE_LAST) == step + 1 or 0 < upcoming <= step + 1

    @property
    def stop_call(self) -> int | None:
        """Return the number of the last should_stop() call, if one is set."""
        return self._get(_STOP) or None

    def propose_stop(self, call: int) -> int:
        """Make ``call`` the last one, unless another rank was faster; return the effective one."""
        fcntl.flock(self._handle, fcntl.LOCK_EX)  # held for microseconds, and freed with the process
        try:
            if self._get(_STOP) == 0:
                self._set(_STOP, call)
            return self._get(_STOP)
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        """Unmap."""
        self._page.close()
        os.close(self._handle)

    def _get(self, at: int) -> int:
        return int(_WORD.unpack_from(self._page, at)[0])

    def _set(self, at: int, value: int) -> None:
        _WORD.pack_into(self._page, at, value)


class StopSignal:
    """Remembers a SIGTERM. The handler is installed on first use, and only where there is no other."""

    def __init__(self) -> None:
        self.received = False
        self._tried = False

    def watch(self) -> None:
        """Install the handler if SIGTERM still has its default meaning and this is the main thread. Once."""
        if self._tried or threading.current_thread() is not threading.main_thread():
            return
        self._tried = True
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        signal.signal(signal.SIGTERM, self._remember)
        # A forked child (a data-loader worker) would inherit the handler and survive its parent's terminate().
        os.register_at_fork(after_in_child=self._forget_in_child)

    def _remember(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True

    def _forget_in_child(self) -> None:
        if signal.getsignal(signal.SIGTERM) == self._remember:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


class StopAgreement:
    """Turns a stop request to one rank into a stop of all ranks. ``board`` None: each rank stops independently."""

    def __init__(self, board: ShmAgreement | None) -> None:
        self._board = board
        self._calls = 0
        self._last_call: float | None = None
        self._between = 0.0  # seconds between calls
        self._since: float | None = None

    def is_now(self, *, requested: bool) -> bool:
        """Whether to stop at this call; ``requested``: this rank has a stop request. Call it once per step."""
        if self._board is None:
            return requested
        self._calls += 1
        last = self._board.stop_call
        if last is None:
            if not requested:
                self._time()
                return False
            last = self._board.propose_stop(self._calls + 1)
        return self._calls >= last or self._is_overdue()

    def _time(self) -> None:
        now = time.monotonic()
        if self._last_call is not None:
            self._between = now - self._last_call
        self._last_call = now

    def _is_overdue(self) -> bool:
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since > max(_PATIENCE_SECONDS, _PATIENCE_CALLS * self._between)
