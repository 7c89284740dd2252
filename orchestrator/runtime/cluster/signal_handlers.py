"""Keeps the process's own handling of SIGTERM beside that of Ray.

``ray.init`` installs a handler in C++ for SIGTERM, whatever handler there is. It arms an alarm that aborts the process 3 s later,
prints a stack, and then calls the handler that it replaced. A process that needs longer than that to end ends by SIGABRT, in
the middle of what it does; so does one that needs longer for the stack, on a busy machine. Ray has no option to leave it out.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

TAKEN_BY_RAY: Final = (signal.SIGTERM,)


def restore_handlers() -> None:
    """Put the handlers that Python knows of back in place of Ray's. Call it in the main thread, during and after each connection."""
    for number in TAKEN_BY_RAY:
        handler = signal.getsignal(number)
        if handler is not None:
            signal.signal(number, handler)
            signal.siginterrupt(number, False)


def disarm_abort(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Cancel the alarm of Ray's handler: for a signal that came before ``restore_handlers``.

    As a handler of Python it runs between any two instructions of the main thread, whatever the event loop does.
    """
    signal.alarm(0)
