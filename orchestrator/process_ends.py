"""Waits for the ends of processes, including those that are not children of this process.

psutil's own wait lasts until a process is reaped. Process 1 of a container is often a program that reaps late or never.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence


def wait_ended(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait up to ``seconds``; return the processes that have not ended. Reaps those that are children of this one."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        living: dict[int, psutil.Process] = {}
        poller = select.poll()
        for process in processes:
            with contextlib.suppress(OSError, psutil.Error):
                handle = os.pidfd_open(process.pid)
                stack.callback(os.close, handle)
                if process.is_running():  # its id has not been reused
                    living[handle] = process
                    poller.register(handle, select.POLLIN)
        while living and (left := deadline - time.monotonic()) > 0:
            for handle, _ in poller.poll(left * 1000):
                poller.unregister(handle)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(living.pop(handle).pid, os.WNOHANG)
        return list(living.values())
