"""What several commands share: options, completion of jobs, job files, and the confirmation of irreversible actions."""

from __future__ import annotations

import inspect
import math
import os
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from orchestrator.cli.session import Session

COMPLETION_SECONDS = 1.0


def complete_job(incomplete: str) -> list[str]:
    """Return ids of jobs with this prefix, for the shell; none if the daemon does not answer at once."""
    from orchestrator.api.client import Client
    from orchestrator.api.errors import OrchError

    try:
        jobs = Client(deadline_seconds=COMPLETION_SECONDS).jobs(limit=200).jobs
    except OrchError:
        return []
    return [job.id for job in jobs if job.id.startswith(incomplete)]


def ask(session: Session, sentence: str) -> None:
    """Ask for confirmation of the sentence. Raises RefusedError if it is denied, and without a terminal."""
    import sys

    from orchestrator.api.errors import RefusedError

    if not sys.stdin.isatty():
        raise RefusedError(f"not confirmed (no terminal): {sentence}", hint="pass --yes to proceed")
    session.console.print_error(sentence)
    if not typer.confirm("continue?", err=True):
        raise RefusedError("nothing was done", hint="--yes does not ask")


def finite(value: float | None) -> float | None:
    """Return an option's number. Raises BadParameter for NaN and infinities, which no range of click excludes."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def from_here(path: str) -> str:
    """Return an option's file with its whole path: the daemon and its Prometheus run in other directories."""
    return os.path.join(os.getcwd(), path) if path else path


def takes(make: Callable[..., Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the parameters of ``make`` before its own options; what ``make`` returns is its first argument."""

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        shared = inspect.signature(make, eval_str=True).parameters
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        @wraps(command)
        def run(**given: Any) -> int:
            return command(make(**{name: given.pop(name) for name in shared}), **given)

        every = [each.replace(kind=each.KEYWORD_ONLY) for each in (*shared.values(), *own)]
        run.__signature__ = inspect.Signature(every)  # type: ignore[attr-defined]  # typer reads it
        return run

    return decorated


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Make SIGTERM unwind the command, like Ctrl-C: its child processes end, and its temporary files are removed."""
    import signal

    def leave(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # a second signal would interrupt the clean-up
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
JsonLines = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the answer and errors.")]
Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB", help="An id, the beginning of one, a name, or USER/NAME.", autocompletion=complete_job
    ),
]


class JobText(NamedTuple):
    """A job.yaml, its name for messages, and the base of its ``working_dir``."""

    text: str
    source: str
    cwd: str


def job_text(path: str) -> JobText:
    """Read the file at ``path``; ``-`` is standard input, with a ``working_dir`` relative to the current directory."""
    import sys

    from orchestrator.api.transport import submission

    if path == "-":
        return JobText(submission.read_job_file(path, sys.stdin.buffer), "<stdin>", os.getcwd())
    text = submission.read_job_file(path)
    return JobText(text, path, os.path.dirname(os.path.abspath(path)))
