"""Python's SIGTERM handler stays installed although Ray resets it when it disconnects."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal

from orchestrator.runtime.cluster.connection import RayConnection
from tests.support.stack import wait_until


def reset_as_ray_does() -> None:
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(signal.SIGTERM, None)


def test_a_signal_after_a_disconnect_reaches_the_own_handler() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: seen.append(number))
    try:
        asyncio.run(RayConnection("orch-x", disconnect=reset_as_ray_does).leave())
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until("it is seen", lambda: seen == [signal.SIGTERM])
    finally:
        signal.signal(signal.SIGTERM, before)
