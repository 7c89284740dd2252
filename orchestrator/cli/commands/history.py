"""What the daemon keeps of a job: `orch events`, `explain`, `checkpoints`, `show`, `diff` and `get`."""

from __future__ import annotations

import json as json_module
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, EXIT_PARTLY, BadRequestError, NotFoundError
from orchestrator.cli.commands.shared import Job, Json, Quiet, complete_job
from orchestrator.cli.console import clean
from orchestrator.cli.render.jobs import LABEL_WIDTH
from orchestrator.cli.render.table import Bar, Cell, Column, render_table
from orchestrator.cli.session import Session, answer
from orchestrator.cli.times import parse_time
from orchestrator.units import age, clock, metric, number, plural, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.files import FileList
    from orchestrator.api.spec_views import GitView, SpecDiff, SpecView
    from orchestrator.api.views import AuditEntry, CheckpointView, EventView, JobView

EXPLAINED_EVENTS = 8
EVENT_COLUMNS: tuple[Column[EventView], ...] = (
    Column("TIME", lambda event: clock(event.at, fraction=True), weight=900),
    Column("ATTEMPT", lambda event: event.attempt, weight=400, right=True),
    Column("EVENT", lambda event: event.kind, weight=1000, styles=("bold",)),
    Column("WHAT", lambda event: event.summary, weight=800, shrink=True),
)

AUDIT_LINES = 1000
AUDIT_COLUMNS: tuple[Column[AuditEntry], ...] = (
    Column("TIME", lambda entry: clock(entry.at), weight=900),
    Column("USER", lambda entry: entry.user or "-", weight=900, styles=("bold",)),
    Column("FROM", lambda entry: entry.source, weight=600),
    Column("REQUEST", lambda entry: entry.action, weight=800, shrink=True),
    Column("JOB", lambda entry: entry.job, weight=700),
    Column("RESULT", lambda entry: Cell(entry.result, () if entry.status < 400 else ("red",)), weight=850),
    Column("DETAIL", lambda entry: entry.detail, weight=300, shrink=True),
)


def _checkpoint_state(item: CheckpointView) -> Cell:
    if item.problem:
        return Cell("broken", ("red",))
    return Cell("verified" if item.valid else item.location, ("green",) if item.valid else ())


CHECKPOINT_COLUMNS: tuple[Column[CheckpointView], ...] = (
    Column("STEP", lambda item: item.step, weight=1000, right=True, styles=("bold",)),
    Column("SAVED", lambda item: clock(item.at) if item.at else "", weight=500),
    Column("AGE", lambda item: age(time.time() - item.at) if item.at else "", weight=700, right=True),
    Column("SIZE", lambda item: size(item.size_bytes), weight=600, right=True),
    Column("SCORE", lambda item: number(item.score) + (" best" if item.is_best else ""), weight=650, right=True),
    Column("STATE", _checkpoint_state, weight=900),
    Column("METRICS", lambda item: " ".join(f"{n} {metric(n, v)}" for n, v in item.metrics.items()), weight=400),
    Column("PATH", lambda item: item.path, weight=800, shrink=True),
)


def events(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="An id, the beginning of one, or a name.",
            autocompletion=complete_job,
            show_default=False,
        ),
    ] = None,
    *,
    audit: Annotated[
        bool,
        typer.Option(
            "--audit", help="Without JOB: the audit log, who has sent which request from where. For the owner."
        ),
    ] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Only the last events.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only events since: 10m, or 2026-11-20T14:30.")
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document; with --follow one object a line.")
    ] = False,
) -> int:
    """Show a job's history, oldest first: all of it, or with --tail its last events. With --audit: the audit log."""
    start = 0.0 if since is None else parse_time(since, "--since", time.time())
    session = Session()
    client = session.client()
    if audit == (job is not None) or (audit and follow):
        raise BadRequestError(
            "give a JOB, or --audit without one and without --follow", hint="`orch events JOB` shows a job's history"
        )
    if job is None:
        entries = client.audit(limit=AUDIT_LINES if tail is None else tail, since=start)
        lines = render_table(session.console, AUDIT_COLUMNS, entries)
        return answer(session, lines, {"entries": [entry.to_json() for entry in entries]}, as_json=json)
    found = session.job(job)
    if follow:
        return _follow_events(session, client, found, tail=tail, since=start, as_json=json)
    history = [event for event in client.events(found.id, tail=tail) if event.at >= start]
    lines = render_table(session.console, EVENT_COLUMNS, history)
    return answer(session, lines, {"job_id": found.id, "events": [event.to_json() for event in history]}, as_json=json)


