"""The daemon's connection to Ray. Every blocking call of Ray runs in its own thread, with a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import TYPE_CHECKING, Any, Final

from orchestrator.runtime.cluster.head.start import ClusterError, start_seconds
from orchestrator.runtime.cluster.serializers import skip_foreign_serializers
from orchestrator.runtime.cluster.signal_handlers import claim_handlers, restore_handlers
from orchestrator.runtime.deadline import OvertakenError, unless, within
from orchestrator.runtime.own_thread import in_own_thread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

CALL_SECONDS: Final = 30.0
CALLS_AT_ONCE: Final = 8
HANDLER_SECONDS: Final = 0.005
LEAVE_SECONDS: Final = 120.0  # usually 2 s; up to 23 s with calls to a dead head in progress


class RayConnection:
    """Connects to Ray. ``namespace`` is that of the daemon's actors; ``connect`` and ``disconnect`` default to Ray's own."""

    def __init__(
        self,
        namespace: str,
        *,
        connect: Callable[[str, str], None] | None = None,
        disconnect: Callable[[], None] | None = None,
    ) -> None:
        self.namespace = namespace
        self._connect = connect or _connect
        self._disconnect = disconnect or _disconnect
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
        seconds = start_seconds()
        self._enter_until = asyncio.get_running_loop().time() + seconds
        self._entering = asyncio.create_task(self._enter(address))
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._entering)
        except Exception as error:
            reason = f"no answer within {seconds:.0f} s" if isinstance(error, TimeoutError) else str(error)
            raise ClusterError(f"cannot connect to Ray at {address}: {reason}{hint}") from error

    async def _enter(self, address: str) -> None:
        await in_own_thread(lambda: importlib.import_module("ray"))
        claim_handlers()
        async with _own_handlers():
            await in_own_thread(lambda: self._connect(address, self.namespace))

    async def end_entering(self) -> None:
        """Wait until a connection attempt succeeds or fails: Ray aborts the process if the head dies during it."""
        if self._entering is not None:
            left = self._enter_until - asyncio.get_running_loop().time()
            await asyncio.wait({self._entering}, timeout=max(left, 0.0))

    async def leave(self, seconds: float = LEAVE_SECONDS) -> None:
        """Disconnect without waiting for a free call slot: calls to a dead or hung head may occupy them all."""
        with contextlib.suppress(Exception):
            async with _own_handlers():
                await within(seconds, in_own_thread(self._disconnect))

    def opened(self) -> None:
        """Allow gangs to be placed from now on."""
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
async def _own_handlers() -> AsyncIterator[None]:
    """Keep Python's signal handlers: a new Ray may install its own while it connects, and it resets SIGTERM when it disconnects.

    The sooner Python's handlers are restored, the fewer signals abort or end this process.
    """
    keeper = asyncio.create_task(_keep_handlers())
    try:
        yield
    finally:
        keeper.cancel()
        restore_handlers()


async def _keep_handlers() -> None:
    while True:
        restore_handlers()
        await asyncio.sleep(HANDLER_SECONDS)


def _connect(address: str, space: str) -> None:
    import ray

    skip_foreign_serializers()
    ray.init(
        address=address,
        namespace=space,
        log_to_driver=False,
        configure_logging=False,
        ignore_reinit_error=False,
    )


def _disconnect() -> None:
    import ray

    ray.shutdown()
