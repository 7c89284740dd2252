"""Threads for blocking work: pools, one per purpose, and a thread of its own for a call that may never return.

A thread that reads from a filesystem that does not answer is lost until it does. With a pool per purpose that delays,
for example, only the reading of logs; and the daemon reports it (``problem``). The store has its own threads.
What ends jobs (``outputs``, ``starts``) shares no pool with what answers requests. A pool thread that blocks for ever also keeps the interpreter from
exiting, and a thread of its own does not.

Pools of requests are fair: each user has at most some of the threads, and users take turns. ``working_for`` says for
whom a task works. When a request is cancelled its call is removed from the queue, or, where it runs, is told so: a long
read then ends at its next look (``abandoned.py``).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from orchestrator.abandoned import abandonable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STUCK_SECONDS: Final = 30.0

T = TypeVar("T")

_user: ContextVar[int | None] = ContextVar("user", default=None)


@contextmanager
def working_for(uid: int | None) -> Iterator[None]:
    """Let this task's calls count as those of a user; None: of the daemon itself."""
    token = _user.set(uid)
    try:
        yield
    finally:
        _user.reset(token)


class Pool:
    """Runs at most ``threads`` calls at once, and at most ``each`` of one user; others wait, and users take turns.

    ``clock`` gives monotonic seconds.
    """

    def __init__(
        self, name: str, threads: int, each: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._threads = threads
        self._each = threads if each is None else each
        self._clock = clock
        self._executor = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=f"orch-{name.partition(' ')[0]}")
        self._running: dict[object, float] = {}
        self._active: dict[int | None, int] = {}
        """Threads that each user has; one counts until its call ends, even if the request was cancelled before."""
        self._waiting: OrderedDict[int | None, deque[asyncio.Future[None]]] = OrderedDict()

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Call the function in a thread of this pool and return its result."""
        user = _user.get()
        await self._turn(user)
        given_up = threading.Event()
        try:
            call = asyncio.get_running_loop().run_in_executor(self._executor, self._timed, given_up, function, args)
        except BaseException:
            self._release(user)
            raise
        call.add_done_callback(lambda ended: self._ended(user, ended))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def problem(self) -> str:
        """Return why calls wait, once calls have taken all threads that one user may have for STUCK_SECONDS; empty otherwise."""
        now = self._clock()
        stuck = [seconds for began in list(self._running.values()) if (seconds := now - began) >= STUCK_SECONDS]
        if len(stuck) < self._each:
            return ""
        which = "all" if len(stuck) == self._threads else f"{len(stuck)} of"
        return f"{which} {self._threads} threads for {self._name} have been waiting for a file for {min(stuck):.0f} s or longer"

    @property
    def busy(self) -> bool:
        """Whether a call is in progress."""
        return bool(self._running)

    def close(self) -> None:
        """Accept no more calls. Does not wait for those in progress: they may never return."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, user: int | None) -> None:
        """Wait for a thread; on return the user has it."""
        if not self._waiting and self._may_start(user):
            self._active[user] = self._active.get(user, 0) + 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(user, deque()).append(turn)
        self._start_waiting()  # those who wait may all have their share
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(user)
            elif turn in (queue := self._waiting.get(user, deque())):
                queue.remove(turn)
                if not queue:
                    del self._waiting[user]
            raise

    def _may_start(self, user: int | None) -> bool:
        return sum(self._active.values()) < self._threads and self._active.get(user, 0) < self._each

    def _start_waiting(self) -> None:
        """Give free threads to those who wait: one call of each user, then the next of each."""
        while ready := [user for user in self._waiting if self._may_start(user)]:
            queue = self._waiting.pop(ready[0])
            turn = queue.popleft()
            if queue:
                self._waiting[ready[0]] = queue  # at the end: the others come first
            if not turn.done():
                self._active[ready[0]] = self._active.get(ready[0], 0) + 1
                turn.set_result(None)

    def _release(self, user: int | None) -> None:
        self._active[user] -= 1
        if not self._active[user]:
            del self._active[user]
        self._start_waiting()

    def _ended(self, user: int | None, call: asyncio.Future[T]) -> None:
        self._release(user)
        if not call.cancelled():
            call.exception()  # after a cancelled request nothing else reads it

    def _timed(self, given_up: threading.Event, function: Callable[..., T], args: tuple[object, ...]) -> T:
        call = object()
        self._running[call] = self._clock()
        try:
            with abandonable(given_up):
                return function(*args)
        finally:
            del self._running[call]


class Pools:
    """The daemon's pools: first those of requests, then those of the daemon's own work."""

    def __init__(self) -> None:
        self.logs = Pool("logs", 8, each=4)
        self.checkpoints = Pool("checkpoints", 4, each=2)
        self.records = Pool("records of metrics and GPUs", 4, each=2)
        self.files = Pool("files of jobs", 6, each=3)
        self.outlook = Pool("expected starts", 2, each=1)
        self.submissions = Pool("submissions", 8, each=3)
        self.removals = Pool("removals of old jobs", 1)
        self.audit = Pool("the audit log", 1)
        self.starts = Pool("starts of attempts", 4)  # choosing the checkpoint of an attempt
        self.outputs = Pool("outputs", 2)  # collecting them: a job ends after that
        self.tidying = Pool("files that ended jobs left", 2)
        self._all: tuple[Pool, ...] = tuple(vars(self).values())

    def problems(self) -> list[str]:
        """Return the problems of all pools, for users."""
        return [problem for pool in self._all if (problem := pool.problem())]

    @property
    def busy(self) -> bool:
        """Whether a call is in progress; its thread would keep the interpreter from exiting."""
        return any(pool.busy for pool in self._all)

    def close(self) -> None:
        """Accept no more calls."""
        for pool in self._all:
            pool.close()


P = ParamSpec("P")


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
