"""Options that several commands share, completion of jobs, and the question before what cannot be undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from orchestrator.cli.session import Session

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


def ask(session: Session, sentence: str) -> None:
    """Ask whether to do what the sentence says. Raises RefusedError for no, and where there is no terminal to ask at."""
    import sys

    from orchestrator.api.errors import RefusedError

    if not sys.stdin.isatty():
        raise RefusedError(f"not confirmed (no terminal): {sentence}", hint="pass --yes to proceed")
    session.console.complain(sentence)
    if not typer.confirm("go on?", err=True):
        raise RefusedError("nothing was done", hint="--yes does not ask")


Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON document.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Answer with one JSON object a line.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but the answer and errors.")]
Job = Annotated[
    str, typer.Argument(metavar="JOB", help="An id, the beginning of one, or a name.", autocompletion=complete_job)
]
