"""Lists and verifies a job's checkpoints, and chooses one as another job's start. Blocks; decides no retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api import views as v
from orchestrator.api.errors import BadRequestError
from orchestrator.checkpoint.external.external_checkpoints import ExternalCheckpoints
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.checkpoint.storage.directory import CheckpointStatus, Retention, best_by_score
from orchestrator.daemon.jobs.tidying import read_secrets
from orchestrator.runtime.gangs.launching import checkpoint_dir, store_environ, watch_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.checkpoint.storage.directory import CheckpointInfo
    from orchestrator.core.job.record import Job
    from orchestrator.spec.paths import Paths
    from orchestrator.train.script.progress_reading import ProgressSnapshot


def list_checkpoints(
    job: Job, paths: Paths, *, verify: bool, newest: ProgressSnapshot | None = None
) -> list[v.CheckpointView]:
    """Return the job's checkpoints, newest first; ``verify`` reads every byte.

    ``newest`` is rank 0's last report: its newest snapshot may be in memory only.
    """
    infos = [check(info) if verify else info for info, check in _entries(job, paths)]
    spec = job.spec.checkpoint
    retention = Retention(score_attribute=spec.score_attribute, score_order=spec.score_order or "min")
    best = best_by_score(infos, retention)
    views = [_view(info, job, verified=verify, is_best=best is not None and best.name == info.name) for info in infos]
    in_memory = _in_memory(job, newest)
    if in_memory is None or any(
        (i.attempt, i.step) == (in_memory.attempt, in_memory.step) for i in infos if i.is_complete
    ):
        return views
    return [in_memory, *views]


def _in_memory(job: Job, newest: ProgressSnapshot | None) -> v.CheckpointView | None:
    """Return the newest snapshot of a live job's ranks that is in memory only; None where there is none."""
    if not job.gang_open or job.gang_lost:
        return None
    if newest is not None and newest.snapshot_step is not None:
        step, at = newest.snapshot_step, newest.snapshot_at
    elif (
        job.checkpoints.at is not None
        and job.checkpoints.at != job.checkpoints.durable_at
        and job.checkpoints.step > job.checkpoints.durable_step
    ):
        step, at = job.checkpoints.step, job.checkpoints.at
    else:
        return None
    return v.CheckpointView(step=step, at=at or 0.0, path="", attempt=job.attempt_number, location="memory")


def choose(job: Job, paths: Paths, step: str) -> str:
    """Return path or URL of the newest valid checkpoint, or of the newest valid one of ``step`` (empty: any step).

    Reads and verifies only candidates. Raises BadRequestError with the existing steps.
    """
    entries = _entries(job, paths)
    infos = [info for info, _ in entries]
    why = ""
    for info, check in entries:
        if step and str(info.step) != step:
            continue
        checked = check(info)
        if checked.status is CheckpointStatus.COMPLETE:
            return checked.path
        why = why or f": {checked.why}"
    steps = ", ".join(dict.fromkeys(str(i.step) for i in infos if i.status is CheckpointStatus.COMPLETE)) or "none"
    which = f"good checkpoint of step {step}" if step else "good checkpoint"
    raise BadRequestError(
        f"{job.id} has no {which} on storage{why}",
        hint=f"there are: {steps}; `orch checkpoints {job.id} --verify` looks at all of them",
    )


def _entries(job: Job, paths: Paths) -> list[tuple[CheckpointInfo, Callable[[CheckpointInfo], CheckpointInfo]]]:
    """Return all of the job's checkpoints, newest first, each with the object that verifies it."""
    environ = store_environ(job, read_secrets(paths, job.id))
    store = CheckpointRepository(checkpoint_dir(job, paths), attempt=max(job.attempt_number, 1), environ=environ)
    found: list[tuple[CheckpointInfo, Callable[[CheckpointInfo], CheckpointInfo]]]
    found = [(info, store.verify) for info in store.list()]
    settings = watch_settings(job, paths)
    if settings is not None:
        files = ExternalCheckpoints(settings)
        found = [(info, files.verify) for info in files.infos()] + found
    return found


def _view(info: CheckpointInfo, job: Job, *, verified: bool, is_best: bool) -> v.CheckpointView:
    status = info.status
    attribute = job.spec.checkpoint.score_attribute
    return v.CheckpointView(
        step=info.step,
        at=info.created_at or 0.0,
        path=info.path,
        attempt=info.attempt,
        location="incomplete" if status is CheckpointStatus.INCOMPLETE else "disk",
        size_bytes=info.bytes if status is CheckpointStatus.COMPLETE else None,
        metrics=dict(info.metrics),
        score=None if attribute is None else info.metrics.get(attribute),
        is_best=is_best,
        valid={CheckpointStatus.COMPLETE: True if verified else None, CheckpointStatus.BROKEN: False}.get(status),
        problem=info.why if status is CheckpointStatus.BROKEN else "",
    )
