"""`orch cancel`, `pause`, `resume`, `rerun`, `update`, `hold`, `release`: one request for each job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.commands.selecting import (
    CANCEL,
    HOLD,
    PAUSE,
    RELEASE,
    RERUN,
    RESUME,
    UPDATE,
    DryRun,
    Jobs,
    Labels,
    Name,
    States,
    User,
    Verb,
    act_on_each,
    selection,
)
from orchestrator.cli.commands.shared import Json, Quiet, Yes
from orchestrator.cli.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.api.client import Client
    from orchestrator.api.views import ActionReply


def cancel(
    jobs: Jobs = None,
    *,
    user: User = None,
    state: States = None,
    label: Labels = None,
    name: Name = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they have ended.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="For the daemon's owner: kill at once; a job that has not ended after a minute is given up by a second --force.",
        ),
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Stop jobs for good: SIGTERM, time to save (stop_duration), then SIGKILL.

    Options choose among jobs that have not ended.
    """
    session = Session(quiet=quiet)
    found = selection(jobs, user, state, label, name, yes=yes, dry_run=dry_run, json=json)
    code, ids = act_on_each(session, found, CANCEL, lambda client, ref: client.cancel(ref, force=force))
    if wait:
        from orchestrator.api.transport import following

        for job_id in ids:
            following.wait(session.client(), job_id, patience=session.patience())
    return code


def rerun(
    jobs: Jobs = None,
    *,
    user: User = None,
    state: States = None,
    label: Labels = None,
    name: Name = None,
    from_checkpoint: Annotated[
        bool, typer.Option("--from-checkpoint", help="Begin at the old job's last checkpoint instead of the start.")
    ] = False,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a value, as in --set resources.num_workers=4."),
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Only what failed: of a matrix, the combinations whose job failed.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Submit the same jobs again, as they were submitted, with values changed by --set; prints the new ids.

    A MATRIX: its combinations whose jobs have ended, as further runs of it. Options choose among jobs that have ended.
    """

    def again(client: Client, ref: str) -> ActionReply:
        return client.rerun(ref, from_checkpoint=from_checkpoint, overrides=overrides or (), failed=failed)

    found = selection(jobs, user, state, label, name, yes=yes, dry_run=dry_run, json=json)
    return act_on_each(Session(quiet=quiet), found, RERUN, again)[0]


def update(
    jobs: Jobs = None,
    *,
    priority: Annotated[int, typer.Option("--priority", metavar="P", min=0, max=100, help="0 to 100, higher first.")],
    user: User = None,
    state: States = None,
    label: Labels = None,
    name: Name = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    json: Json = False,
    quiet: Quiet = False,
) -> int:
    """Change jobs that are queued or running."""
    found = selection(jobs, user, state, label, name, yes=yes, dry_run=dry_run, json=json)
    session = Session(quiet=quiet)
    return act_on_each(session, found, UPDATE, lambda client, ref: client.update(ref, priority=priority))[0]


def _plain(verb: Verb, act: Callable[[Client, str], ActionReply], text: str) -> Callable[..., int]:
    """Return a command that has no option but those that choose jobs."""

    def command(
        jobs: Jobs = None,
        *,
        user: User = None,
        state: States = None,
        label: Labels = None,
        name: Name = None,
        dry_run: DryRun = False,
        yes: Yes = False,
        json: Json = False,
        quiet: Quiet = False,
    ) -> int:
        found = selection(jobs, user, state, label, name, yes=yes, dry_run=dry_run, json=json)
        return act_on_each(Session(quiet=quiet), found, verb, act)[0]

    command.__doc__ = text
    return command


pause = _plain(
    PAUSE,
    lambda client, ref: client.pause(ref),
    """Stop jobs and keep them: they save, give their GPUs back, and wait for `orch resume`.

    Options choose among jobs that have neither ended nor been paused.
    """,
)
resume = _plain(
    RESUME,
    lambda client, ref: client.resume(ref),
    """Put paused jobs back into the queue; they continue from their last checkpoint.

    Options choose among paused jobs.
    """,
)
hold = _plain(
    HOLD,
    lambda client, ref: client.hold(ref),
    """Keep queued jobs from starting until `orch release`; they claim no resources meanwhile. A MATRIX: all of its queued jobs.

    Options choose among queued jobs.
    """,
)
release = _plain(
    RELEASE,
    lambda client, ref: client.release(ref),
    """Put held jobs into the queue, each at the place of its arrival. A MATRIX: all of its held jobs.

    Options choose among jobs that are held or paused.
    """,
)
