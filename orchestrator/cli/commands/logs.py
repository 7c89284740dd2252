"""`orch logs`, and everything that keeps running beside a job: its output, its end, and views that change with it.

Uses the long polls and streams of ``api.transport.following``, so that the daemon may restart meanwhile.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, BadRequestError, NotEndedError
from orchestrator.api.matrix_views import MatrixView
from orchestrator.api.transport import following
from orchestrator.cli.commands.selecting import job_or_matrix
from orchestrator.cli.commands.shared import Job, JsonLines, takes
from orchestrator.cli.console import RANK_STYLES, clean, steerless
from orchestrator.cli.session import Session, print_json
from orchestrator.cli.times import parse_time
from orchestrator.units import clock, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from orchestrator.api.views import JobView, LogLine


def wait_jobs(
    session: Session,
    refs: list[str],
    *,
    as_json: bool,
    as_array: bool | None = None,
    exact: bool = False,
    timeout_seconds: float | None = None,
) -> int:
    """Wait until every job has ended, including each job of a matrix; return 0 if all succeeded, else 1.

    ``as_array``: the JSON of one job is an array, too. ``exact``: ``refs`` are ids of jobs. Raises NotEndedError after
    ``timeout_seconds``, which is for all jobs together.
    """
    jobs = []
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    named = refs if exact else list(_each_job(session, refs, deadline))
    as_array = True if len(named) != len(refs) else as_array
    for ref in named:
        job = _wait_one(session, ref, deadline)
        jobs.append(job)
        if not as_json:
            report_end(session, job)
    if as_json:
        several = len(jobs) != 1 if as_array is None else as_array
        print_json(session, [job.to_json() for job in jobs] if several else jobs[0].to_json())
    elif len(jobs) > 1:
        failed = [job for job in jobs if not ended_well(job)]
        pruned = sum(job.matrix is not None and job.matrix.pruned for job in jobs)
        ended = f"{len(jobs) - len(failed) - pruned} SUCCEEDED, " + (f"{pruned} pruned, " if pruned else "")
        session.console.note(f"{len(jobs)} jobs ended: {ended}{len(failed)} not")
    return exit_code_of(jobs)


def _each_job(session: Session, refs: list[str], deadline: float | None) -> Iterator[str]:
    """Yield the references, with a matrix replaced by its jobs."""
    for ref in refs:
        one = following.present(lambda ref=ref: job_or_matrix(session.client(), ref), session.patience(), deadline)  # type: ignore[misc]  # bound now
        if isinstance(one, MatrixView) and one.searching:
            one = _search_over(session, one.id, deadline)
        yield from [job.job_id for job in one.jobs] if isinstance(one, MatrixView) else [ref]


def _search_over(session: Session, matrix_id: str, deadline: float | None) -> MatrixView:
    """Return a search once no further trial will start; print the number of ended trials. Raises NotEndedError."""
    client, reported = session.client(), 0
    for view in following.watch(
        client, lambda: client.matrix(matrix_id), job_ids=(), patience=session.patience(), deadline=deadline
    ):
        ended = sum(job.ended_at is not None for job in view.jobs)
        if ended != reported:
            session.console.note(f"{matrix_id} {ended} of {view.count} trials ended")
            reported = ended
        if not view.searching:
            return view
        if _is_past(deadline):
            raise NotEndedError(f"{matrix_id} has not ended yet: {ended} of {view.count} trials have")
    raise AssertionError("a watch has no end")


def _wait_one(session: Session, ref: str, deadline: float | None) -> JobView:
    client, patience = session.client(), session.patience()
    shown = ""
    job_id = following.present(lambda: client.job(ref), patience, deadline).id
    for job in following.watch(
        client, lambda: client.job(job_id), job_ids=[job_id], patience=patience, deadline=deadline
    ):
        if job.is_terminal:
            return job
        if shown != (shown := f"{job.state}: {job.reason}"):
            session.console.note(f"{job.id} {clean(shown)}")
        if _is_past(deadline):
            raise following.not_ended(job)
    raise AssertionError("a watch has no end")


def _is_past(deadline: float | None) -> bool:
    return deadline is not None and time.monotonic() >= deadline


def exit_code_of(jobs: Iterable[JobView]) -> int:
    """Return 0 when every job succeeded, 1 otherwise."""
    return EXIT_OK if all(map(ended_well, jobs)) else EXIT_JOB_FAILED


def ended_well(job: JobView) -> bool:
    """Return whether the job succeeded, or is a pruned trial of a search."""
    return job.state == "SUCCEEDED" or (job.matrix is not None and job.matrix.pruned)


def report_end(session: Session, job: JobView) -> None:
    """Print how a job ended on standard error, since standard output is for the requested data."""
    console = session.console
    took = "" if job.started_at is None or job.ended_at is None else f" after {duration(job.ended_at - job.started_at)}"
    console.note(f"{job.id} {job.state}{took}" + (f": {clean(job.reason)}" if job.reason else ""))
    if job.failure is None:
        return
    for text in job.failure.log_tail:
        console.note(f"  | {clean(text)}")
    if job.failure.advice:
        console.note(f"  {clean(job.failure.advice)}")


# -- logs


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """The options of `logs` that choose lines and their form."""

    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.")] = None
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", min=1, help="This attempt; default: the newest.")
    ] = None
    tail: Annotated[int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Only the last lines.")] = None
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="PATTERN", help="Only lines that match this regular expression.")
    ] = None
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only lines since: 10m, or 2026-11-20T14:30.")
    ] = None
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="Begin each line with its time.")] = False
    raw: Annotated[
        bool, typer.Option("--raw", help="Let colours and other escape sequences through to a terminal.")
    ] = False
    json: JsonLines = False


def show_logs(session: Session, ref: str, options: LogOptions, *, follow: bool) -> int:
    """Print a job's log; with ``follow`` until the job has ended."""
    since = None if options.since is None else parse_time(options.since, "--since", time.time())
    client = session.client()
    job = client.job(ref)
    matches = _matcher(options.grep)
    if follow:
        lines = following.follow_logs(
            client,
            job.id,
            rank=options.rank,
            attempt=options.attempt,
            tail=options.tail,
            since=since,
            patience=session.patience(),
        )
    else:
        # The daemon runs no user's regular expressions: the pattern, and then --tail, are applied here.
        cut_here = options.grep is not None
        lines = client.logs(
            job.id,
            rank=options.rank,
            attempt=options.attempt,
            tail=None if cut_here else options.tail,
            since=since,
        )
    chosen: Iterable[LogLine] = (line for line in lines if matches(line.text))
    if not follow and options.grep is not None and options.tail is not None:
        chosen = deque(chosen, maxlen=options.tail)
    _print_log(session, chosen, _printer(session, job, options), at_once=follow, raw=options.raw)
    return EXIT_OK


