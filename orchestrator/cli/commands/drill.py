"""`orch drill`: hurt a running job on purpose, and see that it comes through."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import EXIT_JOB_FAILED, EXIT_OK, BadRequestError
from orchestrator.cli.commands.shared import Job, Json, Yes, ask
from orchestrator.cli.console import clean
from orchestrator.cli.render.units import parse_span_within
from orchestrator.cli.session import Session, print_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.cli.drills.drills import DrillReport


MAX_SECONDS = 86_400.0


class Victim(enum.StrEnum):
    """What ``--kill`` kills."""

    RANK = "rank"
    ACTOR = "actor"
    AGENT = "agent"
    DAEMON = "daemon"
    RAY = "ray"


WHAT = {
    "rank": "kills the training process of rank {rank}; the job continues from its newest checkpoint",
    "actor": "kills the actor of rank {rank}; the gang is started again and continues from its newest checkpoint on storage",
    "agent": "kills the agent of the node of rank {rank}; Ray starts another, and all jobs keep running",
    "ray": "kills Ray's head; EVERY job of this daemon continues from its newest checkpoint on storage",
    "fill-disk": "fills the disk of its checkpoints until a save has failed; the job keeps running and saves again",
    "daemon": "kills the daemon and starts it again; all jobs keep running; submissions fail meanwhile",
    "hang": "stops rank {rank} without ending it; when that is found, the job goes on from its newest checkpoint",
    "tear-checkpoint": "destroys the newest checkpoint and kills the actor of rank {rank}; the job goes back to the one before",
}


def drill(
    job: Job,
    kill: Annotated[Victim | None, typer.Option("--kill", help="Kill one of its processes.")] = None,
    hang: Annotated[bool, typer.Option("--hang", help="Stop a rank without ending it.")] = False,
    tear_checkpoint: Annotated[
        bool, typer.Option("--tear-checkpoint", help="Damage the newest checkpoint, then make the job read it.")
    ] = False,
    fill_disk: Annotated[
        bool, typer.Option("--fill-disk", help="Fill the disk of its checkpoints until a save has failed.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="Which rank is hit.")] = 0,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="SPAN", help="How long to wait for the recovery: 90s, 5m.")
    ] = "2m",
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Inject a fault into a running job and report the recovery; exit code 1 when the job did not recover."""
    from orchestrator.cli.drills.machine import MachineDrill

    chosen = [
        name for name, on in (("hang", hang), ("tear-checkpoint", tear_checkpoint), ("fill-disk", fill_disk)) if on
    ]
    chosen += [kill.value] if kill is not None else []
    if len(chosen) != 1:
        raise BadRequestError(
            "one drill at a time" if chosen else "which drill?",
            hint="--kill rank, actor, agent, daemon or ray, --hang, --tear-checkpoint, or --fill-disk",
        )
    (what,) = chosen
    seconds = parse_span_within(timeout, "--timeout", least=1.0, most=MAX_SECONDS)
    session = Session()
    planned = MachineDrill(session.client(), job, rank=rank, seconds=seconds)
    if not yes:
        ask(session, f"{planned.job.id}: {WHAT[what].format(rank=rank)}")
    run: dict[str, Callable[[], DrillReport]] = {
        "rank": planned.kill_rank,
        "actor": planned.kill_actor,
        "daemon": planned.kill_daemon,
        "agent": planned.kill_agent,
        "ray": planned.kill_ray,
        "hang": planned.hang,
        "tear-checkpoint": planned.tear_checkpoint,
        "fill-disk": lambda: planned.fill_disk(much=yes),
    }
    report = run[what]()
    if json:
        print_json(session, report.to_json())
    else:
        _print(session, report)
    return EXIT_OK if report.intact else EXIT_JOB_FAILED


def _print(session: Session, report: DrillReport) -> None:
    def seconds(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f} s"

    rows = [
        ("did", clean(report.did)),
        ("detected after", seconds(report.detection_seconds)),
        ("recovered after", seconds(report.recovery_seconds)),
        ("steps lost", "-" if report.steps_lost is None else str(report.steps_lost)),
        ("attempts", f"{report.attempt_before} before, {report.attempt_after} now"),
        ("good checkpoint", "-" if report.checkpoint_step is None else f"step {report.checkpoint_step}"),
        ("intact", "yes" if report.intact else "no: " + "; ".join(clean(p) for p in report.problems)),
    ]
    for label, text in rows:
        session.console.print(f"{label:<16} {text}")
