"""Reads the records of jobs that have only been submitted, which is what a long queue consists of.

All else in such a record is as it is in any other. So a record whose other values equal those of one that was read and checked in full
needs a check of its own values alone; every other record is read in full.
"""

from __future__ import annotations

from operator import itemgetter
from sys import intern
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.conformance import is_count, is_text, is_time
from orchestrator.core.job.record import Job, Submission
from orchestrator.core.states import JobState

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from orchestrator.spec.model import JobSpec

_TEXTS: Final = ("id", "name", "user", "idempotency_key", "python", "path", "work_dir", "snapshot")
_COUNTS: Final = ("sequence", "version", "uid", "priority")
_TIMES: Final = ("submitted_at", "state_since")
_OWN: Final = frozenset({*_TEXTS, *_COUNTS, *_TIMES, "spec", "story"})
_texts = itemgetter(*_TEXTS)
_counts = itemgetter(*_COUNTS)
_times = itemgetter(*_TIMES)
_MOST_TEMPLATES: Final = 16


class FreshRecords:
    """Remembers what records of submitted jobs have in common, and reads others of the same kind."""

    def __init__(self, spec_of: Callable[[Any], JobSpec]) -> None:
        self._spec_of = spec_of
        self._templates: list[tuple[dict[str, Any], Job]] = []

    def learn(self, row: Mapping[str, Any], job: Job) -> None:
        """Take in a record that was read in full."""
        known = len(self._templates) >= _MOST_TEMPLATES or _OWN - row.keys()
        if not known and _is_fresh(job):
            self._templates.append(({key: value for key, value in row.items() if key not in _OWN}, job))

    def read(self, row: Mapping[str, Any]) -> Job | None:
        """Return the job of a record; None where it has to be read in full."""
        if row.get("state") != "PENDING" or row.get("attempts"):
            return None
        rest = {key: value for key, value in row.items() if key not in _OWN}
        known = next((job for template, job in self._templates if template == rest), None)
        return None if known is None or not _own_values_fit(row) else self._made(row, known)

    def _made(self, row: Mapping[str, Any], known: Job) -> Job:
        job_id, name, user, key, python, path, work_dir, snapshot = _texts(row)
        sequence, version, uid, priority = _counts(row)
        submission = Submission(
            id=job_id,
            sequence=sequence,
            name=intern(name),
            spec=self._spec_of(row["spec"]),
            user=intern(user),
            uid=uid,
            submitted_at=row["submitted_at"],
            idempotency_key=key,
            python=intern(python),
            path=intern(path),
            work_dir=work_dir,
            snapshot=intern(snapshot),
            resume_from=known.submission.resume_from,
            rerun_of=known.submission.rerun_of,
        )
        return Job(
            submission=submission,
            version=version,
            priority=priority,
            phase=known.phase,
            state_since=row["state_since"],
            reason=known.reason,
            past=known.past,
            restarts=known.restarts,
            checkpoints=known.checkpoints,
            story=tuple(row["story"]),
        )


def _is_fresh(job: Job) -> bool:
    """Whether the job has only been submitted, so that another one like it needs nothing but what ``_made`` takes over."""
    if job.state is not JobState.PENDING or job.attempts or job.unusable or job.restarts or job.notes or job.findings:
        return False
    submission = job.submission
    return not (job.no_progress or job.fenced_until or submission.prerequisites or submission.matrix)


def _own_values_fit(row: Mapping[str, Any]) -> bool:
    if not (all(map(is_text, _texts(row))) and all(map(is_count, _counts(row))) and all(map(is_time, _times(row)))):
        return False
    story = row["story"]
    return type(story) is list and all(map(is_text, story))
