"""`orch exec`: a command, or a shell, beside a running rank."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.commands.shared import Job
from orchestrator.cli.session import Session
from orchestrator.cli.status_view import note_which

CONTEXT_SETTINGS = {"exec": {"allow_interspersed_args": True}}


def exec_beside(
    job: Job,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- CMD...]", help="The command; without it, a shell.")
    ] = None,
    *,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="Beside this rank.")] = 0,
    terminal: Annotated[
        bool | None,
        typer.Option(
            "--terminal/--no-terminal",
            "-t/-T",
            help="Give the command a terminal. Default: when standard input and output are terminals.",
        ),
    ] = None,
) -> int:
    """Run a command beside a running rank: in its directory, with its environment and GPUs, on its node.

    The exit code is the command's; 128 plus the signal's number when a signal ended it. It ends with the rank, and when this command ends.
    Enter ~. leaves a session on a terminal.
    """
    from orchestrator.cli.sessions import terminal as sessions

    session = Session()
    client = session.client()
    found = client.job(job)
    note_which(session, job, found)
    wanted = sessions.may_have_terminal() if terminal is None else terminal
    stream = client.session(
        found.id, rank=rank, argv=command or (), terminal=sessions.terminal_of(session.environ) if wanted else None
    )
    sessions.flush_standard_streams()
    try:
        end = sessions.carry(stream, terminal=wanted)
    except sessions.LeftError:
        session.console.note("left; the command was ended")
        return 0
    finally:
        stream.close()
    if end.reason != "exited":
        session.console.print_error(f"orch: rank {rank} of {found.id} has ended, and the session with it")
    return sessions.exit_code(end)
