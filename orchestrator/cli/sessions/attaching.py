"""Connects a rank's own terminal to this one, until the rank ends or the user detaches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, RefusedError
from orchestrator.api.transport import following
from orchestrator.api.transport.wire import ConnectionLostError
from orchestrator.cli.console import clean
from orchestrator.cli.sessions import terminal as sessions

if TYPE_CHECKING:
    from orchestrator.api.views import JobView
    from orchestrator.cli.session import Session

SETTLE_SECONDS: Final = 20.0
"""Time in which the end of a rank must show in its job. The other ranks of a gang may run for longer."""


def attach_to(session: Session, job_id: str, rank: int) -> int:
    """Pass keys and output on; return the rank's exit code, or 0 if the user detached. Raises OrchError."""
    wanted = sessions.may_have_terminal()
    size = sessions.terminal_of(session.environ) if wanted else None
    stream = session.client().session(job_id, rank=rank, attach=True, terminal=size)
    sessions.flush_standard_streams()
    try:
        end = sessions.carry(stream, terminal=wanted)
    except sessions.LeftError:
        session.console.note(
            f"\ndetached; rank {rank} keeps running, and `orch attach {job_id} --rank {rank}` returns to it"
        )
        return EXIT_OK
    except ConnectionLostError as error:
        hint = f"the rank keeps running; `orch attach {job_id} --rank {rank}` returns to it"
        raise ConnectionLostError(error.message, hint=hint) from error
    except RefusedError:
        return _ended(session, job_id)
    finally:
        stream.close()
    known = end.reason == "exited" and (end.exit_code is not None or end.signal is not None)
    if not known or end.signal is not None:
        code = _ended(session, job_id)
        return sessions.exit_code(end) if known else code
    return sessions.exit_code(end)


def _ended(session: Session, job_id: str) -> int:
    """Print why a rank ended that was killed or did not report its end; return an exit code for it."""
    job = _settled(session, job_id)
    session.console.print_error(f"orch: {job_id} is {job.state}: {clean(job.reason)}")
    return EXIT_OK if job.state == "SUCCEEDED" else job.exit_code or EXIT_JOB_FAILED


def _settled(session: Session, job_id: str) -> JobView:
    """Return the job once it no longer runs: a session may end before the end of its rank is recorded."""
    client, deadline = session.client(), time.monotonic() + SETTLE_SECONDS
    readings = following.watch(
        client, lambda: client.job(job_id), job_ids=[job_id], patience=session.patience(), deadline=deadline
    )
    return next(job for job in readings if job.state != "RUNNING" or time.monotonic() >= deadline)
