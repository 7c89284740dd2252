"""Accepts submissions, and says what one would do."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Protocol

from orchestrator.api import views as v
from orchestrator.api.errors import DiskFullError, OrchError, RefusedError
from orchestrator.core.scheduler.scheduler import State
from orchestrator.daemon.jobs import submission
from orchestrator.daemon.jobs import workdir_archive as snapshot
from orchestrator.daemon.jobs.event_views import left_out_notes, left_out_view
from orchestrator.daemon.jobs.interpreter import torch_notes
from orchestrator.daemon.jobs.prerequisites import prerequisite_states, resolve
from orchestrator.daemon.requests.placement import placement
from orchestrator.daemon.sharing.admission import check_queue
from orchestrator.store import errors as store_errors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from orchestrator.api.service import Caller, SubmitRequest
    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.runtime.pools import Share, SharedPool
    from orchestrator.spec.job import JobSpec
    from orchestrator.spec.settings import Settings
    from orchestrator.store.port import Store

READY_SECONDS: Final = 60.0


class Admission(Protocol):
    """What decides whether a submission can be taken now."""

    def refuse(self) -> None:
        """Raise DaemonStoppingError once the daemon is on its way out."""
        ...


class Nodes(Protocol):
    """The nodes, as far as submissions need them."""

    async def wait(self, seconds: float) -> None:
        """Return once there are nodes. Raises DaemonStoppingError when they do not come."""
        ...


class Counter(Protocol):
    """What counts submissions."""

    def submitted(self, seconds: float) -> None:
        """One took that long."""
        ...

    def commit_failed(self) -> None:
        """One could not be written."""
        ...


class Submissions:
    """``blind_to`` names the nodes that do not see a directory; ``resume_path`` the checkpoint that a reference means.

    Users' files are looked at in threads of ``pool``.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        settings: Settings,
        *,
        admission: Admission,
        nodes: Nodes,
        counter: Counter,
        blind_to: Callable[[str], Awaitable[list[str]]],
        resume_path: Callable[[str], Awaitable[str]],
        pool: SharedPool,
    ) -> None:
        self._loop = loop
        self._store = store
        self._settings = settings
        self._admission = admission
        self._nodes = nodes
        self._counter = counter
        self._blind_to = blind_to
        self._resume_path = resume_path
        self._pool = pool

    def files_of(self, caller: Caller) -> Share:
        """The threads that look at files of this user's submissions."""
        return self._pool.of(caller.uid)

    async def submit(self, request: SubmitRequest, caller: Caller) -> v.SubmitReply:
        """Accept a job; durable once this returns."""
        began = time.perf_counter()
        self._admission.refuse()
        checked = await self.files_of(caller).run(submission.check, request)
        missing = tuple(name for name in checked.spec.secrets if name not in request.secrets)
        if missing:
            return v.SubmitReply(job_id=None, created=False, state=None, needs_secrets=missing)
        try:
            event = await self._prepare(checked, request, caller)
        except OrchError:
            # A client that repeats its request has not heard that the first was accepted; what has changed since is no answer.
            known = await self._store.accepted(caller.uid, request.idempotency_key)
            if known is None or known.spec != checked.spec:
                raise
            return _reply(known, left_out_view(None), created=False)
        reply = await self.accept(event)
        notes = await self.files_of(caller).run(
            torch_notes, checked.spec, checked.python, checked.directory, request.source
        )
        self._counter.submitted(time.perf_counter() - began)
        return replace(reply, notes=(*reply.notes, *notes))

    async def _prepare(self, checked: submission.Checked, request: SubmitRequest, caller: Caller) -> ev.JobSubmitted:
        """Lay out the files of a new job. Raises what keeps it from being accepted now."""
        self.refuse_when_full()
        await self._nodes.wait(READY_SECONDS)
        submission.check_fits(checked, self._loop.nodes)
        check_queue(checked.spec, self._loop.shares.sharing)
        await self._check_storage(checked)
        prerequisites = await self.prerequisites(checked.spec, request.source)
        resume_from = await self._resume_path(request.resume_from) if request.resume_from else None
        files, at = self.files_of(caller), self._loop.now()
        try:
            return await submission.prepare(
                checked, request, caller, self._settings, resume_from, files=files, at=at, prerequisites=prerequisites
            )
        except OSError as error:
            raise DiskFullError(f"the submission could not be written: {error}") from error

    async def accept(self, event: ev.JobSubmitted) -> v.SubmitReply:
        """Write a submission whose files are laid out, and hand it to the loop; of one that is not taken nothing is left."""
        try:
            job, created = await self._store.submit(event)
        except store_errors.IdempotencyConflictError as error:
            submission.discard(self._settings, event.job_id)
            raise RefusedError(str(error)) from error
        except store_errors.DiskFullError as error:
            self._counter.commit_failed()
            submission.discard(self._settings, event.job_id)
            raise DiskFullError(str(error)) from error
        if created:
            self._loop.add(job, await prerequisite_states(job, self._loop.decided, self._store))
        else:
            submission.discard(self._settings, event.job_id)
        return _reply(job, left_out_view(event.left_out), created=created)

    async def prerequisites(self, spec: JobSpec, source: str) -> tuple[ev.Prerequisite, ...]:
        """The jobs that the spec's ``depends_on`` means now. Raises InvalidSpecError where one is not there, or has ended otherwise."""
        return await resolve(spec, self._store, source)

    def refuse_when_full(self) -> None:
        """Raise DiskFullError where the disk has no room for another job."""
        disk = self._store.disk()
        if not disk.accepts_submissions:
            raise DiskFullError(f"only {disk.free_bytes / 1e6:.0f} MB are free under {self._settings.home}")

    async def plan(self, request: SubmitRequest, caller: Caller) -> v.PlanReply:
        """Say what a submission would do; store nothing."""
        look = self.files_of(caller)
        checked = await look.run(submission.check, request)
        await self._nodes.wait(READY_SECONDS)
        files, size, left_out = (
            (0, 0, None) if checked.directory is None else await look.run(snapshot.measure, checked.directory)
        )
        told = left_out_view(left_out)
        notes = (
            *left_out_notes(told),
            *await look.run(torch_notes, checked.spec, checked.python, checked.directory, request.source),
        )
        reply: dict[str, Any] = {
            "name": checked.spec.name,
            "queue": checked.spec.queue,
            "python": checked.python,
            "working_dir": str(checked.directory or ""),
            "snapshot_files": files,
            "snapshot_bytes": size,
            "left_out": told,
            "secrets": checked.spec.secrets,
        }
        try:
            submission.check_fits(checked, self._loop.nodes)
            check_queue(checked.spec, self._loop.shares.sharing)
        except RefusedError as error:
            reason = f"{error.message}; {error.hint}"
            return v.PlanReply(**reply, starts="never", reason=reason, notes=notes)
        placed = await self._placement(checked, request.source)
        return v.PlanReply(**reply, **placed, notes=notes)

    async def _placement(self, checked: submission.Checked, source: str) -> dict[str, Any]:
        asked = submission.probe(checked, await self.prerequisites(checked.spec, source))
        ended = await prerequisite_states(asked, self._loop.jobs, self._store)
        shares = self._loop.shares
        state = State(
            jobs=self._loop.jobs, nodes=self._loop.nodes, ended=ended, sharing=shares.sharing, past=shares.past
        )
        return placement(asked, state, self._loop.now())

    async def _check_storage(self, checked: submission.Checked) -> None:
        """Refuse a checkpoint directory that a node would have for itself: what is saved there would be lost with it."""
        storage = checked.spec.checkpoint.storage_path
        if storage is None or "://" in storage:  # a URL is the same place from everywhere
            return
        try:
            blind = await self._blind_to(storage)
        except OSError as error:
            raise RefusedError(
                f"checkpoint.storage_path {storage} cannot be written here: {error.strerror}",
                hint="name a directory that the daemon's user may write",
            ) from error
        if blind:
            raise RefusedError(
                f"checkpoint.storage_path {storage} is not shared with {', '.join(blind)}",
                hint="mount it there too, name a directory that every node shares, or `orch nodes cordon` those nodes",
            )


def _reply(job: Job, left_out: v.LeftOutView | None, *, created: bool) -> v.SubmitReply:
    return v.SubmitReply(
        job_id=job.id, created=created, state=job.state.value, notes=left_out_notes(left_out), left_out=left_out
    )
