"""The fork server's client: starts a server, requests processes from it, holds their lifelines, reads the record left at an end.

Owns the client's half of the protocol in forkserver/wire.py and nothing of what is run. The other end of a lifeline is the keeper's
(forkserver/keeper.py), whose JSON is checked here against the classes of the events. Every call has a deadline.

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
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from msgspec import Meta

from orchestrator.core.codec import Count, Integer, Message, RecordError, Text, Time, usable
from orchestrator.private_files import make_private
from orchestrator.runtime.forkserver import wire
from orchestrator.runtime.forkserver.holder import MARK, MARK_CHARACTERS
from orchestrator.runtime.spawn.environment import inheritable_environment
from orchestrator.spec.plain_files import read_plain

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from orchestrator.runtime.forkserver.wire import SpawnRequest

_READ_BYTES = 65536
_RECORD_VERSION = 1
_CLOSED = -1
MAX_RECORD_BYTES: Final = 4 * 1024 * 1024
"""An exit record is less than a tenth of this: the reporting process cuts its texts."""
ExitCode = Annotated[int, Meta(ge=0, le=255)]
SignalNumber = Annotated[int, Meta(ge=1, le=64)]

R = TypeVar("R", bound=Message)


class ForkServerError(Exception):
    """The fork server did not do what was asked; each subclass says why and what to do next."""


class ForkServerMissingError(ForkServerError):
    """Nothing listens on the socket: start the server with start_fork_server, then repeat the call."""


class ForkServerForeignError(ForkServerError):
    """Another user listens on the socket; nothing was sent. Remove the socket's file."""


class ForkServerRefusedError(ForkServerError):
    """The server refused the request; the message is its own. Fix the request and repeat it."""


class ForkServerVersionError(ForkServerError):
    """The server was started by another version of orch: shut it down and start one of this version."""


class ForkServerTimeoutError(ForkServerError):
    """No answer within the deadline: the server may still be warming up (see its log), or the machine is overloaded."""


class ForkServerStartError(ForkServerError):
    """The server could not be started; the message holds the interpreter's output."""


class ExitRecordError(ForkServerError):
    """The file in an exit record's place is invalid: the job's own processes can write there. It counts as absent."""


# -- events of a lifeline; times are Unix times in seconds


class Started(Message):
    """The process is about to run its first line."""

    pid: Integer
    cold: Text | None
    """Reason for a fresh interpreter; None for a warm start and for commands."""
    at: Time


class ErrorRaised(Message):
    """The exception that is ending the process, or what kept it from starting."""

    type: Text
    message: Text
    traceback: Text
    at: Time
    missing_file: Text = ""
    """The file that a FileNotFoundError names."""


class Ending(Message):
    """Facts about the end of a process besides its status; None where they are not known."""

    stop_seen_at: Time | None = None
    """Time at which it noticed a request to stop, from its owner or not: by its handler for SIGTERM, or by its page."""
    keeper_terminated_at: Time | None = None
    """Time at which its keeper got SIGTERM, which its owner never sends."""
    last_step: Count | None = None
    total_steps: Count | None = None


class MemoryUsed(Message):
    """Memory of the machine that the process used.

    ``peak_bytes``, ``limit_bytes`` and ``kills`` are of its control group: None and 0 where there is none, or no limit.
    """

    max_rss_bytes: Count
    peak_bytes: Count | None = None
    limit_bytes: Count | None = None
    kills: Count = 0
    """Number of the group's processes that the kernel has killed for memory, at the group's own limit or not."""


class Exited(Message):
    """The process has ended; one of `exit_code` and `signal` is None."""

    exit_code: ExitCode | None
    signal: SignalNumber | None
    cause: Text | None
    """The last order to its keeper: stop, stop_deadline, kill, lifeline; None: it ended by itself."""
    record_error: Text | None
    """Reason that the exit record could not be written; None: it is on disk."""
    at: Time
    ending: Ending = Ending()
    memory: MemoryUsed | None = None


class Gone(Message):
    """No process of the tree is left."""

    at: Time


class KeeperLost(Message):
    """The keeper died first: the process dies with it; how it would have ended is unknown."""

    at: Time


Event = Started | ErrorRaised | Exited | Gone | KeeperLost


class ExitRecord(Message):
    """End of a process, as its keeper recorded it on disk."""

    record: Mapping[str, Any]
    """The ``record`` of the request, unchanged."""
    pid: Integer
    keeper_pid: Integer
    started_at: Time
    ended_at: Time
    exit_code: ExitCode | None
    signal: SignalNumber | None
    cause: Text | None
    error: ErrorRaised | None
    ending: Ending = Ending()
    memory: MemoryUsed | None = None


