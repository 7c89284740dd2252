"""Limits an awaited call: by a deadline, or by an event after which no answer can come; awaits the end of a process.

``asyncio.wait_for`` of Python 3.11 loses a cancellation that comes in the same turn of the event loop as the
answer (python/cpython#86296): a background task that used it could not be stopped any more.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable, Coroutine

T = TypeVar("T")


class OvertakenError(Exception):
    """The awaited answer cannot come any more."""


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Return the result of ``call``. Raises TimeoutError, and cancels the call, after ``seconds``."""
    async with asyncio.timeout(seconds):
        return await call


async def unless(event: asyncio.Event, call: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``call``. Raises OvertakenError, and cancels the call, once ``event`` is set."""
    calling, waiting = asyncio.create_task(call), asyncio.create_task(event.wait())
    try:
        await asyncio.wait({calling, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if calling.done():
            return calling.result()
        raise OvertakenError
    finally:
        calling.cancel()
        waiting.cancel()
        await asyncio.gather(calling, waiting, return_exceptions=True)


async def process_ended(handle: int) -> None:
    """Return when the process of ``handle``, a pidfd, has ended, and close the handle. A cancellation leaves nothing in the event loop."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
