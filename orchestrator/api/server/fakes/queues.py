# ruff: noqa: D102 - JobService documents the methods
"""The part of the in-memory service that serves queues; see ``testing.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.api.queue_views import OutlookView, QueueChange, QueueShares, QueueView, UserShareView

if TYPE_CHECKING:
    from orchestrator.api.service import Caller
    from orchestrator.api.views import JobView
    from orchestrator.core.ids import JobId


class FakeQueues:
    """Orders waiting jobs by priority, then arrival; serves the queues that a test has set."""

    _jobs: dict[JobId, JobView]
    calls: list[tuple[str, Any]]
    outlook_answer: OutlookView = OutlookView()
    _queues: tuple[QueueView, ...] = ()
    _users: tuple[UserShareView, ...] = ()

    async def queue_shares(self) -> QueueShares:
        waiting = [job for job in self._jobs.values() if job.state == "PENDING"]
        waiting.sort(key=lambda job: (-job.priority, job.submitted_at))
        return QueueShares(order=tuple(job.id for job in waiting), queues=self._queues, users=self._users)

    async def outlook(self, job_id: JobId | None) -> OutlookView:
        self.calls.append(("outlook", job_id))
        return self.outlook_answer

    async def set_queue(self, name: str, change: QueueChange, caller: Caller) -> QueueView:
        self.calls.append(("set_queue", (name, change, caller.user)))
        known = {queue.name: queue for queue in self._queues}
        before = known.get(name, QueueView(name=name))
        after = replace(
            before,
            parent=before.parent if change.parent is None else change.parent,
            guaranteed=before.guaranteed if change.guaranteed is None else change.guaranteed,
            maximum=None if change.unbounded else before.maximum if change.maximum is None else change.maximum,
            weight=before.weight if change.weight is None else change.weight,
            changed_by=caller.user,
        )
        self._queues = tuple({**known, name: after}.values())
        return after
