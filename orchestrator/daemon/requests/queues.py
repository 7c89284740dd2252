"""Answers users' queries about queues, and changes queues for the daemon's owner."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import BadRequestError, DiskFullError
from orchestrator.api.queue_views import HolderView, OutlookView, QueueShares, QueueView, UserShareView
from orchestrator.core.scheduler.outlook import expected_starts, front_of, outlook_of
from orchestrator.core.scheduler.scheduler import shares_of, waiting_order
from orchestrator.core.scheduler.shares import fair_shares
from orchestrator.core.states import JobState
from orchestrator.daemon.loop import readable
from orchestrator.spec.queues import QueueSpec, queue_problems
from orchestrator.store.errors import StoreError
from orchestrator.store.records import StoredQueueChange

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.requests import QueueChange
    from orchestrator.api.service import Caller
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.core.scheduler.outlook import Outlook
    from orchestrator.core.scheduler.scheduler import State
    from orchestrator.core.scheduler.shares import Shares
    from orchestrator.daemon.loop import Loop
    from orchestrator.runtime.pools import Pool
    from orchestrator.store.store import Store

SHOWN_STARTS: Final = 20


class Queues:
    """Reads the loop's jobs; changes are written before they take effect, one after the other.

    Expected starts are computed in ``pool``. ``eta`` returns the seconds that a running job still needs, by its own progress.
    """

    def __init__(
        self, loop: Loop, store: Store, pool: Pool, eta: Callable[[Job], float | None] = lambda _: None
    ) -> None:
        self._pool = pool
        self._eta = eta
        self._loop = loop
        self._store = store
        self._turn = asyncio.Lock()

    async def shares(self) -> QueueShares:
        """Return the order of waiting jobs, and the shares of queues and users."""
        now, book = self._loop.now(), self._loop.shares
        state = readable(self._loop)
        shares = shares_of(state, now)
        order = waiting_order(state, now)
        hungry = {job.spec.queue for job in order}
        fair = fair_shares(shares, hungry) if book.sharing.queues else {}
        return QueueShares(
            order=tuple(job.id for job in order),
            queues=tuple(self._queue(queue, shares, fair, state) for queue in self._known(shares, hungry)),
            users=self._users(shares, state),
        )

    async def outlook(self, job_id: JobId | None) -> OutlookView:
        """Return when jobs are expected to start: one, with what it waits for, or the first of the queue."""
        now = self._loop.now()
        order: tuple[JobId, ...] = ()
        if job_id is None:
            state, order = front_of(self._loop.state(), now)
        else:
            state = readable(self._loop)
        remaining = {
            job.id: eta for job in state.jobs.values() if job.gang_open and (eta := self._eta(job)) is not None
        }
        past = replace(state.past, run_times=replace(state.past.run_times, reported=remaining))
        state = replace(state, past=past)
        if job_id is None:
            found = await self._pool.run(expected_starts, state, now, SHOWN_STARTS)
            return OutlookView(starts={str(each): at for each, at in found.items()}, order=order)
        return outlook_view(await self._pool.run(outlook_of, job_id, state, now))

    async def change(self, name: str, change: QueueChange, caller: Caller) -> QueueView:
        """Change or create a queue; durable once this returns. Raises BadRequestError for an invalid table, DiskFullError."""
        async with self._turn:
            book = self._loop.shares
            known = {queue.name: queue for queue in book.sharing.queues}
            queue = _changed(known.get(name, QueueSpec(name=name)), change)
            table = tuple({**known, name: queue}.values())
            problems = queue_problems(table)
            if problems:
                raise BadRequestError("; ".join(problems), hint="`orch queue` shows the queues as they are")
            stored = StoredQueueChange(name=name, body=asdict(queue), by=caller.user, at=self._loop.now())
            try:
                await self._store.put_queue_change(stored)
            except StoreError as error:
                raise DiskFullError(f"the change of queue {name} could not be written: {error}") from error
            book.change(table, stored)
        self._loop.wake()
        return next(view for view in (await self.shares()).queues if view.name == name)

    def _known(self, shares: Shares, hungry: set[str]) -> list[QueueSpec]:
        """Return the configured queues with their children, and queues that have jobs without being configured."""
        if not shares.tree.configured:
            return []
        found: list[QueueSpec] = []
        level = sorted(shares.tree.below(""), key=lambda queue: queue.name, reverse=True)
        while level:
            found.append(level.pop())
            level += sorted(shares.tree.below(found[-1].name), key=lambda queue: queue.name, reverse=True)
        names = {queue.name for queue in found}
        used = hungry | {job.spec.queue for job in self._loop.jobs.begun.values() if job.gang_open}
        return found + [QueueSpec(name=name) for name in sorted(used - names)]

    def _queue(self, queue: QueueSpec, shares: Shares, fair: dict[str, float], state: State) -> QueueView:
        inside = [
            job for job in state.jobs.values() if queue.name in {q.name for q in shares.tree.path(job.spec.queue)}
        ]
        change = self._loop.shares.changes.get(queue.name)
        return QueueView(
            name=queue.name,
            parent=queue.parent,
            guaranteed=queue.guaranteed,
            maximum=queue.maximum,
            weight=queue.weight,
            gpus=shares.held_gpus(queue.name),
            fair_share=round(fair.get(queue.name, 0.0), 4),
            share=shares.queue_share(queue.name),
            running=sum(job.gang_open for job in inside),
            waiting=sum(job.state is JobState.PENDING for job in inside),
            changed_by=change.by if change else "",
            changed_at=change.at if change else None,
        )

    def _users(self, shares: Shares, state: State) -> tuple[UserShareView, ...]:
        running: Counter[tuple[str, str]] = Counter()
        waiting: Counter[tuple[str, str]] = Counter()
        for job in state.jobs.values():
            key = (shares.tree.queue_of(job), job.submission.user)
            running[key] += job.gang_open
            waiting[key] += job.state is JobState.PENDING
        return tuple(
            UserShareView(
                queue=queue,
                user=user,
                gpus=shares.user_held_gpus(queue, user),
                share=shares.user_share(queue, user),
                running=running[queue, user],
                waiting=waiting[queue, user],
            )
            for queue, user in sorted({**running, **waiting})
            if running[queue, user] or waiting[queue, user]
        )


def _changed(queue: QueueSpec, change: QueueChange) -> QueueSpec:
    if change.guaranteed is not None:
        queue = replace(queue, guaranteed=change.guaranteed)
    if change.unbounded or change.maximum is not None:
        queue = replace(queue, maximum=None if change.unbounded else change.maximum)
    if change.weight is not None:
        queue = replace(queue, weight=change.weight)
    return queue if change.parent is None else replace(queue, parent=change.parent)


def outlook_view(found: Outlook) -> OutlookView:
    """Return the API's view of an outlook."""
    return OutlookView(
        starts_at=found.starts_at,
        ahead=tuple(found.ahead),
        rule=found.rule.value if found.rule else "",
        holders=tuple(
            replace(
                _holder(each.job),
                ends_at=each.ends_at,
                basis=each.left.basis.value if each.left else "",
                like_jobs=each.left.jobs if each.left else 0,
                error=each.error,
            )
            for each in found.holders
        ),
        stops=tuple(replace(_holder(each.job), lost_gpu_seconds=each.gpu_seconds) for each in found.stops),
    )


def _holder(job: Job) -> HolderView:
    gpus = job.spec.resources.resources_per_worker.gpu * job.num_workers
    return HolderView(job_id=job.id, name=job.name, user=job.submission.user, gpus=gpus)
