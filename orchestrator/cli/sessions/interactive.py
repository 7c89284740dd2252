"""`orch run -i`: submits a job, waits until it has its GPUs, and attaches to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.api.transport import following
from orchestrator.cli.console import clean
from orchestrator.cli.live import report_end
from orchestrator.cli.sessions.attaching import attach_to
from orchestrator.cli.submitting import submit_one

if TYPE_CHECKING:
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
    if job.state != "RUNNING":
        report_end(session, job)
        return 0 if job.state == "SUCCEEDED" else job.exit_code or 1
    session.console.note(f"works in {clean(job.working_dir)}, a copy of {clean(item.cwd)}; ~. detaches")
    return attach_to(session, job_id, 0)


def _up(session: Session, job_id: str) -> JobView:
    """Wait until the job runs or has ended; print what it waits for."""
    client, told = session.client(), ""
    for job in following.watch(client, lambda: client.job(job_id), job_ids=[job_id], patience=session.patience()):
        if job.state == "RUNNING" or job.is_terminal:
            return job
        if told != (told := f"{job.state}: {job.reason}"):
            session.console.note(f"{job.id} {clean(told)}")
    raise AssertionError("a watch has no end")
