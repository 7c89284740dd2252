"""A script's handler for SIGTERM is recorded before it is called, and the script sees no difference."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

from orchestrator.runtime.forkserver.reports import Reports

BEFORE = """
import asyncio, os, signal, sys
from orchestrator.runtime.forkserver.launch import note_sigterm
noted = []
note_sigterm(lambda: noted.append("noted"))
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEFORE + textwrap.dedent(body)], capture_output=True, text=True, timeout=300, check=False
    )


def test_the_note_comes_first_and_the_handler_gets_what_it_always_gets() -> None:
    done = run(
        """
        def handle(number, frame):
            noted.append((number, frame.f_code.co_name))
        assert signal.signal(signal.SIGTERM, handle) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is handle
        def work():
            os.kill(os.getpid(), signal.SIGTERM)
        work()
        assert noted == ["noted", (15, "work")], noted
        assert signal.signal(signalnum=signal.SIGTERM, handler=signal.SIG_IGN) is handle
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(noted) == 2
        """
    )
    assert done.returncode == 0, done.stderr


def test_asyncio_and_other_signals_work_as_ever() -> None:
    done = run(
        """
        async def main():
            loop, asked = asyncio.get_running_loop(), asyncio.Event()
            loop.add_signal_handler(signal.SIGTERM, asked.set)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(asked.wait(), 300)
        asyncio.run(main())
        assert noted == ["noted"], noted
        signal.signal(signal.SIGUSR1, lambda *_: noted.append("usr1"))
        os.kill(os.getpid(), signal.SIGUSR1)
        assert noted == ["noted", "usr1"], noted
        for wrong in ((signal.SIGKILL, lambda *_: None), (signal.SIGTERM, "no handler"), ("no signal", lambda *_: None)):
            try:
                signal.signal(*wrong)
            except (OSError, TypeError):
                continue
            raise AssertionError(wrong)
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("attach", [True, False])
def test_only_the_training_process_itself_is_noted(attach: bool) -> None:
    reports = Reports()
    assert reports.terminated_at is None
    before = time.time()
    child = os.fork()
    if child == 0:
        if attach:
            reports.attach_writer()
        reports.note_sigterm()
        reports.note_sigterm()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    noted = reports.terminated_at
    assert (noted is not None and before <= noted <= time.time()) if attach else noted is None
    assert reports.receive() == []
