"""Starts a rank's process, or its attempt's rendezvous store, through the node's fork server.

A process tree holds an advisory lock per job and rank on its node (through its keeper), so a second tree cannot start
before the first has ended. Where the keeper was killed, its tree is ended first, and its memory is free
again before the next process starts. A missing fork server is started; a cancelled attempt is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.private_files import make_private
from orchestrator.runtime.forkserver import holder
from orchestrator.runtime.forkserver.wire import SpawnRequest
from orchestrator.runtime.spawn.client import ForkServerClient
from orchestrator.runtime.spawn.lifeline import ForkServerMissingError
from orchestrator.runtime.spawn.rank_locks import (
    KEEPER_SECONDS,
    end_locked_remains,
    end_tree,
    is_current,
    open_lock,
    rank_lock_path,
    try_lock,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.runtime.ranks.launch_spec import RankPlan
    from orchestrator.runtime.ranks.output import RankOutput
    from orchestrator.runtime.ranks.terminal import RankTerminal
    from orchestrator.runtime.spawn.client import Spawned
    from orchestrator.runtime.spawn.lifeline import Lifeline

_BACKLOG: Final = 2048


def bind_rendezvous(address: str) -> socket.socket:
    """Bind a listening socket to a free port of ``address``; the kernel chooses the port."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class Rendezvous:
    """The socket of the current attempt, and the lifeline of its server process. Only rank 0 has them."""

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._store: Lifeline | None = None

    @property
    def port(self) -> int | None:
        """The port, if this rank serves one."""
        return None if self._listener is None else int(self._listener.getsockname()[1])

    def bind(self, address: str) -> None:
        """Bind the attempt's socket."""
        self._listener = bind_rendezvous(address)

    async def serve(self, starter: RankStarter) -> None:
        """Start the process that serves the socket, once. Ranks that connect before it wait in the socket's backlog."""
        if self._listener is not None and self._store is None:
            store = await starter.store(self._listener)
            self._store = None if store is None else store.lifeline

    def close(self) -> None:
        """End the process that serves the socket, and close the socket."""
        if self._store is not None:
            self._store.close()
            self._store = None
        if self._listener is not None:
            self._listener.close()
            self._listener = None


_LOCK_SECONDS: Final = 60.0
_ROUND_SECONDS: Final = 5.0  # between two checks whether the attempt was cancelled
_FORK_SERVER_SECONDS: Final = 30.0
_PIPE_BYTES: Final = 1024 * 1024


class RankBusyError(Exception):
    """Processes of an earlier attempt of this rank still exist after the deadline; see the node's process list."""


