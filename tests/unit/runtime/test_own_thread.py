"""Blocking calls that may never return do not block anything else."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from orchestrator.runtime.pools import in_own_thread
from tests.support.stack import PATIENCE_SECONDS


def test_what_the_function_gives_or_raises_arrives() -> None:
    async def ask() -> None:
        assert await in_own_thread(lambda: 6 * 7) == 42
        with pytest.raises(ValueError, match="no such thing"):
            await in_own_thread(lambda: int("no such thing"))
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_own_thread(lambda: next(iter(())))

    asyncio.run(ask())


def test_a_call_that_is_given_up_is_dropped() -> None:
    gate, ended = threading.Event(), threading.Event()

    def slow() -> None:
        gate.wait(PATIENCE_SECONDS)
        ended.set()
        raise OSError("nobody hears this")

    async def ask() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await in_own_thread(slow)
        gate.set()
        assert await asyncio.to_thread(ended.wait, PATIENCE_SECONDS)

    asyncio.run(ask())


def test_a_process_ends_though_a_call_never_returns() -> None:
    script = """
import asyncio, threading
from orchestrator.runtime.pools import WatchedExecutor, in_own_thread
async def ask():
    try:
        async with asyncio.timeout(0.05):
            await in_own_thread(threading.Event().wait)
    except TimeoutError:
        print("given up")
asyncio.run(ask())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert done.stdout == "given up\n"
