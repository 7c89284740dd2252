"""Records in a training process that SIGTERM has reached a handler of the script.

A script may exit with 0 after a SIGTERM, as after its last step, so its exit status is no evidence. Therefore the two
functions of the `signal` module through which Python code sets and reads handlers are replaced: a SIGTERM handler is
called through an object that records the time first, and the script still sees its own handler. Without a handler of
the script nothing is installed: SIGTERM then ends the process, and its status shows it.

Replaces only these two functions. A handler set by C code, or in a program that the process executes, is not seen.
"""

from __future__ import annotations

import functools
import signal
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class _Noting:
    """A handler of the script that records each call first."""

    __slots__ = ("handler", "note")

    def __init__(self, handler: Callable[[int, Any], object], note: Callable[[], None]) -> None:
        self.handler, self.note = handler, note

    def __call__(self, number: int, frame: Any) -> object:
        self.note()
        return self.handler(number, frame)


def note_sigterm(note: Callable[[], None]) -> None:
    """Call ``note`` before each call of a SIGTERM handler that Python code sets from now on."""
    set_handler, get_handler = signal.signal, signal.getsignal

    @functools.wraps(set_handler)
    def noting_signal(signalnum: Any, handler: Any) -> Any:
        noting = signalnum == signal.SIGTERM and callable(handler)
        return _of_script(set_handler(signalnum, _Noting(handler, note) if noting else handler))

    @functools.wraps(get_handler)
    def noting_getsignal(signalnum: Any) -> Any:
        return _of_script(get_handler(signalnum))

    signal.signal = noting_signal
    signal.getsignal = noting_getsignal


def _of_script(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Noting) else handler
