"""Thread pools for blocking work, one per purpose, so that one purpose cannot occupy the threads of another.

A thread that reads from a filesystem that does not answer is lost until it does. With a pool per purpose that delays,
for example, only the reading of logs; and the daemon reports it (``problem``). The store has its own threads.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

STUCK_SECONDS: Final = 30.0

T = TypeVar("T")


class Pool:
    """Runs at most ``threads`` calls at once; others wait. ``clock`` gives monotonic seconds."""

    def __init__(self, name: str, threads: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._threads = threads
        self._clock = clock
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=f"orch-{name.partition(' ')[0]}")
        self._running: dict[object, float] = {}

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call the function in a thread of this pool and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._timed, function, args)

    def problem(self) -> str:
        """Return why calls wait, once every thread has been in one call for STUCK_SECONDS; empty otherwise."""
        now = self._clock()
        seconds = sorted(now - began for began in list(self._running.values()))
        if len(seconds) < self._threads or seconds[0] < STUCK_SECONDS:
            return ""
        return f"all {self._threads} threads for {self._name} have been waiting for a file for {seconds[0]:.0f} s or longer"

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return bool(self._running)

    def close(self) -> None:
        """Accept no more calls. Does not wait for those in progress: they may never return."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _timed(self, function: Callable[..., T], args: tuple[object, ...]) -> T:
        call = object()
        self._running[call] = self._clock()
        try:
            return function(*args)
        finally:
            del self._running[call]


class SharedPool(Pool):
    """A pool of which each user has at most ``each`` threads at once: files that hang delay only their own user."""

    def __init__(self, name: str, threads: int, each: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(name, threads, clock=clock)
        self._each = each
        self._turns: dict[int, asyncio.Semaphore] = {}

    def of(self, uid: int) -> Share:
        """Return the share of one user."""
        return Share(self, self._turns.setdefault(uid, asyncio.Semaphore(self._each)))


class Share:
    """One user's share of a pool."""

    def __init__(self, pool: Pool, turns: asyncio.Semaphore) -> None:
        self._pool = pool
        self._turns = turns

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run the call in the pool. The thread counts until the call ends, even if the request is cancelled before."""
        await self._turns.acquire()
        call = asyncio.ensure_future(self._pool.run(function, *args))
        call.add_done_callback(self._ended)
        return await asyncio.shield(call)

    def _ended(self, call: asyncio.Future[T]) -> None:
        self._turns.release()
        if not call.cancelled():
            call.exception()  # after a cancelled request nothing else reads it


class Pools:
    """The daemon's pools."""

    def __init__(self) -> None:
        self.logs = Pool("logs", 4)
        self.checkpoints = Pool("checkpoints", 2)
        self.starts = Pool("starts of attempts", 4)  # choosing the checkpoint of an attempt
        self.outputs = Pool("outputs", 2)
        self.records = Pool("records of metrics and GPUs", 2)
        self.submissions = SharedPool("submissions", 8, each=3)
        self.removals = Pool("removals of old jobs", 1)

    def problems(self) -> list[str]:
        """Return the problems of all pools, for users."""
        return [problem for pool in self._all() if (problem := pool.problem())]

    @property
    def busy(self) -> bool:
        """Whether a call is in progress; its thread would keep the interpreter from exiting."""
        return any(pool.busy for pool in self._all())

    def close(self) -> None:
        """Accept no more calls."""
        for pool in self._all():
            pool.close()

    def _all(self) -> tuple[Pool, ...]:
        return (
            self.logs,
            self.checkpoints,
            self.starts,
            self.outputs,
            self.records,
            self.submissions,
            self.removals,
        )
