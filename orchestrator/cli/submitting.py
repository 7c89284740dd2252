"""`submit` and `run`: send a text to the daemon, print the job's id. Imports typer and dataclasses only if needed.

The daemon parses the YAML. This module reads the text, starts a daemon if none runs, and prints the result.
"""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.api.errors import EXIT_OK, EXIT_REFUSED, BadRequestError, DaemonUnreachableError
from orchestrator.api.transport import submission
from orchestrator.cli.console import clean
from orchestrator.cli.session import print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.transport.upload import Uploaded
    from orchestrator.cli.render.transfer import Bar
    from orchestrator.cli.session import Session

PLAN_SECONDS = 120.0


class SubmitOptions(NamedTuple):
    """Options of `submit`."""

    files: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    resume_from: str | None = None
    after: tuple[str, ...] = ()
    dry_run: bool = False
    wait: bool = False
    follow: bool = False
    watch: bool = False
    json: bool = False
    quiet: bool = False
    hold: bool = False
    start_at: str | None = None


class JobText(NamedTuple):
    """A job.yaml, its name for messages, and the base of its ``working_dir``."""

    text: str
    source: str
    cwd: str


def submit_files(session: Session, options: SubmitOptions) -> int:
    """Submit each file; all are read before the first is sent."""
    return submit_texts(session, [job_text(path) for path in options.files], options)


def job_text(path: str) -> JobText:
    """Read the file at ``path``; ``-`` is standard input, with a ``working_dir`` relative to the current directory."""
    if path == "-":
        return JobText(submission.read_job_file(path, sys.stdin.buffer), "<stdin>", os.getcwd())
    text = submission.read_job_file(path)
    return JobText(text, path, os.path.dirname(os.path.abspath(path)))


def submit_texts(session: Session, texts: list[JobText], options: SubmitOptions) -> int:
    """Submit each text, or plan it, and then wait or follow as requested."""
    if options.follow and (options.json or len(texts) > 1):
        raise BadRequestError("--follow shows the log of one job", hint="leave out --json, and submit one file")
    if options.watch and (options.json or options.follow or len(texts) > 1):
        raise BadRequestError("--watch shows one job", hint="leave out --json and --follow, and submit one file")
    options = options._replace(overrides=(*options.overrides, *_when(options)))
    if options.dry_run:
        return _plan(session, texts, options)
    replies = []
    for item in texts:
        reply = _deliver(session, _body(session, item, options))
        replies.append(reply)
        if not (options.json or options.follow or options.watch):
            session.console.print(str(reply.get("matrix_id") or reply["job_id"]))
        _remark(session, reply, options)
    if options.watch or options.wait or options.follow:
        return _stay(session, replies, options)
    if options.json:
        print_json(session, replies[0] if len(replies) == 1 else replies)
    return EXIT_OK


def submit_one(session: Session, item: JobText, options: SubmitOptions) -> str:
    """Submit one text; return the job's id."""
    reply = _deliver(session, _body(session, item, options))
    for note in reply.get("notes") or ():
        session.console.note(f"note: {note}")
    return str(reply["job_id"])


def _when(options: SubmitOptions) -> list[str]:
    """Return the overrides of `--hold` and `--start-at`. Raises BadRequestError."""
    found = ["hold=true"] if options.hold else []
    if options.start_at is not None:
        from orchestrator.cli.times import parse_start

        found.append(f"start_at={parse_start(options.start_at, '--start-at', time.time())}")
    return found


def _stay(session: Session, replies: list[dict[str, Any]], options: SubmitOptions) -> int:
    """Follow, watch or wait until the submitted jobs have ended; return an exit code for their result."""
    from orchestrator.cli import live

    ids = [str(job_id) for reply in replies for job_id in reply.get("job_ids") or [reply["job_id"]]]
    matrix_id = replies[0].get("matrix_id")
    if options.follow and matrix_id is None:
        return live.follow_job(session, ids[0])
    if options.watch:
        from orchestrator.cli.status_view import StatusOptions, show_status

        show_status(session, StatusOptions(job=str(matrix_id or ids[0]), watch=True))
        if matrix_id is not None:  # a search has submitted more jobs meanwhile
            ids = [job.job_id for job in session.client().matrix(str(matrix_id)).jobs]
        return live.exit_code_of([session.client().job(job_id) for job_id in ids])
    if options.follow:
        session.console.note(f"--follow shows the log of one job; waiting for the {len(ids)} of {matrix_id} instead")
    if matrix_id is not None:
        refs = [str(reply.get("matrix_id") or reply["job_id"]) for reply in replies]
        return live.wait_jobs(session, refs, as_json=options.json, as_array=True)
    return live.wait_jobs(session, ids, as_json=options.json, as_array=len(replies) > 1, exact=True)


