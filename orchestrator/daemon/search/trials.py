"""Trials of a search: where they stand, and the submission of a further one from the archive of an earlier one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from msgspec import structs

from orchestrator.api.service import Caller
from orchestrator.core.facts.reasons import is_pruned
from orchestrator.core.states import JobState
from orchestrator.daemon.sharing import check_queue
from orchestrator.daemon.submitting.checking import Checked
from orchestrator.daemon.submitting.submission import check_fits, prepare_rerun
from orchestrator.spec.job import parse_trial
from orchestrator.train.trainer.config.config import trainer_findings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from orchestrator.core.events import JobSubmitted, MatrixCell
    from orchestrator.core.job.record import Job
    from orchestrator.daemon.loop import Loop
    from orchestrator.daemon.search.files import SearchPlan
    from orchestrator.daemon.submitting.under_way import UnderWay
    from orchestrator.runtime.pools import Pool
    from orchestrator.spec.settings import Settings


async def prepare_trial(
    base: Job,
    plan: SearchPlan,
    cell: MatrixCell,
    secrets: Mapping[str, str],
    loop: Loop,
    settings: Settings,
    files: Pool,
    under_way: UnderWay,
) -> JobSubmitted:
    """Lay out the files of a trial at ``cell``, as ``base``'s were. Raises SpecError, RefusedError, OSError.

    The conditions that the first trials waited for (`depends_on`, `start_at`, `hold`) do not apply.
    """
    spec = parse_trial(
        plan.yaml,
        cell.values,
        source=plan.source,
        overrides=plan.overrides,
        rules=(trainer_findings,),
        environ=plan.passed,
    )
    spec = replace(spec, hold=False, start_at=None)
    check_fits(Checked(spec=spec, python=base.submission.python, directory=None), loop.nodes)
    check_queue(spec, loop.shares.sharing)
    who = base.submission
    caller = Caller(uid=who.uid, gid=-1, user=who.user, is_owner=False)
    event = await prepare_rerun(
        base, spec, caller, settings, secrets, None, files=files, at=loop.now(), under_way=under_way
    )
    return structs.replace(event, matrix=cell, rerun_of=None)


MOST_FAILURES: Final = 3
"""This many failed trials end a search in which no trial has ended well: the script is broken, not its values."""
SETTLE_SECONDS: Final = 3.0
"""The last report and the GPUs' last samples of a job are written this much after its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """The trials as the advisor receives them, the next number, and how many run, have failed, and have ended well."""

    trials: tuple[dict[str, Any], ...]
    following: int
    live: int
    failed: int
    ended_well: int

    def gives_up(self, plan: SearchPlan) -> str:
        """Return why no further trial is submitted; empty where one may be."""
        if plan.fail_fast and self.failed:
            return "a trial failed (fail_fast)"
        if self.failed >= MOST_FAILURES and not self.ended_well:
            return f"{self.failed} trials failed and none ended well; fix the script and submit it again"
        return ""

    def want(self, plan: SearchPlan) -> int:
        """Return how many trials may be submitted now."""
        if self.gives_up(plan):
            return 0
        return max(0, min(plan.max_concurrent - self.live, plan.trials - self.following))

    def is_over(self, plan: SearchPlan) -> bool:
        """Whether every trial has ended and no further one comes."""
        return self.live == 0 and (self.following >= plan.trials or bool(self.gives_up(plan)))


def standing(jobs: Iterable[Job], now: float, directory_of: Callable[[str], object]) -> Standing:
    """Return the standing of a search; ``jobs`` are those of its matrix. The newest job of each trial counts."""
    newest: dict[int, Job] = {}
    for job in sorted(jobs, key=lambda job: job.submission.sequence):
        if job.submission.matrix is not None:
            newest[job.submission.matrix.index] = job
    states = {number: trial_state(job, now) for number, job in newest.items()}
    trials = tuple(
        {
            "number": number,
            "state": states[number],
            "values": dict(job.submission.matrix.values),
            "directory": str(directory_of(job.id)),
        }
        for number, job in sorted(newest.items())
        if job.submission.matrix is not None
    )
    return Standing(
        trials=trials,
        following=max(newest, default=-1) + 1,
        live=sum(state == "running" for state in states.values()),
        failed=sum(job.state is JobState.FAILED for job in newest.values()),
        ended_well=sum(state in ("complete", "pruned") for state in states.values()),
    )


def settles(job: Job, now: float) -> bool:
    """Whether records of an ended job may still be incomplete. An end in the future is from before a step of the clock."""
    return job.ended_at is not None and 0.0 <= now - job.ended_at < SETTLE_SECONDS


def trial_state(job: Job, now: float) -> str:
    """Return the state of a trial: running until its records are complete."""
    if not job.state.is_terminal or settles(job, now):
        return "running"
    if job.state is JobState.SUCCEEDED:
        return "complete"
    return "pruned" if is_pruned(job.reason) else "failed"