def _matcher(grep: str | None) -> Callable[[str], object]:
    if grep is None:
        return lambda _: True
    try:
        return re.compile(grep).search
    except re.error as error:
        raise BadRequestError(
            f"--grep {grep!r} is not a regular expression: {error}", hint="escape signs like ( [ * with a backslash"
        ) from error


def _printer(session: Session, job: JobView, options: LogOptions) -> Callable[[LogLine], str]:
    if options.json:
        import json

        return lambda line: json.dumps({"job_id": job.id, **line.to_json()}, ensure_ascii=False)
    with_rank = job.num_workers > 1 and options.rank is None
    steered = session.console.is_terminal and not options.raw

    def text(line: LogLine) -> str:
        parts = []
        if options.timestamps:
            parts.append(session.console.style(clock(line.at, fraction=True), "dim"))
        if with_rank:
            style = RANK_STYLES[line.rank % len(RANK_STYLES)]
            parts.append(session.console.style(f"[{line.rank}]", style))
        return " ".join([*parts, steerless(line.text, keep_styles=False) if steered else line.text])

    return text


def _print_log(
    session: Session, lines: Iterable[LogLine], printer: Callable[[LogLine], str], *, at_once: bool, raw: bool
) -> None:
    for line in lines:
        session.console.print(printer(line), raw=raw)
        if at_once:
            session.console.flush()


def follow_job(session: Session, job_id: str) -> int:
    """Follow a job's log to its end; return an exit code for the job's result."""
    show_logs(session, job_id, LogOptions(), follow=True)
    client = session.client()
    job = following.wait(client, job_id, patience=session.patience())
    report_end(session, job)
    return exit_code_of([job])


# -- a view that updates itself

REST_SECONDS = 0.2
"""Least time between two views: hundreds of jobs change all the time, and a person cannot read faster."""


def watch_view(
    session: Session,
    read: Callable[[], Any],
    render: Callable[[Any], list[str]],
    *,
    job_ids: tuple[str, ...] = (),
    ended: Callable[[Any], bool] = lambda _: False,
    as_json: Callable[[Any], object] | None = None,
) -> Any:
    """Show ``render(read())`` now and after each change, until ``ended``; with ``as_json`` one document a line.

    On a terminal the view is drawn in place, elsewhere each view follows the last. Returns the last value.
    """
    import json

    screen = Screen(session)
    for value in _changes(session, read, job_ids):
        if as_json is not None:
            session.console.print(json.dumps(as_json(value), ensure_ascii=False))
            session.console.flush()
        else:
            screen.show(render(value))
        if ended(value):
            return value
    raise AssertionError("a watch has no end")


def _changes(session: Session, read: Callable[[], Any], job_ids: tuple[str, ...]) -> Iterator[Any]:
    return following.watch(
        session.client(), read, job_ids=job_ids, patience=session.patience(), rest_seconds=REST_SECONDS
    )


class Screen:
    """The part of the terminal in which a view is drawn repeatedly."""

    def __init__(self, session: Session) -> None:
        self._console = session.console
        self._drawn = 0
        self._last: list[str] = []

    def show(self, lines: list[str]) -> None:
        """Draw the lines over the last ones. Lines that exceed the height are only counted."""
        console = self._console
        if not console.is_terminal:
            if lines != self._last:
                console.print(f"-- {time.strftime('%H:%M:%S')}")
                for line in lines:
                    console.print(line)
                console.flush()
            self._last = lines
            return
        room = console.height - 2 if console.height > 4 else len(lines)
        if len(lines) > room:
            lines = [*lines[: room - 1], f"and {len(lines) - room + 1} more lines"]
        up = f"\x1b[{self._drawn}A" if self._drawn else ""
        console.out.write(f"{up}\r\x1b[J")
        for line in lines:
            console.print(line)
        console.flush()
        self._drawn = len(lines)


@takes(LogOptions)
def logs(
    options: LogOptions,
    job: Job,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job has ended.")] = False,
) -> int:
    """Show a job's log; with several ranks each line begins with its rank.

    With --follow, --tail counts lines before --grep; without, after. On a terminal, control characters are shown
    as text and colours are removed, unless --raw is given; a file or a pipe gets the lines unchanged.
    """
    return show_logs(Session(), job, options, follow=follow)
