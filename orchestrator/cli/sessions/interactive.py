"""`orch run -i`: submits a job, waits until it has its GPUs, and attaches to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, RefusedError
from orchestrator.api.transport import following
from orchestrator.cli.console import clean
from orchestrator.cli.live import LogOptions, report_end, show_logs
from orchestrator.cli.sessions.attaching import attach_to
from orchestrator.cli.submitting import submit_one

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session
    from orchestrator.cli.submitting import JobText, SubmitOptions

_INTERRUPTED = 130


def run_interactive(session: Session, item: JobText, options: SubmitOptions) -> int:
    """Run the job on this terminal; return its command's exit code. Ctrl-C while it waits cancels it."""
    job_id = submit_one(session, item, options)
    session.console.note(f"submitted {job_id}; Ctrl-C cancels it while it waits")
    try:
        job = _up(session, job_id)
    except KeyboardInterrupt:
        session.client().cancel(job_id)
        session.console.note(f"\n{job_id} is cancelled")
        return _INTERRUPTED
    if job.state == "RUNNING":
        session.console.note(f"works in {clean(job.working_dir)}, a copy of {clean(item.cwd)}; ~. detaches")
        try:
            return attach_to(session, job_id, 0)
        except RefusedError:  # the job is never restarted, so its rank has ended
            job = _ended(session, job_id)
    show_logs(session, job_id, LogOptions(), follow=False)  # the command ended before this terminal was attached
    report_end(session, job)
    return EXIT_OK if job.state == "SUCCEEDED" else job.exit_code or EXIT_JOB_FAILED


def _up(session: Session, job_id: str) -> JobView:
    """Wait until the job runs or has ended; print what it waits for."""
    shown = ""
    for job in _seen(session, job_id):
        if job.state == "RUNNING" or job.is_terminal:
            return job
        if shown != (shown := f"{job.state}: {job.reason}"):
            session.console.note(f"{job.id} {clean(shown)}")
    raise AssertionError("a watch has no end")


def _ended(session: Session, job_id: str) -> JobView:
    """Wait until the job has ended; its rank already has."""
    for job in _seen(session, job_id):
        if job.is_terminal:
            return job
    raise AssertionError("a watch has no end")


def _seen(session: Session, job_id: str) -> Iterator[JobView]:
    client = session.client()
    return following.watch(client, lambda: client.job(job_id), job_ids=[job_id], patience=session.patience())
