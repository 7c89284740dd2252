"""The daemon's connection to Ray. Every blocking call of Ray runs in its own thread, with a deadline.

``ray.init`` holds the interpreter's lock until the node's raylet has answered: meanwhile no signal, deadline or request
reaches the process, and only SIGKILL ends it. So a process that can be killed connects first: this module as a program,
``python -m orchestrator.runtime.cluster.connection ADDRESS NAMESPACE SECONDS``. A timer of the C library ends the daemon
if it is frozen nevertheless.

``ray.init`` also installs a SIGTERM handler in C++, which arms an alarm that aborts the process 3 s later, prints a stack, and then
calls the handler that it replaced; disconnecting resets the signal. ``disarm_abort`` and ``restore_handlers`` undo both.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import importlib
import os
import signal
import sys
from typing import TYPE_CHECKING, Any, Final

import structlog

from orchestrator.runtime.cluster.head import (
    OF_THE_DRIVER,
    START_TRIES,
    ClusterError,
    output_of,
    scaled_to_load,
    start_seconds,
)
from orchestrator.runtime.deadline import OvertakenError, unless, within
from orchestrator.runtime.pools import in_own_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from types import FrameType

CALL_SECONDS: Final = 30.0
CALLS_AT_ONCE: Final = 8
FROZEN_SECONDS: Final = 30.0  # at a load of one process per CPU
REARM_SECONDS: Final = 1.0
STDERR: Final = 2
LEAVE_SECONDS: Final = 120.0  # usually 2 s; up to 23 s with calls to a dead head in progress


log = structlog.get_logger("orch.ray")


def connect(address: str, space: str) -> None:
    """Connect this process to Ray; ``space`` is the namespace of its actors."""
    import ray

    ray.init(address=address, namespace=space, log_to_driver=False, configure_logging=False)


def disconnect() -> None:
    """Disconnect this process from Ray."""
    import ray

    ray.shutdown()


def trial(address: str, space: str, seconds: float) -> list[str]:
    """Return the command that connects and disconnects; it ends after ``seconds`` even if the process that started it is gone."""
    return [sys.executable, "-m", "orchestrator.runtime.cluster.connection", address, space, str(seconds)]


def restore_handlers() -> None:
    """Restore Python's own SIGTERM handler in place of Ray's. Call in the main thread after Ray connected or disconnected."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
        signal.siginterrupt(signal.SIGTERM, False)


def disarm_abort(_number: int = 0, _frame: FrameType | None = None) -> None:
    """Cancel the alarm of Ray's handler, for a signal that arrived before ``restore_handlers``.

    As a Python handler it runs between any two instructions of the main thread, whatever the event loop does.
    """
    signal.alarm(0)


