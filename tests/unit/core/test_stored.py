"""Events and jobs survive conversion to JSON and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings

from orchestrator.core import events as ev
from orchestrator.core.errors import UnknownEventError
from orchestrator.core.states import JobState
from orchestrator.core.stored import event_body, event_from, job_from_dict, job_to_dict
from tests.unit.core import strategies
from tests.unit.core.builders import ID, T0, in_state


@settings(max_examples=50, deadline=None)
@given(strategies.all_events)
def test_every_event_survives_its_json_form(event: ev.Event) -> None:
    body = json.loads(json.dumps(event_body(event)))
    again = event_from(event.kind, body, job_id=event.job_id, at=event.at, cause=event.cause)
    assert again == event
    assert type(again) is type(event)


@settings(max_examples=40, deadline=None)
@given(strategies.jobs)
def test_every_job_survives_its_json_form(job: object) -> None:
    assert job_from_dict(json.loads(json.dumps(job_to_dict(job)))) == job


@pytest.mark.parametrize("state", JobState)
def test_a_job_of_every_state_survives_its_json_form(state: JobState) -> None:
    job = in_state(state)
    assert job.state is state
    assert job_from_dict(json.loads(json.dumps(job_to_dict(job)))) == job


def test_the_columns_of_the_store_are_not_in_the_body() -> None:
    event = ev.JobResumed(job_id=ID, at=T0, by="ada", cause="c")
    assert event_body(event) == {"by": "ada"}
    assert set(event.__struct_fields__) - set(event_body(event)) == {"job_id", "at", "cause"}


def test_an_event_of_a_newer_version_says_what_to_do() -> None:
    with pytest.raises(UnknownEventError, match="upgrade orch"):
        event_from("job_teleported", {}, job_id=ID, at=T0, cause="")
