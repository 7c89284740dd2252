"""Connects a session to this terminal or to pipes: sends keys, size and signals to the command, writes its output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import termios
import tty
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.transport.session_stream import MAX_WAITING_BYTES, STDERR, End, SessionStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
