"""The helpers that inspect processes tolerate processes that have ended."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil

from tests.support.processes import command_line


def test_the_command_line_of_what_has_ended_is_empty() -> None:
    program = "print(flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()  # has begun
    process = psutil.Process(child.pid)
    assert command_line(process) == [sys.executable, "-c", program]
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # has ended, and is not reaped
    assert process.status() == psutil.STATUS_ZOMBIE
    assert command_line(process) == []
    child.wait()
    assert command_line(process) == []
