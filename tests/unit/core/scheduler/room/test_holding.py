"""The jobs that hold gangs, and values that are computed once for each of their records."""

from __future__ import annotations

from datetime import timedelta

from orchestrator.core.scheduler.durations import clock_of
from orchestrator.core.scheduler.room.holding import Holding
from orchestrator.core.states import StopPurpose
from tests.unit.core.builders import T0, after, make_spec, pending, running, stop


def test_a_clock_is_that_of_the_newest_record() -> None:
    job = running(pending(make_spec(workers=1, max_duration=timedelta(hours=1)), job_id="a"), nodes=("a",), at=T0)
    holding = Holding([job])
    assert list(holding.clocks()) == [(job, clock_of(job))]
    assert next(holding.clocks())[1] is next(holding.clocks())[1], "found once"
    stopped = after(job, stop(job, StopPurpose.CANCEL, at=T0 + 5))
    holding.put(stopped)
    [(record, clock)] = holding.clocks()
    assert (record, clock) == (stopped, clock_of(stopped))
    assert clock.over_at is not None
    holding.drop(job.id)
    assert list(holding.clocks()) == []
    holding.put(job)
    assert list(holding.clocks()) == [(job, clock_of(job))], "nothing is left of what was dropped"
