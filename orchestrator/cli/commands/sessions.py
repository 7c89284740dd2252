"""Beside running ranks: `orch exec`, `attach`, `port-forward` (terminals and connections), `stacks` and `profile` (what they do)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import termios
import threading
import time
import tty
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, BadRequestError, OrchError, RefusedError
from orchestrator.api.transport import following
from orchestrator.api.transport.session_stream import MAX_WAITING_BYTES, STDERR, End, SessionStream
from orchestrator.api.transport.wire import ConnectionLostError
from orchestrator.api.views import TERMINAL_STATES
from orchestrator.cli.commands.shared import Job, Json, ended_in_order
from orchestrator.cli.console import clean
from orchestrator.cli.session import Session, answer, writing
from orchestrator.cli.times import parse_span_within
from orchestrator.units import size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from orchestrator.api.client import Client
    from orchestrator.api.transport.session_stream import SessionStream
    from orchestrator.api.views import JobView, RankStacksView
    from orchestrator.cli.console import Console

_READ_BYTES: Final = 32 * 1024
_LOOK_SECONDS: Final = 5.0
_SIGNAL_EXIT: Final = 128
_STANDARD_INPUT, _STANDARD_OUTPUT, _STANDARD_ERROR = 0, 1, 2
_NEW_LINE: Final = b"\r\n"
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class LeftError(Exception):
    """The user left the session with ``~.``."""


def may_have_terminal() -> bool:
    """Return whether standard input and standard output are a terminal."""
    return os.isatty(_STANDARD_INPUT) and os.isatty(_STANDARD_OUTPUT)


def terminal_of(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the properties of this terminal for the daemon."""
    columns, rows = _size()
    kind = environ.get("TERM", "")
    known = 0 < len(kind) <= 64 and all(letter.isascii() and (letter.isalnum() or letter in "._+-") for letter in kind)
    return {"rows": rows, "columns": columns, "kind": kind if known else "dumb"}


def carry(stream: SessionStream, *, terminal: bool) -> End:
    """Pass data between this command and the session until the session ends; return its end. Raises LeftError."""
    with _raw_terminal() if terminal and os.isatty(_STANDARD_INPUT) else contextlib.nullcontext():
        return _Carrier(stream, terminal=terminal).run()


def exit_code(end: End) -> int:
    """Return the exit code that a shell would give."""
    if end.signal is not None:
        return _SIGNAL_EXIT + end.signal
    return _SIGNAL_EXIT + signal.SIGKILL if end.exit_code is None else end.exit_code


class _Carrier:
    def __init__(self, stream: SessionStream, *, terminal: bool) -> None:
        self._stream, self._terminal = stream, terminal
        self._reading = True
        self._escape = Escape() if terminal else None
        self._interrupted = False

    def run(self) -> End:
        with _signals(terminal=self._terminal) as wake:
            while True:
                for found in self._stream.receive():
                    if isinstance(found, End):
                        return found
                    _write(_STANDARD_ERROR if found.stream == STDERR else _STANDARD_OUTPUT, found.data)
                self._wait(wake)

    def _wait(self, wake: socket.socket) -> None:
        poll = select.poll()
        poll.register(self._stream, select.POLLIN | (select.POLLOUT if self._stream.waiting else 0))
        poll.register(wake, select.POLLIN)
        if self._reading and self._stream.waiting < MAX_WAITING_BYTES:
            poll.register(_STANDARD_INPUT, select.POLLIN)
        ready = dict(poll.poll(0 if self._stream.ready else _LOOK_SECONDS * 1000))
        if self._stream.waiting:
            self._stream.flush()
        if wake.fileno() in ready:
            for number in wake.recv(_READ_BYTES):
                self._signal(signal.Signals(number))
        if _STANDARD_INPUT in ready:
            self._read()

    def _read(self) -> None:
        try:
            data = os.read(_STANDARD_INPUT, _READ_BYTES)
        except OSError:  # the terminal was hung up
            data = b""
        if not data:
            self._reading = False
            self._stream.end_input()
            return
        if self._escape is not None:
            data = self._escape.passed(data)
        if data:
            self._stream.write(data)

    def _signal(self, number: signal.Signals) -> None:
        if number == signal.SIGWINCH:
            columns, rows = _size()
            self._stream.resize(rows, columns)
        elif (
            self._terminal or self._interrupted
        ):  # the second signal, or one that no key sent: leave, which ends the command
            raise SystemExit(_SIGNAL_EXIT + number)
        else:
            self._interrupted = True
            self._stream.signal(number)


