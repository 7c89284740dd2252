"""Campaigns: drills one after the other, chosen by a seed; their report and its texts."""

from __future__ import annotations

import math
import random
import time
from dataclasses import asdict, dataclass, field
from html import escape
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.errors import OrchError, RefusedError
from orchestrator.cli.console import clean
from orchestrator.cli.drills.drills import CHARGED_TO, FELT_BY_ALL, Drill, Kind, NotRecoveredError
from orchestrator.cli.render.table import Column, render_table
from orchestrator.units import clock, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.views import JobView
    from orchestrator.cli.console import Console
    from orchestrator.cli.drills.drills import DrillReport


@dataclass(slots=True, kw_only=True)
class Round:
    """One drill. ``refused``: why no fault was injected; ``problem``: the part of the recovery that was not seen."""

    at: float
    kind: Kind
    job_id: str
    rank: int
    report: DrillReport | None = None
    refused: str = ""
    problem: str = ""

    @property
    def intact(self) -> bool:
        """Whether the job recovered as expected."""
        return self.report is not None and self.report.intact

    @property
    def problems(self) -> list[str]:
        """Problems of the drill and of its report."""
        return [*([self.problem] if self.problem else []), *(self.report.problems if self.report else [])]


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReached:
    """A job has used ``used`` restarts of a failure class; another drill would take its last one."""

    job_id: str
    failure_class: str
    used: int
    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRepeatedly:
    """The job has refused the kind ``times`` times in a row."""

    times: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftAlone:
    """Kinds that a job was not drilled with at the end of the campaign, and why."""

    job_id: str
    kinds: tuple[Kind, ...]
    reason: BudgetReached | RefusedRepeatedly


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of one kind. Seconds are those of the drills with a measurement; None without any."""

    kind: str
    done: int
    refused: int
    intact: int
    detection_p50: float | None
    detection_max: float | None
    recovery_p50: float | None
    recovery_p99: float | None
    recovery_max: float | None
    steps_lost: int


@dataclass(slots=True, kw_only=True)
class CampaignReport:
    """Results of a campaign. ``ended_because`` is empty if the time was over; ``problems`` belong to no round."""

    seed: int
    began_at: float
    jobs: list[str]
    kinds: list[Kind]
    seconds: float = 0.0
    rounds: list[Round] = field(default_factory=list)
    interrupted: bool = False
    ended_because: str = ""
    problems: list[str] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)

    @property
    def done(self) -> int:
        """Number of drills that injected a fault."""
        return sum(not done.refused for done in self.rounds)

    @property
    def intact(self) -> bool:
        """Whether every job recovered from every drill; true if none was done."""
        return not self.problems and all(done.intact or done.refused for done in self.rounds)

    def figures(self) -> list[Figures]:
        """Return the figures by kind, in the order of the kinds."""
        return [_figures(kind, [done for done in self.rounds if done.kind is kind]) for kind in self.kinds]

    def all_problems(self) -> list[str]:
        """Return the problems, each with its job and kind."""
        own = [f"{done.kind} on {done.job_id}: {problem}" for done in self.rounds for problem in done.problems]
        return [*own, *self.problems]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-ready values."""
        return {
            **asdict(self),
            "done": self.done,
            "intact": self.intact,
            "rounds": [{**asdict(done), "intact": done.intact} for done in self.rounds],
            "figures": [asdict(one) for one in self.figures()],
        }


