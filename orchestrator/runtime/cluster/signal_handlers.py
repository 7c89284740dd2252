"""Keeps the process's own SIGTERM handler although Ray installs one.

``ray.init`` replaces any SIGTERM handler by one in C++. It arms an alarm that aborts the process 3 s later, prints a stack,
and then calls the handler that it replaced. A process that takes longer to end is killed by SIGABRT halfway; on a busy
machine the stack alone can take that long. Ray has no option to disable the handler.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

TAKEN_BY_RAY: Final = (signal.SIGTERM,)


def restore_handlers() -> None:
    """Restore Python's own handlers in place of Ray's. Call in the main thread, during and after each connection."""
    for number in TAKEN_BY_RAY:
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def disarm_abort(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Cancel the alarm of Ray's handler, for a signal that arrived before ``restore_handlers``.

    As a Python handler it runs between any two instructions of the main thread, whatever the event loop does.
    """
    signal.alarm(0)
