"""`orch usage`: usage and cost by users, queues and labels."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from orchestrator.api.errors import BadRequestError
from orchestrator.cli.commands.shared import Json, finite
from orchestrator.cli.session import Session


def usage(
    *,
    by: Annotated[
        str, typer.Option("--by", metavar="WHAT", help="user, queue, label:KEY, or several: user,queue.")
    ] = "user",
    since: Annotated[
        str,
        typer.Option(
            "--since", metavar="TIME", help="Use from this time on: 30d, or 2026-11-01; `all` for everything."
        ),
    ] = "7d",
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Use up to this time, as with --since; default: now.")
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price", metavar="P", min=0.0, callback=finite, help="Price of a GPU hour; default ORCH_GPU_HOUR_PRICE."
        ),
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Write comma-separated values, every phase in a column.")] = False,
    json: Json = False,
) -> int:
    """Show GPU hours by phase, GPU hours waited for, energy and cost, from the daemon's record.

    Jobs that `orch prune` has removed are no longer counted.
    """
    from orchestrator.cli.commands.runs.usage_view import show_usage
    from orchestrator.cli.times import parse_time

    if csv and json:
        raise BadRequestError("--csv and --json are two forms of the answer", hint="leave one out")
    now = time.time()
    first = None if since == "all" else parse_time(since, "--since", now)
    last = None if until is None else parse_time(until, "--until", now)
    names = [name.strip() for name in by.split(",")]
    return show_usage(Session(), names, first, last, price, "json" if json else "csv" if csv else "table")
