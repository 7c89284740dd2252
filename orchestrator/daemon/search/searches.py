"""Conducts the searches: gets values from the advisor when a trial has ended, submits them, and ends bad trials.

A trial is a job like any other, submitted by the daemon from the archive of the first one. A daemon that starts again finds the trials
in the store and the rest in the files, so a search continues where it was, and no trial is submitted twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.errors import OrchError
from orchestrator.core.events import MatrixCell
from orchestrator.core.facts.requesters import ByPruner
from orchestrator.core.lifecycle.advance import request_stop
from orchestrator.core.states import StopPurpose
from orchestrator.daemon.search.advisor import process_advisor
from orchestrator.daemon.search.files import SearchFiles, StudyRecord
from orchestrator.daemon.search.trials import SETTLE_SECONDS, prepare_trial, settles, standing
from orchestrator.daemon.submitting.under_way import mark_accepted
from orchestrator.runtime.pools import working_for
from orchestrator.spec.problems import SpecError
from orchestrator.store.errors import DiskError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from structlog.typing import FilteringBoundLogger

    from orchestrator.core.events import Event
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.search.advisor import Advisor
    from orchestrator.daemon.search.files import SearchPlan
    from orchestrator.daemon.search.trials import Standing
    from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.settings import Settings
    from orchestrator.store.port import Store

    Change = Callable[[StudyRecord], StudyRecord]
    MakeAdvisor = Callable[[Mapping[str, Any]], AbstractAsyncContextManager[Advisor]]

LOOK_SECONDS: Final = 2.0
"""Time between two looks at the reports of running trials."""
LOOK_SHARE: Final = 0.1
"""Largest share of the time that looks may take: with many trials they are farther apart."""
FIRST_DELAY_SECONDS: Final = 5.0
LONGEST_DELAY_SECONDS: Final = 300.0


@dataclass(slots=True)
class Search:
    """A search that is not over: its jobs by id, and its last written record."""

    plan: SearchPlan
    study: StudyRecord
    jobs: dict[JobId, Job] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    failures: int = 0


class Searches:
    """Conducts searches. ``advisor`` starts the advisor of a space; files are read and written in ``pool``."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        settings: Settings,
        pool: Pool,
        under_way: SubmissionsUnderWay,
        log: FilteringBoundLogger,
        *,
        advisor: MakeAdvisor = process_advisor,
        look_seconds: float = LOOK_SECONDS,
        first_delay: float = FIRST_DELAY_SECONDS,
    ) -> None:
        self._loop = loop
        self._store = store
        self._settings = settings
        self._pool = pool
        self._under_way = under_way
        self._log = log
        self._advisor = advisor
        self._look_seconds = look_seconds
        self._first_delay = first_delay
        self.book = SearchFiles(settings.home)
        self._searches: dict[str, Search] = {}
        self._new: asyncio.Queue[str] = asyncio.Queue()
        self._reading = asyncio.Lock()
        """Held while a search that is not conducted is read or written, so that none begins with an outdated record."""

    def changed(self, job: Job) -> None:
        """Handle a job that was accepted, has changed, or has ended."""
        cell = job.submission.matrix
        if cell is None or not cell.search:
            return
        search = self._searches.get(cell.matrix_id)
        if search is None:
            self._new.put_nowait(cell.matrix_id)
        else:
            search.jobs[job.id] = job
            search.changed.set()

    async def stop(self, matrix_id: str) -> None:
        """Submit no further trial; durable once this returns."""
        await self._set(matrix_id, lambda study: replace(study, over=True))

    async def pause(self, matrix_id: str) -> bool:
        """Submit no further trial until it is resumed; durable once this returns. False where the search is over, or is none."""
        return await self._set(matrix_id, lambda study: replace(study, paused=True))

    async def resume(self, matrix_id: str) -> bool:
        """Submit trials again; durable once this returns. False where the search is over, or is none."""
        return await self._set(matrix_id, lambda study: replace(study, paused=False))

    async def _set(self, matrix_id: str, change: Change) -> bool:
        async with self._reading:
            search = self._searches.get(matrix_id)
            if search is None:
                return await self._pool.run(self._set_file, matrix_id, change)
        async with search.turn:
            if search.study.over:
                return False
            await self._note(search, change(search.study))
        search.changed.set()
        return True

    def _set_file(self, matrix_id: str, change: Change) -> bool:
        if self.book.plan(matrix_id) is None:
            return False
        study = self.book.study(matrix_id)
        self.book.note(matrix_id, study if study.over else change(study))  # once more: a kill may have left secrets
        return not study.over

    async def run(self) -> None:
        """Conduct searches until cancelled. No failure of one is a failure of the daemon."""
        for matrix_id in await self._pool.run(self.book.ids):
            self._new.put_nowait(matrix_id)
        async with asyncio.TaskGroup() as tasks:
            while True:
                matrix_id = await self._new.get()
                if matrix_id in self._searches:
                    continue
                try:
                    async with self._reading:
                        search = await self._found(matrix_id)
                        if search is not None:
                            self._searches[matrix_id] = search
                except Exception as error:
                    self._log.warning("search.not_read", matrix=matrix_id, error=str(error))
                    continue
                if search is not None:
                    tasks.create_task(self._conduct(search))

    async def _found(self, matrix_id: str) -> Search | None:
        """Return a search that is not over. One without stored jobs (never accepted, or all pruned) is removed."""
        plan = await self._pool.run(self.book.plan, matrix_id)
        if plan is None:
            return None
        study = await self._pool.run(self.book.study, matrix_id)
        if study.over:
            return None
        jobs = await self._store.matrix_jobs(matrix_id)
        if not jobs:
            await self._pool.run(self.book.remove, matrix_id)
            return None
        return Search(plan, study, {job.id: self._loop.jobs.get(job.id, job) for job in jobs})

    async def _conduct(self, search: Search) -> None:
        while not search.study.over:
            try:
                async with self._advisor(search.plan.space) as advisor:
                    while not search.study.over:
                        await self._wait(search, await self._round(search, advisor))
            except Exception as error:
                search.failures += 1
                text = _text(error)
                self._log.warning("search.delayed", matrix=search.plan.matrix_id, error=text)
                with contextlib.suppress(OSError):
                    async with search.turn:
                        # A job file that is invalid with these values stays invalid; any other error may pass.
                        over = isinstance(error, SpecError) or search.study.over
                        await self._note(search, replace(search.study, problem=text, over=over))
                delay = min(LONGEST_DELAY_SECONDS, self._first_delay * 2.0 ** min(search.failures - 1, 10))
                await self._wait(search, 0.0 if search.study.over else delay, early=False)
        del self._searches[search.plan.matrix_id]

    @staticmethod
    async def _wait(search: Search, seconds: float | None, *, early: bool = True) -> None:
        """Wait for a change of a trial, at most ``seconds``; with ``early`` False, for that long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await (search.changed if early else asyncio.Event()).wait()
        search.changed.clear()

    async def _round(self, search: Search, advisor: Advisor) -> float | None:
        """Ask once and act on the answer; return the seconds until the next look, None for the next change."""
        plan, began = search.plan, self._loop.now()
        at = standing(search.jobs.values(), began, self._settings.paths.job)
        answer = await advisor.ask(at.trials, 0 if search.study.paused else at.want(plan))
        await self._prune(search, answer["pruned"])
        async with search.turn:
            if search.study.over:  # cancelled meanwhile
                return 0.0
            for values in () if search.study.paused else answer["suggested"]:  # also one that was paused meanwhile
                await self._submit(search, values)
            over, paused = at.is_over(plan), search.study.paused
            await self._note(search, _record(answer, over=over, paused=paused, problem=at.gives_up(plan)))
        search.failures = 0
        if over:
            return 0.0
        return self._pause(plan, at, self._loop.now() - began)

    def _pause(self, plan: SearchPlan, at: Standing, took: float) -> float | None:
        settling = [
            job.ended_at
            for job in self._searches[plan.matrix_id].jobs.values()
            if job.ended_at is not None and settles(job, self._loop.now())
        ]
        if settling:
            return max(0.1, min(settling) + SETTLE_SECONDS - self._loop.now())
        looks = plan.space["prunes"] and at.live and not self._searches[plan.matrix_id].study.paused
        return max(self._look_seconds, took / LOOK_SHARE) if looks else None

    async def _prune(self, search: Search, pruned: list[Mapping[str, Any]]) -> None:
        by_number = {one["number"]: one for one in pruned}
        objective = next(iter(search.plan.objectives))

        def make() -> list[Event]:
            events: list[Event] = []
            for job_id in search.jobs:
                live = self._loop.decided.get(job_id)
                cell = None if live is None else live.submission.matrix
                if live is None or cell is None or cell.index not in by_number or not live.attempts:
                    continue
                one = by_number[cell.index]
                by = ByPruner(matrix=cell.matrix_id, metric=objective, step=one["step"], value=one["value"])
                events += request_stop(live, StopPurpose.CANCEL, by, self._loop.now())
            return events

        if by_number:
            await self._loop.command(make)

    async def _submit(self, search: Search, values: Mapping[str, Any]) -> None:
        """Submit the next trial with these values. Raises OrchError, SpecError, OSError."""
        plan, base = search.plan, max(search.jobs.values(), key=lambda job: job.submission.sequence)
        number = 1 + max(job.submission.matrix.index for job in search.jobs.values() if job.submission.matrix)
        cell = MatrixCell(
            matrix_id=plan.matrix_id,
            name=plan.name,
            index=number,
            count=plan.trials,
            values=values,
            max_concurrent=plan.max_concurrent,
            fail_fast=plan.fail_fast,
            search=True,
        )
        secrets = await self._pool.run(self.book.secrets, plan.matrix_id)
        async with self._under_way.begin() as under_way:
            under_way.need([base.id])
            with working_for(base.submission.uid):
                given = (base, plan, cell, secrets, self._loop, self._settings, self._pool, under_way)
                event = await prepare_trial(*given)
            under_way.accepted = True  # until it is known: a cancelled write may be done
            try:
                job, _ = await self._store.submit(event)
            except DiskError:
                under_way.accepted = False
                raise
            mark_accepted(self._settings.paths, [job.id])
        search.jobs[job.id] = job
        self._loop.add(job, {})
        self._log.info("search.trial", matrix=plan.matrix_id, number=number, job=job.id, values=dict(values))

    async def _note(self, search: Search, study: StudyRecord) -> None:
        if study != search.study:
            await self._pool.run(self.book.note, search.plan.matrix_id, study)
            search.study = study


def _record(answer: Mapping[str, Any], *, over: bool, paused: bool, problem: str) -> StudyRecord:
    given = {int(n): tuple(v) for n, v in answer["given"].items() if all(map(math.isfinite, v))}
    missing = {int(n): text for n, text in answer["missing"].items()}
    return StudyRecord(given=given, missing=missing, over=over, paused=paused, problem=problem)


def _text(error: Exception) -> str:
    if isinstance(error, OrchError):
        return f"{error.message}; {error.hint}" if error.hint else error.message
    return str(error) or type(error).__name__
