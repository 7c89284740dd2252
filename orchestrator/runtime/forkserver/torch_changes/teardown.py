"""Works around a race at the end of torch programs.

Seen in torch 2.13 with gloo: the thread that ran a collective needs the GIL for a moment to release what it ran (the
Python context of the backward pass). If the main thread reaches the process group's destructor first, it joins that thread
with the GIL held, and both wait for ever; if it reaches the interpreter's end first, the thread is ended inside a C++
destructor and the process aborts after all its work is done. A fresh process, which still imports and compiles, loses this
race in a few of a hundred runs; a forked one, with nothing left to import, in a third of them. The fix releases the GIL
for a moment where the main thread would have been busy.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

# Twice the interpreter's switch interval: a thread that waits for the GIL gets it within that time.
_PAUSE_SECONDS = 0.01


def let_threads_finish() -> None:
    """Give torch's threads time to finish, if this process still has a process group."""
    distributed: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is not None and distributed.is_initialized():
        time.sleep(_PAUSE_SECONDS)


def patch_teardown(distributed: Any) -> None:
    """Make `destroy_process_group` give torch's threads time to finish first."""
    original = distributed.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(*args: Any, **kwargs: Any) -> Any:
        time.sleep(_PAUSE_SECONDS)
        return original(*args, **kwargs)

    distributed.destroy_process_group = destroy_process_group
    distributed.distributed_c10d.destroy_process_group = destroy_process_group
