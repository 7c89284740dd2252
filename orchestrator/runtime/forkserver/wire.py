"""Messages between a client and the fork server, and between a keeper and its owner.

Owns framing and names; interprets no message. Requests and replies are JSON behind a four-byte length; file descriptors
travel beside the first byte of a request (SCM_RIGHTS), their roles named in order by the request's `fds`. The lifeline
carries JSON lines both ways. Standard library only: both sides import this file.
"""

from __future__ import annotations

import json
import socket
import struct
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
