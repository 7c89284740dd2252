"""Sends notices about jobs to web hooks: each receiver has its own queue, and no address may serve a machine's credentials.

An IPv6 address that carries an IPv4 address (mapped, compatible, translated, NAT64, 6to4, Teredo) must also pass the
check of that IPv4 address: a router may deliver it there.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import secrets
import socket
import ssl
import time
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from orchestrator import clock
from orchestrator.core.facts.findings import linked
from orchestrator.durable_files import write_whole
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.store.records import StoredNotice
    from orchestrator.store.store import Store

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

METADATA_SERVICES: Final = frozenset(
    map(
        ipaddress.ip_address,
        (
            "100.100.100.200",  # Alibaba Cloud
            "168.63.129.16",  # Azure's wire server
            "192.0.0.192",  # Oracle Cloud
            "fd00:ec2::23",  # Amazon, credentials of pods
            "fd00:ec2::254",  # Amazon
            "fd20:ce::254",  # Google
        ),
    )
)
"""Addresses of metadata services that are not link-local, unlike those of most."""

_LOCAL_NAT64: Final = ipaddress.IPv6Network("64:ff9b:1::/48")
_TEREDO: Final = ipaddress.IPv6Network("2001::/32")
_CARRIERS: Final = (
    # The network, and the number of bits after the embedded IPv4 address.
    (ipaddress.IPv6Network("::/96"), 0),  # IPv4-compatible
    (ipaddress.IPv6Network("::ffff:0:0/96"), 0),  # IPv4-mapped
    (ipaddress.IPv6Network("::ffff:0:0:0/96"), 0),  # IPv4-translated
    (ipaddress.IPv6Network("64:ff9b::/96"), 0),  # NAT64
    (_LOCAL_NAT64, 0),
    (ipaddress.IPv6Network("2002::/16"), 80),  # 6to4
    (_TEREDO, 64),  # its server
)
_IPV4: Final = 0xFFFFFFFF


def is_refused(text: str) -> bool:
    """Whether no hook may be sent to this address, which may carry a zone (`fe80::1%eth0`)."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return any(map(_is_refused, (address, *_carried(address))))


def _is_refused(address: Address) -> bool:
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in METADATA_SERVICES


def _carried(address: Address) -> Iterator[ipaddress.IPv4Address]:
    if isinstance(address, ipaddress.IPv4Address):
        return
    number = int(address)
    if number in (0, 1):  # unspecified, and loopback
        return
    for network, behind in _CARRIERS:
        if address in network:
            yield ipaddress.IPv4Address(number >> behind & _IPV4)
    if address in _LOCAL_NAT64:
        # RFC 6052: with a prefix of 48 bits the address is split around an unused octet.
        yield ipaddress.IPv4Address((number >> 64 & 0xFFFF) << 16 | number >> 40 & 0xFFFF)
    if address in _TEREDO:
        yield ipaddress.IPv4Address(~number & _IPV4)  # its client, inverted


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
        raise HookError(f"no answer within {duration(seconds)}") from None
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


FIRST_DELAY_SECONDS: Final = 2.0
LONGEST_DELAY_SECONDS: Final = 3600.0
MAX_TRIES: Final = 35
"""With these delays the last one is about a day after the first."""
EACH_AT_ONCE: Final = 2  # to one receiver
ALL_AT_ONCE: Final = 64
STORE_RETRY_SECONDS: Final = 5.0


def delay_seconds(number: int, attempts: int, first: float = FIRST_DELAY_SECONDS) -> float:
    """Return the seconds until the next try: doubling, less up to 10 % that depends on the notice and the try only."""
    jitter = zlib.crc32(f"{number}/{attempts}".encode()) / 0xFFFFFFFF
    return min(LONGEST_DELAY_SECONDS, first * 2.0 ** min(attempts, 30)) * (1.0 - 0.1 * jitter)


class Notifier:
    """Sends due notices; runbooks in them are addresses below ``docs_url``. ``wake`` is called after a transition is written; ``run`` continues until cancelled."""

    def __init__(
        self,
        store: Store,
        key_file: Path,
        log: FilteringBoundLogger,
        *,
        first_delay: float = FIRST_DELAY_SECONDS,
        docs_url: str = "",
    ) -> None:
        self._store = store
        self._key_file = key_file
        self._log = log
        self._first_delay = first_delay
        self._docs_url = docs_url
        self._wake = asyncio.Event()
        self._sending: dict[int, tuple[str, asyncio.Task[None]]] = {}  # receiver and task by the notice's number

    def wake(self) -> None:
        """Look for new notices."""
        self._wake.set()

    async def run(self) -> None:
        """Begin to send due notices, then sleep until the next is due, one is sent, or until woken."""
        try:
            while True:
                self._wake.clear()
                try:
                    wait = await self._begin_due()
                except Exception:
                    self._log.exception("notify.store_failed")
                    wait = STORE_RETRY_SECONDS
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait):
                        await self._wake.wait()
        finally:
            tasks = [task for _, task in self._sending.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin_due(self) -> float | None:
        """Begin to send due notices; return the seconds until the next one becomes due, or None when none does."""
        due, next_at = await self._store.due_notices(clock.now(), EACH_AT_ONCE)
        for notice in due:
            receiver, number = notice.notice.receiver, notice.number
            busy = sum(receiver == other for other, _ in self._sending.values())
            if number in self._sending or busy >= EACH_AT_ONCE or len(self._sending) >= ALL_AT_ONCE:
                continue
            task = asyncio.create_task(self._send_one(notice), name=f"notice-{number}")
            self._sending[number] = receiver, task
        return None if next_at is None else max(0.05, next_at - clock.now())

    async def _send_one(self, notice: StoredNotice) -> None:
        try:
            await self._send(notice)
        except Exception:
            self._log.exception("notify.store_failed")
            await asyncio.sleep(STORE_RETRY_SECONDS)  # it would be sent again at once
        finally:
            del self._sending[notice.number]
            self._wake.set()

    async def _send(self, notice: StoredNotice) -> None:
        body = with_links(notice.notice.body, self._docs_url).encode()
        host = urlsplit(notice.notice.url).hostname  # the rest of the URL is often a secret
        try:
            key = await asyncio.to_thread(signing_key, self._key_file)
            headers = {"X-Orch-Delivery": str(notice.number), SIGNATURE_HEADER: signature(key, int(time.time()), body)}
            await post(notice.notice.url, body, headers)
        except (HookError, OSError, ValueError) as error:
            final = isinstance(error, HookError) and error.final
            if final or notice.attempts + 1 >= MAX_TRIES:
                self._log.warning("notify.given_up", job=notice.notice.job_id, host=host, why=str(error))
                await self._store.settle_notice(notice.number, again_at=None)
                return
            self._log.info("notify.later", job=notice.notice.job_id, host=host, why=str(error))
            again_at = clock.now() + delay_seconds(notice.number, notice.attempts, self._first_delay)
            await self._store.settle_notice(notice.number, again_at=again_at)
        else:
            await self._store.settle_notice(notice.number, again_at=None)


def with_links(body: str, docs_url: str) -> str:
    """Return a payload with its finding's runbook as an address below ``docs_url``; as it is without one."""
    payload: dict[str, Any] = json.loads(body)
    finding = payload.get("finding")
    if not docs_url or not isinstance(finding, dict):
        return body
    finding["runbook"] = linked(str(finding.get("runbook", "")), docs_url)
    return json.dumps(payload)
