"""The goodput ledger: every second of a GPU is in one phase, phases never shrink, and each phase has its meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.errors import CoreError
from orchestrator.core.facts.codec import fact_from
from orchestrator.core.goodput import GoodputLedger, Phase
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import StopPurpose
from tests.support.records import replace
from tests.unit.core.builders import ID, T0, failed, make_spec, pending, seats, started, stop
from tests.unit.core.strategies import FACTS

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job


class Life:
    """A job of two ranks with one GPU each, and the ledger that follows it. Times are seconds after T0."""

    def __init__(self, **keys: Any) -> None:
        self.job: Job = pending(make_spec(**keys))
        self.ledger = GoodputLedger()

    def event(self, event: ev.Event) -> None:
        self.job = fold(self.job, event)
        self.ledger.observe(self.job, event)

    def start(self, at: float, *, running_at: float, gang: int | None = None) -> None:
        self.event(started(self.job, at=T0 + at, gang=gang))
        self.event(ev.GangPlaced(job_id=ID, at=T0 + at, gang=self.job.gang, seats=seats(self.job, self.job.nodes)))
        number = self.job.attempt_number
        self.event(ev.AttemptRunning(job_id=ID, at=T0 + running_at, attempt=number, pids=(1, 2)))

    def step(self, step: int, at: float, **saves: Any) -> None:
        self.ledger.progress(ID, attempt=self.job.attempt_number, step=step, at=T0 + at, **saves)

    def checkpoint(self, step: int, at: float) -> None:
        number = self.job.attempt_number
        self.event(ev.CheckpointSaved(job_id=ID, at=T0 + at, attempt=number, step=step, path="/ckpt"))

    def fail(self, at: float, *, retry: bool = True, keep_gang: bool = True) -> None:
        self.event(failed(self.job, at=T0 + at + 0.5, failed_at=T0 + at, retry=retry, keep_gang=keep_gang))
        self.event(ev.AttemptGone(job_id=ID, at=T0 + at + 0.5, attempt=self.job.attempt_number))

    def succeed(self, at: float, *, released_at: float) -> None:
        self.event(ev.AttemptSucceeded(job_id=ID, at=T0 + at, attempt=self.job.attempt_number))
        self.event(ev.GangReleased(job_id=ID, at=T0 + released_at, gang=self.job.gang))

    def phases(self, now: float) -> dict[str, float]:
        reading = self.ledger.read(T0 + now)
        found = {phase.value: round(amount, 6) for phase, amount in reading.jobs.get(ID, {}).items() if amount}
        if waiting := sum(reading.uncommitted.values()):
            found["open"] = round(waiting, 6)
        assert sum(found.values()) == pytest.approx(reading.held)
        return found


def test_a_job_that_goes_well() -> None:
    life = Life()
    life.start(0, running_at=3)
    assert life.phases(3) == {"starting": 6}
    life.step(1, 5)
    assert life.phases(5) == {"starting": 10}
    life.step(11, 15)
    assert life.phases(15) == {"starting": 10, "open": 20}
    life.checkpoint(11, 16)
    assert life.phases(16) == {"starting": 10, "productive": 22}
    life.succeed(20, released_at=21)
    assert life.phases(100) == {"starting": 10, "productive": 30, "draining": 2}


def test_a_checkpoint_credits_only_the_steps_that_it_holds() -> None:
    life = Life()
    life.start(0, running_at=0)
    for step in range(11):
        life.step(step, float(step))
    life.checkpoint(4, 10)
    assert life.phases(10) == {"productive": 8, "open": 12}
    life.checkpoint(7, 11)
    assert life.phases(11) == {"productive": 14, "open": 8}


def test_what_a_failure_throws_away_is_lost_and_the_way_back_is_recovery() -> None:
    life = Life()
    life.start(0, running_at=1)
    life.step(1, 2)
    life.step(9, 10)
    life.checkpoint(5, 10)
    life.fail(12)
    assert life.phases(13) == {"starting": 4, "productive": 8, "open": 12, "recovering": 2}
    life.start(14, running_at=15, gang=life.job.gang)
    assert life.phases(15) == {"starting": 4, "productive": 8, "lost": 12, "recovering": 6}
    life.step(6, 16)
    assert life.phases(18) == {"starting": 4, "productive": 8, "lost": 12, "recovering": 8, "open": 4}


def test_what_is_saved_after_the_death_is_not_lost() -> None:
    life = Life()
    life.start(0, running_at=0)
    life.step(0, 0)
    life.step(10, 10)
    life.fail(10)
    life.checkpoint(10, 11)
    life.start(12, running_at=12, gang=life.job.gang)
    assert life.phases(12) == {"productive": 20, "recovering": 4}


def test_standing_still_to_save_is_its_own_phase() -> None:
    life = Life()
    life.start(0, running_at=0)
    life.step(0, 0)
    life.step(10, 10, saves=1, save_seconds=2.0)
    life.step(11, 11, saves=1, save_seconds=2.0)
    assert life.phases(11) == {"checkpoint_stall": 4, "open": 18}
    life.step(21, 21, saves=3, save_seconds=1.0)
    assert life.phases(21) == {"checkpoint_stall": 8, "open": 34}
    life.checkpoint(21, 21)
    assert life.phases(21) == {"checkpoint_stall": 8, "productive": 34}


def test_a_script_that_reports_nothing_is_productive_when_it_succeeds_and_lost_when_it_fails() -> None:
    good, bad = Life(), Life()
    good.start(0, running_at=2)
    good.succeed(10, released_at=10)
    assert good.phases(10) == {"starting": 4, "productive": 16}
    bad.start(0, running_at=2)
    bad.fail(10, retry=False)
    bad.event(ev.GangReleased(job_id=ID, at=T0 + 11, gang=1))
    assert bad.phases(11) == {"starting": 4, "open": 16, "recovering": 2}
    bad.event(
        ev.JobFinished(job_id=ID, at=T0 + 11, state=bad.job.state.FAILED, reason=fact_from("exit code 1"), exit_code=1)
    )
    assert bad.phases(50) == {"starting": 4, "lost": 16, "recovering": 2}


def test_preemption_drains_saves_and_starts_again() -> None:
    life = Life()
    life.start(0, running_at=0)
    life.step(0, 0)
    life.step(10, 10)
    life.event(stop(life.job, StopPurpose.PREEMPT, at=T0 + 10))
    life.checkpoint(10, 12)
    life.event(ev.AttemptGone(job_id=ID, at=T0 + 13, attempt=1))
    life.event(ev.GangReleased(job_id=ID, at=T0 + 13, gang=1))
    life.event(ev.JobRequeued(job_id=ID, at=T0 + 13, reason=fact_from("preempted")))
    assert life.phases(60) == {"productive": 20, "draining": 6}
    life.start(60, running_at=61)
    life.step(11, 62)
    assert life.phases(62) == {"productive": 20, "draining": 6, "starting": 4}


def test_waiting_costs_nothing_and_neither_do_jobs_without_gpus() -> None:
    life = Life()
    assert life.phases(1000) == {}
    cpu = Life(gpu=0)
    cpu.start(0, running_at=1)
    cpu.succeed(10, released_at=10)
    assert cpu.phases(10) == {}
    half = Life(gpu=0.5)
    half.start(0, running_at=0)
    half.succeed(10, released_at=10)
    assert half.phases(10) == {"productive": 10}


def test_reports_of_an_attempt_that_is_over_change_nothing() -> None:
    life = Life()
    life.start(0, running_at=0)
    life.step(1, 1)
    life.fail(5)
    before = life.phases(6)
    life.ledger.progress(ID, attempt=1, step=99, at=T0 + 6)
    life.ledger.progress(replace(life.job).id, attempt=7, step=99, at=T0 + 6)
    assert life.phases(6) == before


def test_a_forgotten_job_stays_in_the_totals_of_its_queue() -> None:
    life = Life(queue="night")
    life.start(0, running_at=0)
    life.ledger.forget(ID)  # the job holds a gang: it is not forgotten yet
    assert life.phases(1)
    life.succeed(10, released_at=11)
    before = life.ledger.read(T0 + 11)
    life.ledger.forget(ID)
    life.ledger.forget(ID)
    after = life.ledger.read(T0 + 11)
    assert after.phases == before.phases
    assert after.phases[("night", Phase.PRODUCTIVE)] == 20
    assert after.held == before.held
    assert not after.jobs


def test_a_replay_of_the_events_rebuilds_the_account() -> None:
    life = Life()
    events: list[ev.Event] = []
    live = life.event

    def record(event: ev.Event) -> None:
        events.append(event)
        live(event)

    life.event = record  # type: ignore[method-assign]
    life.start(0, running_at=2)
    life.event(ev.FirstStep(job_id=ID, at=T0 + 3.0, attempt=1, step=1, step_at=T0 + 3.0, steps_lost=0))
    life.checkpoint(50, 20)
    life.fail(25)
    copy = Life()
    for event in events:
        copy.event(event)
    assert copy.phases(30) == life.phases(30) == {"starting": 6, "productive": 34, "open": 10, "recovering": 10}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_phases_add_up_and_never_shrink_whatever_happens(data: st.DataObject) -> None:
    """Random histories with readings in between and reports out of order are compared with a separate stopwatch."""
    ledger, job = GoodputLedger(), pending(make_spec())
    now, stopwatch, seen = T0, 0.0, dict[tuple[str, Phase], float]()
    for _ in range(data.draw(st.integers(0, 40))):
        passed = data.draw(st.floats(0, 1000))
        now += passed
        stopwatch += passed * len(job.nodes) if job.gang_open else 0.0
        kind = data.draw(st.sampled_from([*FACTS, "report", "read", "next"]))
        if kind == "report":
            numbers = {"step": data.draw(st.integers(0, 50)), "saves": data.draw(st.integers(0, 3))}
            ledger.progress(
                ID, attempt=job.attempt_number, at=now - data.draw(st.floats(0, 5)), save_seconds=3.0, **numbers
            )
        if isinstance(kind, type) or kind == "next":
            event = started(job, at=now) if kind == "next" else data.draw(FACTS[kind])  # type: ignore[index]
            event = replace(event, at=now)
            if isinstance(event, ev.AttemptFailed):
                event = replace(event, failed_at=now)
            try:
                job = fold(job, event)
            except CoreError:
                continue
            ledger.read(now)
            ledger.observe(job, event)
        reading = ledger.read(now)
        assert sum(reading.phases.values()) + sum(reading.uncommitted.values()) == pytest.approx(reading.held, rel=1e-9)
        for key, amount in seen.items():
            assert reading.phases[key] >= amount - 1e-6
        seen = dict(reading.phases)
        assert reading.held == pytest.approx(stopwatch, rel=1e-6, abs=1e-3)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 100), st.booleans(), st.booleans()), min_size=1, max_size=12),
    st.floats(0, 0.4),
)
def test_phases_are_the_gpu_time_held_to_one_percent(attempts: list[tuple[float, bool, bool]], late: float) -> None:
    """Attempts follow each other, all with reports and some with checkpoints; facts arrive up to 0.4 s late."""
    life = Life()
    at = 0.0
    for seconds, saves, scraped in attempts:
        life.start(at, running_at=at + 1, gang=life.job.gang or 1)
        life.step(1, at + 2)
        life.step(100, at + 2 + seconds)
        if scraped:
            life.phases(at + 2 + seconds + late)
        if saves:
            life.checkpoint(60 + life.job.checkpoints.step, at + 2 + seconds)
        life.fail(at + 2 + seconds)
        at += seconds + 4
    reading = life.ledger.read(T0 + at)
    total = sum(reading.phases.values()) + sum(reading.uncommitted.values())
    assert total == pytest.approx(2 * at, rel=0.01)