def read_exit_record(path: Path) -> ExitRecord | None:
    """Read the record at `path`; None while there is none. Records are complete or absent.

    The job's own processes can write to the file, and replace its directories: no link is followed. Raises ExitRecordError
    for an invalid record, and ForkServerVersionError.
    """
    try:
        text = read_plain(path, MAX_RECORD_BYTES, real=True)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ExitRecordError(f"{path} cannot be read: {error.strerror}") from error
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ExitRecordError(f"{path} is not an exit record: it is not JSON") from error
    if not isinstance(fields, dict) or "version" not in fields:
        raise ExitRecordError(f"{path} is not an exit record")
    if fields["version"] != _RECORD_VERSION:
        raise ForkServerVersionError(f"{path} was written by another version of orch; read it with that one")
    record = _built(ExitRecord, fields, besides=("ending",))
    if record is None or (record.exit_code is None) == (record.signal is None):
        raise ExitRecordError(f"{path} is not an exit record: a value is missing, of the wrong type, or out of range")
    return record


class Lifeline:
    """The owner's end of a lifeline: the process's events, and orders to its keeper. One reader at a time.

    The process lives as long as this is open. Orders return False when the keeper has ended.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._lines = wire.LineReader()
        self._pending: list[Event] = []
        self._ended = False
        self._waiting: asyncio.Event | None = None

    def signal(self, number: int) -> bool:
        """Send a signal to the process's group."""
        return self._order({"cmd": "signal", "signal": int(number)})

    def stop(self, grace: timedelta) -> bool:
        """Send SIGTERM to the group now; the keeper sends SIGKILL to the whole tree after `grace`, even if the caller dies."""
        return self._order({"cmd": "stop", "grace_seconds": grace.total_seconds()})

    def kill(self) -> bool:
        """Send SIGKILL to the whole tree, now."""
        return self._order({"cmd": "kill"})

    def close(self) -> None:
        """Close the lifeline: the rest of the tree is killed. A waiting reader gets what has arrived, then None."""
        self._ended = True
        if self._waiting is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._waiting.set()
        self._socket.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, for pollers."""
        return self._socket.fileno()

    def _order(self, message: dict[str, Any]) -> bool:
        try:
            self._socket.send(wire.encode_line(message))
        except OSError:
            return False
        return True

    def __aiter__(self) -> AsyncIterator[Event]:
        return self._events()

    async def _events(self) -> AsyncIterator[Event]:
        """Yield every event until Gone or KeeperLost, which is the last."""
        while (event := await self.next_event()) is not None:
            yield event

    async def next_event(self) -> Event | None:
        """Return the next event; None after the last one. Cancelling loses nothing."""
        while not self._pending and not self._ended:
            await self._readable()
            if not self._ended:
                self._receive()
        return self._pending.pop(0) if self._pending else None

    async def _readable(self) -> None:
        """Wait without reading: a cancelled sock_recv may already have taken bytes from the socket."""
        loop = asyncio.get_running_loop()
        self._waiting = asyncio.Event()
        loop.add_reader(self._socket, self._waiting.set)
        try:
            await self._waiting.wait()
        finally:
            self._waiting = None
            if self._socket.fileno() != _CLOSED:
                loop.remove_reader(self._socket)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._take(data)

    def _take(self, data: bytes) -> None:
        messages = self._messages(data)
        if messages is not None:
            for message in messages:
                self._take_message(message)
            self._ended = any(isinstance(event, Gone) for event in self._pending)
        else:
            self._ended = True
            self._pending.append(KeeperLost(at=time.time()))

    def _messages(self, data: bytes) -> list[dict[str, Any]] | None:
        """Return the received messages; None at the end, and for a peer that sends invalid messages."""
        try:
            return self._lines.feed(data) if data else None
        except wire.WireError:
            return None

    def _take_message(self, message: dict[str, Any]) -> None:
        """Add the event of a message; none for one of unknown kind or with missing fields."""
        cls = _EVENTS.get(str(message.get("event")))
        event = None if cls is None else _built(cls, message, besides=("ending", "memory"))
        if event is not None:
            self._pending.append(event)


def owned(sock: socket.socket) -> Lifeline:
    """Return the owner's end of a started process's lifeline, and let the process run its first line."""
    with contextlib.suppress(OSError):  # the keeper has ended: the lifeline reports that
        sock.send(wire.encode_line({"cmd": "go"}))
    return Lifeline(sock)


_EVENTS: dict[str, type[Started | ErrorRaised | Exited | Gone]] = {
    "started": Started,
    "error": ErrorRaised,
    "exited": Exited,
    "gone": Gone,
}


def _built(cls: type[R], values: dict[str, Any], besides: tuple[str, ...]) -> R | None:
    """Return the record of the values; None if one is missing or does not fit, but for what is told of the end ``besides``."""
    try:
        record, unusable = usable(cls, values)
    except RecordError:
        return None
    return record if all(name.startswith(besides) for name in unusable) else None


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
