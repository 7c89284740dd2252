"""Answers users' queries about matrices, and runs commands on every job of one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from orchestrator.api.errors import AmbiguousReferenceError, NotFoundError, Problem, RefusedError
from orchestrator.api.service import Verb
from orchestrator.api.views import ActionReply
from orchestrator.core.sentences.base import plural
from orchestrator.core.states import JobState
from orchestrator.daemon.requests.actions import events_of
from orchestrator.daemon.requests.matrix_overview import Searched, by_combination, matrix_view, state_of
from orchestrator.daemon.requests.reader import named_by_others
from orchestrator.daemon.requests.sharing import SharingService
from orchestrator.store import errors as store_errors

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from orchestrator.api.matrix_views import MatrixView
    from orchestrator.api.service import ActionRequest, Caller
    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.requests.actions import JobActions
    from orchestrator.daemon.requests.best_values import BestValues, Reported
    from orchestrator.daemon.requests.reader import JobReader
    from orchestrator.daemon.requests.sharing import SharingDesk
    from orchestrator.daemon.requests.specs import JobSpecs
    from orchestrator.daemon.search.desk import SearchDesk
    from orchestrator.runtime.pools import Pool
    from orchestrator.store.port import Store

_DONE = {
    Verb.CANCEL: "cancelled",
    Verb.PAUSE: "paused",
    Verb.RESUME: "put back into the queue",
    Verb.HOLD: "held",
    Verb.RELEASE: "put into the queue",
    Verb.UPDATE: "changed",
}


class MatrixDesk:
    """Queries about matrices, and commands. ``best`` reads files, one query at a time, in threads of ``pool``."""

    def __init__(
        self,
        loop: Loop,
        store: Store,
        reader: JobReader,
        actions: JobActions,
        best: BestValues,
        searches: SearchDesk,
        pool: Pool,
    ) -> None:
        self._loop = loop
        self._store = store
        self._reader = reader
        self._actions = actions
        self._best = best
        self._searches = searches
        self._pool = pool
        self._turn = asyncio.Lock()

    async def find(self, reference: str, caller: Caller) -> str | None:
        """Return the id of the matrix that a reference means; None where it means a job. Raises AmbiguousReferenceError, NoSuchJobError."""
        try:
            return await self._store.find_matrix(reference, caller.uid)
        except store_errors.NamedByOthersError as error:
            raise named_by_others(error) from error
        except store_errors.AmbiguousJobError as error:
            problems = [Problem(message=str(candidate)) for candidate in error.candidates]
            raise AmbiguousReferenceError(f"{reference!r} fits several matrices", problems=problems) from error

    async def matrix(self, matrix_id: str) -> MatrixView:
        """Return the matrix with this id. Raises NotFoundError."""
        jobs = await self._jobs(matrix_id)
        views = await self._reader.views_of(jobs)
        score = jobs[0].spec.checkpoint
        reported: Mapping[str, Reported] = {}
        if score.score_attribute is not None:
            async with self._turn:
                reported = await self._pool.run(
                    self._reported, [job.id for job in jobs], score.score_attribute, score.score_order == "max"
                )
        searched = await self._pool.run(self._searched, matrix_id) if _is_search(jobs) else None
        return matrix_view(jobs, {view.id: view for view in views}, reported, self._loop.now(), searched)

    def _searched(self, matrix_id: str) -> Searched | None:
        book = self._searches.book
        plan = book.plan(matrix_id)
        return None if plan is None else Searched(plan.objectives, book.study(matrix_id))

    def _reported(self, job_ids: Sequence[str], metric: str, highest: bool) -> Mapping[str, Reported]:  # noqa: FBT001 - pools pass positional arguments
        return {job_id: self._best.of(job_id, metric, highest=highest) for job_id in job_ids}

    async def _jobs(self, matrix_id: str) -> list[Job]:
        stored = await self._store.matrix_jobs(matrix_id)
        if not stored:
            raise NotFoundError(f"there is no matrix {matrix_id!r}", hint="`orch matrix` lists the matrices")
        return [self._loop.jobs.get(job.id, job) for job in stored]

    async def act(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        """Run a command on every job of a matrix that it applies to, in one step; durable once this returns."""
        jobs = [one.newest for one in by_combination(await self._jobs(matrix_id))]
        if request.verb is Verb.RERUN:
            return await self._rerun(matrix_id, request, caller)
        self._actions.check(request, caller)
        further = ""
        if _is_search(jobs):
            further = await self._steer(matrix_id, request.verb)
            jobs = [
                one.newest for one in by_combination(await self._jobs(matrix_id))
            ]  # a trial may have come meanwhile
        done: list[str] = []

        def make() -> list[ev.Event]:
            events: list[ev.Event] = []
            done.clear()
            for job in jobs:
                live = self._loop.decided.get(job.id)
                found = [] if live is None else events_of(live, request, caller, self._loop.now())
                if found:
                    done.append(job.id)
                    events += found
            return events

        await self._loop.command(make)
        jobs = [one.newest for one in by_combination(await self._jobs(matrix_id))]
        states = [job.state for job in jobs]
        if not done and not further and request.verb is not Verb.CANCEL and all(state.is_terminal for state in states):
            raise RefusedError(f"every job of {matrix_id} has ended", hint=f"`orch rerun {matrix_id}` runs them again")
        if not done and not further and request.verb is Verb.HOLD:
            raise RefusedError(f"no job of {matrix_id} waits in the queue", hint=f"`orch pause {matrix_id}` stops them")
        message = f"{len(done)} of {plural(len(jobs), 'job')} {_DONE[request.verb]}{further}"
        return ActionReply(job_id=matrix_id, state=state_of(states), message=message, job_ids=tuple(done))

    async def _steer(self, matrix_id: str, verb: Verb) -> str:
        """Stop, pause or resume a search, as a command on all of its jobs requires; return what the reply adds."""
        match verb:
            case Verb.CANCEL:
                await self._searches.stop(matrix_id)
            case Verb.PAUSE | Verb.HOLD if await self._searches.pause(matrix_id):
                lifted = Verb.RESUME if verb is Verb.PAUSE else Verb.RELEASE
                return f"; no further trial is submitted until `orch {lifted} {matrix_id}`"
            case Verb.RESUME | Verb.RELEASE if await self._searches.resume(matrix_id):
                return "; the search goes on"
            case _:
                pass
        return ""

    async def _rerun(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        """Rerun the combinations that have ended, or only the failed ones; all or none."""
        ended = [one for one in by_combination(await self._jobs(matrix_id)) if one.newest.state.is_terminal]
        again = [one.newest for one in ended if one.failed or not request.failed]
        if not again:
            what = "failed" if request.failed else "has ended"
            raise RefusedError(f"no job of {matrix_id} {what}", hint=f"`orch matrix {matrix_id}` shows where they are")
        reply = await self._actions.rerun_all(again, request, caller, in_matrix=True)
        changed = f" with {', '.join(request.overrides)}" if request.overrides else ""
        message = f"runs {plural(len(again), 'combination')} again{changed}"
        return ActionReply(job_id=matrix_id, state=JobState.PENDING.value, message=message, job_ids=reply.job_ids)


def _is_search(jobs: Sequence[Job]) -> bool:
    return any(job.submission.matrix is not None and job.submission.matrix.search for job in jobs)


class MatrixService(SharingService):
    """The part of the service for matrices."""

    def __init__(self, specs: JobSpecs, sharing: SharingDesk, matrices: MatrixDesk) -> None:
        super().__init__(specs, sharing)
        self._matrices = matrices

    async def find_matrix(self, ref: str, caller: Caller) -> str | None:
        """Return the id of the matrix that ``ref`` means; None where it means a job."""
        return await self._matrices.find(ref, caller)

    async def matrix(self, matrix_id: str) -> MatrixView:
        """Return a matrix and its jobs."""
        return await self._matrices.matrix(matrix_id)

    async def act_on_matrix(self, matrix_id: str, request: ActionRequest, caller: Caller) -> ActionReply:
        """Run a command on every job of a matrix that it applies to; durable once this returns."""
        return await self._matrices.act(matrix_id, request, caller)
