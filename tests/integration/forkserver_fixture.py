"""Fork server for a test module: started and warm; afterwards it is ended and its directory removed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import (
    Event,
    ForkServerClient,
    ForkServerError,
    Hello,
    Lifeline,
    Spawned,
    StartedServer,
    start_fork_server,
)
from orchestrator.runtime.spawn.environment import inheritable_environment
from tests.support.stack import PATIENCE_SECONDS

T = TypeVar("T")

BARE_PYTHON = Path(sys.base_prefix) / "bin" / "python3"
"""An interpreter without torch: its server is warm at once."""

ENVIRONMENT = inheritable_environment(os.environ)
"""What the daemon passes on: of other variables torch reads some as it is imported, such as CI, and a server without them starts a rank cold."""


class BlockingClient(ForkServerClient):
    """The client for tests that wait without a loop."""

    def hello_sync(self) -> Hello:
        return _run(self.hello())

    def shutdown_sync(self) -> None:
        _run(self.shut_down())

    def spawn_sync(self, request: SpawnRequest, **descriptors: Any) -> Spawned:
        return _run(self.spawn(request, **descriptors))


def _run(call: Coroutine[Any, Any, T]) -> T:
    """Run the call in a loop of its own, in a thread: a test may have a loop too."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, call).result()


def next_event(lifeline: Lifeline, deadline: timedelta = timedelta(seconds=PATIENCE_SECONDS)) -> Event | None:
    """Return the lifeline's next event; TimeoutError when nothing arrives within ``deadline``."""

    async def bounded() -> Event | None:
        async with asyncio.timeout(deadline.total_seconds()):
            return await lifeline.next_event()

    return asyncio.run(bounded())


@dataclass
class RunningServer:
    """A warm server and its directory."""

    started: StartedServer
    hello: Hello
    client: BlockingClient
    directory: Path

    @property
    def socket(self) -> Path:
        return self.directory / "fork.sock"

    @property
    def log(self) -> str:
        return (self.directory / "fork.log").read_text()


@contextmanager
def running_server(python: str = sys.executable, preload: tuple[str, ...] = ()) -> Iterator[RunningServer]:
    """Run a server in a directory of its own with a short name (a socket's path has at most 107 bytes)."""
    directory = Path(tempfile.mkdtemp(prefix="orch-fs-"))
    try:
        started = start_fork_server(python, directory / "fork.sock", directory / "fork.log", preload, env=ENVIRONMENT)
        client = BlockingClient(directory / "fork.sock")
        try:
            yield RunningServer(started, client.hello_sync(), client, directory)
        finally:
            _shut_down(client, started.pid)
    finally:
        shutil.rmtree(directory)


def _shut_down(client: BlockingClient, pid: int) -> None:
    with contextlib.suppress(ForkServerError):  # a test has ended it already
        client.shutdown_sync()
    wait_until(lambda: not alive(pid), f"the fork server {pid} to end")


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(
    condition: Callable[[], bool], what: str, deadline: timedelta = timedelta(seconds=PATIENCE_SECONDS)
) -> None:
    """Poll until the condition holds; fail the test with `what` if it does not within the deadline."""
    until = time.monotonic() + deadline.total_seconds()
    while not condition():
        assert time.monotonic() < until, f"waited {deadline} for {what}"
        time.sleep(0.01)