def _body(session: Session, item: JobText, options: SubmitOptions) -> dict[str, Any]:
    return submission.request_body(
        item.text,
        item.source,
        environ=session.environ,
        cwd=item.cwd,
        overrides=options.overrides,
        resume_from=options.resume_from,
        after=options.after,
        note=lambda text: session.console.note(f"note: {clean(text)}"),
    )


def _remark(session: Session, reply: dict[str, Any], options: SubmitOptions) -> None:
    console = session.console
    matrix_id = reply.get("matrix_id")
    if options.follow or options.watch:
        runs = "the job keeps" if matrix_id is None else "the jobs keep"
        console.note(f"submitted {matrix_id or reply['job_id']}; Ctrl-C stops following; {runs} running")
    elif matrix_id is not None and not options.json:
        count = len(reply["job_ids"])
        jobs = "1 job" if count == 1 else f"{count} jobs"
        console.note(f"submitted {jobs}; `orch matrix {matrix_id}` shows {'it' if count == 1 else 'them'}")
    elif not options.json and not options.wait and console.is_terminal:
        console.note(f"submitted; `orch logs -f {reply['job_id']}` follows it")
    for note in reply.get("notes") or ():
        console.note(f"note: {note}")


class UploadBar:
    """Progress bar of an upload; imported and shown only during one."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._bar: Bar | None = None

    def sent(self, done: int, total: int) -> None:
        """Show that the daemon has received ``done`` of ``total`` bytes."""
        from orchestrator.cli.render.transfer import Bar

        self._bar = self._bar or Bar(self._session, total)
        self._bar.at(done, "upload of working_dir")

    def ended(self, uploaded: Uploaded) -> None:
        """Print what was uploaded, and what ignore files left out."""
        from orchestrator.units import size

        if self._bar is not None:
            self._bar.end()
        text = f"uploaded working_dir: {_files(uploaded.files)}, {size(uploaded.size_bytes)}"
        if uploaded.sent_bytes < uploaded.size_bytes:
            text += f" ({size(uploaded.sent_bytes)} sent, the rest was there)"
        self._session.console.note(text)
        if uploaded.left_out is not None and uploaded.left_out.files:
            found = uploaded.left_out
            more = "at least " if found.more else ""
            self._session.console.note(
                f"note: not uploaded, by {', '.join(found.by)}: {more}{_files(found.files)} ({size(found.size_bytes)})"
            )


def _files(count: int) -> str:
    return f"{count} file{'' if count == 1 else 's'}"


def _deliver(session: Session, body: dict[str, Any]) -> dict[str, Any]:
    """Submit; if no daemon runs, start one and submit again, with the same key."""

    def send() -> dict[str, Any]:
        return submission.submit(session.endpoint, body, environ=session.environ, watch=UploadBar(session))

    return with_daemon(session, send)


def with_daemon(session: Session, send: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of ``send``; if no daemon of this machine listens, print a note and start one first."""
    try:
        return send()
    except DaemonUnreachableError as error:
        if type(error) is not DaemonUnreachableError or not session.endpoint.socket_path:
            raise
    from orchestrator.cli import local
    from orchestrator.cli.outcome import require

    require("daemon", "a daemon on this machine")
    session.console.note("no daemon is running; starting one (`orch down` stops it)")
    local.start_daemon(session)
    return send()


def _plan(session: Session, texts: list[JobText], options: SubmitOptions) -> int:
    plans = []
    for item in texts:
        body = _body(session, item, options)

        def send(body: dict[str, Any] = body) -> dict[str, Any]:
            watch = UploadBar(session)
            return submission.plan(session.endpoint, body, deadline_seconds=PLAN_SECONDS, watch=watch)

        plans.append(with_daemon(session, send))
    code = EXIT_REFUSED if any(plan.get("starts") == "never" for plan in plans) else EXIT_OK
    if options.json:
        print_json(session, plans[0] if len(plans) == 1 else plans)
        return code
    from orchestrator.api.views import PlanReply
    from orchestrator.cli.render.plan_view import plan_lines

    for plan in plans:
        for line in plan_lines(session.console, PlanReply.from_json(plan)):
            session.console.print(line)
    return code
