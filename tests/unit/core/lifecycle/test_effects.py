"""The table of effects: every phase with everything that it can hold, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from orchestrator.core.job.record import Hold, Holding, Job, Leaving, Running, Starting, hold_of
from orchestrator.core.lifecycle.advance import (
    EFFECTS,
    Ensure,
    KillRanks,
    ReleaseGang,
    StopRanks,
    desired_effect,
)
from orchestrator.core.states import JobState, StopPurpose
from tests.support.records import replace
from tests.unit.core import strategies
from tests.unit.core.builders import (
    T0,
    after,
    checkpoint,
    exited,
    failed,
    finished,
    gone,
    in_state,
    leaves_files,
    lost,
    pending,
    released,
    running,
    starting,
    stop,
)
from tests.unit.core.job.test_phases import PHASES

UP = running()


def ended_well(job: Job) -> Job:
    from orchestrator.core import events as ev

    zeros = [exited(job, rank=rank, exit_code=0) for rank in range(job.num_workers)]
    return after(job, *zeros, ev.AttemptSucceeded(job_id=job.id, at=T0 + 11, attempt=job.attempt_number))


def asked(job: Job) -> Job:
    """Return the job after rank 1 has left on a request from outside and the others are requested to follow."""
    from orchestrator.core import events as ev
    from orchestrator.core.facts.reasons import OthersAsked, Queued

    event = ev.RanksAsked(
        job_id=job.id, at=T0 + 20, attempt=job.attempt_number, reason=OthersAsked(cause=Queued()), deadline=T0 + 40
    )
    return after(job, exited(job, rank=1, exit_code=0, stop_seen_at=T0 + 9), event)


def holding(job: Job) -> dict[Hold, Job]:
    """Return the job as it is, without processes, with a lost gang, without a gang, and with files of a released one."""
    found = [job, after(job, gone(job)), after(job, lost(job)), after(job, released(job))]
    if type(job.phase) not in (Starting, Running, Leaving):  # their gangs are not released
        found.append(after(job, leaves_files(job)))
    return {hold_of(each.phase): each for each in found}


CASES: dict[str, dict[Hold, Job]] = {
    "Pending": {Hold.NOTHING: pending()},
    "Starting": holding(starting()),
    "Running": holding(UP),
    "Leaving": holding(asked(UP)),
    "Finishing": holding(ended_well(UP)),
    "Restarting": {h: j for h, j in holding(after(UP, failed(UP))).items() if h in (Hold.PROCESSES, Hold.ACTORS)},
    "Replacing": holding(after(UP, failed(UP, keep_gang=False))),
    "GivingUp": holding(after(UP, failed(UP, retry=False, keep_gang=False))),
    "Draining": holding(after(UP, stop(UP, StopPurpose.PAUSE))),
    "Suspended": {Hold.NOTHING: in_state(JobState.SUSPENDED)},
    "Succeeded": {Hold.NOTHING: in_state(JobState.SUCCEEDED)},
    "Failed": {Hold.NOTHING: in_state(JobState.FAILED)},
    "Cancelled": {Hold.NOTHING: in_state(JobState.CANCELLED)},
}
EVERY = [(phase, hold) for phase in PHASES for hold in Hold]


@pytest.mark.parametrize(("phase", "hold"), EVERY, ids=lambda value: getattr(value, "__name__", value))
def test_every_phase_with_everything_that_it_can_hold(phase: type, hold: Hold) -> None:
    job = CASES[phase.__name__].get(hold)
    assert (hold in EFFECTS[phase]) == (job is not None)
    if job is None:
        return
    assert type(job.phase) is phase
    assert hold_of(job.phase) is hold
    expected = EFFECTS[phase][hold]
    effect = desired_effect(job)
    assert (effect is None) if expected is None else (type(effect) is expected)


def test_the_table_has_every_phase_and_nothing_is_done_for_what_holds_nothing() -> None:
    assert set(EFFECTS) == set(PHASES)
    assert all(row[Hold.NOTHING] is None for row in EFFECTS.values() if Hold.NOTHING in row)
    assert all(set(row) == {Hold.NOTHING} for phase, row in EFFECTS.items() if not issubclass(phase, Holding))


def test_an_effect_says_which_attempt_and_gang_it_is_for() -> None:
    drains = CASES["Draining"][Hold.PROCESSES]
    assert desired_effect(UP) == Ensure(UP.id, 1, 1)
    assert desired_effect(drains) == StopRanks(drains.id, 1, 1, T0 + 50)
    assert desired_effect(CASES["GivingUp"][Hold.PROCESSES]) == KillRanks(UP.id, 1, 1)
    assert desired_effect(CASES["Finishing"][Hold.ACTORS]) == ReleaseGang(UP.id, 1)


def test_a_stop_that_comes_first_does_not_release_what_runs() -> None:
    """Every rank had ended, and the processes are not confirmed gone."""
    zeros = [exited(UP, rank=rank, exit_code=0) for rank in range(UP.num_workers)]
    job = after(UP, checkpoint(UP, 3), *zeros, stop(UP, StopPurpose.CANCEL))
    assert isinstance(desired_effect(job), StopRanks)
    assert isinstance(desired_effect(after(job, gone(job))), ReleaseGang)
    assert desired_effect(after(job, gone(job), released(job), finished(job, JobState.SUCCEEDED))) is None


@settings(max_examples=200, deadline=None)
@given(strategies.jobs)
def test_no_history_leads_to_what_the_table_lacks(job: Job) -> None:
    effect = desired_effect(job)
    assert effect is None or (bool(job.file_nodes) and effect.gang == job.gang)
    assert desired_effect(replace(job, reason="another")) == effect
