"""Messages between a client and the fork server, and between a keeper and its owner; the request to start a process.

Requests and replies are JSON behind a four-byte length; file descriptors travel beside the first byte of a request (SCM_RIGHTS), their
roles named in order by the request's `fds`. The lifeline carries JSON lines both ways. Owns the check of what the socket received: all other
code relies on these types and checks nothing again. The peer is the same user, so this guards against mistakes and other versions, not
against malice. Standard library only: both sides import this file.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence  # noqa: TC003  # msgspec reads the annotations of RankPlan
from dataclasses import dataclass, field, fields
from typing import Any

PROTOCOL = 1
"""Increased when the meaning of a message changes; client and server with different numbers refuse each other."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""An environment may be a few megabytes (ARG_MAX); more is not a request."""

MAX_FDS = 64
_READ_BYTES = 262144
MAX_LINE_BYTES = 1024 * 1024
"""Longest line on the lifeline; tracebacks are cut to much less."""

HEADER = struct.Struct("!I")

MODES = ("script", "module", "command", "store")

REQUIRED_FDS = ("stdout", "stderr", "lifeline")
OPTIONAL_FDS = ("stdin", "listen", "lease")


class WireError(Exception):
    """The peer sent something that is not a message of this protocol; close the connection and check its version."""


def encode(message: dict[str, Any]) -> bytes:
    """Frame one message. Surrogates (bytes of an environment that are not UTF-8) survive the round trip."""
    body = json.dumps(message, separators=(",", ":")).encode("ascii")
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a message of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}; shorten env or args")
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Return the length that a header announces, in bytes."""
    (length,) = HEADER.unpack(header)
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"the peer announced a message of {length} bytes; the limit is {MAX_MESSAGE_BYTES}")
    return int(length)


def decode(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Decode the message in a body."""
    try:
        message = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from error
    if not isinstance(message, dict):
        raise WireError(f"a message is an object, not {type(message).__name__}")
    return message


