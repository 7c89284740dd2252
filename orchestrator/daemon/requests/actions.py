"""Runs users' commands on jobs and waits until they are durable."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from orchestrator.api import views as v
from orchestrator.api.errors import BadRequestError, RefusedError
from orchestrator.api.protocol import Verb
from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import ByHold, ByUser
from orchestrator.core.lifecycle.advance import FORCE_SECONDS, request_force, request_resume, request_stop
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.daemon.jobs.tidying import read_secrets
from orchestrator.daemon.requests.submissions import disk_error
from orchestrator.daemon.sharing import check_priority, check_queue
from orchestrator.daemon.submitting.submission import prepare_rerun, spec_of_rerun
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.requests import ActionRequest
    from orchestrator.api.service import Caller
    from orchestrator.core.ids import JobId
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.requests.reader import JobReader
    from orchestrator.daemon.requests.submissions import Submissions
    from orchestrator.daemon.submitting.under_way import UnderWay
    from orchestrator.spec.model import JobSpec
    from orchestrator.spec.settings import Settings

COLLECTION_ENDED: Final = "its ranks have ended; it ends now, without waiting for its outputs to be copied"


class JobActions:
    """Commands on jobs: cancel, pause, resume, rerun, update, hold, release.

    ``end_collection`` stops copying what a job's gang left; it returns False where nothing is being copied.
    """

    def __init__(
        self,
        loop: Loop,
        reader: JobReader,
        submissions: Submissions,
        settings: Settings,
        *,
        end_collection: Callable[[JobId], bool],
    ) -> None:
        self._loop = loop
        self._reader = reader
        self._submissions = submissions
        self._settings = settings
        self._end_collection = end_collection

    async def act(self, job_id: JobId, request: ActionRequest, caller: Caller) -> v.ActionReply:
        """Run a command on a job; durable once this returns."""
        job = await self._reader.record(job_id)
        match request.verb:
            case Verb.CANCEL if request.force and not job.state.is_terminal:
                return await self._force(job, caller)
            case Verb.CANCEL:
                return await self._stop(job, StopPurpose.CANCEL, caller)
            case Verb.PAUSE:
                return await self._stop(job, StopPurpose.PAUSE, caller)
            case Verb.RESUME:
                return await self._resume(job, caller)
            case Verb.RERUN:
                return await self._rerun(job, request, caller)
            case Verb.UPDATE:
                return await self._update(job, request, caller)
            case Verb.HOLD:
                return await self._hold(job, request, caller)
            case Verb.RELEASE:
                return await self._resume(job, caller)

    async def _stop(self, job: Job, purpose: StopPurpose, caller: Caller) -> v.ActionReply:
        word = "cancel" if purpose is StopPurpose.CANCEL else "pause"
        if job.state.is_terminal:
            if purpose is StopPurpose.CANCEL and job.state is JobState.CANCELLED:
                return v.ActionReply(job_id=job.id, state=job.state.value, message="it is cancelled already")
            raise RefusedError(f"{job.id} has ended ({job.state.value}); there is nothing to {word}")

        def make() -> Sequence[ev.Event]:
            live = self._loop.decided.get(job.id)
            if live is None:
                return []
            if purpose is StopPurpose.PAUSE and live.stop is not None and live.stop.purpose is StopPurpose.CANCEL:
                raise RefusedError(f"{job.id} is being cancelled; it cannot be paused")
            return request_stop(live, purpose, ByUser(name=caller.user), self._loop.now())

        await self._loop.command(make)
        if purpose is StopPurpose.CANCEL and self._end_collection(job.id):
            return v.ActionReply(job_id=job.id, state=job.state.value, message=COLLECTION_ENDED)
        return await self._acted(job.id)

    async def _force(self, job: Job, caller: Caller) -> v.ActionReply:
        made: list[ev.Event] = []

        def make() -> Sequence[ev.Event]:
            live = self._loop.decided.get(job.id)
            made[:] = [] if live is None else request_force(live, caller.user, self._loop.now())
            return made

        await self._loop.command(make)
        if self._end_collection(job.id):
            return v.ActionReply(job_id=job.id, state=job.state.value, message=COLLECTION_ENDED)
        after = await self._reader.record(job.id)
        message = after.reason.sentence()
        if any(isinstance(event, ev.GangAbandoned) for event in made):
            nodes = ", ".join(sorted({self._loop.nodes[n].name if n in self._loop.nodes else n for n in job.nodes}))
            message = (
                f"its gang on {nodes} is given up: its ranks may still run there and use GPUs, until orch reaches and ends them"
                " (`orch nodes cordon NODE` keeps other jobs away); what it has not saved, and outputs that were not"
                " collected, are lost"
            )
        elif not after.state.is_terminal:
            message = (
                f"its processes are killed without time to save; if it has not ended in {duration(FORCE_SECONDS)},"
                f" `orch cancel --force {job.id}` gives up its gang"
            )
        return v.ActionReply(job_id=job.id, state=after.state.value, message=message)

    async def _acted(self, job_id: JobId) -> v.ActionReply:
        job = await self._reader.record(job_id)
        return v.ActionReply(job_id=job_id, state=job.state.value, message=job.reason.sentence())

    async def _hold(self, job: Job, request: ActionRequest, caller: Caller) -> v.ActionReply:
        def make() -> Sequence[ev.Event]:
            live = self._loop.decided.get(job.id, job)
            if live.state not in (JobState.PENDING, JobState.SUSPENDED):
                hint = "`orch rerun` starts it again" if live.state.is_terminal else f"`orch pause {job.id}` stops it"
                raise RefusedError(f"{job.id} is {live.state.value}; only a job in the queue can be held", hint=hint)
            return events_of(live, request, caller, self._loop.now())

        await self._loop.command(make)
        return await self._acted(job.id)

    async def _resume(self, job: Job, caller: Caller) -> v.ActionReply:
        def make() -> Sequence[ev.Event]:
            live = self._loop.decided.get(job.id)
            events = None if live is None else request_resume(live, caller.user, self._loop.now())
            if events is not None:
                return events
            now = live.state.value if live else job.state.value
            raise RefusedError(
                f"{job.id} is {now}; only a paused or held job can be resumed", hint="`orch rerun` starts it again"
            )

        await self._loop.command(make)
        return await self._acted(job.id)

    async def _update(self, job: Job, request: ActionRequest, caller: Caller) -> v.ActionReply:
        priority = request.priority
        if priority is None:
            raise BadRequestError("nothing to change was given", hint="for example --priority 30")
        self.check(request, caller)
        if job.state.is_terminal:
            raise RefusedError(f"{job.id} has ended ({job.state.value}); nothing of it can be changed")
        await self._loop.command(
            lambda: [ev.JobUpdated(job_id=job.id, at=self._loop.now(), by=caller.user, priority=priority)]
        )
        return v.ActionReply(job_id=job.id, state=job.state.value, message=f"priority is {priority} now")

    def check(self, request: ActionRequest, caller: Caller) -> None:
        """Raise NotPermittedError for a change that only the daemon's owner may make."""
        if request.priority is not None:
            check_priority(request.priority, caller, self._settings)

    async def _rerun(self, job: Job, request: ActionRequest, caller: Caller) -> v.ActionReply:
        if request.failed and job.state is not JobState.FAILED:
            raise RefusedError(f"{job.id} is {job.state.value}; it has not failed", hint="leave out --failed")
        reply = await self.rerun_all([job], request, caller)
        return v.ActionReply(job_id=reply.job_id or "", state=reply.state or "", message=_rerun_message(job, request))

    async def rerun_all(
        self, jobs: Sequence[Job], request: ActionRequest, caller: Caller, *, in_matrix: bool = False
    ) -> v.SubmitReply:
        """Submit these jobs again, all or none; ``in_matrix``: each at its place in its matrix."""
        self._submissions.refuse_when_full()
        specs = [spec_of_rerun(job, request.overrides, self._loop.nodes) for job in jobs]
        try:
            with self._submissions.limits.adding(specs, caller):
                async with self._submissions.under_way.begin() as under_way:
                    events = [
                        await self._again(job, spec, request, caller, under_way, in_matrix=in_matrix)
                        for job, spec in zip(jobs, specs, strict=True)
                    ]
                    return await self._submissions.accept(events, under_way)
        except OSError as error:
            raise disk_error(error, self._settings.home) from error

    async def _again(
        self, job: Job, spec: JobSpec, request: ActionRequest, caller: Caller, under_way: UnderWay, *, in_matrix: bool
    ) -> ev.JobSubmitted:
        under_way.need([job.id])
        resume_from = await self._reader.checkpoint_path(job.id, caller) if request.from_checkpoint else None
        check_queue(spec, self._loop.shares.sharing)
        secrets = {n: v for n, v in read_secrets(self._settings.paths, job.id).items() if n in spec.secrets}
        if missing := [name for name in spec.secrets if name not in secrets]:
            names = ", ".join(missing)
            raise RefusedError(
                f"the secrets of {job.id} ({names}) were deleted at its end", hint="submit its job.yaml again"
            )
        # A job that has started has met its dependencies: only one that never started waits again.
        fulfilled = job.attempts and spec.depends_on == job.spec.depends_on
        needed = () if fulfilled else await self._submissions.prerequisites(spec, job.id, job.submission.uid)
        under_way.need(each.job_id for each in needed)
        files, at = self._submissions.pool, self._loop.now()
        given = (job, spec, caller, self._settings, secrets, resume_from)
        return await prepare_rerun(
            *given, files=files, at=at, under_way=under_way, prerequisites=needed, in_matrix=in_matrix
        )


def events_of(job: Job, request: ActionRequest, caller: Caller, now: float) -> Sequence[ev.Event]:
    """Return the events of a command on a live job; none where it is impossible or changes nothing."""
    by = ByUser(name=caller.user)
    match request.verb:
        case Verb.CANCEL:
            return request_stop(job, StopPurpose.CANCEL, by, now)
        case Verb.PAUSE:
            return request_stop(job, StopPurpose.PAUSE, by, now)
        case Verb.RESUME | Verb.RELEASE:
            return request_resume(job, caller.user, now) or []
        case Verb.HOLD if job.state is JobState.PENDING:
            return request_stop(job, StopPurpose.PAUSE, ByHold(name=caller.user), now)
        case Verb.UPDATE if request.priority is not None and not job.state.is_terminal:
            return [ev.JobUpdated(job_id=job.id, at=now, by=caller.user, priority=request.priority)]
        case _:
            return []


def _rerun_message(job: Job, request: ActionRequest) -> str:
    changed = f" with {', '.join(request.overrides)}" if request.overrides else ""
    return f"runs what {job.id} ran, from its archive{changed}"