class RayConnection:
    """Connects to Ray. ``namespace`` is that of the daemon's actors; ``connect`` and ``disconnect`` are Ray's own.

    ``try_first`` returns the command line of a program that connects to an address within a number of seconds.
    ``frozen_seconds`` returns after how many seconds without a turn of the event loop, while Ray connects or
    disconnects, this process ends.
    """

    def __init__(
        self,
        namespace: str,
        *,
        connect: Callable[[str, str], None] = connect,
        disconnect: Callable[[], None] = disconnect,
        try_first: Callable[[str, str, float], Sequence[str]] = trial,
        frozen_seconds: Callable[[], float] = lambda: scaled_to_load(FROZEN_SECONDS),
    ) -> None:
        self.namespace = namespace
        self._connect = connect
        self._disconnect = disconnect
        self._try_first = try_first
        self._frozen_seconds = frozen_seconds
        self.problem = ""
        """Reason why Ray has not accepted the connection so far; empty if there is none."""
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._open = asyncio.Event()
        self._dead = asyncio.Event()  # set once the head that calls go to has died
        self._entering: asyncio.Task[None] | None = None
        self._enter_until = 0.0  # time of the event loop's clock
        self.epoch = 0  # number of dead heads: work begun under one must not continue under the next

    async def call(self, function: Callable[..., Any], *args: Any, seconds: float = CALL_SECONDS, **kwargs: Any) -> Any:
        """Run a blocking call of Ray in its own thread. Raises TimeoutError, also once the head has died; the thread is then left to finish.

        A call to a head that has died may never return: it blocks neither other calls nor the exit of the process.
        """
        try:
            async with asyncio.timeout(seconds), self._turns:
                return await unless(self._dead, in_own_thread(lambda: function(*args, **kwargs)))
        except OvertakenError as error:
            raise TimeoutError("Ray's head died before it answered") from error

    async def enter(self, address: str, *, hint: str = "") -> None:
        """Connect to the head at ``address``. Raises ClusterError with a message that ends with ``hint``."""
        await asyncio.gather(self._prove(address, hint), in_own_thread(lambda: importlib.import_module("ray")))
        seconds = start_seconds()
        self._enter_until = asyncio.get_running_loop().time() + seconds
        self._entering = asyncio.create_task(self._enter(address))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._entering)
        except Exception as error:
            reason = f"no answer within {seconds:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise ClusterError(f"cannot connect to Ray at {address}: {reason}{hint}") from error

    async def _prove(self, address: str, hint: str, tries: int = START_TRIES) -> None:
        """Have another process connect. Raises ClusterError after ``tries`` tries; ``problem`` has the reason meanwhile."""
        environ = {name: value for name, value in os.environ.items() if name not in OF_THE_DRIVER}
        for number in range(1, tries + 1):
            seconds = start_seconds()
            try:
                await output_of(self._try_first(address, self.namespace, seconds), environ, seconds)
            except TimeoutError:
                reason = f"it did not register a driver within {seconds:.0f} s"
                self.problem = f"cannot connect to Ray at {address}: {reason}{hint}"
                log.warning("ray.connect_failed", reason=reason, tried=number, of=tries)
            except ClusterError as error:
                raise ClusterError(f"cannot connect to Ray at {address}: {error}{hint}") from error
            else:
                return
        raise ClusterError(self.problem)

    async def _enter(self, address: str) -> None:
        async with _own_handlers(self._frozen_seconds()):
            await in_own_thread(lambda: self._connect(address, self.namespace))

    async def end_entering(self) -> None:
        """Wait until a connection attempt succeeds or fails: Ray aborts the process if the head dies during it."""
        if self._entering is not None:
            left = self._enter_until - asyncio.get_running_loop().time()
            await asyncio.wait({self._entering}, timeout=max(left, 0.0))

    async def leave(self, seconds: float = LEAVE_SECONDS) -> None:
        """Disconnect without waiting for a free call slot: calls to a dead or hung head may occupy them all."""
        with contextlib.suppress(Exception):
            async with _own_handlers(self._frozen_seconds()):
                await within(seconds, in_own_thread(self._disconnect))

    def opened(self) -> None:
        """Allow gangs to be placed from now on."""
        self.problem = ""
        self._open.set()

    def closed(self) -> None:
        """Refuse to place gangs from now on."""
        self._open.clear()

    def lost(self) -> None:
        """Record that the head has died. Calls to it fail now."""
        self._open.clear()
        self._dead.set()
        self._dead = asyncio.Event()
        self.epoch += 1

    async def until_connected(self) -> None:
        """Return once Ray is connected."""
        await self._open.wait()

    @property
    def connected(self) -> bool:
        """Whether Ray accepts calls."""
        return self._open.is_set()


@contextlib.asynccontextmanager
async def _own_handlers(frozen_seconds: float) -> AsyncIterator[None]:
    """Restore Python's signal handlers at the end, and end this process if it is frozen meanwhile.

    A process whose interpreter's lock is not released for ``frozen_seconds`` writes its threads' stacks to stderr and ends
    with 1: a thread without Python waits for that, and what supervises the daemon starts the next one. Jobs keep running.
    """
    _end_if_frozen(frozen_seconds)  # before a thread can take the lock
    turning = asyncio.create_task(_while_turning(frozen_seconds))
    try:
        yield
    finally:
        turning.cancel()
        faulthandler.cancel_dump_traceback_later()
        restore_handlers()


async def _while_turning(frozen_seconds: float) -> None:
    while True:
        await asyncio.sleep(REARM_SECONDS)
        _end_if_frozen(frozen_seconds)


def _end_if_frozen(seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[3]), exit=True)
    try:
        connect(sys.argv[1], sys.argv[2])
        disconnect()
    except Exception as error:
        sys.exit(str(error) or type(error).__name__)
