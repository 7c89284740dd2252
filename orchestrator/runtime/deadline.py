"""A deadline on what is awaited from outside.

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
    """What ``call`` gives. Raises TimeoutError when that takes longer than ``seconds``, and cancels it."""
    async with asyncio.timeout(seconds):
        return await call
