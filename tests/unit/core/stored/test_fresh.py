"""The quick reading of records of jobs that have only been submitted gives the same jobs as the full reading."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.codec import RecordError
from orchestrator.core.events import Prerequisite
from orchestrator.core.ids import JobId
from orchestrator.core.states import EndCondition
from orchestrator.core.stored import job_record
from orchestrator.core.stored.fresh import FreshRecords
from orchestrator.core.stored.job_record import job_from_dict, job_from_text, job_to_dict
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
    """Return a reader that has seen one record."""
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


def text_of(job: Job, **change: Any) -> str:
    """Return the text of the record in the store."""
    return json.dumps({**job_to_dict(job), **change}, separators=(",", ":"))


def text_reader() -> FreshRecords:
    """Return a reader that has seen the text of one record."""
    found = FreshRecords(job_record._spec_of)
    found.learn_text(text_of(FIRST), FIRST)
    return found


TEXTS = [
    OTHER,
    changed(FIRST, priority=3, version=4),
    pending(make_spec(entrypoint='echo "," user":,"user":"x'), job_id="q", user='ada","spec":{'),
    pending(make_spec(), job_id="story", user=',"story":\\'),
]


@pytest.mark.parametrize("job", TEXTS)
def test_the_text_of_a_record_of_the_kind_is_read_as_in_full(job: Job) -> None:
    assert text_reader().read_text(text_of(job)) == job == job_from_text(text_of(job))
    assert FreshRecords(job_record._spec_of).read_text(text_of(job)) is None


def test_jobs_of_one_spec_share_it() -> None:
    reads = text_reader()
    jobs = [reads.read_text(text_of(changed(OTHER, version=version))) for version in (1, 2)]
    assert jobs[0] is not None
    assert jobs[1] is not None
    assert jobs[0].submission.spec is jobs[1].submission.spec


@pytest.mark.parametrize(
    "text",
    [
        text_of(running(FIRST)),
        text_of(changed(FIRST, not_before=T0 + 9)),
        text_of(changed(FIRST, resume_from="/c/5")),
        text_of(pending(make_spec(env={"a": "1", "user": "x"}), job_id="env")),
        *(text_of(OTHER, **{key: value}) for key, value in (("user", 5), ("uid", True), ("story", [3]), ("id", None))),
        text_of(OTHER, spec=None),
        text_of(OTHER, surprise=1),
        text_of(OTHER).replace('"name":', '"name":"x" ', 1),
        text_of(OTHER).replace(',"spec":{', ',"spec":{{'),
        text_of(OTHER)[:-1],
        text_of(OTHER) + "}",
        json.dumps(job_to_dict(OTHER)),
        "",
        "[]",
    ],
)
def test_any_other_text_is_left_to_the_full_reading(text: str) -> None:
    assert text_reader().read_text(text) is None


def test_of_a_key_that_is_there_twice_the_last_counts_as_in_the_full_reading() -> None:
    text = text_of(OTHER).replace('"sequence":', '"sequence":1,"sequence":')
    assert text_reader().read_text(text) == job_from_dict(json.loads(text)) == OTHER


@given(st.integers(0, len(text_of(OTHER)) - 1), st.integers(0, 40), st.text('",:{}[]\\ 1au', max_size=8))
def test_a_changed_text_is_read_as_in_full_or_not_at_all(at: int, length: int, put: str) -> None:
    text = text_of(OTHER)
    text = text[:at] + put + text[at + length :]
    try:
        found = text_reader().read_text(text)
    except RecordError:
        with pytest.raises(RecordError):
            job_from_dict(json.loads(text))
        return
    if found is not None:
        assert found == job_from_dict(json.loads(text))
