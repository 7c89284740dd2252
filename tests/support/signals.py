"""Keeps a test from sending signals to the suite and its parents.

For ``kill``, process 0 is the sender's whole group, -1 is every process, and 1 may end the machine. A test that uses such a
number because its target does not exist would end the suite and the programs that have started it, without a message.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import psutil

EVERYTHING: Final = 1
"""Group 1, for which ``killpg`` calls ``kill`` with process -1."""


class OwnProcessError(AssertionError):
    """A signal would have reached the suite itself, or every process."""


def guard() -> None:
    """Make ``os.kill`` and ``os.killpg`` of this process and its forks refuse such targets."""
    if os.kill.__module__ == __name__:
        return
    above = {process.pid for process in psutil.Process().parents()}
    groups = {EVERYTHING, os.getpgrp(), *(os.getpgid(pid) for pid in above)}
    os.kill = _refusing(os.kill, lambda pid: -pid in groups or pid in above or -1 <= pid <= 1)
    os.killpg = _refusing(os.killpg, lambda group: group in groups or group <= 0)


def _refusing(send: Callable[[int, int], None], is_own: Callable[[int], bool]) -> Callable[[int, int], None]:
    def guarded(pid: int, number: int, /) -> None:
        if number and is_own(pid):  # 0 only tests whether the process exists
            raise OwnProcessError(f"signal {number} to {pid} would hit this suite: who is the victim?")
        send(pid, number)

    return guarded
