"""Records of jobs that have only been submitted are read by what they have of their own, and as any other record is."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.events import Prerequisite
from orchestrator.core.ids import JobId
from orchestrator.core.states import EndCondition
from orchestrator.core.stored import job_record
from orchestrator.core.stored.fresh import FreshRecords
from orchestrator.core.stored.job_record import job_from_dict, job_to_dict
from tests.unit.core.builders import T0, changed, make_spec, pending, running

if TYPE_CHECKING:
    from orchestrator.core.job.record import Job

FIRST = pending(make_spec(workers=2), sequence=1, job_id="first-aaaaaa")
OTHER = pending(
    make_spec(workers=4, name="words", max_duration=timedelta(hours=1)),
    sequence=7,
    job_id="other",
    user="bob",
    at=T0 + 5,
)


def reader() -> FreshRecords:
    """A reader that has seen one record."""
    found = FreshRecords(job_record._spec_of)
    found.learn(job_to_dict(FIRST), FIRST)
    return found


def test_another_record_of_the_kind_is_read_as_in_full() -> None:
    assert reader().read(job_to_dict(OTHER)) == OTHER
    assert reader().read(job_to_dict(changed(FIRST, priority=3, version=4))) == changed(FIRST, priority=3, version=4)
    assert FreshRecords(job_record._spec_of).read(job_to_dict(OTHER)) is None


@pytest.mark.parametrize(
    "job",
    [
        running(FIRST),
        changed(FIRST, not_before=T0 + 9),
        changed(FIRST, resume_from="/c/5"),
        changed(FIRST, restarts={"infra": 1}),
        changed(FIRST, prerequisites=(Prerequisite(job_id=JobId("a"), on=EndCondition.ANY),)),
    ],
)
def test_any_other_record_is_read_in_full(job: Job) -> None:
    row = job_to_dict(job)
    assert reader().read(row) is None
    assert job_from_dict(row) == job


@pytest.mark.parametrize(
    "change",
    [
        {"user": 5},
        {"sequence": "1"},
        {"uid": True},
        {"submitted_at": float("nan")},
        {"story": "x"},
        {"story": [3]},
        {"id": None},
    ],
)
def test_a_value_of_the_wrong_kind_is_left_to_the_full_reading(change: dict[str, Any]) -> None:
    assert reader().read({**job_to_dict(OTHER), **change}) is None


def test_a_record_that_lacks_a_key_or_has_one_more_is_left_to_the_full_reading() -> None:
    row = job_to_dict(OTHER)
    assert reader().read({**row, "surprise": 1}) is None
    assert reader().read({key: value for key, value in row.items() if key != "retry"}) is None