def _figures(kind: Kind, rounds: Sequence[Round]) -> Figures:
    reports = [done.report for done in rounds if done.report is not None]
    detected = [r.detection_seconds for r in reports if r.detection_seconds is not None]
    recovered = [r.recovery_seconds for r in reports if r.recovery_seconds is not None]
    return Figures(
        kind=kind.value,
        done=sum(not done.refused for done in rounds),
        refused=sum(bool(done.refused) for done in rounds),
        intact=sum(done.intact for done in rounds),
        detection_p50=quantile(detected, 0.5),
        detection_max=max(detected, default=None),
        recovery_p50=quantile(recovered, 0.5),
        recovery_p99=quantile(recovered, 0.99),
        recovery_max=max(recovered, default=None),
        steps_lost=sum(r.steps_lost or 0 for r in reports),
    )


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least this share of the values does not exceed; None without values."""
    return sorted(values)[math.ceil(share * len(values)) - 1] if values else None


POLL_SECONDS: Final = 0.1
MAX_REFUSALS: Final = 3
"""A kind that a job has refused this many times in a row is no longer tried on that job."""
CHARGEABLE: Final = ("STARTING", "RUNNING", "RECOVERING")
"""States of jobs of which the end of Ray ends an attempt."""


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Runs drills on the jobs with the ids ``jobs``. ``on_round`` is called with each finished round."""

    client: Client
    jobs: Sequence[str]
    kinds: Sequence[Kind]
    seconds: float
    drill_seconds: float
    seed: int
    much: bool = False
    on_round: Callable[[Round], None] = lambda _: None
    _refusals: dict[tuple[str, Kind], int] = field(default_factory=dict)
    _known_budgets: dict[str, dict[str, Any]] = field(default_factory=dict)

    def run(self) -> CampaignReport:
        """Run the campaign. Ctrl-C and SIGTERM end it: stopped processes continue, and the results are reported."""
        dice, began = random.Random(self.seed), time.monotonic()  # noqa: S311 - a seed that repeats the campaign
        report = CampaignReport(seed=self.seed, began_at=time.time(), jobs=list(self.jobs), kinds=list(self.kinds))
        try:
            while (left := self.seconds - (time.monotonic() - began)) > 0:
                choice = self._choice(dice)
                if choice is None:
                    report.ended_because = "no job is left for a drill"
                    break
                job, kind = choice
                done = self._round(job, kind, dice.randrange(job.num_workers))
                report.rounds.append(done)
                self.on_round(done)
                if not done.intact and not done.refused:
                    report.ended_because = "a drill found a defect; its traces are kept"
                    break
                self._wait_for_progress(job.id, done, min(left, self.drill_seconds))
        except (KeyboardInterrupt, SystemExit):
            report.interrupted = True
        except OrchError as error:
            report.problems.append(str(error))
        report.seconds = round(time.monotonic() - began, 3)
        self._conclude(report)
        return report

    def _choice(self, dice: random.Random) -> tuple[JobView, Kind] | None:
        """Return a running job and a kind of drill; wait while jobs only recover. None if no job can be chosen."""
        deadline = time.monotonic() + self.drill_seconds
        while True:
            jobs = [self.client.job(job_id) for job_id in self.jobs]
            alive = [job for job in jobs if not job.is_terminal]
            running = [job for job in alive if job.state == "RUNNING"]
            others = self._others()
            choices = [
                (job, kind)
                for job in running
                for kind in self.kinds
                if not self._obstacle(job, kind, [*alive, *others])
            ]
            if choices:
                kind = dice.choice(sorted({kind for _, kind in choices}))
                return dice.choice([choice for choice in choices if choice[1] is kind])
            if len(running) == len(alive) or time.monotonic() > deadline:
                return None
            time.sleep(POLL_SECONDS)

    def _others(self) -> list[JobView]:
        """Return the jobs, of all users, that are not the campaign's and that a drill of it would charge."""
        if Kind.RAY not in self.kinds:
            return []
        return [job for job in self.client.jobs(states=CHARGEABLE).jobs if job.id not in self.jobs]

    def _obstacle(self, job: JobView, kind: Kind, alive: Sequence[JobView]) -> BudgetReached | RefusedRepeatedly | None:
        """Return why the job is not drilled with this kind; None if it may be.

        ``alive`` has the jobs that a drill of Ray is charged to: those of the campaign that have not ended, and others.
        """
        if self._refusals.get((job.id, kind), 0) >= MAX_REFUSALS:
            return RefusedRepeatedly(times=MAX_REFUSALS)
        charged = CHARGED_TO.get(kind)
        if charged is None:
            return None
        reached = (self._reached(each, charged) for each in (alive if kind in FELT_BY_ALL else (job,)))
        return next(filter(None, reached), None)

    def _reached(self, job: JobView, failure_class: str) -> BudgetReached | None:
        budget, used = self._budgets(job).get(failure_class), job.restarts_by_class.get(failure_class, 0)
        if not isinstance(budget, int) or used + 1 < budget:
            return None
        return BudgetReached(job_id=job.id, failure_class=failure_class, used=used, budget=budget)

    def _budgets(self, job: JobView) -> dict[str, Any]:
        if job.id not in self._known_budgets:  # a job's spec does not change
            self._known_budgets[job.id] = self.client.spec(job.id).spec.get("retry", {}).get("max_restarts", {})
        return self._known_budgets[job.id]

    def _round(self, job: JobView, kind: Kind, rank: int) -> Round:
        done = Round(at=time.time(), kind=kind, job_id=job.id, rank=rank)
        try:
            drill = Drill(self.client, job.id, rank=rank, seconds=self.drill_seconds)
            done.report = drill.run(kind, much=self.much)
        except NotRecoveredError as error:
            done.problem = str(error)
        except RefusedError as error:
            done.refused = str(error)
        refused = self._refusals.get((job.id, kind), 0) + 1 if done.refused else 0
        self._refusals[job.id, kind] = refused
        return done

    def _wait_for_progress(self, job_id: str, done: Round, seconds: float) -> None:
        """Wait until a job that saves has saved after the drill: restarts without progress are charged to a budget."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            job = self.client.job(job_id)
            saved = job.checkpoint is None or (job.checkpoint.at or 0.0) >= done.at
            if job.is_terminal or (job.state == "RUNNING" and (saved or done.refused)):
                return
            time.sleep(POLL_SECONDS)

    def _conclude(self, report: CampaignReport) -> None:
        """Add the jobs that did not recover, and the kinds that jobs were not drilled with."""
        try:
            jobs = [self.client.job(job_id) for job_id in self.jobs]
            report.problems += [f"{job.id} is FAILED: {job.reason}" for job in jobs if job.state == "FAILED"]
            report.left_alone = self._left_alone([job for job in jobs if not job.is_terminal])
        except OrchError as error:
            report.problems.append(f"the daemon does not answer at the end: {error}")

    def _left_alone(self, alive: Sequence[JobView]) -> list[LeftAlone]:
        found: dict[tuple[str, BudgetReached | RefusedRepeatedly], list[Kind]] = {}
        charged = [*alive, *self._others()]
        for job in alive:
            for kind in self.kinds:
                if reason := self._obstacle(job, kind, charged):
                    found.setdefault((job.id, reason), []).append(kind)
        return [LeftAlone(job_id=job, kinds=tuple(kinds), reason=reason) for (job, reason), kinds in found.items()]


HEAD: Final = ("KIND", "DONE", "INTACT", "REFUSED", "DETECTED p50", "max", "RECOVERED p50", "p99", "max", "STEPS LOST")
ROUNDS: Final = ("TIME", "KIND", "JOB", "RANK", "DID", "DETECTED", "RECOVERED", "STEPS LOST", "RESULT")


def round_line(done: Round) -> str:
    """Format a finished drill as a line."""
    if done.refused:
        return f"{clock(done.at)}  {done.kind} on {done.job_id}: not done: {clean(done.refused)}"
    report = done.report
    did = clean(report.did) if report else done.kind.value
    durations = (
        f"detected after {duration(report.detection_seconds) or '-'}, recovered after {duration(report.recovery_seconds) or '-'}"
        if report
        else ""
    )
    result = "intact" if done.intact else "NOT INTACT: " + "; ".join(clean(p) for p in done.problems)
    return "  ".join(part for part in (clock(done.at), f"{done.job_id}: {did}", durations, result) if part)


def outcome(report: CampaignReport) -> str:
    """Format the outcome of the campaign as a line."""
    how = "interrupted" if report.interrupted else report.ended_because or "its time has passed"
    state = ("every job is intact" if report.done else "no fault was injected") if report.intact else "NOT INTACT"
    return f"{report.done} drills in {duration(report.seconds)} ({how}), seed {report.seed}: {state}"


def lines(console: Console, report: CampaignReport) -> list[str]:
    """Format the figures by kind, and the outcome."""
    columns: list[Column[list[str]]] = [
        Column(title, itemgetter(index), right=index > 0) for index, title in enumerate(HEAD)
    ]
    rows = [_cells(one) for one in report.figures() if one.done or one.refused]
    problems = [f"problem: {clean(problem)}" for problem in report.all_problems()]
    return [*render_table(console, columns, rows), *left_alone(report), *problems, outcome(report)]


def left_alone(report: CampaignReport) -> list[str]:
    """Format the kinds that jobs were not drilled with, and why, as lines."""
    return [f"left alone: {one.job_id}, {', '.join(one.kinds)}: {_reason(one.reason)}" for one in report.left_alone]


def _reason(reason: BudgetReached | RefusedRepeatedly) -> str:
    if not isinstance(reason, BudgetReached):
        return f"refused {reason.times} times in a row"
    kept = "the last one is kept for the job" if reason.used < reason.budget else "none is left"
    used = f"{reason.failure_class} restarts of {reason.job_id} used: {reason.used} of {reason.budget}"
    return f"{used}, and {kept}; a higher retry.max_restarts.{reason.failure_class} allows more"


def page(report: CampaignReport) -> str:
    """Format the report as one HTML page that loads no other file."""
    from orchestrator.analysis.report import document, html_table

    state = "" if report.intact else ' class="bad"'
    notes = [f'<li class="bad">{escape(problem)}</li>' for problem in report.all_problems()]
    notes += [f"<li>{escape(line)}</li>" for line in left_alone(report)]
    body = [
        "<h1>Campaign of drills</h1>",
        f"<p{state}>{escape(outcome(report))}</p>\n<p>Jobs: {escape(', '.join(report.jobs))}</p>",
        *(["<ul>", *notes, "</ul>"] if notes else []),
        f"<h2>By kind</h2>\n{html_table(HEAD, [_cells(one) for one in report.figures()])}",
        f"<h2>Drills</h2>\n{html_table(ROUNDS, [_round_cells(done) for done in report.rounds])}",
    ]
    return document("Campaign of drills", body)


def _cells(one: Figures) -> list[str]:
    measured = (one.detection_p50, one.detection_max, one.recovery_p50, one.recovery_p99, one.recovery_max)
    counts = [one.kind, str(one.done), str(one.intact), str(one.refused)]
    return [*counts, *(duration(value) or "-" for value in measured), str(one.steps_lost)]


def _round_cells(done: Round) -> list[str]:
    report = done.report
    measured = (report.detection_seconds, report.recovery_seconds) if report else (None, None)
    lost = "-" if report is None or report.steps_lost is None else str(report.steps_lost)
    result = "intact" if done.intact else "; ".join(done.problems) or f"not done: {done.refused}"
    did = report.did if report else ""
    return [
        clock(done.at),
        done.kind.value,
        done.job_id,
        str(done.rank),
        did,
        *(duration(value) or "-" for value in measured),
        lost,
        result,
    ]
