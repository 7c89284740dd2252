"""A keeper that does not end by itself is continued, and killed if that does not help."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from orchestrator.runtime.ranks.rank_process import KeeperWatch
from tests.support.stack import wait_until


def ended(*script: str, stopped: bool) -> int:
    """Return the exit code of a keeper, once its watch has reported its end."""
    command = [sys.executable, "-c", *script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        keeper.stdout.readline()
        if stopped:
            os.kill(keeper.pid, signal.SIGSTOP)

        async def case() -> None:
            watch = KeeperWatch(keeper.pid)
            keeper.stdin.close()  # type: ignore[union-attr]
            async with asyncio.timeout(300):
                await watch.ended()
            watch.close()

        asyncio.run(case())
        return keeper.wait(300)


UNTIL_TOLD = "import sys; print(flush=True); sys.stdin.read()"
STOPS_AGAIN = "import os, signal; print(flush=True)\nwhile True: os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_keeper_that_has_told_its_last_ends_though_it_was_stopped(stopped: bool) -> None:
    assert ended(UNTIL_TOLD, stopped=stopped) == 0


def test_one_that_stays_stopped_is_killed() -> None:
    assert ended(STOPS_AGAIN, stopped=False) == -signal.SIGKILL


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
