"""Runs a blocking call that may never return in its own thread; has a thread pool that tracks calls in progress.

A pool thread that blocks for ever is lost to the pool, and keeps the interpreter from exiting; a thread of its own does
neither.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
T = TypeVar("T")


class WatchedExecutor(ThreadPoolExecutor):
    """A pool of threads for an event loop's ``to_thread`` that tracks which calls have not returned."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="to_thread")
        self._calls: set[Future[Any]] = set()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a call as ThreadPoolExecutor does, and track it. Call in the event loop's thread."""
        future = super().submit(fn, *args, **kwargs)
        self._calls = {call for call in self._calls if not call.done()} | {future}
        return future

    def busy(self, seconds: float) -> bool:
        """Whether a call has not returned after another ``seconds``."""
        return bool(wait(self._calls, timeout=seconds).not_done)


class OwnThread(threading.Thread):
    """A thread that makes one call. The interpreter does not wait for it."""


def calls_under_way() -> bool:
    """Whether a call has not returned. Code that the interpreter runs at exit (Ray disconnects there) may wait for it."""
    return any(isinstance(thread, OwnThread) for thread in threading.enumerate())


async def in_own_thread(function: Callable[[], T]) -> T:
    """Return the result of ``function()`` or raise its error. After a cancellation the thread continues, its result unused."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except StopIteration as stop:  # an asyncio future cannot hold it
            future.set_exception(RuntimeError(f"StopIteration: {stop}"))
        except BaseException as error:
            future.set_exception(error)

    OwnThread(target=run, name=f"call {getattr(function, '__name__', '')}", daemon=True).start()
    return await asyncio.wrap_future(future)
