"""`orch gpus`, `orch top` and `orch replay`: the activity of GPUs. All of them also work without a daemon."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, complete_job
from orchestrator.cli.session import Session, answer, require
from orchestrator.cli.times import parse_span, parse_span_within
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.cli.render.gpus import GpuSummary
    from orchestrator.gpu.row import GpuRow

Simulate = Annotated[
    int, typer.Option("--simulate-gpus", metavar="N", min=0, help="Use N simulated GPUs instead of real ones.")
]


def gpus(
    job: Annotated[
        str | None,
        typer.Option("--job", metavar="JOB", help="Only this job's GPUs.", autocompletion=complete_job),
    ] = None,
    json: Json = False,
    simulate_gpus: Simulate = 0,
) -> int:
    """List every GPU of every node: load, memory, power, temperature, and which rank of which job is on it."""
    from orchestrator.cli.render.gpus import COLUMNS
    from orchestrator.cli.render.table import render_table

    session = Session()
    seen = _gpu_summary(session, simulate_gpus) if job is None else _gpus_of(session, job, simulate_gpus)
    none = "no GPU found (orch gpus --simulate-gpus 2 shows an example)"
    none = none if job is None else f"{job} holds no GPU now; `orch report {job}` shows what it did"
    lines = [*(render_table(session.console, COLUMNS, seen.rows) or [none]), *_balance_lines(session, seen)]
    broken = [f"{row.node}: GPU {row.index}: {row.problem}" for row in seen.rows if row.problem]
    value = {"gpus": [row.to_json() for row in seen.rows], "problems": list(seen.problems)}
    return answer(session, lines, value, as_json=json, notes=[*broken, *seen.problems])


def _gpu_summary(session: Session, simulate: int) -> GpuSummary:
    from orchestrator.cli.render.gpus import GpuSummary, gpu_summary
    from orchestrator.gpu.drivers.inventory import node_name, survey
    from orchestrator.gpu.row import read_once

    def local() -> tuple[list[GpuRow], tuple[str, ...]]:
        found = survey(simulate=simulate)
        return read_once(found.readers, node_name()), found.problems

    if simulate:
        rows, problems = local()
        return GpuSummary(rows=tuple(rows), problems=problems)
    return gpu_summary(session, local)


def _gpus_of(session: Session, ref: str, simulate: int) -> GpuSummary:
    """Return the GPUs that a job holds. Raises BadRequestError with simulated GPUs, which no job holds."""
    if simulate:
        raise BadRequestError("--simulate-gpus shows GPUs without a job", hint="leave out --job or --simulate-gpus")
    found = session.job(ref)
    seen = _gpu_summary(session, simulate)
    return replace(
        seen,
        rows=tuple(row for row in seen.rows if row.job_id == found.id),
        jobs=tuple(one for one in seen.jobs if one.id == found.id),
    )


def _balance_lines(session: Session, seen: GpuSummary) -> Iterator[str]:
    from orchestrator.cli.render.gpus import BAND_STYLES, balance_line, finding_lines

    for job in seen.jobs:
        text, band = balance_line(job.balance)
        lines = finding_lines(job.findings)
        if text:
            yield f"{job.id}: balance {session.console.style(text, *BAND_STYLES.get(band, ()))}"
        elif lines:
            yield f"{job.id}:"
        yield from (f"  {line}" for line in lines)


def top(
    interval: Annotated[
        str, typer.Option("--interval", metavar="SPAN", help="Time between two readings: 200ms to 1m.")
    ] = "1s",
    simulate_gpus: Simulate = 0,
) -> int:
    """Watch GPUs, jobs and processes live. q quits, ? shows the keys."""
    seconds = parse_span_within(interval, "--interval", least=0.2, most=60.0)
    require("top", "`orch top`")
    from orchestrator.cli.top.frames import TopSource
    from orchestrator.cli.top.screen import TopApp

    session = Session()
    if not session.console.is_terminal:
        raise BadRequestError("`orch top` needs a terminal", hint="`orch gpus --json` prints the same once")
    with TopSource(session, simulate=simulate_gpus, interval=seconds) as source:
        TopApp(source, interval=seconds).run()
    return EXIT_OK


def replay(
    recording: Annotated[
        str, typer.Argument(metavar="FILE|JOB", help="A file of `orch record` or gputop, a job, or its directory.")
    ],
    *,
    speed: Annotated[
        float, typer.Option("--speed", metavar="X", help="Times as fast as it was recorded: 0.1 to 1000.")
    ] = 1.0,
    start: Annotated[str | None, typer.Option("--from", metavar="SPAN", help="Begin here: 90s, 1h30m.")] = None,
) -> int:
    """Play a recording in the view of `orch top`. space pauses, + and - change the speed, ? shows the keys."""
    from orchestrator.cli.commands.runs import find_recording

    if not 0.1 <= speed <= 1000.0:
        raise BadRequestError(f"--speed {speed:g} is out of range", hint="write a number from 0.1 to 1000")
    begin = 0.0 if start is None else parse_span(start, "--from")
    require("top", "`orch replay`")
    from orchestrator.cli.top.player import Player
    from orchestrator.cli.top.screen import ReplayApp

    session = Session()
    found = find_recording(session, recording)
    player = Player(found.recording, start=begin, speed=speed, name=found.name)
    if begin > player.end:
        raise BadRequestError(
            f"--from {start} is after the end of {recording}: it is {duration(player.end)} long", hint="write less"
        )
    if not session.console.is_terminal:
        raise BadRequestError("`orch replay` needs a terminal", hint=f"`orch report {recording}` writes a summary")
    ReplayApp(player).run()
    return EXIT_OK
