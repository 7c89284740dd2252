"""Keeps a test from signalling who runs it.

To ``kill``, process 0 is the sender's whole group, -1 is every process, and 1 may end the machine. A test that takes such a
number for its victim, since that one is just not there, would end the suite with all that has started it, and say nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import psutil

EVERYTHING: Final = 1
"""To ``killpg``: it asks ``kill`` for process -1."""


class OwnProcessError(AssertionError):
    """A signal would have hit the suite itself, or everything."""


def guard() -> None:
    """Have ``os.kill`` and ``os.killpg`` of this process and its forks refuse such victims."""
    if os.kill.__module__ == __name__:
        return
    above = {process.pid for process in psutil.Process().parents()}
    groups = {EVERYTHING, os.getpgrp(), *(os.getpgid(pid) for pid in above)}
    os.kill = _refusing(os.kill, lambda pid: -pid in groups or pid in above or -1 <= pid <= 1)
    os.killpg = _refusing(os.killpg, lambda group: group in groups or group <= 0)


def _refusing(send: Callable[[int, int], None], is_own: Callable[[int], bool]) -> Callable[[int, int], None]:
    def guarded(pid: int, number: int, /) -> None:
        if number and is_own(pid):  # 0 only asks whether there is such a process
            raise OwnProcessError(f"signal {number} to {pid} would hit this suite: who is the victim?")
        send(pid, number)

    return guarded
