"""`orch attach`: the terminal of a running rank."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.commands.shared import Job
from orchestrator.cli.session import Session
from orchestrator.cli.status_view import note_which


def attach(
    job: Job,
    *,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="To this rank.")] = 0,
) -> int:
    """Attach this terminal to a running rank: its debugger at a breakpoint, or all of an interactive job.

    Output of the rank is shown too. Keys are sent to its debugger while it is at a breakpoint, and always to an interactive job.
    The exit code is the rank's. ~. at the beginning of a line detaches; the rank keeps running.
    """
    from orchestrator.cli.sessions.attaching import attach_to

    session = Session()
    found = session.client().job(job)
    note_which(session, job, found)
    return attach_to(session, found.id, rank)
