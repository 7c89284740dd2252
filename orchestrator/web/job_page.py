"""Page of one job: findings, progress, attempts on a time line, ranks, events, checkpoints, and its log."""

from __future__ import annotations

from collections import deque
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup

from orchestrator import units
from orchestrator.api.errors import OrchError
from orchestrator.api.protocol import Verb
from orchestrator.api.queue_views import OutlookView
from orchestrator.api.service import JobFilter, LogQuery
from orchestrator.core.ids import JobId
from orchestrator.web.charts import timeline
from orchestrator.web.rendering import clean, render_parts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping, Sequence

    from orchestrator.api.service import JobService
    from orchestrator.api.views import JobView, LogLine

PARTS: Final = ("head", "findings", "totals", "attempts", "charts", "ranks", "events", "checkpoints", "report")
EVENTS: Final = 60
LOG_LINES: Final = 300
SILENT_SECONDS: Final = 30.0
SEARCHED_LINES: Final = 100_000
"""Maximum number of newest lines that a search reads."""

MAX_RELATED: Final = 7
"""Most jobs of each kind in ``Related``: a comparison takes eight jobs."""
SEARCHED_JOBS: Final = 200
"""Number of earlier jobs that are searched for jobs of the same name."""

EFFECTS: Final = {
    Verb.CANCEL: "It is asked to stop, has its stop_duration to save, and ends as CANCELLED. It does not start again.",
    Verb.PAUSE: "It saves, stops, and gives its GPUs back until it is resumed.",
    Verb.RESUME: "It goes back to its place in the queue, and continues at its newest checkpoint.",
    Verb.RERUN: "The same job is submitted again, with the changes below if there are any: KEY=VALUE, separated by spaces.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuestion:
    """Selection of the lines of the log to show: one rank or all, one attempt or the newest, with a text or any."""

    rank: int | None = None
    attempt: int | None = None
    text: str = ""

    def query(self, *, follow: bool) -> LogQuery:
        """Return the service's query for these lines."""
        tail = SEARCHED_LINES if self.text else LOG_LINES
        return LogQuery(rank=self.rank, attempt=self.attempt, tail=tail, follow=follow, contains=self.text)


def verbs_for(job: JobView, *, may_act: bool) -> list[Verb]:
    """Return the commands that apply to the job in its state, for a user who may act on it."""
    if not may_act:
        return []
    if job.is_terminal:
        return [Verb.RERUN]
    if job.state == "SUSPENDED":
        return [Verb.RESUME, Verb.CANCEL, Verb.RERUN]
    return [Verb.PAUSE, Verb.CANCEL, Verb.RERUN]


async def job_parts(service: JobService, job_id: JobId, now: float, *, may_act: bool, charts: str) -> Mapping[str, str]:
    """Return the parts of the page as HTML; ``charts`` are already drawn. Checkpoints are shown to users who may act."""
    job = await service.job(job_id)
    events = await service.events(job_id, 0, tail=EVENTS)
    try:
        checkpoints = await service.checkpoints(job_id, verify=False) if may_act else ()
    except OrchError:  # the rest is shown even if the storage does not answer
        checkpoints = ()
    outlook = await outlook_of(service, job)
    return render_parts(
        "job.html",
        PARTS,
        starts_at=outlook.starts_at,
        silent=is_silent(job, now),
        job=job,
        pairs=[(None, one) for one in job.findings],
        verbs=verbs_for(job, may_act=may_act),
        timeline=Markup(timeline(job, now)),  # noqa: S704 - a template's output, escaped there
        charts=Markup(charts),  # noqa: S704 - likewise
        events=events,
        checkpoints=checkpoints,
        now=now,
    )


async def outlook_of(service: JobService, job: JobView) -> OutlookView:
    """Return the outlook of a waiting job; an empty one for others."""
    if job.state != "PENDING":
        return OutlookView()
    try:
        return await service.outlook(JobId(job.id))
    except OrchError:  # the job has just started
        return OutlookView()


@dataclass(frozen=True, slots=True, kw_only=True)
class Related:
    """Jobs to compare a job with: those next to it in its matrix, and the user's earlier ones of its name, the newest first."""

    matrix: tuple[str, ...] = ()
    named: tuple[str, ...] = ()


async def related_jobs(service: JobService, job: JobView) -> Related:
    """Return the jobs that ``job`` is likely to be compared with; none if they cannot be read."""
    try:
        rows = () if job.matrix is None else (await service.matrix(job.matrix.id)).jobs
        earlier = await service.jobs(JobFilter(user=job.user, before=JobId(job.id), limit=SEARCHED_JOBS))
    except OrchError:  # the rest is shown
        return Related()
    place = 0 if job.matrix is None else job.matrix.index
    near = sorted((row for row in rows if row.job_id != job.id), key=lambda row: (abs(row.index - place), row.index))
    return Related(
        matrix=tuple(row.job_id for row in near[:MAX_RELATED]),
        named=tuple(one.id for one in earlier if one.name == job.name)[:MAX_RELATED],
    )


def is_silent(job: JobView, now: float) -> bool:
    """Return whether a job has run for ``SILENT_SECONDS`` and has reported no progress."""
    began = job.started_at
    return job.state == "RUNNING" and job.progress is None and began is not None and now - began >= SILENT_SECONDS


async def log_lines(service: JobService, job_id: JobId, question: LogQuestion) -> list[dict[str, Any]]:
    """Return the newest lines of the log that match."""
    found: deque[LogLine] = deque(maxlen=LOG_LINES)
    async with aclosing(service.logs(job_id, question.query(follow=False))) as batches:
        async for batch in batches:
            found.extend(batch)
    return [shown(line) for line in found]


async def follow_log(
    service: JobService, job_id: JobId, question: LogQuestion
) -> AsyncGenerator[Sequence[dict[str, Any]], None]:
    """Yield the newest lines of the log that match, and new ones until the job has ended."""
    async with aclosing(service.logs(job_id, question.query(follow=True))) as batches:
        async for batch in batches:
            if batch:
                yield [shown(line) for line in batch[-LOG_LINES:]]


def shown(line: LogLine) -> dict[str, Any]:
    """Return a line as the page shows it."""
    return {"at": units.clock(line.at), "rank": line.rank, "stream": line.stream, "text": clean(line.text)}
