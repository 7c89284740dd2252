"""Sends one signed HTTP POST to a web hook. No redirects, no proxies; only the status of the answer is used.

The name is resolved once and exactly that address is connected. Link-local addresses and those of metadata services are
refused (hook_addresses), because clouds serve a machine's credentials there. Loopback and private ones are allowed, for
relays on the same network; a user who may submit a job runs code on this machine as the daemon's user anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import re
import secrets
import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from orchestrator.daemon.notify.hook_addresses import is_refused
from orchestrator.durable_files import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

DEADLINE_SECONDS: Final = 10.0
SIGNATURE_HEADER: Final = "X-Orch-Signature"
_LONGEST_HEAD: Final = 64 * 1024


class HookError(Exception):
    """The hook did not accept the notice; ``final`` when another try cannot help."""

    def __init__(self, message: str, *, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


def signature(key: bytes, at: int, body: bytes) -> str:
    """Return the header's value: ``t=TIME,v1=HEX``, an HMAC-SHA256 over ``TIME.BODY``."""
    return f"t={at},v1={hmac.new(key, str(at).encode() + b'.' + body, hashlib.sha256).hexdigest()}"


def signing_key(path: Path) -> bytes:
    """Return the key in ``path``; created, readable by the owner only, where there is none."""
    with contextlib.suppress(FileNotFoundError):
        if known := path.read_text().strip():
            return known.encode()
    key = secrets.token_hex(32).encode()
    write_whole(path, key + b"\n")
    return key


async def post(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    seconds: float = DEADLINE_SECONDS,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Send ``body``; return on a 2xx answer within ``seconds``. Raises HookError."""
    try:
        async with asyncio.timeout(seconds):
            status = await _post(url, body, headers, tls)
    except TimeoutError:
        raise HookError(f"no answer within {seconds:g} s") from None
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise HookError(f"{type(error).__name__}: {error}") from error
    if 200 <= status < 300:
        return
    raise HookError(f"it answered {status}", final=300 <= status < 500 and status not in (408, 425, 429))


async def _post(url: str, body: bytes, headers: Mapping[str, str], tls: ssl.SSLContext | None) -> int:
    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    address = await _address(host, port)
    context = (tls or ssl.create_default_context()) if secure else None
    reader, writer = await asyncio.open_connection(
        address, port, ssl=context, server_hostname=host if secure else None, limit=_LONGEST_HEAD
    )
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = {
            "Host": parts.netloc.rpartition("@")[2],
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            "Connection": "close",
            "User-Agent": "orch",
            **headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        writer.write(f"POST {target} HTTP/1.1\r\n{lines}\r\n".encode() + body)
        await writer.drain()
        return _status(await reader.readline())
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


def _status(line: bytes) -> int:
    words = line.split()
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not re.fullmatch(b"[0-9]{3}", words[1]):
        raise HookError("the reply is not HTTP")
    return int(words[1])


async def _address(host: str, port: int) -> str:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    if is_refused(address):
        raise HookError(f"{host} is {address}, an address that web hooks may not use", final=True)
    return address
