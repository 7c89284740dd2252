"""The fork server's client: starts a server, requests processes from it, holds their lifelines.

Owns the client's half of the protocol in forkserver/wire.py and nothing of what is run. Standard library only; every
call has a deadline.

The life of a process as the client sees it: `spawn` returns once its keeper exists; `Started` means that the process is
about to run its first line; at most one `ErrorRaised` gives the exception that is ending it, as soon as it is raised;
`Exited` gives the status, which is on disk by then; `Gone` means that no process of its tree is left. When the lifeline
closes, even by the client's death, everything is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.private_files import make_private
from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.forkserver.holder import MARK, MARK_CHARACTERS
from orchestrator.runtime.spawn.environment import inheritable_environment
from orchestrator.runtime.spawn.lifeline import (
    ForkServerError,
    ForkServerForeignError,
    ForkServerMissingError,
    ForkServerRefusedError,
    ForkServerStartError,
    ForkServerTimeoutError,
    ForkServerVersionError,
    Lifeline,
    owned,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.runtime.forkserver.wire import SpawnRequest

SERVER_FILE = Path(__file__).parents[1] / "forkserver" / "server.py"
MAX_SOCKET_PATH_BYTES = 107

_START_DEADLINE = timedelta(seconds=20)
_CALL_DEADLINE = timedelta(seconds=60)
_CREDENTIALS = struct.Struct("3i")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedServer:
    """The outcome of start_fork_server. ``pid`` is None for a running server that has not written its own."""

    pid: int | None
    already_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Description that a warm server returns of itself."""

    pid: int
    protocol: int
    executable: str
    python: str
    torch: str | None
    """None: the interpreter has no torch; scripts start without being warmed."""
    warm_seconds: float
    cold: str | None
    """Reason that this server only starts fresh interpreters, which is seconds slower; None: it forks warm ones."""
    keepers: int
    nice: int
    oom_score_adj: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawned:
    """A process that is being started: its keeper exists."""

    keeper_pid: int
    lifeline: Lifeline


