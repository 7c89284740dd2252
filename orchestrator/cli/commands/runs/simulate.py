"""`orch simulate`: runs a trace through the scheduler. Works without a daemon, except for its own history."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003  # typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, finite
from orchestrator.cli.session import Session, print_json

T = TypeVar("T")

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.analysis.simulation.comparison import Result
    from orchestrator.core.simulation.trace import TraceJob


def simulate(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE.csv", help="A trace with the columns of Philly, Helios or Alibaba PAI.", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        str, typer.Option("--nodes", metavar="NxG", help="Nodes and GPUs of each: 64x8, or 64x8,4x16.")
    ] = "8x8",
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="P",
            help="orch (the daemon's) or fifo.",
        ),
    ] = "orch",
    compare: Annotated[str, typer.Option("--compare", metavar="P,P", help="More policies, side by side.")] = "",
    history: Annotated[
        str | None,
        typer.Option(
            "--history", metavar="SINCE", help="Instead of a trace: the daemon's jobs that ended since (30d)."
        ),
    ] = None,
    synthetic: Annotated[
        str | None,
        typer.Option("--synthetic", metavar="F", help="Instead of a trace: philly, bursty, large or exponential."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", metavar="N", min=1, help="How many synthetic jobs.")] = 1000,
    load: Annotated[
        float,
        typer.Option(
            "--load",
            metavar="X",
            min=0.01,
            max=10.0,
            callback=finite,
            help="GPU time that the jobs request, as a share of the cluster's.",
        ),
    ] = 0.9,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the synthetic jobs.")] = 0,
    checkpoints: Annotated[
        str, typer.Option("--checkpoints", metavar="TIME", help="Time between two checkpoints of a job.")
    ] = "30m",
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE.csv", help="Write the jobs in Philly's format, and exit.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE.png", help="Write a picture, too.")] = None,
    json: Json = False,
) -> int:
    """Play a trace of jobs through the scheduler: completion times, waits, use of the GPUs, fairness.

    Policies: orch decides as the daemon does. fifo starts jobs in the order of arrival, and none overtakes another.
    """
    from orchestrator.analysis.simulation.comparison import compare as play
    from orchestrator.analysis.simulation.comparison import parse_nodes, parse_policies
    from orchestrator.cli.render.simulation_view import simulation_lines
    from orchestrator.cli.times import parse_span_within

    session = Session()
    cluster = _checked(lambda: parse_nodes(nodes), "--nodes")
    policies = _checked(lambda: parse_policies(f"{policy},{compare}"), "--policy")
    every = parse_span_within(checkpoints, "--checkpoints", least=1.0, most=7 * 86400.0)
    if sum(source is not None for source in (trace, history, synthetic)) != 1:
        raise BadRequestError(
            "one source of jobs is needed", hint="name a TRACE.csv, or give --history 30d or --synthetic philly"
        )
    if trace is not None:
        found = _read(trace)
    elif history is not None:
        found = _history(session, history)
    else:
        gpus = sum(node.gpus for node in cluster.values())
        found = _synthetic(synthetic or "", jobs=jobs, gpus=gpus, load=load, seed=seed)
    if write is not None:
        return _write(session, found, write)
    results = play(found, cluster, policies, checkpoint_seconds=every)
    if plot is not None:
        _plot(results, plot)
    if json:
        print_json(session, _document(nodes, results))
    else:
        for line in simulation_lines(session.console, results):
            session.console.print(line)
    return EXIT_OK


def _checked(parse: Callable[[], T], option: str) -> T:
    try:
        return parse()
    except ValueError as error:
        raise BadRequestError(f"{option}: {error}", hint="orch simulate --help lists what may be written") from error


def _read(path: Path) -> list[TraceJob]:
    from orchestrator.analysis.simulation.reading import TraceError, read_trace

    try:
        return read_trace(path)
    except TraceError as error:
        raise BadRequestError(str(error), hint=error.hint) from error
    except OSError as error:
        raise BadRequestError(
            f"{path} cannot be read: {error.strerror or error}", hint="name a CSV file that exists"
        ) from error


def _history(session: Session, since: str) -> list[TraceJob]:
    from orchestrator.api.views import TERMINAL_STATES
    from orchestrator.cli.commands.runs.past_jobs import trace_of
    from orchestrator.cli.times import parse_time

    at = parse_time(since, "--history", time.time())
    found = trace_of(session.client().jobs(states=sorted(TERMINAL_STATES), since=at).jobs)
    if not found:
        raise BadRequestError(
            f"no job with GPUs has ended since {since}", hint="name an earlier time, or --synthetic philly"
        )
    return found


def _synthetic(family: str, *, jobs: int, gpus: float, load: float, seed: int) -> list[TraceJob]:
    from orchestrator.analysis.simulation.synthetic import FAMILIES, synthetic_trace

    if family not in FAMILIES:
        raise BadRequestError(f"unknown family {family!r}", hint=f"one of: {', '.join(FAMILIES)}")
    return synthetic_trace(family, jobs=jobs, gpus=gpus, load=load, seed=seed)


def _write(session: Session, jobs: list[TraceJob], path: Path) -> int:
    from orchestrator.analysis.simulation.synthetic import write_trace

    try:
        write_trace(jobs, path)
    except OSError as error:
        raise BadRequestError(
            f"{path} cannot be written: {error.strerror or error}", hint="name another file"
        ) from error
    session.console.print(f"{path}: {len(jobs)} jobs")
    return EXIT_OK


def _plot(results: list[Result], path: Path) -> None:
    from orchestrator.analysis.plots.style import PlotError
    from orchestrator.analysis.simulation.plots import write_picture

    try:
        write_picture(results, path)
    except PlotError as error:
        raise BadRequestError(str(error), hint="or omit --plot") from error
    except OSError as error:
        raise BadRequestError(
            f"{path} cannot be written: {error.strerror or error}", hint="name another file"
        ) from error


def _document(nodes: str, results: list[Result]) -> dict[str, Any]:
    return {"nodes": nodes, "policies": {result.policy: result.figures.to_json() for result in results}}
