"""Each phase has only the fields that exist in it; contradictory values cannot be made."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given, settings

from orchestrator.core.codec import RecordError
from orchestrator.core.errors import BrokenRuleError
from orchestrator.core.facts.reasons import ByUser
from orchestrator.core.job import record as p
from orchestrator.core.job.record import Job, Stop
from orchestrator.core.states import AttemptState, JobState, StopPurpose
from orchestrator.core.stored import job_from_dict, job_to_dict
from tests.support.records import replace
from tests.unit.core import strategies
from tests.unit.core.builders import (
    T0,
    after,
    changed,
    failed,
    failure,
    gone,
    lost,
    pending,
    released,
    running,
)

PHASES: tuple[type[p.Phase], ...] = tuple(
    cls for alias in get_args(p.Phase) for cls in (get_args(alias) or (alias,)) if isinstance(cls, type)
)
GANG = p.Gang(nodes=("a", "a"))
LOST = p.LostGang(nodes=("a", "a"))
STOP = Stop(purpose=StopPurpose.PAUSE, by=ByUser(name="ada"), at=T0, deadline=T0 + 30)


def fields(phase: type[p.Phase]) -> set[str]:
    return set(phase.__struct_fields__)


def test_every_state_has_a_phase_and_every_phase_one_state() -> None:
    assert {phase.state for phase in PHASES} == set(JobState)
    assert len(PHASES) == len(set(PHASES)) == 13
    assert {phase for phase in PHASES if phase.state.is_terminal} == set(p.ENDED)
    assert {phase for phase in PHASES if phase.state.may_hold_gang} == {c for c in PHASES if issubclass(c, p.Holding)}


def test_what_exists_only_in_some_phases_is_a_field_of_no_other() -> None:
    having = {
        name: {phase.__name__ for phase in PHASES if name in fields(phase)}
        for phase in PHASES
        for name in fields(phase)
    }
    holding = {"Starting", "Running", "Leaving", "Finishing", "Restarting", "Replacing", "GivingUp", "Draining"}
    assert having == {
        "gang": holding,
        "files_on": holding,
        "exits": holding,
        "stop": {"Draining"},
        "deadline": {"Leaving"},
        "not_before": {"Pending", "Restarting", "Replacing"},
        "failure": {*holding, "Pending", "Suspended", "Failed"},
        "exit_code": {"Failed"},
    }


@pytest.mark.parametrize(
    ("phase", "values"),
    [
        (p.Pending, {"gang": GANG}),
        (p.Suspended, {"stop": STOP}),
        (p.Succeeded, {"failure": failure()}),
        (p.Cancelled, {"exit_code": 1}),
        (p.Draining, {"gang": GANG}),
        (p.Restarting, {"gang": GANG, "not_before": T0}),
        (p.GivingUp, {"gang": GANG, "failure": failure(), "not_before": T0}),
        (p.Running, {"gang": GANG, "stop": STOP}),
    ],
)
def test_a_phase_takes_what_it_has_and_wants_all_of_it(phase: type[Any], values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="argument"):
        phase(**values)


def test_a_job_that_finishes_has_no_processes() -> None:
    with pytest.raises(ValueError, match="no processes"):
        p.Finishing(gang=GANG)
    assert p.hold_of(p.Finishing(gang=replace(GANG, pids=None))) is p.Hold.ACTORS


@pytest.mark.parametrize(
    "phase",
    [
        p.Starting(gang=GANG),
        p.Finishing(gang=None),
        p.Restarting(gang=GANG, failure=failure(), not_before=T0),
        p.GivingUp(gang=LOST, failure=failure()),
    ],
)
def test_a_phase_that_the_attempt_contradicts_is_refused(phase: p.Phase) -> None:
    job = running()
    with pytest.raises(
        BrokenRuleError, match=f"{type(phase).__name__} with RUNNING; events before it: .*attempt_running"
    ):
        replace(job, phase=phase)
    with pytest.raises(BrokenRuleError, match="with no attempt"):
        replace(pending(), phase=phase)


def test_a_gang_of_which_a_part_is_lost_is_not_restarted_in() -> None:
    job = running()
    restarting = after(job, failed(job, keep_gang=True))
    assert isinstance(restarting.phase, p.Restarting)
    assert isinstance(after(restarting, lost(restarting)).phase, p.Replacing)
    assert isinstance(after(restarting, gone(restarting), released(restarting)).phase, p.Replacing)
    torn = after(job, lost(job))
    assert isinstance(after(torn, failed(torn, keep_gang=True)).phase, p.Replacing)


@pytest.mark.parametrize(
    ("gang", "hold"),
    [
        (None, p.Hold.NOTHING),
        (GANG, p.Hold.PROCESSES),
        (replace(GANG, pids=(1, 2)), p.Hold.PROCESSES),
        (replace(GANG, pids=None), p.Hold.ACTORS),
        (LOST, p.Hold.LOST),
        (replace(LOST, pids=None), p.Hold.LOST),
    ],
)
def test_what_is_held(gang: p.Gang | p.LostGang | None, hold: p.Hold) -> None:
    assert p.hold_of(p.Running(gang=gang)) is hold
    assert p.hold_of(p.Running(gang=gang, files_on=("a",))) is (p.Hold.FILES if gang is None else hold)


@settings(max_examples=60, deadline=None)
@given(strategies.jobs)
def test_the_properties_of_a_job_agree_with_its_phase(job: Job) -> None:
    assert job.state is job.phase.state
    assert job.gang_open == (job.held is not None) == (bool(job.nodes))
    assert job.gang_open or not (job.attempt_live or job.gang_lost or job.degraded or job.seats or job.pids)
    assert (job.stop is not None) == (job.state is JobState.DRAINING)
    assert (job.ended_at is not None) == job.state.is_terminal
    assert job.not_before >= job.fenced_until or job.state is JobState.PENDING
    if job.succeeded:
        assert job.attempts[-1].state is AttemptState.SUCCEEDED
        assert not job.attempt_live


def test_a_phase_and_its_attempt_belong_together() -> None:
    assert changed(running(), failure=failure()).failure == failure()
    row = job_to_dict(running())
    row["phase"] |= {"phase": "Finishing"}
    with pytest.raises(BrokenRuleError, match="Finishing with RUNNING"):
        job_from_dict(row | {"phase": row["phase"] | {"gang": None}})
    with pytest.raises(RecordError, match="has no processes"):
        job_from_dict(row)
