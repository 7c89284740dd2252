"""Reads what may be long page by page, through the port alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from orchestrator.core.ids import JobId
    from orchestrator.store.port import Store, StoredEvent

PAGE_EVENTS: Final = 1000


async def every_event(store: Store, job_id: JobId, *, after: int = 0) -> AsyncIterator[StoredEvent]:
    """Every event of a job with a number above ``after``, oldest first, in bounded memory. Raises JobNotFoundError."""
    while page := await store.events(job_id, after=after, limit=PAGE_EVENTS):
        for stored in page:
            yield stored
        if len(page) < PAGE_EVENTS:
            return
        after = page[-1].number