def _follow_events(
    session: Session, client: Client, job: JobView, *, tail: int | None, since: float, as_json: bool
) -> int:
    import json

    from orchestrator.api.transport import following

    last = 0
    if tail is not None:
        first = client.events(job.id, tail=max(1, tail))[0].sequence
        last = first if tail == 0 else first - 1

    def read() -> tuple[JobView, Sequence[EventView]]:
        # Read the job first: the events up to its end are then included.
        return client.job(job.id), client.events(job.id, after=last)

    for now, fresh in following.watch(client, read, job_ids=[job.id], patience=session.patience()):
        for event in fresh:
            last = event.sequence
            if event.at < since:
                continue
            text = "  ".join(cell for column in EVENT_COLUMNS if (cell := column.cell(event).text))
            fields = {"job_id": job.id, **event.to_json()}
            session.console.print(json.dumps(fields, ensure_ascii=False) if as_json else text)
        session.console.flush()
        if now.is_terminal:
            break
    return EXIT_OK


def explain(job: Job, json: Json = False) -> int:
    """Explain a job's state: its reason, when it is expected to start and why, the jobs ahead of it, its last events."""
    from orchestrator.cli.render.jobs import detail_lines, outlook_lines

    session = Session()
    client = session.client()
    found = session.job(job)
    history = client.events(found.id, tail=None if json else EXPLAINED_EVENTS)
    outlook = client.outlook(found.id) if found.state == "PENDING" else None
    now = time.time()
    lines = [
        *detail_lines(session.console, found, now),
        *([] if outlook is None else outlook_lines(session.console, outlook, now)),
        "",
        "what happened last:",
        *render_table(session.console, EVENT_COLUMNS, history),
    ]
    value = {
        "job_id": found.id,
        "job": found.to_json(),
        "ahead": list(outlook.ahead) if outlook else [],
        "outlook": outlook.to_json() if outlook else None,
        "events": [event.to_json() for event in history],
    }
    return answer(session, lines, value, as_json=json)


def checkpoints(
    job: Job,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte; exit code 1 where a checkpoint is broken.")
    ] = False,
    json: Json = False,
) -> int:
    """List a job's checkpoints, newest first."""
    session = Session()
    client = session.client()
    found = session.job(job)
    saved = client.checkpoints(found.id, verify=verify)
    lines = render_table(session.console, CHECKPOINT_COLUMNS, saved) or ["no checkpoint yet"]
    lines += [f"step {item.step} is broken: {clean(item.problem)}" for item in saved if item.problem]
    value = {"job_id": found.id, "checkpoints": [item.to_json() for item in saved]}
    code = EXIT_JOB_FAILED if any(item.valid is False for item in saved) else EXIT_OK
    return answer(session, lines, value, as_json=json, code=code)


MAX_FILES = 20
"""Most changed files that are listed, so that the values above them stay in view."""

SIGNS = {"added": "+", "removed": "-", "changed": "~"}


def show(
    job: Job,
    *,
    yaml: Annotated[bool, typer.Option("--yaml", help="Print a job.yaml with every key, to submit it again.")] = False,
    json: Json = False,
) -> int:
    """Show exactly what a job runs: command, interpreter, environment, archive, git commit, and its spec as resolved.

    Values that look like secrets are masked.
    """
    session = Session()
    found = session.client().spec(job)
    if yaml:
        for line in found.yaml.rstrip("\n").split("\n"):
            session.console.print(line)
        if found.masked:
            session.console.note(f"masked: {', '.join(found.masked)}; put the values back before you submit it")
        return EXIT_OK
    return answer(session, _lines(session, found), found.to_json(), as_json=json)


def _lines(session: Session, found: SpecView) -> Iterator[str]:
    console = session.console
    yield f"{console.style(found.job_id, 'bold')}  submitted {clock(found.submitted_at)} by {clean(found.user)}"
    rows = [
        ("command", shlex.join(found.command)),
        ("interpreter", found.python),
        ("archive", f"sha256:{found.archive}" if found.archive else "none"),
        ("git", _git_text(found.git)),
        ("begins at", found.resume_from or ""),
        ("rerun of", found.rerun_of or ""),
        *(("" if number else "environment", f"{n}={v}") for number, (n, v) in enumerate(sorted(found.env.items()))),
    ]
    for label, text in rows:
        if text:
            yield f"  {console.style(label.ljust(LABEL_WIDTH), 'dim')}{clean(text)}"
    yield ""
    yield from map(clean, found.yaml.rstrip("\n").split("\n"))


