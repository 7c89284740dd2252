"""The scheduler decides exactly as a naive one does; `make reference` holds ten thousand cases against it."""

from __future__ import annotations

import pytest

from orchestrator.core import events as ev
from orchestrator.core.facts.reasons import DoesNotFit, NotEnoughFree
from orchestrator.core.scheduler import placement
from orchestrator.core.scheduler.scheduler import State, decide
from tests.unit.core.builders import T0, make_spec, node, nodes, pending
from tests.unit.core.scheduler.reference import answer, differences, random_case


def test_the_scheduler_decides_as_the_reference_does() -> None:
    assert differences(0, 600) == []


def test_the_cases_hold_what_there_is_to_decide() -> None:
    found = [answer(*random_case(seed)) for seed in range(400)]
    assert any(one.starts for one in found)
    assert any(one.stops for one in found)
    assert sum(one.backfilled for one in found) >= 3
    assert any(one.closing for one in found)
    assert any(one.reclaimed for one in found)
    assert any(one.shared for one in found)
    assert any(isinstance(fact, NotEnoughFree) and fact.reserved for one in found for fact in one.waiting.values())
    kinds = {type(reason).__name__ for one in found for reason in one.waiting.values()}
    limits = {"QueueAtMaximum", "UserAtLimit"}
    assert kinds == {
        "NotEnoughFree",
        "DoesNotFit",
        "NoNodeWithLabels",
        "AwaitsNodes",
        "BackingOff",
        "AwaitsRoom",
        *limits,
    }


def test_equal_jobs_that_do_not_fit_are_not_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    room = placement._slots

    def counted(job: placement.Job, *rest: object) -> dict[str, int]:  # type: ignore[name-defined]
        tried.append(job.id)
        return room(job, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(placement, "_slots", counted)
    jobs = [pending(make_spec(workers=8), sequence=n, job_id=f"job-{n}") for n in range(1, 200)]
    jobs += [pending(make_spec(workers=99), sequence=300 + n, job_id=f"large-{n}") for n in range(100)]
    commands = decide(State(jobs={job.id: job for job in jobs}, nodes=nodes(node("a"), node("b"))), T0)
    assert [event.job_id for event in commands.events if isinstance(event, ev.AttemptStarted)] == ["job-1", "job-2"]
    assert isinstance(commands.waiting[jobs[150].id], NotEnoughFree)
    assert isinstance(commands.waiting[jobs[-1].id], DoesNotFit)
    assert len(set(tried)) == 4
