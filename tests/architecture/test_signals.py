"""No test can send a signal to the suite or to the programs that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.signals import OwnProcessError


@pytest.mark.parametrize("pid", [0, 1, -1, os.getppid(), -os.getpgrp()])
def test_who_runs_the_suite_gets_no_signal(pid: int) -> None:
    with pytest.raises(OwnProcessError, match="who is the victim"):
        os.kill(pid, signal.SIGCONT)  # harmless, should it arrive


@pytest.mark.parametrize("group", [0, 1, os.getpgrp()])
def test_nor_does_its_group(group: int) -> None:
    with pytest.raises(OwnProcessError, match="who is the victim"):
        os.killpg(group, signal.SIGCONT)


def test_its_children_do_and_whether_a_process_exists_may_be_asked() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    try:
        os.kill(os.getppid(), 0)
        os.kill(child.pid, 0)
        os.killpg(child.pid, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()
