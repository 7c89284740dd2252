"""`orch estimate`: the time left of jobs, with intervals, and the accuracy of earlier estimates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK
from orchestrator.api.matrix_views import MatrixView
from orchestrator.cli.choosing import job_or_matrix
from orchestrator.cli.commands.shared import Json, complete_job
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from orchestrator.api.client import Client
    from orchestrator.api.views import JobView
    from orchestrator.cli.render.estimate_table import Estimates

LIVE = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "DRAINING", "SUSPENDED")


def estimate(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB|MATRIX", help="Default: every job that has not ended.", autocompletion=complete_job
        ),
    ] = None,
    *,
    json: Json = False,
) -> int:
    """Show how long jobs will still run, with a 95 % interval, their GPUs' memory, and how good estimates were.

    Uses the steps that a job reports, or that `health.progress` finds in its log; the total number of steps must be known.
    """
    from orchestrator.cli.render.estimate_table import as_json, estimate_lines

    session = Session()
    found = _ask(session, session.client(), name)
    if json:
        print_json(session, as_json(found))
        return EXIT_OK
    for line in estimate_lines(session.console, found, time.time()):
        session.console.print(line)
    return EXIT_OK


def _ask(session: Session, client: Client, name: str | None) -> Estimates:
    from orchestrator.cli.render.estimate_table import Estimates, Total, total_of
    from orchestrator.cli.status_view import note_which

    jobs: list[JobView]
    if name is None:
        jobs = list(client.jobs(states=list(LIVE)).jobs)
        total = total_of(jobs)
    elif isinstance(found := job_or_matrix(client, name), MatrixView):
        ids = [row.job_id for row in found.jobs if row.state in LIVE]
        jobs = [client.job(job_id) for job_id in ids]
        total = Total(found.eta_seconds, found.eta_low_seconds, found.eta_high_seconds)
    else:
        note_which(session, name, found)
        jobs, total = [found], total_of([found])
    held = {uuid for job in jobs for rank in job.gpus for uuid in rank.gpu_uuids}
    memory = {row.gpu_uuid: row for row in client.gpus() if row.gpu_uuid in held} if held else {}
    return Estimates(jobs=tuple(jobs), total=total, gpus=memory, quality=client.estimate_quality(), asked=name)
