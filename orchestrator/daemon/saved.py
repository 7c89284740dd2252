"""What a job has saved: listed, verified, and chosen as the beginning of another job. Blocking; decides no retention."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from orchestrator.api import views as v
from orchestrator.api.errors import BadRequestError
from orchestrator.checkpoint.info import CheckpointStatus, Retention, best_by_score
from orchestrator.checkpoint.store import CheckpointStore
from orchestrator.checkpoint.watched import WatchedFiles
from orchestrator.runtime.plan import checkpoint_dir, store_environ
from orchestrator.runtime.resuming import watch_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.checkpoint.info import CheckpointInfo
    from orchestrator.core.job import Job
    from orchestrator.spec.paths import Paths


def list_checkpoints(job: Job, paths: Paths, *, verify: bool) -> list[v.CheckpointView]:
    """The job's checkpoints, newest first; ``verify`` reads every byte."""
    infos = [check(info) if verify else info for info, check in _entries(job, paths)]
    spec = job.spec.checkpoint
    retention = Retention(score_attribute=spec.score_attribute, score_order=spec.score_order or "min")
    best = best_by_score(infos, retention)
    return [_view(info, job, verified=verify, is_best=best is not None and best.name == info.name) for info in infos]


def choose(job: Job, paths: Paths, step: str) -> str:
    """Path or URL of the newest good checkpoint, or of the newest good one of ``step`` (empty: any step).

    Reads and verifies only what comes into question. Raises BadRequestError naming the steps that there are.
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
    """Everything that the job has saved, newest first, each with what verifies it."""
    environ = store_environ(job, _secrets(job, paths))
    store = CheckpointStore(checkpoint_dir(job, paths), attempt=max(job.attempt_number, 1), environ=environ)
    found: list[tuple[CheckpointInfo, Callable[[CheckpointInfo], CheckpointInfo]]]
    found = [(info, store.verify) for info in store.list()]
    settings = watch_settings(job, paths)
    if settings is not None:
        files = WatchedFiles(settings)
        found = [(info, files.verify) for info in files.infos()] + found
    return found


def _secrets(job: Job, paths: Paths) -> dict[str, str]:
    """The job's secrets; none once it has ended."""
    try:
        values: dict[str, str] = json.loads(paths.secrets(job.id).read_bytes())
    except (OSError, ValueError):
        return {}
    return values


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
