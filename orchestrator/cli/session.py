"""The context of a command, read once: environment, terminal and address; and its end: errors as sentences, exit codes.

Expected errors never show a traceback; faults of orch do, because they should be reported. Ctrl-C and a closed pipe are
normal ends, not errors.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from orchestrator.api.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    BadRequestError,
    DiskFullError,
    MissingPartError,
    OrchError,
)
from orchestrator.cli.console import Console

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from orchestrator.api.client import Client
    from orchestrator.api.transport.endpoint import Endpoint
    from orchestrator.api.transport.following import Patience
    from orchestrator.api.views import JobView


class Session:
    """One run of the command line."""

    def __init__(self, *, quiet: bool = False, environ: Mapping[str, str] | None = None) -> None:
        self.environ: Mapping[str, str] = os.environ if environ is None else environ
        self.console = Console(self.environ, quiet=quiet)

    @property
    def endpoint(self) -> Endpoint:
        """Endpoint of the daemon that the environment names."""
        from orchestrator.api.transport.endpoint import endpoint_from

        return endpoint_from(self.environ)

    def client(self) -> Client:
        """Return a client of that daemon."""
        from orchestrator.api.client import Client

        return Client(self.endpoint, environ=self.environ)

    def job(self, ref: str) -> JobView:
        """Return the job of a reference, and print which one a name refers to. Raises NotFoundError and others."""
        found = self.client().job(ref)
        self.note_which(ref, found)
        return found

    def note_which(self, ref: str, job: JobView) -> None:
        """Print which job a name refers to: several jobs of a user may have it."""
        if ref.rpartition("/")[2] == job.name and ref != job.id:
            self.console.note(f"{ref} is {job.id}, the newest of that name")

    def patience(self) -> Patience:
        """Return the Patience for a daemon that restarts; it prints a note once for each absence."""
        from orchestrator.api.transport.following import Patience

        return Patience(
            notice=lambda error: self.console.note(f"{error.message}; waiting for it to come back (jobs keep running)")
        )


def print_json(session: Session, value: object) -> None:
    """Print one JSON document: indented for a person, compact for a program."""
    import json

    indent = 2 if session.console.is_terminal else None
    session.console.print(json.dumps(value, ensure_ascii=False, indent=indent))


def answer(
    session: Session,
    lines: Iterable[str],
    value: object,
    *,
    as_json: bool,
    code: int = EXIT_OK,
    notes: Iterable[str] = (),
) -> int:
    """Print a command's answer, ``lines`` and then ``notes`` for people or ``value`` as one JSON document; return ``code``."""
    if as_json:
        print_json(session, value)
    else:
        for line in lines:
            session.console.print(line)
        for note in notes:
            session.console.note(note)
    return code


@contextmanager
def writing(place: object, hint: str) -> Iterator[None]:
    """Raise BadRequestError where ``place`` cannot be written."""
    try:
        yield
    except OSError as error:
        raise BadRequestError(f"{place} cannot be written: {error.strerror or error}", hint=hint) from error


EXIT_BROKEN_PIPE = 141
"""The shell's exit code for a program stopped by the end of its pipe."""

MAX_PROBLEMS = 50


def guarded(run: Callable[[], int], console: Console, *, as_json: bool) -> int:
    """Return the exit code of ``run``; print its error on standard error, with ``as_json`` as a problem document."""
    try:
        code = run()
        console.out.flush()
    except OrchError as error:
        report_error(error, console, as_json=as_json)
        return error.exit_code
    except ModuleNotFoundError as error:
        return _missing(error, console, as_json=as_json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _abandon_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            return _bug(console)
        _abandon_output()
        full = DiskFullError(f"the answer could not be written: {error.strerror}", hint="free space and try again")
        report_error(full, console, as_json=as_json)
        return full.exit_code
    except Exception as error:
        if hasattr(error, "exit_code"):
            raise  # click's exceptions: it has shown help, or refuses the line
        return _bug(console)
    return code


def _missing(error: ModuleNotFoundError, console: Console, *, as_json: bool) -> int:
    """Report a part that is not installed, with the line to type; any other failed import is a bug."""
    missing = _from_import(error)
    if missing is None:
        return _bug(console)
    report_error(missing, console, as_json=as_json)
    return missing.exit_code


def _bug(console: Console) -> int:
    import traceback

    console.print_error(traceback.format_exc().rstrip())
    console.print_error("orch: this is a bug of orch; please report it with the lines above")
    return EXIT_INTERNAL


def _abandon_output() -> None:
    """Discard buffered output: at its exit, Python would try to write it again and report the error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def report_error(error: OrchError, console: Console, *, as_json: bool) -> None:
    """Print the error for users, with every problem on its own line and the next step last; or as JSON."""
    if error.client_hint and error.hint == error.default_hint:
        from orchestrator import parts

        if parts.missing_modules("daemon"):
            error.hint = error.client_hint
    if as_json:
        import json

        console.print_error(json.dumps(error.to_json(), ensure_ascii=False))
        return
    console.print_error(f"{console.err_style('orch:', 'red', 'bold')} {error.message}")
    for problem in error.problems[:MAX_PROBLEMS]:
        console.print_error(f"  {problem.render()}")
    if len(error.problems) > MAX_PROBLEMS:
        console.print_error(f"  and {len(error.problems) - MAX_PROBLEMS} more")
    if error.hint:
        console.print_error(f"  {console.err_style('next:', 'bold')} {error.hint}")


def require(part: str, what: str) -> None:
    """Check that the part that ``what`` needs is installed. Raises MissingPartError with the line to type."""
    from orchestrator import parts

    missing = parts.missing_modules(part)
    if missing:
        raise _missing_part(part, what, missing)


def _missing_part(part: str, what: str, missing: tuple[str, ...]) -> MissingPartError:
    """Return the error for a part of which the modules ``missing`` are not installed."""
    from orchestrator import parts

    message = f"{what} needs the part '{part}', which is not installed here (no {', '.join(missing)})"
    return MissingPartError(message, hint=parts.install_line(part))


def _from_import(error: ModuleNotFoundError) -> MissingPartError | None:
    """Return the error for a failed import; None if the module belongs to no part of orch."""
    from orchestrator import parts

    module = (error.name or "").partition(".")[0]
    part = parts.part_of(module)
    return None if part is None else _missing_part(part, "this command", (module,))
