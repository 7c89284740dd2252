"""Runs a campaign: drills of several kinds on several jobs, one after the other, drawn from a seed, for a time.

Each restart budget keeps one restart for the job itself. The next drill waits until the last job has made progress.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from orchestrator.api.errors import OrchError, RefusedError
from orchestrator.cli.drills.campaign_report import BudgetReached, CampaignReport, LeftAlone, RefusedRepeatedly, Round
from orchestrator.cli.drills.drills import NotRecoveredError
from orchestrator.cli.drills.kinds import CHARGED_TO, FELT_BY_ALL, Kind
from orchestrator.cli.drills.machine import MachineDrill

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from orchestrator.api.client import Client
    from orchestrator.api.views import JobView

POLL_SECONDS: Final = 0.1
MOST_REFUSALS: Final = 3
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
        if self._refusals.get((job.id, kind), 0) >= MOST_REFUSALS:
            return RefusedRepeatedly(times=MOST_REFUSALS)
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
            drill = MachineDrill(self.client, job.id, rank=rank, seconds=self.drill_seconds)
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
