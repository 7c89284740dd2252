"""Options that several commands share, and completion of jobs."""

from __future__ import annotations

from typing import Annotated

import typer

COMPLETION_SECONDS = 1.0


def complete_job(incomplete: str) -> list[str]:
    """Ids of jobs that begin like this, for the shell; none where the daemon does not answer at once."""
    from orchestrator.api.client import Client
    from orchestrator.api.errors import OrchError

    try:
        jobs = Client(deadline_seconds=COMPLETION_SECONDS).jobs(limit=200).jobs
    except OrchError:
        return []
    return [job.id for job in jobs if job.id.startswith(incomplete)]


Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Answer with one JSON object a line.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the answer and errors.")]
Job = Annotated[
    str, typer.Argument(metavar="JOB", help="An id, the beginning of one, or a name.", autocompletion=complete_job)
]
Jobs = Annotated[
    list[str], typer.Argument(metavar="JOB", help="Ids, beginnings of ids, or names.", autocompletion=complete_job)
]
