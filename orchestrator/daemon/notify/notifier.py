"""Delivers notices to web hooks: takes due ones from the store, sends them, and reschedules failed ones.

Each receiver has its own queue: one that does not answer holds up its own notices only. Each notice is sent at least once: it leaves the store only when the hook has answered 2xx, has refused it for good, or
after MOST_TRIES tries. The decision loop never waits for any of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import zlib
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from orchestrator import clock
from orchestrator.core.sentences.findings import linked
from orchestrator.daemon.notify.webhook import SIGNATURE_HEADER, HookError, post, signature, signing_key

if TYPE_CHECKING:
    from pathlib import Path

    from structlog.typing import FilteringBoundLogger

    from orchestrator.store.port import Store, StoredNotice

FIRST_DELAY_SECONDS: Final = 2.0
LONGEST_DELAY_SECONDS: Final = 3600.0
MOST_TRIES: Final = 35
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
            if final or notice.attempts + 1 >= MOST_TRIES:
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
