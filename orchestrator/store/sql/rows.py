"""Converts jobs and events to rows of the SQLite store and back."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from orchestrator.core import events as ev
from orchestrator.core.errors import UnknownEventError
from orchestrator.core.ids import JobId
from orchestrator.core.lifecycle.fold import fold, submitted
from orchestrator.core.notices import Notice
from orchestrator.core.stored import event_body, event_from, job_from_dict, job_to_dict
from orchestrator.spec.paths import is_job_id
from orchestrator.store.errors import UnreadableRecordError
from orchestrator.store.port import StoredEvent, StoredNotice

if TYPE_CHECKING:
    from collections.abc import Iterable

    from orchestrator.core.job.record import Job


PARSED_JOBS = 1024  # about 10 MB; `orch status --watch` reads the same jobs again and again
LONGEST_PARSED = 32 * 1024
"""Characters of a record that is kept: 1024 of the largest that are accepted would take some gigabytes."""


class Parsed:
    """A cache of jobs by id and version, so that an unchanged row is not parsed again. For one thread."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[tuple[str, int], Job] = OrderedDict()

    def job(self, row: tuple[str, int, str]) -> Job:
        """Return the job of a row of id, version and record."""
        key = row[:2]
        job = self._jobs.get(key)
        if job is None and len(row[2]) > LONGEST_PARSED:
            return job_of(row[2], row[0])
        if job is None:
            job = self._jobs[key] = job_of(row[2], row[0])
            if len(self._jobs) > PARSED_JOBS:
                self._jobs.popitem(last=False)
        else:
            self._jobs.move_to_end(key)
        return job


def job_row(job: Job) -> dict[str, Any]:
    """Return the columns of a job's row. ``ended_at`` is set exactly when the state is terminal."""
    return {
        "sequence": job.submission.sequence,
        "id": job.id,
        "version": job.version,
        "name": job.name,
        "user": job.submission.user,
        "uid": job.submission.uid,
        "idempotency_key": job.submission.idempotency_key,
        "state": job.state.value,
        "submitted_at": job.submission.submitted_at,
        "ended_at": job.ended_at if job.state.is_terminal else None,
        "record": _dumps(job_to_dict(job)),
        "matrix": None if job.submission.matrix is None else job.submission.matrix.matrix_id,
        "matrix_name": None if job.submission.matrix is None else job.submission.matrix.name,
    }


def job_of(record: str, job_id: str) -> Job:
    """Return the job of a row's ``record``. Raises UnreadableRecordError; also where it is another job's, or its id names no directory."""
    try:
        job = job_from_dict(_loads(record))
    except Exception as error:  # an invalid record can raise any error
        raise UnreadableRecordError(job_id, f"{type(error).__name__}: {error}") from error
    if job.id != job_id or not is_job_id(job_id):
        raise UnreadableRecordError(
            job_id, f"it is the record of {job.id!r}" if job.id != job_id else "this is no job's id"
        )
    return job


def replay(stored: Iterable[StoredEvent], sequence: int) -> Job:
    """Return the record folded from the events. Raises ValueError when they do not begin with a submission or have gaps."""
    entries = iter(stored)
    first = next(entries, None)
    if first is None or not isinstance(first.event, ev.JobSubmitted):
        raise ValueError("its events do not begin with a submission")
    job = submitted(first.event, sequence)
    for entry in entries:
        job = fold(job, entry.event)
        if job.version != entry.number:
            raise ValueError(f"event {entry.number} ({entry.event.kind}) does not follow from those before it")
    return job


def event_row(sequence: int, number: int, event: ev.Event) -> tuple[int, int, str, float, str, str]:
    """Return the columns of an event's row."""
    return sequence, number, event.kind, event.at, event.cause, _dumps(event_body(event))


def notice_row(notice: Notice) -> tuple[str, str, str, float, float]:
    """Return the columns of a new notice; it is due at once."""
    return notice.job_id, notice.url, notice.body, notice.made_at, 0.0


def notice_of(row: tuple[int, str, str, str, float, int]) -> StoredNotice:
    """Return the notice of a row of ``due_notices``."""
    number, job_id, url, body, made_at, attempts = row
    return StoredNotice(number, Notice(job_id=JobId(job_id), url=url, body=body, made_at=made_at), attempts)


def event_of(job_id: JobId, row: tuple[int, str, float, str, str]) -> StoredEvent:
    """Return the event of a row of ``events_of``. Raises UnreadableRecordError; UnknownEventError for a newer version's event."""
    number, kind, at, cause, body = row
    try:
        return StoredEvent(number, event_from(kind, _loads(body), job_id=job_id, at=at, cause=cause))
    except UnknownEventError:
        raise
    except Exception as error:  # an invalid body can raise any error
        raise UnreadableRecordError(job_id, f"event {number}: {type(error).__name__}: {error}") from error


def _dumps(value: Any) -> str:
    # ASCII only: a log line may hold half of a surrogate pair, which UTF-8 cannot.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _loads(text: str) -> Any:
    if not text.isascii():  # ``_dumps`` writes nothing else
        raise ValueError("it has bytes that are not ASCII")
    return json.loads(text)
