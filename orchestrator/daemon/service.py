"""The daemon as the API sees it: reads the loop's state and the store, turns wishes into commands."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from typing import TYPE_CHECKING, Any

from orchestrator import __version__
from orchestrator.api import views as v
from orchestrator.api.errors import (
    AmbiguousReferenceError,
    BadRequestError,
    DiskFullError,
    NoSuchJobError,
    NoSuchNodeError,
    Problem,
    RefusedError,
)
from orchestrator.api.protocol import PAGE, PROTOCOL_VERSION
from orchestrator.api.service import (
    ActionRequest,
    Caller,
    JobFilter,
    LogQuery,
    NodeVerb,
    ProfileRequest,
    SubmitRequest,
    Verb,
)
from orchestrator.core import events as ev
from orchestrator.core.scheduler.placement import capacity, free_on, place
from orchestrator.core.scheduler.scheduler import queue_order, request_stop
from orchestrator.core.states import JobState, StopPurpose
from orchestrator.daemon.jobs import job_checkpoints as saved
from orchestrator.daemon.jobs import submission
from orchestrator.daemon.jobs import workdir_archive as snapshot
from orchestrator.daemon.jobs.log_stream import LogStream
from orchestrator.daemon.jobs.secrets import read_secrets
from orchestrator.daemon.jobs.views import event_view, job_view, left_out_notes, left_out_view, rank_stacks
from orchestrator.runtime.gangs.launch_spec import checkpoint_dir
from orchestrator.runtime.ranks.process_inspector import report_lines
from orchestrator.store import errors as store_errors
from orchestrator.store.port import JobFilter as StoreFilter
from orchestrator.train.script.trace_request import TraceRefusedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from orchestrator.core.ids import JobId
    from orchestrator.core.job import Job
    from orchestrator.daemon.daemon import Daemon
    from orchestrator.spec.paths import Paths

READY_SECONDS = 60.0


class Service:
    """Implements ``api.service.JobService`` on a daemon."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    # -- submitting

    async def submit(self, request: SubmitRequest, caller: Caller) -> v.SubmitReply:
        """Accept a job; durable once this returns."""
        daemon = self._daemon
        began = time.perf_counter()
        daemon.refuse_when_stopping()
        checked = await asyncio.to_thread(submission.check, request)
        missing = tuple(name for name in checked.spec.secrets if name not in request.secrets)
        if missing:
            return v.SubmitReply(job_id=None, created=False, state=None, needs_secrets=missing)
        self._refuse_when_full()
        await daemon.wait_for_nodes(READY_SECONDS)
        submission.check_fits(checked, daemon.loop.nodes)
        await self._check_storage(checked)
        resume_from = await self._resume_path(request.resume_from) if request.resume_from else None
        try:
            event = await submission.prepare(checked, request, caller, daemon.settings, resume_from)
        except OSError as error:
            raise DiskFullError(f"the submission could not be written: {error}") from error
        reply = await self._accept(event)
        daemon.metering.submitted(time.perf_counter() - began)
        return reply

    async def _check_storage(self, checked: submission.Checked) -> None:
        """Refuse a checkpoint directory that a node would have for itself: what is saved there would be lost with it."""
        storage = checked.spec.checkpoint.storage_path
        if storage is None or "://" in storage:  # a URL is the same place from everywhere
            return
        try:
            blind = await self._daemon.blind_nodes(storage)
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

    async def _accept(self, event: ev.JobSubmitted) -> v.SubmitReply:
        daemon = self._daemon
        try:
            job, created = await daemon.store.submit(event)
        except store_errors.IdempotencyConflictError as error:
            submission.discard(daemon.settings, event.job_id)
            raise RefusedError(str(error)) from error
        except store_errors.DiskFullError as error:
            daemon.metering.commit_failed()
            submission.discard(daemon.settings, event.job_id)
            raise DiskFullError(str(error)) from error
        if created:
            daemon.loop.add(job)
        else:
            submission.discard(daemon.settings, event.job_id)
        left_out = left_out_view(event.left_out)
        return v.SubmitReply(
            job_id=job.id,
            created=created,
            state=job.state.value,
            notes=left_out_notes(left_out),
            left_out=left_out,
        )

    def _refuse_when_full(self) -> None:
        disk = self._daemon.store.disk()
        if not disk.accepts_submissions:
            raise DiskFullError(f"only {disk.free_bytes / 1e6:.0f} MB are free under {self._daemon.settings.home}")

    async def _resume_path(self, reference: str) -> str:
        ref, at, step = reference.partition("@")
        if at and not step.isdecimal():
            raise BadRequestError(f"{step or 'nothing'!r} is not a step", hint=f"write {ref}@100, or {ref} alone")
        job = await self._record(await self.resolve(ref))
        return await self._daemon.pools.checkpoints.run(saved.choose, job, self._daemon.settings.paths, step)

    async def plan(self, request: SubmitRequest, caller: Caller) -> v.PlanReply:  # noqa: ARG002 - the port's signature
        """Say what a submission would do; store nothing."""
        checked = await asyncio.to_thread(submission.check, request)
        daemon = self._daemon
        await daemon.wait_for_nodes(READY_SECONDS)
        files, size, left_out = (
            (0, 0, None) if checked.directory is None else await asyncio.to_thread(snapshot.measure, checked.directory)
        )
        told = left_out_view(left_out)
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
            submission.check_fits(checked, daemon.loop.nodes)
        except RefusedError as error:
            reason = f"{error.message}; {error.hint}"
            return v.PlanReply(**reply, starts="never", reason=reason, notes=left_out_notes(told))
        placed = self._placement(checked)
        notes = (*placed.pop("notes", ()), *left_out_notes(told))
        return v.PlanReply(**reply, **placed, notes=notes)

    def _placement(self, checked: submission.Checked) -> dict[str, Any]:
        loop = self._daemon.loop
        probe = submission.probe(checked)
        ahead = sorted(
            (j for j in loop.jobs.values() if j.state is JobState.PENDING and j.priority >= probe.priority),
            key=queue_order,
        )
        worker = checked.spec.resources.resources_per_worker
        free = free_on(loop.nodes.values(), loop.jobs.values())
        nodes = None if ahead else place(probe, free, loop.nodes)
        if nodes is not None and probe.most_workers > len(nodes):
            nodes = place(probe, free, loop.nodes, ranks=min(probe.most_workers, capacity(probe, free, loop.nodes)))
        ranks = probe.num_workers if nodes is None else len(nodes)
        common = {"num_workers": ranks, "ahead": tuple(j.id for j in ahead)}
        if nodes is None:
            reason = f"behind {len(ahead)} queued job(s)" if ahead else "its GPUs and CPUs are in use"
            return {"starts": "later", "reason": reason, **common}
        seats = tuple(
            v.SeatPlan(rank=rank, node=loop.nodes[node].name, gpus=worker.gpu, cpus=worker.cpu)
            for rank, node in enumerate(nodes)
        )
        return {"starts": "now", "reason": "there is room", "seats": seats, **common}

    # -- reading

    async def jobs(self, query: JobFilter) -> Sequence[v.JobView]:
        """Jobs that fit the filter, newest first."""
        before = None if query.before is None else (await self._record(query.before)).sequence
        found = await self._daemon.store.jobs(
            StoreFilter(user=query.user, states=query.states, since=query.since, before=before, limit=query.limit)
        )
        await self._daemon.recall_progress(found)
        return [self._view(job) for job in found]

    def _view(self, job: Job) -> v.JobView:
        daemon = self._daemon
        return job_view(
            job,
            daemon.progress_of(job.id),
            daemon.loop.waiting.get(job.id),
            str(daemon.settings.paths.logs(job.id)),
            daemon.gpus.balances.get(job.id),
            outputs_dir=str(daemon.settings.paths.outputs(job.id)) if job.spec.outputs else "",
        )

    async def resolve(self, ref: str) -> JobId:
        """The id that ``ref`` means."""
        try:
            return (await self._daemon.store.find(ref)).job.id
        except store_errors.JobNotFoundError as error:
            raise NoSuchJobError(f"there is no job {ref!r}") from error
        except store_errors.AmbiguousJobError as error:
            problems = [Problem(message=str(candidate)) for candidate in error.candidates]
            raise AmbiguousReferenceError(f"{ref!r} fits several jobs", problems=problems) from error

    async def job(self, job_id: JobId) -> v.JobView:
        """One job."""
        job = await self._record(job_id)
        await self._daemon.recall_progress([job])
        return self._view(job)

    async def _record(self, job_id: JobId) -> Job:
        live = self._daemon.loop.jobs.get(job_id)
        if live is not None:
            return live
        try:
            return await self._daemon.store.job(job_id)
        except store_errors.JobNotFoundError as error:
            raise NoSuchJobError(f"there is no job {job_id!r}") from error

    async def events(
        self, job_id: JobId, after: int, *, limit: int = PAGE, tail: int | None = None
    ) -> Sequence[v.EventView]:
        """The job's history."""
        job = await self._record(job_id)
        if tail is not None:  # an event's number is the job's version after it
            after = max(after, job.version - tail)
        return [event_view(stored) for stored in await self._daemon.store.events(job_id, after=after, limit=limit)]

    async def profile(self, job_id: JobId, request: ProfileRequest) -> bytes:
        """A torch.profiler trace of a running job's next steps."""
        job = await self._record(job_id)
        if job.state is not JobState.RUNNING:
            raise RefusedError(f"{job.id} is {job.state.value}; only a running job can be traced")
        if request.rank >= job.num_workers:
            raise BadRequestError(f"{job.id} has no rank {request.rank}", hint=f"0 to {job.num_workers - 1}")
        try:
            return await self._daemon.calls.trace(job, request.rank, request.steps, request.timeout_seconds)
        except TraceRefusedError as error:
            message, _, hint = str(error).partition(": ")
            raise RefusedError(message, hint=hint) from error

    async def stacks(self, job_id: JobId, rank: int | None) -> v.StacksView:
        """Where the ranks of a running job stand."""
        job = await self._record(job_id)
        if job.state is not JobState.RUNNING:
            raise RefusedError(f"{job.id} is {job.state.value}; only a running job has stacks")
        if rank is not None and rank >= job.num_workers:
            raise BadRequestError(f"{job.id} has no rank {rank}", hint=f"0 to {job.num_workers - 1}")
        calls, ranks = self._daemon.calls, tuple(range(job.num_workers)) if rank is None else (rank,)
        looks = await calls.look(job, stacks=True, ranks=ranks)
        await calls.note(job, {number: report_lines(look) for number, look in looks.items()})
        return v.StacksView(job_id=job.id, ranks=tuple(rank_stacks(number, looks.get(number)) for number in ranks))

    async def logs(self, job_id: JobId, query: LogQuery) -> AsyncGenerator[Sequence[v.LogLine], None]:
        """Lines of the job's log."""
        await self._record(job_id)
        stream = LogStream(
            self._daemon.settings.paths.logs(job_id), query, lambda: self._ended(job_id), self._daemon.pools.logs
        )
        async for batch in stream.batches():
            yield batch

    async def _ended(self, job_id: JobId) -> tuple[bool, int]:
        job = await self._record(job_id)
        return job.state.is_terminal, job.attempt_number

    async def checkpoints(self, job_id: JobId, *, verify: bool) -> Sequence[v.CheckpointView]:
        """The job's checkpoints, newest first."""
        job = await self._record(job_id)
        book = self._daemon.progress_of(job_id)
        newest = book.ranks.get(0) if book is not None and book.attempt == job.attempt_number else None
        paths = self._daemon.settings.paths
        return await self._daemon.pools.checkpoints.run(
            lambda: saved.list_checkpoints(job, paths, verify=verify, newest=newest)
        )

    async def nodes(self) -> Sequence[v.NodeView]:
        """Every node of the cluster."""
        return self._daemon.node_views()

    async def gpus(self) -> Sequence[dict[str, Any]]:
        """Every GPU of every node, with its newest values and holders."""
        return [row.to_json() for row in await self._daemon.gpus.rows(self._daemon.avoided_gpus)]

    def change_version(self) -> int:
        """The change counter."""
        return self._daemon.changes.version

    async def wait_change(self, after: int, timeout_seconds: float, job_ids: frozenset[JobId] = frozenset()) -> int:
        """The counter, once it differs by a change of one of the jobs, or at the time-out."""
        return await self._daemon.changes.wait(after, timeout_seconds, job_ids)

    async def health(self) -> v.HealthView:
        """The daemon's own state."""
        daemon = self._daemon
        nodes = daemon.loop.nodes.values()
        free = free_on(nodes, daemon.loop.jobs.values())
        counts = await daemon.store.state_counts()
        return v.HealthView(
            ready=daemon.ready.is_set() and not daemon.problems(),
            version=__version__,
            protocol=PROTOCOL_VERSION,
            pid=os.getpid(),
            owner=submission.owner_name(),
            started_at=daemon.started_at,
            home=str(daemon.settings.home),
            ray_address=daemon.cluster.address,
            simulated_gpus=daemon.simulated_gpus(),
            read_address=daemon.read_address,
            prometheus_url=daemon.prometheus_url,
            alertmanager_url=daemon.alertmanager_url,
            counts={state.value: count for state, count in counts.items()},
            nodes=sum(n.alive for n in nodes),
            gpus_total=sum(n.gpus for n in nodes if n.alive),
            gpus_free=sum(max(0.0, f.gpus) for f in free.values()),
            problems=tuple(daemon.problems()),
        )

    # -- acting

    async def act(self, job_id: JobId, request: ActionRequest, caller: Caller) -> v.ActionReply:
        """Do something to a job; durable once this returns."""
        job = await self._record(job_id)
        match request.verb:
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

    async def _stop(self, job: Job, purpose: StopPurpose, caller: Caller) -> v.ActionReply:
        word = "cancel" if purpose is StopPurpose.CANCEL else "pause"
        if job.state.is_terminal:
            if purpose is StopPurpose.CANCEL and job.state is JobState.CANCELLED:
                return v.ActionReply(job_id=job.id, state=job.state.value, message="it is cancelled already")
            raise RefusedError(f"{job.id} has ended ({job.state.value}); there is nothing to {word}")
        loop = self._daemon.loop

        def make() -> Sequence[ev.Event]:
            live = loop.decided.get(job.id)
            return request_stop(live, purpose, caller.user, time.time()) if live else []

        await loop.command(make)
        return await self._acted(job.id)

    async def _acted(self, job_id: JobId) -> v.ActionReply:
        job = await self._record(job_id)
        return v.ActionReply(job_id=job_id, state=job.state.value, message=job.reason)

    async def _resume(self, job: Job, caller: Caller) -> v.ActionReply:
        loop = self._daemon.loop

        def make() -> Sequence[ev.Event]:
            live = loop.decided.get(job.id)
            if live is not None and live.state is JobState.SUSPENDED:
                return [ev.JobResumed(job_id=job.id, at=time.time(), by=caller.user)]
            if live is not None and live.state is not JobState.DRAINING:
                return []  # it runs or waits already: the goal is reached
            now = live.state.value if live else job.state.value
            raise RefusedError(
                f"{job.id} is {now}; only a paused job can be resumed", hint="`orch rerun` starts it anew"
            )

        await loop.command(make)
        return await self._acted(job.id)

    async def _update(self, job: Job, request: ActionRequest, caller: Caller) -> v.ActionReply:
        priority = request.priority
        if priority is None:
            raise BadRequestError("nothing to change was given", hint="for example --priority 80")
        if job.state.is_terminal:
            raise RefusedError(f"{job.id} has ended ({job.state.value}); nothing of it can be changed")
        await self._daemon.loop.command(
            lambda: [ev.JobUpdated(job_id=job.id, at=time.time(), by=caller.user, priority=priority)]
        )
        return v.ActionReply(job_id=job.id, state=job.state.value, message=f"priority is {priority} now")

    async def _rerun(self, job: Job, request: ActionRequest, caller: Caller) -> v.ActionReply:
        daemon = self._daemon
        self._refuse_when_full()
        resume_from = await self._resume_path(job.id) if request.from_checkpoint else None
        secrets = read_secrets(daemon.settings.paths, job.id)
        if job.spec.secrets and not secrets:
            names = ", ".join(job.spec.secrets)
            raise RefusedError(
                f"the secrets of {job.id} ({names}) were deleted at its end", hint="submit its job.yaml again"
            )
        event = await submission.prepare_rerun(job, caller, daemon.settings, secrets, resume_from)
        reply = await self._accept(event)
        return v.ActionReply(
            job_id=reply.job_id or "", state=reply.state or "", message=f"runs what {job.id} ran, from its snapshot"
        )

    async def node_action(self, node: str, verb: NodeVerb, caller: Caller) -> v.NodeActionReply:
        """Cordon, drain or uncordon a node."""
        found = [n for n in self._daemon.loop.nodes.values() if node in (n.id, n.name) or n.id.startswith(node)]
        if not found:
            raise NoSuchNodeError(f"there is no node {node!r}")
        if len(found) > 1:
            ids = ", ".join(n.id[:12] for n in found)
            raise BadRequestError(f"{node!r} means several nodes", hint=f"name one by its id: {ids}")
        return await self._daemon.node_action(found[0], verb, caller.user)

    async def shutdown(self, *, stop_jobs: bool, caller: Caller) -> v.ShutdownReply:
        """Begin to stop the daemon."""
        return await self._daemon.begin_shutdown(stop_jobs=stop_jobs, by=caller.user)

    async def prune(self, *, older_than_seconds: float, dry_run: bool, caller: Caller) -> v.PruneReply:  # noqa: ARG002 - the port's signature
        """Remove what is left in the home of jobs that ended long ago; see ``api.views.PruneReply``."""
        daemon = self._daemon
        paths, before = daemon.settings.paths, time.time() - older_than_seconds
        going = await daemon.store.ended_before(before)
        kept = [_left_alone(await daemon.store.job(job_id), paths) for job_id in going]
        folders = [paths.job(job_id) for job_id in going]
        freed = await asyncio.to_thread(lambda: sum(_size(p) for p in folders))
        if not dry_run:
            # The record goes last: of a prune that was cut short everything is found again by the next.
            for folder in folders:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            going = await daemon.store.prune(before)
        return v.PruneReply(
            removed=tuple(going),
            freed_bytes=freed,
            dry_run=dry_run,
            kept=tuple(place for place in kept if place),
        )


def _left_alone(job: Job, paths: Paths) -> str:
    """Where the job has saved by its owner's wish, outside the home: that is nobody's to remove but his."""
    configured = job.spec.checkpoint.storage_path is not None and job.checkpoint_path
    return checkpoint_dir(job, paths) if configured else ""


def _size(directory: Any) -> int:
    return sum(p.lstat().st_size for p in directory.rglob("*") if p.is_file() and not p.is_symlink())
