"""Detects a request to stop, and makes all ranks of a node stop after the same step."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from orchestrator.train.script.shm_agreement import ShmAgreement

_PATIENCE_SECONDS = 5.0  # for ranks that do not train in step: then each stops independently
_PATIENCE_CALLS = 5


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
