"""Starts a fork server while a new head starts, so that it is warm when the node's agent looks for it."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING

from orchestrator.runtime.cluster.driver_environment import OF_THE_DRIVER
from orchestrator.runtime.cluster.head.processes import end_fork_server
from orchestrator.runtime.spawn.client import StartedServer, start_fork_server

if TYPE_CHECKING:
    from pathlib import Path


class FirstForkServer:
    """A fork server of the daemon's own interpreter, on this machine."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._beginning: asyncio.Task[StartedServer] | None = None

    def begin(self) -> None:
        """Start the fork server in a thread."""
        self._beginning = asyncio.create_task(asyncio.to_thread(self._start))

    async def begun(self) -> None:
        """Return when it has started or failed; after a failure the agent tries again and reports the reason."""
        if self._beginning is not None:
            await asyncio.wait({self._beginning})
            self._beginning.exception()

    async def end(self) -> None:
        """End the fork server that this object started; leave alone one that existed before."""
        begun, self._beginning = self._beginning, None
        if begun is None:
            return
        await asyncio.wait({begun})  # a thread cannot be cancelled, and the server that it starts must be ended
        server = None if begun.exception() is not None else begun.result()
        if server is not None and server.pid is not None and not server.already_running:
            self._socket.unlink(missing_ok=True)
            await asyncio.to_thread(end_fork_server, server.pid)

    def _start(self) -> StartedServer:
        """Start the fork server. Raises ForkServerError."""
        from orchestrator.runtime.nodes.agent import PRELOAD

        path = self._socket
        env = {name: value for name, value in os.environ.items() if name not in OF_THE_DRIVER}
        return start_fork_server(sys.executable, path, path.with_suffix(".log"), PRELOAD, env=env)
