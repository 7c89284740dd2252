"""`orch logs`: the output of ranks."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from orchestrator.cli.commands.shared import Job, JsonLines
from orchestrator.cli.session import Session


def logs(
    job: Job,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.")] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", metavar="N", min=1, help="This attempt; default: the newest.")
    ] = None,
    tail: Annotated[int | None, typer.Option("--tail", "-n", metavar="N", min=0, help="Only the last lines.")] = None,
    grep: Annotated[
        str | None, typer.Option("--grep", metavar="PATTERN", help="Only lines that match this regular expression.")
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only lines since: 10m, or 2026-11-20T14:30.")
    ] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", "-t", help="Begin each line with its time.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Let colours and other escape sequences through to a terminal.")
    ] = False,
    json: JsonLines = False,
) -> int:
    """Show a job's log; with several ranks each line begins with its rank.

    With --follow, --tail counts lines before --grep; without, after. On a terminal, control characters are shown
    as text and colours are removed, unless --raw is given; a file or a pipe gets the lines unchanged.
    """
    from orchestrator.cli.live import LogOptions, show_logs
    from orchestrator.cli.times import parse_time

    options = LogOptions(
        rank=rank,
        attempt=attempt,
        tail=tail,
        grep=grep,
        since=None if since is None else parse_time(since, "--since", time.time()),
        timestamps=timestamps,
        json=json,
        raw=raw,
    )
    return show_logs(Session(), job, options, follow=follow)