class Escape:
    """Finds ``~.`` at the beginning of a line, as ssh does, to leave a command that hangs. ``~~`` is one ``~``."""

    def __init__(self) -> None:
        self._at_start, self._held = True, False

    def passed(self, data: bytes) -> bytes:
        """Return the part of ``data`` that is for the command. Raises LeftError."""
        out = bytearray()
        for byte in data:
            if self._held:
                self._held = False
                if byte == ord("."):
                    raise LeftError
                out += b"~" if byte == ord("~") else bytes((ord("~"), byte))
            elif self._at_start and byte == ord("~"):
                self._held = True
                continue
            else:
                out.append(byte)
            self._at_start = byte in _NEW_LINE
        return bytes(out)


def _size() -> tuple[int, int]:
    for descriptor in (_STANDARD_OUTPUT, _STANDARD_INPUT):
        with contextlib.suppress(OSError):
            size = os.get_terminal_size(descriptor)
            return min(size.columns, 10_000), min(size.lines, 10_000)
    return 80, 24


def _write(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:  # another program made the descriptor non-blocking
            select.select([], [descriptor], [])


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Send every key to the command, including Ctrl-C; restore the terminal at the end."""
    before = termios.tcgetattr(_STANDARD_INPUT)
    tty.setraw(_STANDARD_INPUT, termios.TCSADRAIN)  # keeps keys that were typed ahead
    try:
        yield
    finally:
        termios.tcsetattr(_STANDARD_INPUT, termios.TCSADRAIN, before)


@contextlib.contextmanager
def _signals(*, terminal: bool) -> Iterator[socket.socket]:
    """Yield a socket on which signals arrive as bytes, so that they interrupt nothing half-way."""
    reader, writer = socket.socketpair()
    reader.setblocking(False)
    writer.setblocking(False)
    numbers = (*_PASSED_ON, signal.SIGWINCH) if terminal else _PASSED_ON
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        reader.close()
        writer.close()


def flush_standard_streams() -> None:
    """Flush earlier output before the session's, which bypasses Python's buffers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()


SETTLE_SECONDS: Final = 20.0
"""Time in which the end of a rank must show in its job. The other ranks of a gang may run for longer."""


def attach_to(session: Session, job_id: str, rank: int) -> int:
    """Pass keys and output on; return the rank's exit code, or 0 if the user detached. Raises OrchError."""
    wanted = may_have_terminal()
    size = terminal_of(session.environ) if wanted else None
    stream = session.client().session(job_id, rank=rank, attach=True, terminal=size)
    flush_standard_streams()
    try:
        end = carry(stream, terminal=wanted)
    except LeftError:
        session.console.note(
            f"\ndetached; rank {rank} keeps running, and `orch attach {job_id} --rank {rank}` returns to it"
        )
        return EXIT_OK
    except ConnectionLostError as error:
        hint = f"the rank keeps running; `orch attach {job_id} --rank {rank}` returns to it"
        raise ConnectionLostError(error.message, hint=hint) from error
    except RefusedError:
        return _ended(session, job_id)
    finally:
        stream.close()
    known = end.reason == "exited" and (end.exit_code is not None or end.signal is not None)
    if not known or end.signal is not None:
        code = _ended(session, job_id)
        return exit_code(end) if known else code
    return exit_code(end)


def _ended(session: Session, job_id: str) -> int:
    """Print why a rank ended that was killed or did not report its end; return an exit code for it."""
    job = _settled(session, job_id)
    session.console.print_error(f"orch: {job_id} is {job.state}: {clean(job.reason)}")
    return EXIT_OK if job.state == "SUCCEEDED" else job.exit_code or EXIT_JOB_FAILED


def _settled(session: Session, job_id: str) -> JobView:
    """Return the job once it no longer runs: a session may end before the end of its rank is recorded."""
    client, deadline = session.client(), time.monotonic() + SETTLE_SECONDS
    readings = following.watch(
        client, lambda: client.job(job_id), job_ids=[job_id], patience=session.patience(), deadline=deadline
    )
    return next(job for job in readings if job.state != "RUNNING" or time.monotonic() >= deadline)


_MAX_CONNECTIONS: Final = 100


class Forwarding:
    """Forwards ports to the node of ``rank``. Errors of single connections are printed; the others continue."""

    def __init__(self, client: Client, job_id: str, rank: int, console: Console) -> None:
        self._client, self._job_id, self._rank = client, job_id, rank
        self._console = console
        self._listeners: dict[int, tuple[socket.socket, int]] = {}
        self._room = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._version: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for listener, _remote in self._listeners.values():
            listener.close()

    def listen(self, address: str, local: int, remote: int) -> str:
        """Listen on a port for the node's ``remote``; return ``host:port``. Raises BadRequestError, RefusedError."""
        try:
            family, kind, proto, _, where = socket.getaddrinfo(address, local, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise BadRequestError(f"--address {address}: {error.strerror}", hint="write one like 127.0.0.1") from error
        listener = socket.socket(family, kind, proto)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise RefusedError(
                f"cannot listen on {address}:{local}: {error.strerror}", hint=f"another port here: 0:{remote} takes any"
            ) from error
        self._listeners[listener.fileno()] = (listener, remote)
        host, port = listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def run(self) -> None:
        """Accept connections until the job has ended."""
        poll = select.poll()
        for descriptor in self._listeners:
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = poll.poll(_LOOK_SECONDS * 1000)
            for descriptor, _ in ready:
                listener, remote = self._listeners[descriptor]
                self._take(listener, remote)
            if not ready and self._has_ended():
                return

    def _has_ended(self) -> bool:
        try:
            job = self._client.job(self._job_id)
        except OrchError:  # the daemon restarts: each connection reports its own error
            return False
        if job.state in TERMINAL_STATES:
            self._console.note(f"{job.id} is {job.state}")
            return True
        return False

    def _take(self, listener: socket.socket, remote: int) -> None:
        connection, _ = listener.accept()
        if not self._room.acquire(blocking=False):
            connection.close()
            self._console.print_error(f"orch: a connection was refused: {_MAX_CONNECTIONS} are open")
            return
        threading.Thread(target=self._serve, args=(connection, remote), daemon=True).start()

    def _serve(self, connection: socket.socket, remote: int) -> None:
        try:
            with (
                connection,
                contextlib.closing(self._client.session(self._job_id, rank=self._rank, port=remote)) as stream,
            ):
                _relay(connection, stream)
        except OrchError as error:
            self._console.print_error(f"orch: {error.message}" + (f" ({error.hint})" if error.hint else ""))
        except OSError:
            pass  # the local program has closed its connection
        finally:
            self._room.release()


def _relay(connection: socket.socket, stream: SessionStream) -> None:
    """Pass bytes on in both directions until one side closes; each side may close its half first."""
    reading = True
    while True:
        for found in stream.receive():
            if isinstance(found, End):
                return
            connection.sendall(found.data)
        poll = select.poll()
        poll.register(stream, select.POLLIN | (select.POLLOUT if stream.waiting else 0))
        if reading and stream.waiting < MAX_WAITING_BYTES:
            poll.register(connection, select.POLLIN)
        ready = dict(poll.poll(0 if stream.ready else _LOOK_SECONDS * 1000))
        if stream.waiting:
            stream.flush()
        if connection.fileno() in ready:
            data = connection.recv(_READ_BYTES)
            reading = bool(data)
            if data:
                stream.write(data)
            else:
                stream.end_input()


CONTEXT_SETTINGS = {"exec": {"allow_interspersed_args": True}}


def exec_beside(
    job: Job,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="The command; without it, a shell.")
    ] = None,
    *,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="Beside this rank.")] = 0,
    terminal: Annotated[
        bool | None,
        typer.Option(
            "--terminal/--no-terminal",
            "-t/-T",
            help="Give the command a terminal. Default: when standard input and output are terminals.",
        ),
    ] = None,
) -> int:
    """Run a command beside a running rank: in its directory, with its environment and GPUs, on its node.

    The exit code is the command's; 128 plus the signal's number when a signal ended it. It ends with the rank, and when this command ends.
    Enter ~. leaves a session on a terminal.
    """
    session = Session()
    client = session.client()
    found = session.job(job)
    wanted = may_have_terminal() if terminal is None else terminal
    stream = client.session(
        found.id, rank=rank, argv=command or (), terminal=terminal_of(session.environ) if wanted else None
    )
    flush_standard_streams()
    try:
        end = carry(stream, terminal=wanted)
    except LeftError:
        session.console.note("left; the command was ended")
        return 0
    finally:
        stream.close()
    if end.reason != "exited":
        session.console.print_error(f"orch: rank {rank} of {found.id} has ended, and the session with it")
    return exit_code(end)


