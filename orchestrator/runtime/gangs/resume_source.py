"""Chooses the checkpoint an attempt resumes from, where orch decides that: ``ORCH_RESUME_FROM``, ``${checkpoint}``.

A script that saves through ``context()`` finds its checkpoint itself; this is for scripts that save by themselves, and
for entry points that take a path. Blocking: it reads and verifies files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestrator.checkpoint.external.external_checkpoints import ExternalCheckpoints
from orchestrator.checkpoint.external.watched_glob import WatchSettings
from orchestrator.checkpoint.repository.repository import CheckpointRepository
from orchestrator.runtime.ranks.launch_spec import checkpoint_dir, store_environ
from orchestrator.spec.entrypoint import CHECKPOINT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from orchestrator.checkpoint.external.resume_choice import Note
    from orchestrator.checkpoint.storage.info import CheckpointInfo
    from orchestrator.core.job.record import Job
    from orchestrator.spec.paths import Paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """Path or URL of the checkpoint to resume from (None: none), and a sentence for each that was found damaged.

    ``notes`` describe other changes to the script's own files; ``found`` is the newest valid one of them.
    """

    path: str | None
    problems: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    found: CheckpointInfo | None = None


def watch_settings(job: Job, paths: Paths) -> WatchSettings | None:
    """Return the settings of ``checkpoint.watch``; None where it is not set."""
    checkpoint = job.spec.checkpoint
    if checkpoint.watch is None:
        return None
    return WatchSettings(
        pattern=checkpoint.watch,
        directory=job.submission.work_dir,
        registry=str(paths.job(job.id) / "watched"),
        keep=checkpoint.keep,
    )


def newest_checkpoint(job: Job, paths: Paths, secrets: Mapping[str, str], reached: int = 0) -> Resumption:
    """Return the checkpoint for the job's current attempt: its own newest valid one, else the one it was submitted with.

    ``reached`` is the highest reported step. Raises OSError when the files cannot be reached.
    """
    settings = watch_settings(job, paths)
    if settings is not None:
        return _from_watched(job, ExternalCheckpoints(settings), reached)
    if CHECKPOINT in job.spec.entrypoint and job.attempt_number > 1:
        store = CheckpointRepository(
            checkpoint_dir(job, paths), attempt=job.attempt_number, environ=store_environ(job, secrets)
        )
        good = store.latest_good()
        return Resumption(
            path=good.path if good is not None else job.submission.resume_from, problems=store.quarantined
        )
    return Resumption(path=job.submission.resume_from)


def _from_watched(job: Job, files: ExternalCheckpoints, reached: int) -> Resumption:
    attempt = job.attempt_number
    if attempt == 1:
        files.adopt_none()
        return Resumption(path=job.submission.resume_from)
    files.scan(attempt=attempt - 1, writer_ended=True, step_at=lambda _: reached or None)
    good = files.newest_good(attempt=attempt)
    return Resumption(
        path=good or job.submission.resume_from,
        problems=tuple(files.problems),
        notes=tuple(files.notes),
        found=files.newest_info() if good else None,
    )
