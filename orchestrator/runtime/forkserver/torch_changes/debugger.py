"""Connects `pdb` in a rank to the user: at a prompt it reads from and writes to the rank's terminal.

A rank's standard input is the null device, at whose end of file `pdb` gives up. `breakpoint()`, `pdb.set_trace()`, post-mortem
debugging and `torch.distributed.breakpoint()` all stop in `Pdb.interaction`, so that one is wrapped, once, in the fork
server. While the prompt is open, an advisory lock on the terminal shows it to the rank's supervisor.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import pdb  # noqa: T100 - it is what is wrapped
    from collections.abc import Iterator

_VARIABLE = "ORCH_TERMINAL"
_NAMES_OF_USERS = frozenset({"code", "cmd"})
"""Modules of the standard library that `pdb` imports, and whose names users give to their own."""


def install() -> None:
    """Wrap `Pdb.interaction` of this interpreter.

    A script with its own module `code` beside it imports that one, as in a fresh interpreter, and needs no cold start.
    """
    known = set(sys.modules)
    import pdb  # noqa: T100 - it is what is wrapped

    for name in _NAMES_OF_USERS & (set(sys.modules) - known):
        del sys.modules[name]
    original = pdb.Pdb.interaction

    @functools.wraps(original)
    def interaction(self: pdb.Pdb, *args: Any, **kwargs: Any) -> Any:
        with _on_terminal(self):
            return original(self, *args, **kwargs)

    pdb.Pdb.interaction = interaction  # type: ignore[method-assign]


@contextlib.contextmanager
def _on_terminal(debugger: pdb.Pdb) -> Iterator[None]:
    path = os.environ.get(_VARIABLE, "")
    if not path or not debugger.use_rawinput:  # it has been given files of its own
        yield
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        yield
        return
    saved = debugger.stdin, debugger.stdout, debugger.use_rawinput
    try:
        with _opened(descriptor, "r") as source, _opened(descriptor, "w") as sink:
            debugger.stdin, debugger.stdout, debugger.use_rawinput = source, sink, False
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
    finally:
        debugger.stdin, debugger.stdout, debugger.use_rawinput = saved
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone would not unlock it: a forked worker has a copy
        os.close(descriptor)


def _opened(descriptor: int, mode: str) -> TextIO:
    return open(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)  # type: ignore[return-value]
