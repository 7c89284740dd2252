"""Notices a request to stop: SIGTERM, or the flag that the rank actor sets on the progress page."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType


class StopSignal:
    """Remembers a SIGTERM. The handler is installed on first use, and only where nobody else has one."""

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
