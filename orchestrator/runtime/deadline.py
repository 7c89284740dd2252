"""A deadline for an awaited call.

``asyncio.wait_for`` of Python 3.11 loses a cancellation that comes in the same turn of the event loop as the
answer (python/cpython#86296): a background task that used it could not be stopped any more.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")


async def within(seconds: float, call: Awaitable[T]) -> T:
    """Return the result of ``call``. Raises TimeoutError, and cancels the call, after ``seconds``."""
    async with asyncio.timeout(seconds):
        return await call