def attach(
    job: Job,
    *,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="To this rank.")] = 0,
) -> int:
    """Attach this terminal to a running rank: its debugger at a breakpoint, or all of an interactive job.

    Output of the rank is shown too. Keys are sent to its debugger while it is at a breakpoint, and always to an interactive job.
    The exit code is the rank's. ~. at the beginning of a line detaches; the rank keeps running.
    """
    session = Session()
    found = session.job(job)
    return attach_to(session, found.id, rank)


def port_forward(
    job: Job,
    ports: Annotated[
        list[str],
        typer.Argument(metavar="[LOCAL:]PORT...", help="A port of the job; LOCAL: its number here, 0 for a free one."),
    ],
    *,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="On the node of this rank.")] = 0,
    address: Annotated[
        str, typer.Option("--address", metavar="ADDRESS", help="The address of this machine to listen on.")
    ] = "127.0.0.1",
) -> int:
    """Make ports of a running job reachable here, such as TensorBoard's (6006) or Jupyter's (8888).

    Runs until Ctrl-C, or until the job has ended.
    """
    pairs = [parse_ports(text) for text in ports]
    session = Session()
    client = session.client()
    found = session.job(job)
    with ended_in_order(), Forwarding(client, found.id, rank, session.console) as forwarding:
        for local, remote in pairs:
            where = forwarding.listen(address, local, remote)
            session.console.print(f"http://{where} is port {remote} of rank {rank} of {found.id}; Ctrl-C ends this")
        session.console.flush()
        forwarding.run()
    return EXIT_OK


