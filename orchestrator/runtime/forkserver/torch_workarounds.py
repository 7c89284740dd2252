"""Where torch counts on being slow.

Owns one race, seen in torch 2.13 with gloo: the thread that ran a collective needs the GIL for a moment to let go of
what it ran (the Python context of the backward pass). If the main thread reaches the process group's destructor first,
it joins that thread with the GIL held, and both wait for ever; if it reaches the interpreter's end first, the thread is
ended inside a C++ destructor and the process aborts after all its work is done. A fresh process, which imports and
compiles its way to its end, loses this race in a few of a hundred runs; a forked one, with nothing left to import, in a
third of them. The cure is to let go of the GIL for a moment where the main thread would have been busy.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

# Twice the interpreter's switch interval: a thread that wants the GIL has had it by then.
_PAUSE_SECONDS = 0.01


def let_threads_finish() -> None:
    """Gives torch's threads their turn, if this process has left a process group behind."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is not None and distributed.is_initialized():
        time.sleep(_PAUSE_SECONDS)


def mend_teardown(distributed: Any) -> None:
    """Makes `destroy_process_group` give torch's threads their turn first."""
    original = distributed.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_PAUSE_SECONDS)
        return original(*args, **kwargs)

    distributed.destroy_process_group = destroy_process_group
    distributed.distributed_c10d.destroy_process_group = destroy_process_group
