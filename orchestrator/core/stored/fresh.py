"""Reads the records of jobs that have only been submitted: a long queue consists of such jobs.

They differ in a few values of their own only. So a record equal in all other values to one that was read and checked in full
needs a check of its own values only; every other record is read in full.

As text, a record is cut where its own values begin and end: what lies between them is compared, not parsed, and its spec is looked up.
A cut is at a comma, a quoted key and a colon. Within a JSON string a quotation mark has a backslash before it, so none of them is text
of a user; and each value is parsed, or known as a whole one, so a cut within a nested object leaves something that is not JSON.
"""

from __future__ import annotations

import json
from operator import itemgetter
from sys import intern
from typing import TYPE_CHECKING, Any, Final

from orchestrator.core.conformance import MAX_INTEGER, MAX_TEXT, is_text, is_time
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
_OWN_BUT_SPEC: Final = _OWN - {"spec"}
_MOST_TEMPLATES: Final = 16
_MOST_SPECS: Final = 1024
LONGEST_KEPT: Final = 16 * 1024
"""Characters of a spec that is kept for others equal to it; larger ones would add up to gigabytes."""
_CUTS: Final = (
    (',"spec":', ',"user":'),
    (',"resume_from":', ',"priority":'),
    (',"state":', ',"state_since":'),
    (',"reason":', ',"story":'),
)
"""Keys at which a record's other values begin, the spec first, and keys at which its own values continue."""

_TEXT: Final = {str}
_WHOLE: Final = {int}
_LAST_CUT: Final = ',"prerequisites":'


class FreshRecords:
    """Remembers what records of submitted jobs have in common, and reads others of the same kind."""

    def __init__(self, spec_of: Callable[[Any], JobSpec]) -> None:
        self._spec_of = spec_of
        self._templates: list[tuple[dict[str, Any], Job]] = []
        self._shapes: dict[tuple[str, ...], Job] = {}
        self._specs: dict[str, JobSpec] = {}

    def learn(self, row: Mapping[str, Any], job: Job) -> None:
        """Learn from a record that was read in full."""
        known = len(self._templates) >= _MOST_TEMPLATES or _OWN - row.keys()
        if not known and _is_fresh(job):
            self._templates.append(({key: value for key, value in row.items() if key not in _OWN}, job))

    def learn_text(self, text: str, job: Job) -> None:
        """Learn from the text of a record that was read in full."""
        parts = _cut(text)
        large = parts is not None and len(parts[1]) > LONGEST_KEPT
        if parts is None or large or len(self._shapes) >= _MOST_TEMPLATES or not _is_fresh(job):
            return
        own = _parsed(parts[0])
        if own is not None and own.keys() == _OWN_BUT_SPEC:
            self._shapes[parts[2]] = job

    def read_text(self, text: str) -> Job | None:
        """Return the job of a record's text; None where it has to be read in full."""
        parts = _cut(text)
        known = None if parts is None else self._shapes.get(parts[2])
        if parts is None or known is None:
            return None
        row = _parsed(parts[0])
        if row is None or row.keys() != _OWN_BUT_SPEC or not _own_values_fit(row):
            return None
        spec = self._spec_of_text(parts[1])
        return None if spec is None else self._made(row, spec, known)

    def _spec_of_text(self, text: str) -> JobSpec | None:
        spec = self._specs.get(text)
        if spec is None:
            form = _parsed(text)
            if form is None:
                return None
            if len(text) > LONGEST_KEPT:
                return self._spec_of(form)
            if len(self._specs) >= _MOST_SPECS:
                self._specs.clear()
            spec = self._specs[text] = self._spec_of(form)
        return spec

    def read(self, row: Mapping[str, Any]) -> Job | None:
        """Return the job of a record; None where it has to be read in full."""
        if row.get("state") != "PENDING" or row.get("attempts"):
            return None
        rest = {key: value for key, value in row.items() if key not in _OWN}
        known = next((job for template, job in self._templates if template == rest), None)
        if known is None or not _own_values_fit(row):
            return None
        return self._made(row, self._spec_of(row["spec"]), known)

    def _made(self, row: Mapping[str, Any], spec: JobSpec, known: Job) -> Job:
        job_id, name, user, key, python, path, work_dir, snapshot = _texts(row)
        sequence, version, uid, priority = _counts(row)
        submission = Submission(
            id=job_id,
            sequence=sequence,
            name=intern(name),
            spec=spec,
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
    """Whether the job has only been submitted, so that ``_made`` sets everything that another one like it needs."""
    if job.state is not JobState.PENDING or job.attempts or job.unusable or job.restarts or job.notes or job.findings:
        return False
    submission = job.submission
    return not (
        job.no_progress
        or job.fenced_until
        or job.later_attempt
        or job.later_gang
        or submission.prerequisites
        or submission.matrix
    )


def _own_values_fit(row: Mapping[str, Any]) -> bool:
    """Whether the values pass ``is_text``, ``is_count`` and ``is_time``, checked in groups: a long queue has millions of them."""
    texts, counts, times, story = _texts(row), _counts(row), _times(row), row["story"]
    if {*map(type, texts)} != _TEXT or max(map(len, texts)) > MAX_TEXT:
        return False
    if {*map(type, counts)} != _WHOLE or min(counts) < 0 or max(counts) > MAX_INTEGER:
        return False
    return all(map(is_time, times)) and type(story) is list and all(map(is_text, story))


def _cut(text: str) -> tuple[str, str, tuple[str, ...]] | None:
    """Return a record's own values as the text of an object, the text of its spec, and everything else; None without such places."""
    own, others, at = [], [], 0
    for begin, end in _CUTS:
        first = text.find(begin, at)
        last = text.find(end, first + len(begin))
        if first < 0 or last < 0:
            return None
        own.append(text[at:first])
        others.append(text[first + len(begin) : last])
        at = last
    last = text.find(_LAST_CUT, at)
    if last < 0:
        return None
    return "".join((*own, text[at:last], "}")), others[0], (*others[1:], text[last:])


def _parsed(text: str) -> dict[str, Any] | None:
    """Return the JSON object of a text; None where the text is not exactly one object."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
