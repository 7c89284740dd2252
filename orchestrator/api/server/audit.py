"""The audit log: a line for each request that changes something or was to, with who sent it, from where, and its result.

Lines are JSON objects, only ever appended, and on the disk before the answer is sent. Neither bodies nor query strings are in them: they
may hold secrets. Old files are renamed (``audit.jsonl.1``, ...), and the oldest is removed. Refusals are the only lines that
a caller without rights can cause, so at most ``MAX_REFUSALS`` a minute of one user or address are written, the rest are counted.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import structlog

from orchestrator.api.views import AuditEntry
from orchestrator.private_files import open_private

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from starlette.requests import HTTPConnection
    from starlette.types import Message, Scope, Send

    from orchestrator.api.service import Caller
    from orchestrator.runtime.pools import Pool

log = structlog.get_logger("orch.audit")

MAX_BYTES: Final = 32 * 1024 * 1024
KEPT: Final = 9
"""Older files that are kept beside the current one: more than a million lines in all."""
MAX_REFUSALS: Final = 60
LONGEST: Final = 300
WRITE_SECONDS: Final = 5.0
"""A request is answered after this time even if the disk does not take its line."""

NOT_CHANGING: Final = ("/plan", "/pieces")
"""Ends of paths of POST requests that change no job and nothing of the daemon."""


async def _nowhere(_status: int) -> None:
    """No-op default."""


@dataclass(slots=True)
class AuditRecord:
    """What routes add to a request's line: the job or jobs by id, and a detail that is no secret.

    ``write`` writes the line with a status, once; a session calls it when it is open, other requests need not.
    """

    job: str = ""
    detail: str = ""
    result: str = ""
    write: Callable[[int], Awaitable[None]] = _nowhere


def audited(request: HTTPConnection) -> AuditRecord:
    """Return the record of a request, for its route to complete."""
    found = getattr(request.state, "audit", None)
    return found if isinstance(found, AuditRecord) else AuditRecord()


class AuditLog:
    """Appends entries to ``path`` in a thread of ``pool``, many at once; ``problems`` holds what is wrong with that, for users."""

    def __init__(
        self,
        path: Path,
        pool: Pool,
        problems: dict[str, str],
        *,
        now: Callable[[], float] = time.time,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._path = path
        self._pool = pool
        self._problems = problems
        self._now = now
        self._max_bytes = max_bytes
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None
        self._minute = 0
        self._refusals: Counter[str] = Counter()

    async def note(self, caller: Caller | None, scope: Scope, record: AuditRecord, status: int) -> None:
        """Write the line of a request; on disk once this returns, unless the disk fails."""
        refused = status >= 400
        entry = AuditEntry(
            at=self._now(),
            user="" if caller is None else caller.user,
            uid=None if caller is None else caller.uid,
            source=_source(caller, scope),
            action=f"{scope.get('method', 'SESSION')} {scope['path']}"[:LONGEST],
            job=record.job[: 4 * LONGEST] or str(scope.get("path_params", {}).get("ref", ""))[:LONGEST],
            result=record.result or ("refused" if refused else "ok"),
            status=status,
            detail=record.detail[:LONGEST],
        )
        if refused and not self._takes(entry.user or entry.source):
            return
        line = json.dumps(entry.to_json(), separators=(",", ":")).encode() + b"\n"  # one line: JSON has no line break
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((line, done))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(), name="orch-audit")
        await asyncio.wait([done], timeout=WRITE_SECONDS)

    def _takes(self, who: str) -> bool:
        minute = int(self._now() // 60)
        if minute != self._minute:
            self._minute = minute
            for name, count in self._refusals.items():
                if count > MAX_REFUSALS:
                    log.warning("audit.refusals_left_out", who=name, count=count - MAX_REFUSALS)
            self._refusals.clear()
        self._refusals[who] += 1
        return self._refusals[who] <= MAX_REFUSALS

    async def _write(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._pool.run(self._append, b"".join(line for line, _ in batch))
                self._problems.pop("audit", None)
            except Exception as error:
                log.warning("audit.not_written", lines=len(batch), error=str(error))
                self._problems["audit"] = f"the audit log {self._path} cannot be written: {error}"
            for _, done in batch:
                if not done.done():
                    done.set_result(None)

    def _append(self, lines: bytes) -> None:
        handle = open_private(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if os.fstat(handle).st_size + len(lines) > self._max_bytes:
                os.close(handle)
                handle = -1
                self._rotate()
                handle = open_private(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            while lines:
                lines = lines[os.write(handle, lines) :]
            os.fsync(handle)
        finally:
            if handle >= 0:
                os.close(handle)

    def _files(self) -> list[Path]:
        """Return the places of the files, the newest first."""
        older = (self._path.with_name(f"{self._path.name}.{number}") for number in range(1, KEPT + 1))
        return [self._path, *older]

    def _rotate(self) -> None:
        files = self._files()
        for newer, older in reversed(list(pairwise(files))):
            if newer.exists():
                newer.replace(older)

    async def entries(self, limit: int, since: float = 0.0) -> list[AuditEntry]:
        """Return the last entries from ``since`` on, the oldest first."""
        return await self._pool.run(self._read, limit, since)

    def _read(self, limit: int, since: float) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        for path in self._files():
            try:
                with os.fdopen(open_private(path, os.O_RDONLY), "rb") as file:
                    lines = file.read().splitlines()
            except FileNotFoundError:
                continue
            for line in reversed(lines):
                entry = _entry(line)
                if entry is not None and entry.at >= since:
                    found.append(entry)
                    if len(found) == limit:
                        return found[::-1]
        return found[::-1]


def _entry(line: bytes) -> AuditEntry | None:
    """Return the entry of a line; None for one that a power cut has left half written."""
    try:
        known: dict[str, Any] = json.loads(line)
        return AuditEntry.from_json(known)
    except Exception:  # not one of orch's: the others are still shown
        return None


def _source(caller: Caller | None, scope: Scope) -> str:
    """Return where a request comes from: the channel, and the process or address at its other end."""
    client = scope.get("client")
    address = str(client[0]) if client else ""
    if caller is None:
        return f"tcp {address}".strip()
    end = f"pid {caller.pid}" if caller.pid is not None else address
    return f"{caller.channel} {end}".strip()


def changes(scope: Scope) -> bool:
    """Whether a request changes something, or asks to."""
    if scope["type"] == "websocket":
        return True
    if scope["path"].endswith(NOT_CHANGING) or "/pieces/" in scope["path"]:
        return False
    signs_in = scope["path"] == "/signin" and bool(scope.get("query_string"))
    return scope["method"] not in {"GET", "HEAD"} or signs_in


def noting(audit: AuditLog | None, scope: Scope, send: Send, caller: Callable[[], Caller | None]) -> Send:
    """Return a ``send`` that first writes the request's line, if it changes something."""
    if audit is None or not changes(scope):
        return send
    record = scope.setdefault("state", {})["audit"] = AuditRecord()
    written = False

    async def write(status: int) -> None:
        nonlocal written
        if not written:
            written = True
            await audit.note(caller(), scope, record, status)

    record.write = write

    async def noted(message: Message) -> None:
        if message["type"] in {"http.response.start", "websocket.http.response.start"}:
            await record.write(message["status"])
        await send(message)

    return noted
