"""Reads long results page by page, through the port alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.core import events as ev
from orchestrator.core.lifecycle.fold import fold, submitted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.store.port import Store, StoredEvent

PAGE_EVENTS: Final = 1000


async def every_event(store: Store, job_id: JobId, *, after: int = 0) -> AsyncIterator[StoredEvent]:
    """Yield every event of a job with a number above ``after``, oldest first, in bounded memory. Raises JobNotFoundError."""
    while page := await store.events(job_id, after=after, limit=PAGE_EVENTS):
        for stored in page:
            yield stored
        if len(page) < PAGE_EVENTS:
            return
        after = page[-1].number


async def every_record(store: Store, job_id: JobId) -> AsyncIterator[tuple[Job, ev.Event]]:
    """Yield every event of a job with the record after it, in order. Raises JobNotFoundError."""
    record: Job | None = None
    async for stored in every_event(store, job_id):
        event = stored.event
        if isinstance(event, ev.JobSubmitted):
            record = submitted(event, 0)
        elif record is not None:
            record = fold(record, event)
        if record is not None:
            yield record, event