def parse_ports(text: str) -> tuple[int, int]:
    """Return the local port and that of the job. Raises BadRequestError."""
    local, colon, remote = text.rpartition(":")
    numbers = (local if colon else remote, remote)
    if not all(number.isascii() and number.isdecimal() and int(number) <= 65535 for number in numbers) or not int(
        remote
    ):
        raise BadRequestError(f"{text!r} is not a port", hint="write 6006, or 8080:6006 for another port here")
    return int(numbers[0]), int(remote)


_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "held by a debugger"}


def stacks(
    job: Job,
    *,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.")] = None,
    json: Json = False,
) -> int:
    """Show the Python stacks of a running job's ranks, without stopping them.

    The same lines are written to the ranks' logs.
    """
    session = Session()
    client = session.client()
    found = session.job(job)
    reply = client.stacks(found.id, rank=rank)
    lines = [line for one in reply.ranks for line in ("", *_lines(one))]
    return answer(session, lines[1:], reply.to_json(), as_json=json)


def _lines(rank: RankStacksView) -> list[str]:
    if rank.pid is None:
        return [f"rank {rank.rank}: {clean(rank.problem)}"]
    state = _STATES.get(rank.state, rank.state or "gone")
    waits = f" in {clean(rank.waits_in)}" if rank.waits_in else ""
    lines = [f"rank {rank.rank}: process {rank.pid}, {state}{waits}, {rank.cpu_seconds:.2f} s of processor time"]
    if rank.problem:
        lines.append(f"  {clean(rank.problem)}")
    for thread in rank.threads:
        lines += [f"  {clean(thread.name)}", *(f"    {clean(frame)}" for frame in thread.frames)]
    return lines


MAX_SECONDS = 600.0


def profile(
    job: Job,
    *,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=100, help="Optimizer steps to trace.")] = 5,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="The rank to trace.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: JOB-rankN.trace.json.gz here.")
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="SPAN", help="How long the steps may take: 30s, 10m.")
    ] = "1m",
    json: Json = False,
) -> int:
    """Trace the next steps of a running job that trains with orchestrator.train.

    The trace opens in https://ui.perfetto.dev and in chrome://tracing.
    """
    seconds = parse_span_within(timeout, "--timeout", least=1.0, most=MAX_SECONDS)
    session = Session()
    client = session.client()
    found = session.job(job)
    target = output or Path(f"{found.id}-rank{rank}.trace.json.gz")
    if not target.parent.is_dir():
        raise BadRequestError(f"{target.parent} is not a directory", hint="make it, or name another --output")
    data = client.profile(found.id, steps=steps, rank=rank, timeout_seconds=seconds)
    with writing(target, "name another --output"):
        target.write_bytes(data)
    line = f"{target} ({size(len(data))}): open it in https://ui.perfetto.dev"
    value = {"job_id": found.id, "rank": rank, "path": str(target), "bytes": len(data)}
    return answer(session, [line], value, as_json=json)
