"""Starts a rank's process, or its attempt's rendezvous store, through the node's fork server.

A process tree holds an advisory lock per job and rank on its node (through its keeper), so a second tree cannot start
before the first is gone, whoever asks. A fork server that is not there is started; an attempt that is called off
meanwhile is not.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from orchestrator.private_files import make_private, open_private
from orchestrator.runtime.forkclient import ForkServerClient, ForkServerMissingError, SpawnRequest
from orchestrator.runtime.rank_locks import rank_lock_path

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from orchestrator.runtime.forkclient import Lifeline
    from orchestrator.runtime.rank_output import RankOutput
    from orchestrator.runtime.rank_plan import RankPlan

_LOCK_SECONDS: Final = 30.0
_FORK_SERVER_SECONDS: Final = 30.0
_PIPE_BYTES: Final = 1024 * 1024


class RankBusyError(Exception):
    """Processes of an earlier attempt of this rank are still there after the deadline; see the node's process list."""


class RankStarter:
    """The starts of one attempt. Each gives the process's lifeline, or None once the attempt was called off."""

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

    async def rank(self, output: RankOutput) -> Lifeline | None:
        """The rank's process, which writes to ``output``. Raises RankBusyError and ForkServerError."""
        return await self._with_fork_server(lambda: self._spawn(output))

    async def store(self, listener: socket.socket) -> Lifeline | None:
        """The rendezvous store on ``listener``. Raises ForkServerError."""
        return await self._with_fork_server(lambda: self._spawn_store(listener))

    async def _with_fork_server(self, call: Callable[[], Awaitable[Lifeline | None]]) -> Lifeline | None:
        deadline = time.monotonic() + _FORK_SERVER_SECONDS
        while not self._is_called_off():
            try:
                return await call()
            except ForkServerMissingError:
                if time.monotonic() > deadline:
                    raise
                await self._start_fork_server(self._plan)
        return None

    async def _spawn_store(self, listener: socket.socket) -> Lifeline:
        env = {name: self._plan.env[name] for name in ("PATH", "HOME") if name in self._plan.env}
        null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            spawned = await self._client.spawn(
                SpawnRequest(mode="store", cwd="/", env=env, threads=1),
                stdout=null,
                stderr=null,
                listen=listener.fileno(),
            )
        finally:
            os.close(null)
        return spawned.lifeline

    async def _spawn(self, output: RankOutput) -> Lifeline | None:
        # A lock of its own for each request: when its answer is lost, the process may be there, and holds it until
        # nothing is left of it.
        lock = await self._lock()
        if lock is None:
            return None
        try:
            return await self._spawn_under(lock, output)
        finally:
            os.close(lock)  # the keeper holds its own copy

    async def _spawn_under(self, lock: int, output: RankOutput) -> Lifeline:
        plan = self._plan
        pipes = [os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK) for _ in range(2)]
        try:
            for _, write_end in pipes:
                os.set_blocking(write_end, True)
                with contextlib.suppress(OSError):
                    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            spawned = await self._client.spawn(
                SpawnRequest(
                    mode=plan.mode,  # type: ignore[arg-type]  # checked where the entry point was parsed
                    target=plan.target,
                    args=plan.args,
                    python_options=plan.python_options,
                    cwd=plan.cwd,
                    env=plan.env,
                    threads=plan.threads,
                    cold=plan.cold,
                    exit_record=Path(plan.exit_record),
                    page=Path(plan.page),
                    record={"job": plan.job_id, "attempt": plan.attempt, "rank": plan.rank},
                    umask=plan.umask,
                    secrets=plan.secrets,
                ),
                stdout=pipes[0][1],
                stderr=pipes[1][1],
                lease=lock,
            )
        except BaseException:
            for read_end, _ in pipes:
                os.close(read_end)
            raise
        finally:
            for _, write_end in pipes:
                os.close(write_end)
        output.listen(*(read_end for read_end, _ in pipes))
        return spawned.lifeline

    async def _lock(self) -> int | None:
        """The node's lock for this job and rank: held by the keeper of a live tree, so at most one tree exists.

        None when the attempt was called off. Raises RankBusyError.
        """
        path = rank_lock_path(self._node_dir, self._plan.job_id, self._plan.rank)
        make_private(path.parent)
        handle = open_private(path, os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + _LOCK_SECONDS
        delay = 0.001
        while not self._is_called_off():
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    os.close(handle)
                    raise RankBusyError(f"{path} is still locked by an older process tree") from None
                await asyncio.sleep(delay)
                delay = min(delay * 2, 0.1)
            else:
                return handle
        os.close(handle)
        return None