class RankStarter:
    """Starts the processes of one attempt. Each start returns the new process, or None once the attempt was cancelled."""

    def __init__(
        self,
        plan: RankPlan,
        node_dir: Path,
        *,
        start_fork_server: Callable[[RankPlan], Awaitable[None]],
        is_called_off: Callable[[], bool],
    ) -> None:
        self._plan, self._node_dir = plan, node_dir
        self._start_fork_server, self._is_called_off = start_fork_server, is_called_off
        self._client = ForkServerClient(Path(plan.fork_socket))

    async def rank(self, output: RankOutput, terminal: RankTerminal | None = None) -> Spawned | None:
        """Start the rank's process, which writes to ``output``. Raises RankBusyError and ForkServerError.

        An interactive job's rank runs on ``terminal``.
        """
        return await self._with_fork_server(lambda: self._spawn(output, terminal))

    async def store(self, listener: socket.socket) -> Spawned | None:
        """Start the rendezvous store on ``listener``. Raises ForkServerError."""
        return await self._with_fork_server(lambda: self._spawn_store(listener))

    async def command(self, request: SpawnRequest, stdin: int, stdout: int, stderr: int) -> Spawned | None:
        """Start a command beside the rank, with these descriptors. Raises ForkServerError."""
        return await self._with_fork_server(
            lambda: self._client.spawn(request, stdin=stdin, stdout=stdout, stderr=stderr)
        )

    async def _with_fork_server(self, call: Callable[[], Awaitable[Spawned | None]]) -> Spawned | None:
        deadline = time.monotonic() + _FORK_SERVER_SECONDS
        while not self._is_called_off():
            try:
                return await call()
            except ForkServerMissingError:
                if time.monotonic() > deadline:
                    raise
                await self._start_fork_server(self._plan)
        return None

    async def _spawn_store(self, listener: socket.socket) -> Spawned:
        env = {name: self._plan.env[name] for name in ("PATH", "HOME") if name in self._plan.env}
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            return await self._client.spawn(
                SpawnRequest(mode="store", cwd="/", env=env, threads=1),
                stdout=null,
                stderr=null,
                listen=listener.fileno(),
            )
        finally:
            os.close(null)

    async def _spawn(self, output: RankOutput, terminal: RankTerminal | None) -> Spawned | None:
        # A lock for each request: when its reply is lost, the process may exist, and its keeper holds the lock until no
        # process of the tree is left.
        lock = await self._lock()
        if lock is None:
            return None
        try:
            if terminal is not None and terminal.interactive:
                return await self._spawn_on(terminal, lock, output)
            return await self._spawn_under(lock, output)
        finally:
            os.close(lock)  # the keeper holds its own copy

    async def _spawn_under(self, lock: int, output: RankOutput) -> Spawned:
        pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
        try:
            for _, write_end in pipes:
                os.set_blocking(write_end, True)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            spawned = await self._client.spawn(self._plan, stdout=pipes[0][1], stderr=pipes[1][1], lease=lock)
        except BaseException:
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        output.listen(*(read_end for read_end, _ in pipes))
        return spawned

    async def _spawn_on(self, terminal: RankTerminal, lock: int, output: RankOutput) -> Spawned:
        theirs = terminal.theirs
        spawned = await self._client.spawn(self._plan, stdin=theirs, stdout=theirs, stderr=theirs, lease=lock)
        terminal.started()
        reader = terminal.reader()
        os.set_blocking(reader, False)
        output.listen(reader)
        return spawned

    async def _lock(self) -> int | None:
        """Take the node's lock for this job and rank: held by the keeper of a live tree, so at most one tree exists.

        None when the attempt was cancelled. Raises RankBusyError.
        """
        path = rank_lock_path(self._node_dir, self._plan.job_id, self._plan.rank)
        make_private(path.parent)
        handle = open_lock(path)
        taken = False
        try:
            taken = await self._take(handle, path)
        finally:
            if not taken:
                os.close(handle)
        return handle if taken else None

    async def _take(self, handle: int, path: Path) -> bool:
        """Whether the lock is held on ``handle`` and the previous tree has ended; False when the attempt was cancelled."""
        began, delay = time.monotonic(), 0.001
        while not self._is_called_off():
            if try_lock(handle, path) and await self._is_clear(handle, path):
                return True
            waited = time.monotonic() - began
            if waited > _LOCK_SECONDS:
                raise RankBusyError(f"processes of an earlier attempt are still there after {waited:.0f} s; see {path}")
            fcntl.flock(handle, fcntl.LOCK_UN)  # another process may then end the rest
            if not is_current(handle, path):
                raise RankBusyError(
                    f"{path} was removed while an attempt waited for it; the next try creates a new one"
                )
            if waited > KEEPER_SECONDS:
                await asyncio.to_thread(end_tree, path, _ROUND_SECONDS, limit=0.0)
            await asyncio.sleep(delay)
            delay = min(delay * 2, 0.1)
        return False

    async def _is_clear(self, handle: int, path: Path) -> bool:
        """Return whether the previous tree has ended; end what is left of it."""
        if holder.is_clear(handle):
            return True
        return await asyncio.to_thread(end_locked_remains, handle, path, _ROUND_SECONDS)