class RequestReader:
    """Assembles requests as they arrive, with the descriptors that travel beside them."""

    __slots__ = ("_buffer", "_fds")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: list[int] = []

    def receive(self, sock: socket.socket) -> dict[str, Any] | None:
        """Read what is available; return a complete request, or None before it is complete. Raises EOFError at the end."""
        data, fds, flags, _ = socket.recv_fds(sock, _READ_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        self._fds.extend(fds)
        if flags & socket.MSG_CTRUNC:
            raise WireError(f"more than {MAX_FDS} descriptors with one request")
        if not data:
            raise EOFError
        self._buffer += data
        if len(self._buffer) < HEADER.size:
            return None
        end = HEADER.size + body_length(bytes(self._buffer[: HEADER.size]))
        if len(self._buffer) < end:
            return None
        message = decode(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return message

    def take_fds(self) -> list[int]:
        """Return the received descriptors; the caller owns them."""
        fds, self._fds = self._fds, []
        return fds


def encode_line(message: dict[str, Any]) -> bytes:
    """Encode one message of the lifeline."""
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


class LineReader:
    """Splits a byte stream into JSON lines; any other content is an error of the peer."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add bytes; return the messages that they complete."""
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise WireError(f"a line of more than {MAX_LINE_BYTES} bytes on the lifeline")
        self._buffer = bytearray(rest)
        return [decode(line) for line in lines if line]


# -- the request to start a process


class BadRequestError(Exception):
    """The request cannot be served as it is; the message says which field, and what it should be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpawnRequest:
    """A process to start, with what its keeper and the process itself need.

    ``env`` is the complete environment. ``threads`` is torch's thread count; None takes OMP_NUM_THREADS from ``env``, else the
    machine's default. ``record`` is copied into the exit record, with the last content of the progress page ``page``.
    ``cold`` requests a fresh interpreter in any case; otherwise the server uses one only where a fork would differ from it.
    """

    mode: str
    target: str = ""
    """A script's path, a module's name, a command; unused for a store."""
    args: Sequence[str] = ()
    python_options: Sequence[str] = ()
    cwd: str
    env: Mapping[str, str] = field(repr=False)
    threads: int | None = None
    cold: bool = False
    exit_record: str | None = None
    page: str | None = None
    """The process's progress page, read once it has ended."""
    record: Mapping[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None
    """The memory limit of the tree in bytes, where it can be enforced; None: no limit."""
    umask: int | None = None
    """The umask of the new process; None: the server's, which keeps files from other users."""
    secrets: Sequence[str] = field(default=(), repr=False)
    """Replaced by `***` in the exit record and in exceptions reported over the lifeline."""

    def message(self, roles: Mapping[str, int]) -> tuple[dict[str, Any], list[int]]:
        """Return the message for the server, and its descriptors; ``roles`` has these by the server's names."""
        body = {f.name: getattr(self, f.name) for f in fields(SpawnRequest)}
        body |= {"env": dict(self.env), "record": dict(self.record)}
        return {"op": "spawn", **body, "fds": list(roles)}, list(roles.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn(SpawnRequest):
    """A received request, and its descriptors: their numbers in the process that holds this object."""

    env: dict[str, str] = field(repr=False)
    stdout: int
    stderr: int
    lifeline: int
    stdin: int | None = None
    """None: the null device. A terminal becomes the controlling one of the new process."""
    listen: int | None
    lease: int | None
    """Held open by the keeper only until no process of the tree is left; a lock on it shows that the tree lives."""

    def descriptors(self) -> set[int]:
        """Return every descriptor that came with the request."""
        optional = {fd for fd in (self.stdin, self.listen, self.lease) if fd is not None}
        return {self.stdout, self.stderr, self.lifeline} | optional


def parse(message: dict[str, Any], fds: list[int]) -> Spawn:
    """Parse a message into a request. Raises BadRequestError; the caller then closes `fds`."""
    named = _name_descriptors(_texts(message, "fds"), fds)
    mode = _text(message, "mode")
    if mode not in MODES:
        raise BadRequestError(f"mode {mode!r} is none of {', '.join(MODES)}")
    if mode == "store" and "listen" not in named:
        raise BadRequestError("mode 'store' needs the listening socket: pass `listen`")
    cwd = _text(message, "cwd")
    if not os.path.isabs(cwd):
        raise BadRequestError(f"cwd {cwd!r} is not absolute; it would be relative to the server's directory")
    return Spawn(
        mode=mode,
        target=_text(message, "target"),
        args=_texts(message, "args"),
        python_options=_texts(message, "python_options"),
        cwd=cwd,
        env=_environment(message),
        threads=_whole_number(message, "threads"),
        cold=message.get("cold") is True,
        exit_record=None if message.get("exit_record") is None else _text(message, "exit_record"),
        page=None if message.get("page") is None else _text(message, "page"),
        record=_object(message, "record"),
        stdout=named["stdout"],
        stderr=named["stderr"],
        lifeline=named["lifeline"],
        stdin=named.get("stdin"),
        listen=named.get("listen"),
        lease=named.get("lease"),
        memory_bytes=_whole_number(message, "memory_bytes"),
        umask=_umask(message),
        secrets=_texts(message, "secrets"),
    )


def _name_descriptors(roles: tuple[str, ...], fds: list[int]) -> dict[str, int]:
    if len(roles) != len(fds):
        raise BadRequestError(f"{len(roles)} descriptors announced, {len(fds)} arrived")
    named = dict(zip(roles, fds, strict=True))
    for role in named.keys() - {*REQUIRED_FDS, *OPTIONAL_FDS}:
        raise BadRequestError(f"descriptor role {role!r} is none of {', '.join((*REQUIRED_FDS, *OPTIONAL_FDS))}")
    missing = [role for role in REQUIRED_FDS if role not in named]
    if missing:
        raise BadRequestError(f"descriptors missing: {', '.join(missing)}")
    return named


def _text(message: dict[str, Any], key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or "\0" in value:
        raise BadRequestError(f"{key} must be text without NUL, not {type(value).__name__}")
    return value


def _texts(message: dict[str, Any], key: str) -> tuple[str, ...]:
    value = message.get(key, [])
    if not isinstance(value, list) or any(not isinstance(item, str) or "\0" in item for item in value):
        raise BadRequestError(f"{key} must be a list of texts without NUL")
    return tuple(value)


def _object(message: dict[str, Any], key: str) -> dict[str, Any]:
    value = message.get(key, {})
    if not isinstance(value, dict):
        raise BadRequestError(f"{key} must be an object, not {type(value).__name__}")
    return value


def _environment(message: dict[str, Any]) -> dict[str, str]:
    env = _object(message, "env")
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
            raise BadRequestError(
                f"env has {name!r}, which no process can be given: text without NUL, names without '='"
            )
    return env


def _whole_number(message: dict[str, Any], key: str) -> int | None:
    value = message.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequestError(f"{key} must be a whole number of at least 1, or null, not {value!r}")
    return value


def _umask(message: dict[str, Any]) -> int | None:
    value = message.get("umask")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 0o777:
        raise BadRequestError(f"umask must be a whole number from 0 to 0o777, or null, not {value!r}")
    return value
