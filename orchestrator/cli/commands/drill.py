"""`orch drill`: inject a fault into a running job and check that it recovers; once, or repeatedly in a campaign."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.api.errors import (
    EXIT_INTERRUPTED,
    EXIT_JOB_FAILED,
    EXIT_OK,
    EXIT_REFUSED,
    BadRequestError,
    RefusedError,
)
from orchestrator.cli.commands.selecting import ME, user_name
from orchestrator.cli.commands.shared import Json, Yes, ask, complete_job, ended_in_order
from orchestrator.cli.console import clean
from orchestrator.cli.drills.drills import FELT_BY_ALL, IN_A_CAMPAIGN, WHAT, Kind
from orchestrator.cli.session import Session, answer, writing
from orchestrator.cli.times import parse_span_within
from orchestrator.units import duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.views import JobView
    from orchestrator.cli.drills.campaign import CampaignReport
    from orchestrator.cli.drills.drills import DrillReport


MAX_SECONDS = 86_400.0
MAX_JOBS = 500
MAX_NAMED = 5


class Victim(enum.StrEnum):
    """Process that ``--kill`` kills."""

    RANK = "rank"
    ACTOR = "actor"
    AGENT = "agent"
    DAEMON = "daemon"
    RAY = "ray"


def drill(
    job: Annotated[
        str | None,
        typer.Argument(
            metavar="JOB",
            help="An id, the beginning of one, or a name. A campaign without one takes all your running jobs.",
            autocompletion=complete_job,
        ),
    ] = None,
    kill: Annotated[Victim | None, typer.Option("--kill", help="Kill one of its processes.")] = None,
    hang: Annotated[bool, typer.Option("--hang", help="Stop a rank without ending it.")] = False,
    tear_checkpoint: Annotated[
        bool, typer.Option("--tear-checkpoint", help="Damage the newest checkpoint, then make the job read it.")
    ] = False,
    fill_disk: Annotated[
        bool, typer.Option("--fill-disk", help="Fill the disk of its checkpoints until a save has failed.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", metavar="N", min=0, help="The rank that gets the fault.")] = 0,
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="SPAN", help="How long to wait for the recovery: 90s, 5m.")
    ] = "2m",
    campaign: Annotated[
        str | None,
        typer.Option("--campaign", metavar="SPAN", help="Inject faults one after the other for this time: 30m."),
    ] = None,
    kinds: Annotated[
        str | None,
        typer.Option("--kinds", metavar="KIND,…", help=f"A campaign's drills, of {', '.join(Kind)}."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", metavar="N", min=0, help="Seed of the campaign's random choices.")
    ] = None,
    html: Annotated[
        str | None, typer.Option("--html", metavar="FILE", help="Write the campaign's report as a page, too.")
    ] = None,
    yes: Yes = False,
    json: Json = False,
) -> int:
    """Inject a fault into a running job and report the recovery; exit code 1 when the job did not recover.

    With --campaign: many faults, of all kinds, one after the other, in your running jobs. Each job keeps the last restart
    of each of its budgets.
    """
    chosen = [
        *(name for name, on in ((Kind.HANG, hang), (Kind.TEAR_CHECKPOINT, tear_checkpoint)) if on),
        *([Kind.FILL_DISK] if fill_disk else []),
        *([Kind(kill.value)] if kill is not None else []),
    ]
    seconds = parse_span_within(timeout, "--timeout", least=1.0, most=MAX_SECONDS)
    session = Session()
    if campaign is not None:
        if chosen or rank:
            raise BadRequestError("a campaign chooses drills and ranks itself", hint="leave some out with --kinds")
        span = parse_span_within(campaign, "--campaign", least=1.0, most=MAX_SECONDS)
        return _campaign(session, job, _kinds(kinds), span, seconds, seed=seed, html=html, yes=yes, json=json)
    if kinds is not None or seed is not None or html is not None:
        raise BadRequestError("--kinds, --seed and --html belong to a campaign", hint="add --campaign 30m")
    if job is None:
        raise BadRequestError("which job?", hint="name one, or take all of yours with --campaign 30m")
    if len(chosen) != 1:
        raise BadRequestError(
            "one drill at a time" if chosen else "which drill?",
            hint="--kill rank, actor, agent, daemon or ray, --hang, --tear-checkpoint, or --fill-disk",
        )
    return _once(session, job, chosen[0], rank, seconds, yes=yes, json=json)


def _once(session: Session, job: str, kind: Kind, rank: int, seconds: float, *, yes: bool, json: bool) -> int:
    from orchestrator.cli.drills.drills import Drill

    planned = Drill(session.client(), job, rank=rank, seconds=seconds)
    if not yes:
        ask(session, f"{planned.job.id}: {WHAT[kind].format(rank=rank)}")
    report = planned.run(kind, much=yes)
    code = EXIT_OK if report.intact else EXIT_JOB_FAILED
    return answer(session, _lines(report), report.to_json(), as_json=json, code=code)


# -- a campaign


def _campaign(
    session: Session,
    job: str | None,
    kinds: Sequence[Kind],
    seconds: float,
    drill_seconds: float,
    *,
    seed: int | None,
    html: str | None,
    yes: bool,
    json: bool,
) -> int:
    import random

    from orchestrator.cli.drills.campaign import Campaign, lines, page, round_line

    client = session.client()
    jobs = _targets(session, job)
    if not yes:
        ask(session, _warning(client, jobs, kinds, seconds))
    planned = Campaign(
        client=client,
        jobs=[each.id for each in jobs],
        kinds=kinds,
        seconds=seconds,
        drill_seconds=drill_seconds,
        seed=random.randrange(2**32) if seed is None else seed,  # noqa: S311 - repeats a campaign
        much=yes,
        on_round=lambda done: session.console.note(round_line(done)),
    )
    with ended_in_order():
        report = planned.run()
    answer(session, lines(session.console, report), report.to_json(), as_json=json)
    if html is not None:
        with writing(html, "choose another --html FILE"):
            Path(html).write_text(page(report), encoding="utf-8")
    return _exit_code(report)


def _exit_code(report: CampaignReport) -> int:
    if not report.intact:
        return EXIT_JOB_FAILED
    if report.interrupted:
        return EXIT_INTERRUPTED
    return EXIT_OK if report.done else EXIT_REFUSED


def _kinds(text: str | None) -> list[Kind]:
    if text is None:
        return list(IN_A_CAMPAIGN)
    names = list(dict.fromkeys(word.strip() for word in text.split(",")))
    unknown = [name for name in names if name not in set(Kind)]
    if unknown:
        raise BadRequestError(
            f"unknown drill {unknown[0]!r}", hint=f"--kinds takes {', '.join(Kind)}, joined by commas"
        )
    return [Kind(name) for name in names]


def _targets(session: Session, job: str | None) -> list[JobView]:
    """Return the named job, or all running jobs of the caller."""
    client = session.client()
    if job is not None:
        found = [client.job(job)]
    else:
        found = list(client.jobs(user=user_name(session, ME), states=("RUNNING",), limit=MAX_JOBS).jobs)
    running = [each for each in found if each.state == "RUNNING"]
    if not running:
        what = f"{found[0].id} is {found[0].state}" if found else "no job of yours is running"
        raise RefusedError(f"{what}; a campaign needs a running job", hint="submit one, and wait until it runs")
    return running


def _warning(client: Client, jobs: Sequence[JobView], kinds: Sequence[Kind], seconds: float) -> str:
    """Return the text of the confirmation: the faults, the jobs, and the other jobs that the faults also reach."""
    felt = [kind for kind in kinds if kind in FELT_BY_ALL]
    own = {job.id for job in jobs}
    running = client.jobs(states=("RUNNING",), limit=MAX_JOBS).jobs if felt else ()
    others = [job for job in running if job.id not in own]
    text = f"injects {', '.join(kinds)} into {_named(jobs)} for {duration(seconds)}, one after the other"
    return f"{text}; {', '.join(felt)} also reaches {_named(others)}" if others else text


def _named(jobs: Sequence[JobView]) -> str:
    more = f" and {len(jobs) - MAX_NAMED} more" if len(jobs) > MAX_NAMED else ""
    return ", ".join(f"{job.id} ({job.user})" for job in jobs[:MAX_NAMED]) + more


def _lines(report: DrillReport) -> list[str]:
    rows = [
        ("did", clean(report.did)),
        ("detected after", duration(report.detection_seconds) or "-"),
        ("recovered after", duration(report.recovery_seconds) or "-"),
        ("steps lost", "-" if report.steps_lost is None else str(report.steps_lost)),
        ("attempts", f"{report.attempt_before} before, {report.attempt_after} now"),
        ("good checkpoint", "-" if report.checkpoint_step is None else f"step {report.checkpoint_step}"),
        ("intact", "yes" if report.intact else "no: " + "; ".join(clean(p) for p in report.problems)),
    ]
    return [f"{label:<16} {text}" for label, text in rows]