class ForkServerClient:
    """Calls the server behind one socket; holds no connection between calls, so it survives the server's restart."""

    def __init__(
        self, socket_path: Path, *, deadline: timedelta = _CALL_DEADLINE, protocol: int = wire.PROTOCOL
    ) -> None:
        self._protocol = protocol
        self._path = socket_path
        self._deadline = deadline

    async def hello(self) -> Hello:
        """Wait until the server is warm; return its description."""
        reply = await self._call({"op": "hello"}, [])
        return Hello(**{name: reply[name] for name in Hello.__slots__})

    async def shut_down(self) -> None:
        """End the server. Processes that it started continue."""
        await self._call({"op": "shutdown"}, [])

    async def end(self, patience: timedelta) -> None:
        """End the server, and return when its process has ended; one that takes longer than ``patience`` is killed.

        Processes that it started continue. Does nothing where no server listens.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            try:
                sock.connect(_checked(self._path))
                process = os.pidfd_open(self._refuse_others(sock))
            except (OSError, ForkServerError):
                return
        seconds = patience.total_seconds()
        try:
            with contextlib.suppress(ForkServerError):
                await ForkServerClient(self._path, deadline=patience).shut_down()
            if not await asyncio.to_thread(_has_ended, process, seconds):
                signal.pidfd_send_signal(process, signal.SIGKILL)
                await asyncio.to_thread(_has_ended, process, seconds)
        finally:
            os.close(process)

    async def spawn(
        self,
        request: SpawnRequest,
        *,
        stdout: int,
        stderr: int,
        stdin: int | None = None,
        listen: int | None = None,
        lease: int | None = None,
    ) -> Spawned:
        """Start a process. The descriptors stay the caller's, which may close them at any time.

        `stdin` None is the null device; a terminal becomes the new process's controlling one. `listen` is a store's bound, listening socket.
        `lease` stays open in the keeper, and there alone, until no process of the tree is left, so a lock on it shows whether the tree lives.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            roles = {"stdout": stdout, "stderr": stderr, "lifeline": theirs.fileno()}
            optional = {"stdin": stdin, "listen": listen, "lease": lease}
            roles |= {name: descriptor for name, descriptor in optional.items() if descriptor is not None}
            try:
                reply = await self._call(*request.message(roles))
                return Spawned(keeper_pid=int(reply["keeper_pid"]), lifeline=owned(ours))
            except BaseException:
                ours.close()
                raise

    async def _call(self, message: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        data = wire.encode({"protocol": self._protocol, **message})
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                async with asyncio.timeout(self._deadline.total_seconds()):
                    await loop.sock_connect(sock, _checked(self._path))
                    self._refuse_others(sock)
                    # The descriptors travel with the header: a few bytes, which an empty socket always takes.
                    socket.send_fds(sock, [data[: wire.HEADER.size]], fds)
                    await loop.sock_sendall(sock, data[wire.HEADER.size :])
                    header = await self._receive(sock, wire.HEADER.size)
                    body = await self._receive(sock, wire.body_length(header))
            except TimeoutError as error:
                raise self._timed_out() from error
            except OSError as error:
                raise self._missing(error) from error
        return _accepted(body)

    async def _receive(self, sock: socket.socket, length: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = bytearray()
        while len(data) < length:
            part = await loop.sock_recv(sock, length - len(data))
            if not part:
                raise ConnectionResetError("the server closed the connection")
            data += part
        return bytes(data)

    def _refuse_others(self, sock: socket.socket) -> int:
        """Return the server's process id. Raises for another user's: the request carries a job's environment and secrets."""
        pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid != os.geteuid():
            raise ForkServerForeignError(
                f"the process that listens on {self._path} belongs to user {uid}, not to user {os.geteuid()}; remove that file"
            )
        return int(pid)

    def _timed_out(self) -> ForkServerTimeoutError:
        return ForkServerTimeoutError(
            f"{self._path}: no answer within {self._deadline.total_seconds():g} s; see the server's log, or start it anew"
        )

    def _missing(self, error: OSError) -> ForkServerMissingError:
        return ForkServerMissingError(
            f"no fork server behind {self._path} ({error.strerror or error}); start one with start_fork_server"
        )


def _has_ended(process: int, seconds: float) -> bool:
    return bool(select.select([process], [], [], seconds)[0])


def _accepted(body: bytes) -> dict[str, Any]:
    reply = wire.decode(body)
    if reply.get("ok"):
        return reply
    if reply.get("code") == "version":
        raise ForkServerVersionError(f"{reply.get('error')}; shut that server down and start one of this version")
    raise ForkServerRefusedError(str(reply.get("error")))


def _checked(path: Path) -> str:
    text = os.fspath(path)
    if len(os.fsencode(text)) > MAX_SOCKET_PATH_BYTES:
        raise ForkServerRefusedError(
            f"{text}: a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes; choose a shorter directory"
        )
    return text


def _server_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the server's environment without a thread count: the server must read the machine's default.

    The mark reserves space in /proc/PID/environ, into which each forked process writes the mark of its tree.
    """
    own = {name: value for name, value in inheritable_environment(env).items() if name != "OMP_NUM_THREADS"}
    return {**own, MARK: " " * MARK_CHARACTERS}


def start_fork_server(
    python: str,
    socket_path: Path,
    log_path: Path,
    preload: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    of_process: int | None = None,
    deadline: timedelta = _START_DEADLINE,
) -> StartedServer:
    """Start a server that outlives its starter, as a child of init; do nothing when one is running.

    Returns when the server listens; it is warm a second or two later, and `hello` waits for that. `env` (default: this process's) should be
    what jobs inherit: a variable that matters to an interpreter's start and that a job sets differently makes that job start cold. It ends
    after the process `of_process`, once nothing that it forked runs. Blocks for about 0.1 s: call it from a thread in asynchronous code.
    """
    try:
        make_private(socket_path.parent)
    except OSError as error:
        raise ForkServerStartError(str(error)) from error
    command = [python, "-u", os.fspath(SERVER_FILE), "--socket", _checked(socket_path), "--log", os.fspath(log_path)]
    command += [] if of_process is None else ["--of-process", str(of_process)]
    for name in preload:
        command += ["--preload", name]
    try:
        outcome = subprocess.run(
            command,
            env=_server_environment(os.environ if env is None else env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=deadline.total_seconds(),
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ForkServerTimeoutError(
            f"{python} did not start within {deadline.total_seconds():g} s; see {log_path}"
        ) from error
    except OSError as error:
        raise ForkServerStartError(f"cannot execute {python}: {error.strerror}; name a Python interpreter") from error
    with contextlib.suppress(ValueError):
        reply = json.loads(outcome.stdout)
        if "error" not in reply:
            return StartedServer(pid=reply["pid"], already_running=bool(reply["already_running"]))
        raise ForkServerStartError(reply["error"])
    stderr_lines = outcome.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing"]
    raise ForkServerStartError(f"{python} ended with {outcome.returncode}: {stderr_lines[0]}; see {log_path}")
