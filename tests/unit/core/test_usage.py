"""The usage of a job in a span of time: phases and waiting, from its events."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.goodput import UNCOMMITTED, Use, use_between
from orchestrator.core.lifecycle.fold import fold, submitted
from tests.unit.core.builders import ID, T0, make_spec, pending, seats, started, submission

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job


def life() -> list[tuple[Job, ev.Event]]:
    """Return the records of 2 GPUs: 100 s queued, 10 s to start, 20 s of training to step 5, saved at 130, 30 s more."""
    first = submission(make_spec(workers=2))
    waits = pending(make_spec(workers=2))
    order = started(waits, at=T0 + 100)
    placed = fold(waits, order)
    events: list[ev.Event] = [
        order,
        ev.GangPlaced(job_id=ID, at=T0 + 105, gang=1, seats=seats(placed, placed.nodes)),
        ev.AttemptRunning(job_id=ID, at=T0 + 108, attempt=1, pids=(1, 2)),
        ev.FirstStep(job_id=ID, at=T0 + 110, attempt=1, step=1, step_at=T0 + 110, steps_lost=0),
        ev.CheckpointSaved(job_id=ID, at=T0 + 130, attempt=1, step=5, path="/c"),
    ]
    job = submitted(first, 1)
    records: list[tuple[Job, ev.Event]] = [(job, first)]
    for event in events:
        job = fold(job, event)
        records.append((job, event))
    return records


def test_time_is_told_by_phase() -> None:
    use = use_between(life(), 0.0, T0 + 160)
    assert use.waited == 200.0
    assert use.held == 120.0
    assert use.phases["starting"] == 20.0
    assert use.phases["productive"] == 40.0
    assert use.phases[UNCOMMITTED] == 60.0


def test_only_the_span_counts() -> None:
    use = use_between(life(), T0 + 50, T0 + 105)
    assert (use.waited, use.held, use.phases["starting"]) == (100.0, 10.0, 10.0)
    assert use_between(life(), T0 - 50, T0 - 1).is_nothing
    assert use_between([], 0.0, 1.0) == Use(phases=use_between([], 0.0, 1.0).phases)


@given(st.lists(st.floats(-10, 200), min_size=2, max_size=6, unique=True))
def test_the_parts_of_a_span_add_up_to_the_whole(cuts: list[float]) -> None:
    times = [T0 + cut for cut in sorted(cuts)]
    whole = use_between(life(), times[0], times[-1])
    parts = [use_between(life(), a, b) for a, b in itertools.pairwise(times)]
    assert sum(part.held for part in parts) == pytest.approx(whole.held, abs=1e-5)
    assert sum(part.waited for part in parts) == pytest.approx(whole.waited, abs=1e-5)
    for part in (*parts, whole):
        assert sum(part.phases.values()) == pytest.approx(part.held, abs=1e-5)
        assert min(part.phases.values()) >= 0.0
