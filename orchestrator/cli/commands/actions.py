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
    Selection,
    act_on_each,
    selection,
)
from orchestrator.cli.commands.shared import takes

if TYPE_CHECKING:
    from orchestrator.api.client import Client
    from orchestrator.api.views import ActionReply


@takes(selection)
def cancel(
    found: Selection,
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Return when they have ended.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="For the daemon's owner: kill at once; a job that has not ended after a minute is given up by a second --force.",
        ),
    ] = False,
) -> int:
    """Stop jobs for good: SIGTERM, time to save (stop_duration), then SIGKILL.

    Options choose among jobs that have not ended.
    """
    code, ids = act_on_each(found, CANCEL, lambda client, ref: client.cancel(ref, force=force))
    if wait:
        from orchestrator.api.transport import following

        for job_id in ids:
            following.wait(found.session.client(), job_id, patience=found.session.patience())
    return code


@takes(selection)
def rerun(
    found: Selection,
    *,
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
) -> int:
    """Submit the same jobs again, as they were submitted, with values changed by --set; prints the new ids.

    A MATRIX: its combinations whose jobs have ended, as further runs of it. Options choose among jobs that have ended.
    """

    def again(client: Client, ref: str) -> ActionReply:
        return client.rerun(ref, from_checkpoint=from_checkpoint, overrides=overrides or (), failed=failed)

    return act_on_each(found, RERUN, again)[0]


@takes(selection)
def update(
    found: Selection,
    *,
    priority: Annotated[int, typer.Option("--priority", metavar="P", min=0, max=100, help="0 to 100, higher first.")],
) -> int:
    """Change jobs that are queued or running."""
    return act_on_each(found, UPDATE, lambda client, ref: client.update(ref, priority=priority))[0]


@takes(selection)
def pause(found: Selection) -> int:
    """Stop jobs and keep them: they save, give their GPUs back, and wait for `orch resume`.

    Options choose among jobs that have neither ended nor been paused.
    """
    return act_on_each(found, PAUSE, lambda client, ref: client.pause(ref))[0]


@takes(selection)
def resume(found: Selection) -> int:
    """Put paused jobs back into the queue; they continue from their last checkpoint.

    Options choose among paused jobs.
    """
    return act_on_each(found, RESUME, lambda client, ref: client.resume(ref))[0]


@takes(selection)
def hold(found: Selection) -> int:
    """Keep queued jobs from starting until `orch release`; they claim no resources meanwhile. A MATRIX: all of its queued jobs.

    Options choose among queued jobs.
    """
    return act_on_each(found, HOLD, lambda client, ref: client.hold(ref))[0]


@takes(selection)
def release(found: Selection) -> int:
    """Put held jobs into the queue, each at the place of its arrival. A MATRIX: all of its held jobs.

    Options choose among jobs that are held or paused.
    """
    return act_on_each(found, RELEASE, lambda client, ref: client.release(ref))[0]
