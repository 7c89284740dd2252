"""Restores the daemon's memory from the store."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from orchestrator.store.paging import every_record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.events import Event
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.jobs.progress_intake import ProgressIntake
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.nodes.quarantine import NodeQuarantine
    from orchestrator.store.port import Store


class Recovery:
    """Restores state. ``history`` are called with each event of live jobs that have had an attempt, and its record.

    Their data (accounts, strikes, annotations) begin with an attempt. Reading the events of jobs that wait takes half a millisecond of processor time each.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        *,
        intake: ProgressIntake,
        quarantine: NodeQuarantine,
        history: Sequence[Callable[[Job, Event], object]],
        log: FilteringBoundLogger,
    ) -> None:
        self._loop = loop
        self._store = store
        self._intake = intake
        self._quarantine = quarantine
        self._history = history
        self._log = log

    async def run(self) -> None:
        """Read the live jobs and their data. Nothing here concerns a job that has ended: the daemon does not answer yet."""
        gc.disable()  # a long queue is read once and stays: collections need not walk it, neither now nor later
        try:
            await self._loop.load()
            gc.freeze()
        finally:
            gc.enable()
        await self._intake.resume()
        self._quarantine.restore(await self._store.places())
        for job_id in list(self._loop.jobs.begun):
            try:
                async for record, event in every_record(self._store, job_id):
                    for observe in self._history:
                        observe(record, event)
            except Exception:  # an error of one job: the others need the daemon
                self._log.exception("daemon.history_not_replayed", job=job_id)
        self._log.info("daemon.loaded", live_jobs=len(self._loop.jobs))
