"""Accepts submissions, and previews them."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from orchestrator.api import views as v
from orchestrator.api.errors import DiskFailedError, DiskFullError, OrchError, RefusedError
from orchestrator.api.matrix_views import CombinationView
from orchestrator.api.requests import RemoteSubmitRequest
from orchestrator.core.scheduler.live_jobs import check, hindrance
from orchestrator.core.scheduler.outlook import outlook_of
from orchestrator.core.scheduler.placement import capacity, closed_to, free_on, nodes_at, place
from orchestrator.core.scheduler.scheduler import State, reserved_for, shares_of, waiting_order
from orchestrator.core.states import JobState
from orchestrator.daemon.jobs.prerequisites import own_name_by_id, prerequisite_states, resolve
from orchestrator.daemon.jobs.views import left_out_notes, left_out_view
from orchestrator.daemon.searches import SearchFiles, plan_of
from orchestrator.daemon.sharing import QueueLimits, check_queue
from orchestrator.daemon.submitting import archives, submission
from orchestrator.daemon.submitting.archives import Uploads
from orchestrator.daemon.submitting.submission import torch_notes
from orchestrator.daemon.submitting.under_way import mark_accepted
from orchestrator.store import errors as store_errors
from orchestrator.store.disk import trouble_of
from orchestrator.store.records import DiskTrouble
from orchestrator.units import plural, size

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
    from pathlib import Path

    from orchestrator.api.requests import SubmitRequest
    from orchestrator.api.service import Caller
    from orchestrator.core import events as ev
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.metrics import Metering
    from orchestrator.daemon.nodes.care import LoopNodes
    from orchestrator.daemon.stopping import StopRequest
    from orchestrator.daemon.submitting.under_way import SubmissionsUnderWay, UnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.model import JobSpec
    from orchestrator.spec.settings import Settings
    from orchestrator.store.store import Store


def placement(asked: Job, state: State, now: float) -> dict[str, Any]:
    """Return fields of ``api.views.PlanReply`` for a job that can fit, beside the live ones of ``state``."""
    nodes = state.nodes
    blocked = hindrance(asked, state.jobs, state.ended)
    if blocked is not None:
        return {"starts": "later", "reason": blocked.sentence(), "num_workers": asked.num_workers}
    held = check([asked], (), state.jobs, state.ended, now).waiting.get(asked.id)
    if held is not None:
        return {"starts": "later", "reason": held.sentence(), "num_workers": asked.num_workers}
    if asked.state is JobState.SUSPENDED:
        return {"starts": "later", "reason": "held until `orch release`", "num_workers": asked.num_workers}
    order = waiting_order(replace(state, jobs={**state.jobs, asked.id: asked}), now)
    ahead = order[: next(place for place, job in enumerate(order) if job.id == asked.id)]
    shares = shares_of(state, now)
    limit = shares.hindrance(asked)
    if limit is not None:
        return {"starts": "later", "reason": limit.sentence(), "num_workers": asked.num_workers}
    worker = asked.spec.resources.resources_per_worker
    nodes = nodes_at(nodes, now, state.past.run_times)
    kept = reserved_for(asked, nodes, closed_to(asked, nodes))
    free = free_on(nodes.values(), state.jobs.values())
    placed = None if ahead else place(asked, free, nodes)
    most = shares.most_ranks(asked)
    if placed is not None and most > len(placed):
        placed = place(asked, free, nodes, ranks=min(most, capacity(asked, free, nodes)))
    ranks = asked.num_workers if placed is None else len(placed)
    common = {"num_workers": ranks, "ahead": tuple(j.id for j in ahead)}
    if placed is None:
        reason = f"behind {plural(len(ahead), 'queued job')}" if ahead else "its GPUs and CPUs are in use"
        reason = "; ".join(each.sentence() for each in kept) if kept and not ahead else reason
        return {"starts": "later", "reason": reason, **common}
    seats = tuple(
        v.PlannedRank(rank=rank, node=nodes[node].name, gpus=worker.gpu, cpus=worker.cpu)
        for rank, node in enumerate(placed)
    )
    return {"starts": "now", "reason": "there is room", "seats": seats, **common}


READY_SECONDS: Final = 120.0  # less than the client waits; Ray's head takes a minute to start on a busy machine


class Submissions:
    """Accepts jobs. ``blind_to`` returns nodes that do not see a directory; ``resume_path`` the checkpoint that a caller's reference means.

    Users' files are read in threads of ``pool``.
    """

    def __init__(
        self,
        loop: Loop,
        store: Store,
        settings: Settings,
        *,
        admission: StopRequest,
        nodes: LoopNodes,
        counter: Metering,
        blind_to: Callable[[str], Awaitable[list[str]]],
        resume_path: Callable[[str, Caller, UnderWay], Awaitable[str]],
        pool: Pool,
        under_way: SubmissionsUnderWay,
    ) -> None:
        self._loop = loop
        self._store = store
        self._settings = settings
        self._admission = admission
        self._nodes = nodes
        self._counter = counter
        self._blind_to = blind_to
        self._resume_path = resume_path
        self.pool = pool
        self.limits = QueueLimits(lambda: loop.jobs.values(), settings)  # noqa: PLW0108 - the loop replaces its dictionary
        self._searches = SearchFiles(settings.home)
        self._uploads = Uploads(settings.home / "uploads", settings.snapshot_max_bytes)
        self.under_way = under_way

    async def missing_pieces(self, digests: Sequence[str], size_bytes: int, caller: Caller) -> Sequence[str]:
        """Return the pieces of an upload that have to be sent."""
        self.refuse_when_full()
        return await self.pool.run(self._uploads.missing, caller.uid, digests, size_bytes, self._loop.now())

    async def put_piece(self, digest: str, data: bytes, caller: Caller) -> None:
        """Keep a piece of an upload."""
        self.refuse_when_full()
        await self.pool.run(self._uploads.put, caller.uid, digest, data)

    @contextlib.asynccontextmanager
    async def _with_files(self, request: SubmitRequest, caller: Caller) -> AsyncGenerator[SubmitRequest, None]:
        """Yield the request to check: with an upload, its directory is the uploaded one, which is then removed."""
        if caller.is_elsewhere or request.upload:
            path = os.environ.get("PATH", os.defpath)
            request = RemoteSubmitRequest(**structs.asdict(request) | {"path": path})
        if not request.upload:
            yield request
            return
        directory = await self.pool.run(self._uploads.lay_out, caller.uid, request.upload)
        try:
            yield structs.replace(request, cwd=str(directory))
        finally:
            await self.pool.run(self._uploads.remove, directory)

    async def submit(self, request: SubmitRequest, caller: Caller) -> v.SubmitReply:
        """Accept a job; durable once this returns."""
        self._admission.refuse()
        async with self._with_files(request, caller) as asked:
            return await self._submit(asked, caller)

    async def _submit(self, request: SubmitRequest, caller: Caller) -> v.SubmitReply:
        began = time.perf_counter()
        checked = await self.pool.run(submission.check, request)
        first = checked[0]
        missing = tuple(name for name in first.spec.secrets if name not in request.secrets)
        if missing:
            return v.SubmitReply(job_id=None, created=False, state=None, needs_secrets=missing)
        plan, home = plan_of(request, first), self._settings.home
        async with self.under_way.begin() as under_way:
            with contextlib.ExitStack() as room:
                try:
                    room.enter_context(self.limits.adding([one.spec for one in checked], caller))
                    events = await self._prepare(checked, request, caller, under_way)
                except (OrchError, OSError) as error:
                    # A client may repeat a request that was accepted: changes since then must not refuse it.
                    known = await self._store.accepted(caller.uid, request.idempotency_key)
                    if known is None or known.spec != first.spec:
                        raise disk_error(error, home) from error
                    cell = known.submission.matrix
                    jobs = [known] if cell is None else await self._store.matrix_jobs(cell.matrix_id)
                    return _reply(jobs, left_out_view(None), created=False)
                try:
                    if (
                        plan is not None
                    ):  # before its first trials are accepted; without them a daemon forgets it at its start
                        await self.pool.run(self._searches.keep, plan, request.secrets)
                    reply = await self.accept(events, under_way)
                except (OrchError, OSError) as error:
                    if plan is not None and not under_way.accepted:
                        await self.pool.run(self._searches.remove, plan.matrix_id)
                    raise disk_error(error, home) from error
        if plan is not None and not reply.created:
            await self.pool.run(self._searches.remove, plan.matrix_id)
        notes: tuple[str, ...] = ()
        if first.directory is not None:
            notes = await self.pool.run(torch_notes, first.spec, first.python, first.directory, request.source)
        self._counter.submitted(time.perf_counter() - began)
        return replace(reply, notes=(*reply.notes, *first.notes, *notes))

    async def _prepare(
        self, checked: Sequence[submission.Checked], request: SubmitRequest, caller: Caller, under_way: UnderWay
    ) -> list[ev.JobSubmitted]:
        """Lay out the files of new jobs. Raises the reason of a refusal, OSError."""
        self.refuse_when_full()
        await self._nodes.wait(READY_SECONDS)
        for one in checked:
            submission.check_fits(one, self._loop.nodes)
            check_queue(one.spec, self._loop.shares.sharing)
        for storage in dict.fromkeys(one.spec.checkpoint.storage_path for one in checked):
            await self._check_storage(storage)
        checked = [replace(one, spec=await own_name_by_id(one.spec, self._store, caller.uid)) for one in checked]
        needed = {
            one.spec.depends_on: await self.prerequisites(one.spec, request.source, caller.uid) for one in checked
        }
        under_way.need(upon.job_id for each in needed.values() for upon in each)
        resume_from = await self._resume_path(request.resume_from, caller, under_way) if request.resume_from else None
        files, at = self.pool, self._loop.now()
        taken = await submission.archive(checked[0].directory, self._settings, files, under_way)
        submission.check_room(taken, len(checked), self._store.disk().free_bytes)
        given: dict[str, Any] = {"taken": taken, "files": files, "at": at, "under_way": under_way}
        events: list[ev.JobSubmitted] = []
        for one in checked:
            asked = (one, request, caller, self._settings, resume_from)
            events.append(await submission.prepare(*asked, **given, prerequisites=needed[one.spec.depends_on]))
        return events

    async def accept(self, events: Sequence[ev.JobSubmitted], under_way: UnderWay) -> v.SubmitReply:
        """Write a submission with its files laid out, and pass it to the loop."""
        try:
            jobs, created = await self._store.submit_all(events)
        except store_errors.IdempotencyConflictError as error:
            raise RefusedError(str(error)) from error
        except (store_errors.DiskError, store_errors.OutcomeUnknownError) as error:
            self._counter.commit_failed()
            under_way.accepted = isinstance(error, store_errors.OutcomeUnknownError)
            raise disk_error(error, self._settings.home) from error
        under_way.accepted = created
        if created:
            mark_accepted(self._settings.paths, [job.id for job in jobs])
        for job in jobs if created else ():
            self._loop.add(job, await prerequisite_states(job, self._loop.decided, self._store))
        return _reply(jobs, left_out_view(events[0].left_out), created=created)

    async def prerequisites(self, spec: JobSpec, source: str, uid: int) -> tuple[ev.Prerequisite, ...]:
        """Return the jobs that ``depends_on`` of this user means now. Raises InvalidSpecError where one is missing, or has ended otherwise."""
        return await resolve(spec, self._store, source, uid)

    def refuse_when_full(self) -> None:
        """Raise DiskFullError or DiskFailedError where the disk takes no other job."""
        disk, home = self._store.disk(), self._settings.home
        if disk.trouble is DiskTrouble.FULL:
            raise DiskFullError(f"only {size(disk.free_bytes)} are free under {home}")
        if disk.trouble is not None:
            raise _refusal(disk.trouble, home)

    async def plan(self, request: SubmitRequest, caller: Caller) -> v.PlanReply:
        """Return the preview of a submission; store nothing."""
        async with self._with_files(request, caller) as asked:
            return await self._plan(asked, caller)

    async def _plan(self, request: SubmitRequest, caller: Caller) -> v.PlanReply:
        every = await self.pool.run(submission.check, request)
        checked = every[0]
        await self._nodes.wait(READY_SECONDS)
        files, size_bytes, left_out = (
            (0, 0, None) if checked.directory is None else await self.pool.run(archives.measure, checked.directory)
        )
        left_out_shown = left_out_view(left_out)
        notes = (
            *left_out_notes(left_out_shown),
            *checked.notes,
            *await self.pool.run(torch_notes, checked.spec, checked.python, checked.directory, request.source),
        )
        reply: dict[str, Any] = {
            "name": checked.spec.name,
            "queue": checked.spec.queue,
            "python": checked.python,
            "working_dir": (checked.spec.working_dir or "") if request.upload else str(checked.directory or ""),
            "snapshot_files": files,
            "snapshot_bytes": size_bytes,
            "left_out": left_out_shown,
            "secrets": checked.spec.secrets,
            "combinations": _combinations(every),
        }
        try:
            for one in every:
                submission.check_fits(one, self._loop.nodes)
                check_queue(one.spec, self._loop.shares.sharing)
        except RefusedError as error:
            reason = f"{error.message}; {error.hint}"
            return v.PlanReply(**reply, starts="never", reason=reason, notes=notes)
        placed = await self._placement(checked, request.source, caller.uid)
        return v.PlanReply(**reply, **placed, notes=notes)

    async def _placement(self, checked: submission.Checked, source: str, uid: int) -> dict[str, Any]:
        asked = submission.probe(checked, await self.prerequisites(checked.spec, source, uid))
        ended = await prerequisite_states(asked, self._loop.jobs, self._store)
        shares = self._loop.shares
        state = State(
            jobs=self._loop.jobs, nodes=self._loop.nodes, ended=ended, sharing=shares.sharing, past=shares.past
        )
        now = self._loop.now()
        found = placement(asked, state, now)
        if found["starts"] == "later":
            there = replace(state, jobs={**state.jobs, asked.id: asked})
            found["expected_start"] = (await self.pool.run(outlook_of, asked.id, there, now)).starts_at
        return found

    async def _check_storage(self, storage: str | None) -> None:
        """Refuse a checkpoint directory that is local to a node: checkpoints there would be lost with the node."""
        if storage is None or "://" in storage:  # a URL names the same place on every node
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


def disk_error(error: Exception, home: Path) -> OrchError:
    """Return the API's error for one that the disk may have caused."""
    if isinstance(error, OrchError):
        return error
    if isinstance(error, store_errors.OutcomeUnknownError):
        return DiskFailedError(str(error), hint="submit again only where `orch status` does not show it")
    trouble = error.trouble if isinstance(error, store_errors.DiskError) else trouble_of(error, home)
    if trouble is None:
        return RefusedError(
            f"the submission could not be written: {error}", hint="remove the reason, then submit again"
        )
    return _refusal(trouble, home)


def _refusal(trouble: DiskTrouble, home: Path) -> OrchError:
    kind = DiskFullError if trouble in (DiskTrouble.FULL, DiskTrouble.NO_INODES) else DiskFailedError
    remedy = store_errors.disk_remedy(trouble, home)
    return kind(
        f"{store_errors.disk_sentence(trouble, home)}, so no new job is accepted",
        hint=f"{remedy}, then submit again; running jobs continue",
    )


def _reply(jobs: Sequence[Job], left_out: v.LeftOutView | None, *, created: bool) -> v.SubmitReply:
    first, cell = jobs[0], jobs[0].submission.matrix
    return v.SubmitReply(
        job_id=first.id,
        created=created,
        state=first.state.value,
        notes=left_out_notes(left_out),
        left_out=left_out,
        matrix_id=None if cell is None else cell.matrix_id,
        job_ids=tuple(job.id for job in jobs),
    )


def _combinations(every: Sequence[submission.Checked]) -> tuple[CombinationView, ...]:
    """Return the jobs that a matrix would create; none for a single job."""
    return tuple(
        CombinationView(index=one.cell.index, name=one.spec.name, values=dict(one.cell.values))
        for one in every
        if one.cell is not None
    )
