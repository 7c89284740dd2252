"""A keeper that does not end by itself is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from orchestrator.runtime.ranks.rank_process import KeeperWatch
from tests.support.stack import wait_until


@pytest.mark.parametrize(("stopped", "code"), [(False, 0), (True, -signal.SIGKILL)])
def test_a_keeper_that_does_not_end_when_it_is_due_is_killed(stopped: bool, code: int) -> None:
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdout.readline()
        if stopped:
            os.kill(keeper.pid, signal.SIGSTOP)

        async def case() -> None:
            watch = KeeperWatch(keeper.pid, late_seconds=0.1 if stopped else 300.0)
            keeper.stdin.close()  # type: ignore[union-attr]
            async with asyncio.timeout(300):
                await watch.ended()
            watch.close()

        asyncio.run(case())
        assert keeper.wait(300) == code


def test_a_keeper_that_is_there_no_more_is_not_waited_for() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as keeper:

        async def case() -> None:
            watch = KeeperWatch(keeper.pid)
            keeper.kill()
            keeper.wait()
            wait_until("its number is free", lambda: not os.path.exists(f"/proc/{keeper.pid}"))
            async with asyncio.timeout(300):
                await watch.ended()

        asyncio.run(case())
