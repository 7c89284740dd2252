"""`orch simulate`: plays a trace of jobs through the scheduler."""

from __future__ import annotations

import time
from pathlib import Path  # noqa: TC003  # typer reads the annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from orchestrator.api.errors import EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Json, finite
from orchestrator.cli.render.table import Column, render_table
from orchestrator.cli.session import Session, answer, writing
from orchestrator.core.simulation import TraceJob
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from orchestrator.analysis.simulation import Result
    from orchestrator.api.views import JobView
    from orchestrator.cli.console import Console
    from orchestrator.core.simulation import Figures, Spread


def simulation_lines(console: Console, results: Sequence[Result]) -> list[str]:
    """Return the table's lines."""
    cells = [(result.policy, _cells(result.figures)) for result in results]
    columns: list[Column[str]] = [
        Column("", str, weight=200),
        *(Column(policy, one.get, right=True) for policy, one in cells),
    ]
    return render_table(console, columns, list(cells[0][1]))


def _cells(figures: Figures) -> dict[str, str]:
    found = {"jobs": str(figures.jobs)}
    if figures.refused:
        found["can never fit"] = str(figures.refused)
    found |= _times("completion", figures.completion) | _times("wait", figures.wait)
    return found | {
        "slowdown, mean": f"{figures.slowdown.mean:.2f}",
        "slowdown, p99": f"{figures.slowdown.p99:.2f}",
        "utilization": f"{figures.utilization:.1%}",
        "idle while jobs wait": f"{figures.idle_while_waiting:.1%}",
        "of that on partly used nodes": f"{figures.fragmentation:.1%}",
        "fairness (Jain)": f"{figures.fairness:.3f}",
        "preemptions": str(figures.preemptions),
        "GPU time lost": f"{figures.lost_gpu_seconds / 3600:.1f} h",
        "makespan": duration(figures.makespan),
    }


def _times(name: str, spread: Spread) -> dict[str, str]:
    return {
        f"{name}, mean": duration(spread.mean),
        f"{name}, median": duration(spread.median),
        f"{name}, p99": duration(spread.p99),
    }


def trace_of(jobs: Iterable[JobView]) -> list[TraceJob]:
    """Return the ended jobs that ran on GPUs, by submission; each lasts from its first start to its end."""
    found = []
    for job in jobs:
        gpus = float((job.resources.get("resources_per_worker") or {}).get("gpu") or 0)
        if gpus <= 0 or job.started_at is None or job.ended_at is None:
            continue
        found.append(
            TraceJob(
                at=job.submitted_at,
                seconds=max(1.0, job.ended_at - job.started_at),
                ranks=job.num_workers,
                gpus=gpus,
                user=job.user,
                priority=job.priority,
            )
        )
    return sorted(found, key=lambda job: job.at)


T = TypeVar("T")


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
    from orchestrator.analysis.simulation import compare as play
    from orchestrator.analysis.simulation import parse_nodes, parse_policies
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
    return answer(session, simulation_lines(session.console, results), _document(nodes, results), as_json=json)


def _checked(parse: Callable[[], T], option: str) -> T:
    try:
        return parse()
    except ValueError as error:
        raise BadRequestError(f"{option}: {error}", hint="orch simulate --help lists what may be written") from error


def _read(path: Path) -> list[TraceJob]:
    from orchestrator.analysis.simulation import TraceError, read_trace

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
    from orchestrator.cli.times import parse_time

    at = parse_time(since, "--history", time.time())
    found = trace_of(session.client().jobs(states=sorted(TERMINAL_STATES), since=at).jobs)
    if not found:
        raise BadRequestError(
            f"no job with GPUs has ended since {since}", hint="name an earlier time, or --synthetic philly"
        )
    return found


def _synthetic(family: str, *, jobs: int, gpus: float, load: float, seed: int) -> list[TraceJob]:
    from orchestrator.analysis.simulation import FAMILIES, synthetic_trace

    if family not in FAMILIES:
        raise BadRequestError(f"unknown family {family!r}", hint=f"one of: {', '.join(FAMILIES)}")
    return synthetic_trace(family, jobs=jobs, gpus=gpus, load=load, seed=seed)


def _write(session: Session, jobs: list[TraceJob], path: Path) -> int:
    from orchestrator.analysis.simulation import write_trace

    with writing(path, "name another file"):
        write_trace(jobs, path)
    session.console.print(f"{path}: {len(jobs)} jobs")
    return EXIT_OK


def _plot(results: list[Result], path: Path) -> None:
    from orchestrator.analysis.plots import PlotError
    from orchestrator.analysis.simulation import write_picture

    try:
        with writing(path, "name another file"):
            write_picture(results, path)
    except PlotError as error:
        raise BadRequestError(str(error), hint="or omit --plot") from error


def _document(nodes: str, results: list[Result]) -> dict[str, Any]:
    return {"nodes": nodes, "policies": {result.policy: result.figures.to_json() for result in results}}