def _git_text(git: GitView | None) -> str:
    if git is None:
        return ""
    branch = f" ({git.branch})" if git.branch else ""
    return f"{git.commit or 'no commit yet'}{branch}{', with uncommitted changes' if git.dirty else ''}"


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A job, as for `orch status`.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The job that it is compared with.")],
    json: Json = False,
) -> int:
    """Show how job B differs from job A: keys of job.yaml, interpreter, git commit, and files of the working directory."""
    session = Session()
    found = session.client().diff(before, after)
    return answer(session, _diff_lines(found), found.to_json(), as_json=json)


def _diff_lines(found: SpecDiff) -> Iterator[str]:
    if not (found.values or found.files or found.files_unknown):
        yield f"{found.before} and {found.after} run the same"
        return
    width = max((len(value.key) for value in found.values), default=0)
    for value in found.values:
        yield clean(f"{value.key.ljust(width)}  {_value(value.before)} -> {_value(value.after)}")
    for file in found.files[:MAX_FILES]:
        yield f"{SIGNS.get(file.change, '?')} {clean(file.path)}"
    if left := max(0, len(found.files) - MAX_FILES) + found.more_files:
        yield f"and {left} more {'file' if left == 1 else 'files'}; --json lists up to 200"
    if found.files_unknown:
        yield f"files: {clean(found.files_unknown)}"


def _value(value: Any) -> str:
    if value is None:
        return "(none)"
    return value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)


def get(
    job: Job,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATTERN...]", help="As in .gitignore: 'outputs/**', '*.pt'. No pattern: every file."),
    ] = None,
    *,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir", "-o", metavar="DIR", help="Where they go. Default: a directory with the job's id."
        ),
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the files; download nothing.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Download outputs and checkpoints of a job; an interrupted download resumes where it ended.

    Each file's SHA-256 is compared with the daemon's. Exit code 6: some files could not be downloaded.
    """
    session = Session(quiet=quiet)
    client = session.client()
    found = session.job(job)
    files = client.files(found.id, patterns or ())
    if files.elsewhere:
        session.console.note(f"the checkpoints of {found.id} are at {files.elsewhere}: fetch them from there")
    if files.more:
        session.console.note(f"only the first {len(files.files)} files; choose with a pattern")
    if files.unnamed:
        many = plural(files.unnamed, "file")
        session.console.note(f"{many} with a name that is not UTF-8 cannot be downloaded; see {found.outputs_dir}")
    if not files.files:
        if not patterns:
            hint = "outputs are what `outputs:` in job.yaml names, and are there once its ranks have ended"
            nothing = "no outputs" if files.elsewhere else "neither outputs nor checkpoints"
            raise NotFoundError(f"{found.id} has left {nothing}", hint=hint)
        hint = f"`orch get {found.id} --list` lists the files; outputs are what `outputs:` in job.yaml names"
        raise NotFoundError(f"{found.id} has left no file that matches {' or '.join(patterns)}", hint=hint)
    if only_list:
        lines = (f"{size(file.size_bytes):>10}  {clean(file.path)}" for file in files.files)
        return answer(session, lines, files.to_json(), as_json=json)
    return _download(session, files, output_dir or Path(found.id), json=json)


def _download(session: Session, files: FileList, target: Path, *, json: bool) -> int:
    from orchestrator.api.errors import BadRequestError, DaemonUnreachableError, OrchError
    from orchestrator.api.transport.download import Downloader

    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRequestError(f"{target} cannot be made: {error.strerror}", hint="name another --output-dir") from error
    bar = Bar(session, sum(file.size_bytes for file in files.files))
    downloader = Downloader(session.client(), files.job_id, target.resolve(), bar.add)
    done, failed = [], []
    for file in files.files:
        bar.show(file.path)
        try:
            done.append(downloader.fetch(file))
        except DaemonUnreachableError:
            bar.end()
            raise
        except OrchError as error:
            bar.end()
            session.console.print_error(f"orch: {clean(error.message)}")
            failed.append(file.path)
    bar.end()
    received = sum(each.received for each in done)
    entries = [{"path": each.path, "bytes": each.size_bytes, "received": each.received} for each in done]
    value = {"job_id": files.job_id, "directory": str(target), "files": entries, "failed": failed}
    line = f"{plural(len(done), 'file')} in {target}, {size(received)} received"
    return answer(session, [line], value, as_json=json, code=EXIT_PARTLY if failed else EXIT_OK)
