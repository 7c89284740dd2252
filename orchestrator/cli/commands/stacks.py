"""`orch stacks`: the stacks of a running job's ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK
from orchestrator.cli.commands.shared import Job, Json
from orchestrator.cli.console import clean
from orchestrator.cli.session import Session, print_json
from orchestrator.cli.status_view import note_which

if TYPE_CHECKING:
    from orchestrator.api.views import RankStacksView

_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "held by a debugger"}


def stacks(
    job: Job,
    *,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.")] = None,
    json: Json = False,
) -> int:
    """Show the Python stacks of a running job's ranks, without stopping them.

    The same lines are written to the ranks' logs.
    """
    session = Session()
    client = session.client()
    found = client.job(job)
    note_which(session, job, found)
    reply = client.stacks(found.id, rank=rank)
    if json:
        print_json(session, reply.to_json())
        return EXIT_OK
    for number, one in enumerate(reply.ranks):
        if number:
            session.console.print("")
        for line in _lines(one):
            session.console.print(line)
    return EXIT_OK


def _lines(rank: RankStacksView) -> list[str]:
    if rank.pid is None:
        return [f"rank {rank.rank}: {clean(rank.problem)}"]
    state = _STATES.get(rank.state, rank.state or "gone")
    waits = f" in {clean(rank.waits_in)}" if rank.waits_in else ""
    lines = [f"rank {rank.rank}: process {rank.pid}, {state}{waits}, {rank.cpu_seconds:.2f} s of processor time"]
    if rank.problem:
        lines.append(f"  {clean(rank.problem)}")
    for thread in rank.threads:
        lines += [f"  {clean(thread.name)}", *(f"    {clean(frame)}" for frame in thread.frames)]
    return lines
