"""`orch cancel`, `pause`, `resume`, `rerun` and `update`: act on jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, OrchError
from orchestrator.cli.commands.shared import Jobs, Json, Quiet
from orchestrator.cli.outcome import tell
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.client import Client
    from orchestrator.api.views import ActionReply


def cancel(
    jobs: Jobs,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they have ended.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Stop jobs for good: SIGTERM, time to save (stop_duration), then SIGKILL to whatever is left."""
    session = Session(quiet=quiet)
    code = _each(session, jobs, lambda client, ref: client.cancel(ref), as_json=json)
    if wait and code == EXIT_OK:
        from orchestrator.api.transport import following

        for ref in jobs:
            following.wait(session.client(), ref, patience=session.patience())
    return code


def pause(jobs: Jobs, json: Json = False, quiet: Quiet = False) -> int:
    """Stop jobs and keep them: they save, give their GPUs back, and wait for `orch resume`."""
    return _each(Session(quiet=quiet), jobs, lambda client, ref: client.pause(ref), as_json=json)


def resume(jobs: Jobs, json: Json = False, quiet: Quiet = False) -> int:
    """Put paused jobs back into the queue; they go on from their last checkpoint."""
    return _each(Session(quiet=quiet), jobs, lambda client, ref: client.resume(ref), as_json=json)


def rerun(
    jobs: Jobs,
    from_checkpoint: Annotated[
        bool, typer.Option("--from-checkpoint", help="Begin at the old job's last checkpoint instead of the start.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, as in --set resources.num_workers=4."),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Submit the same jobs again, as they were submitted, with values changed by --set; prints the new ids."""

    def again(client: Client, ref: str) -> ActionReply:
        return client.rerun(ref, from_checkpoint=from_checkpoint, overrides=overrides or ())

    return _each(Session(quiet=quiet), jobs, again, as_json=json)


def update(
    jobs: Jobs,
    priority: Annotated[int, typer.Option("--priority", metavar="P", min=0, max=100, help="0 to 100, higher first.")],
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Change jobs that are queued or running."""
    return _each(Session(quiet=quiet), jobs, lambda client, ref: client.update(ref, priority=priority), as_json=json)


def _each(session: Session, refs: list[str], act: Callable[[Client, str], ActionReply], *, as_json: bool) -> int:
    """Act on every job, also when one is refused; the exit code is the first refusal's."""
    client = session.client()
    code = EXIT_OK
    replies: list[ActionReply] = []
    for ref in refs:
        try:
            reply = act(client, ref)
        except OrchError as error:
            if len(refs) == 1:
                raise
            tell(error, session.console, as_json=as_json)
            code = code or error.exit_code
            continue
        replies.append(reply)
        if not as_json:
            session.console.print(reply.job_id)
            session.console.note(f"{reply.job_id} {reply.message} ({reply.state})")
    if as_json:
        print_json(session, replies[0].to_json() if len(refs) == 1 else [reply.to_json() for reply in replies])
    return code
