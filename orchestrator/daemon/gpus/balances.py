"""Computes how evenly each job uses its GPUs from their exporters' reports. ``core/diagnosis`` finds the reasons.

Keeps the last minute of every GPU. Reads nothing by itself: reports are passed in.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from orchestrator import clock
from orchestrator.gpu.balance.balance import SETTLED_SECONDS, Balance, LoadWindow
from orchestrator.gpu.balance.view import balance_json

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.runtime.exporters.actor import ExporterReport


class JobBalances:
    """The balance of each job that holds GPUs: ``raw`` as values, ``json_ready`` for JSON."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = clock.now) -> None:
        self._clock = clock
        self._wall = wall
        self._window = LoadWindow()
        self.seen: dict[str, float] = {}
        """Time of each GPU's newest known sample."""
        self.raw: dict[JobId, Balance] = {}
        self.json_ready: dict[JobId, dict[str, Any]] = {}

    def take(self, reports: Mapping[str, ExporterReport]) -> None:
        """Add each GPU's loads since the last report; after a restart of the daemon, its whole last minute."""
        now = self._clock()
        for uuid, report in reports.items():
            if report.loads:
                self.seen[uuid] = report.loads[-1].timestamp
                self._window.add_points(uuid, report.loads, now)
            elif (sample := report.status.sample) is not None and sample.timestamp < self.seen.get(uuid, 0.0):
                self.seen[uuid] = sample.timestamp  # the node's clock was set back

    def latest(self) -> Mapping[JobId, dict[str, Any]]:
        """Return the present balances for JSON."""
        return self.json_ready

    def judge(self, holding: Collection[Job]) -> None:
        """Compute the balance of each job that holds GPUs, from what they did during its run, and drop all other jobs."""
        now, wall = self._clock(), self._wall()
        settled = set()
        for job in holding:
            uuids = [uuid for seat in job.seats for uuid in seat.gpu_uuids]
            running_at = job.attempt.running_at if job.attempt is not None else None
            if uuids and running_at is not None and wall - running_at >= SETTLED_SECONDS:
                settled.add(job.id)
                self.raw[job.id] = self._window.balance(uuids, now, since=now - (wall - running_at))
                self.json_ready[job.id] = balance_json(self.raw[job.id])
        for job_id in self.json_ready.keys() - settled:
            del self.json_ready[job_id]
            self.raw.pop(job_id, None)
