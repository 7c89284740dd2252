"""`orch profile` and `orch stacks`: what the ranks of a running job do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import BadRequestError
from orchestrator.cli.commands.shared import Job, Json
from orchestrator.cli.console import clean
from orchestrator.cli.session import Session, answer, writing
from orchestrator.cli.times import parse_span_within
from orchestrator.units import size

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
    found = session.job(job)
    reply = client.stacks(found.id, rank=rank)
    lines = [line for one in reply.ranks for line in ("", *_lines(one))]
    return answer(session, lines[1:], reply.to_json(), as_json=json)


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


MAX_SECONDS = 600.0


def profile(
    job: Job,
    *,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, max=100, help="Optimizer steps to trace.")] = 5,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="The rank to trace.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: JOB-rankN.trace.json.gz here.")
    ] = None,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="SPAN", help="How long the steps may take: 30s, 10m.")
    ] = "1m",
    json: Json = False,
) -> int:
    """Trace the next steps of a running job that trains with orchestrator.train.

    The trace opens in https://ui.perfetto.dev and in chrome://tracing.
    """
    seconds = parse_span_within(timeout, "--timeout", least=1.0, most=MAX_SECONDS)
    session = Session()
    client = session.client()
    found = session.job(job)
    target = output or Path(f"{found.id}-rank{rank}.trace.json.gz")
    if not target.parent.is_dir():
        raise BadRequestError(f"{target.parent} is not a directory", hint="make it, or name another --output")
    data = client.profile(found.id, steps=steps, rank=rank, timeout_seconds=seconds)
    with writing(target, "name another --output"):
        target.write_bytes(data)
    line = f"{target} ({size(len(data))}): open it in https://ui.perfetto.dev"
    value = {"job_id": found.id, "rank": rank, "path": str(target), "bytes": len(data)}
    return answer(session, [line], value, as_json=json)
