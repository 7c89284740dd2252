"""Waits for the ends of processes, also of those that are not this one's children.

A process that has ended may still have to be reaped. Process 1 of a container is often a program that does so late or never;
psutil's own wait lasts until then.
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
    """Return those that have not ended after ``seconds``, as soon as there are none. Reaps those that are this process's children."""
    deadline = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        living: dict[int, psutil.Process] = {}
        poller = select.poll()
        for process in processes:
            with contextlib.suppress(OSError, psutil.Error):
                handle = os.pidfd_open(process.pid)
                stack.callback(os.close, handle)
                if process.is_running():  # its number belongs to no other process
                    living[handle] = process
                    poller.register(handle, select.POLLIN)
        while living and (left := deadline - time.monotonic()) > 0:
            for handle, _ in poller.poll(left * 1000):
                poller.unregister(handle)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(living.pop(handle).pid, os.WNOHANG)
        return list(living.values())
