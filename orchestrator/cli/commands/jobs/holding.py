"""`orch hold` and `orch release`: keep queued jobs from starting."""

from __future__ import annotations

from orchestrator.cli.commands.jobs.selecting import (
    HOLD,
    RELEASE,
    DryRun,
    Jobs,
    Labels,
    Name,
    States,
    User,
    act_on_each,
    selection,
)
from orchestrator.cli.commands.shared import Json, Quiet, Yes
from orchestrator.cli.session import Session


def hold(
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
    """Keep queued jobs from starting until `orch release`; they claim no resources meanwhile. A MATRIX: all of its queued jobs.

    Options choose among queued jobs.
    """
    found = selection(jobs, user, state, label, name, yes=yes, dry_run=dry_run, json=json)
    return act_on_each(Session(quiet=quiet), found, HOLD, lambda client, ref: client.hold(ref))[0]


def release(
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
    """Put held jobs into the queue, each at the place of its arrival. A MATRIX: all of its held jobs.

    Options choose among jobs that are held or paused.
    """
    found = selection(jobs, user, state, label, name, yes=yes, dry_run=dry_run, json=json)
    return act_on_each(Session(quiet=quiet), found, RELEASE, lambda client, ref: client.release(ref))[0]
