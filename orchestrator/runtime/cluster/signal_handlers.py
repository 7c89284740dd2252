"""Keeps the process's own SIGTERM handler although Ray installs one when it connects, and resets it when it disconnects.

``ray.init`` replaces any SIGTERM handler by one in C++, which arms an alarm that aborts the process 3 s later, prints a
stack, and then calls the handler that it replaced. A process that takes longer to end is killed by SIGABRT halfway; on
a busy machine the stack alone can take that long. Ray has no option to disable the handler, but installs it once in a
process: ``claim_handlers`` has it do so before it connects, when Python's handler can be restored at once. While Ray
connects, it holds the interpreter's lock, on a busy machine for seconds, and no Python code could restore the handler.
"""

from __future__ import annotations

import contextlib
import ctypes
import signal
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from types import FrameType

TAKEN_BY_RAY: Final = (signal.SIGTERM,)
INSTALL: Final = "_ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb"
"""``ray::RayLog::InstallFailureSignalHandler(const char *argv0, bool call_previous_handler)``"""


def claim_handlers() -> None:
    """Have Ray install its handlers, and restore Python's own. Call in the main thread, before the first connection.

    A Ray without that function installs them while it connects: ``restore_handlers`` and ``disarm_abort`` undo that.
    """
    from ray import _raylet

    with contextlib.suppress(AttributeError):
        install = getattr(ctypes.CDLL(_raylet.__file__), INSTALL)
        install.argtypes, install.restype = (ctypes.c_char_p, ctypes.c_bool), None
        install(None, True)
    restore_handlers()


def restore_handlers() -> None:
    """Restore Python's own handlers in place of Ray's. Call in the main thread, while Ray connects or disconnects, and after."""
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
