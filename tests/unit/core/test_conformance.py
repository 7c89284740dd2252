"""Records with values that do not fit the declarations of their fields."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.conformance import is_finite, is_time, misfits, repaired
from orchestrator.core.facts.requesters import ByUser
from orchestrator.core.lifecycle.fold import fold
from orchestrator.core.states import JobState
from orchestrator.core.stored.job_record import event_body, event_from, job_from_dict, job_to_dict
from tests.unit.core import strategies
from tests.unit.core.builders import ID, T0, in_state

ODD = (
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.text(max_size=3)
    | st.lists(st.integers(), max_size=2).map(tuple)
    | st.just({"a": 1})
)
SAVED = ev.CheckpointSaved(job_id=ID, at=T0, attempt=1, step=3, path="/c/3")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, ()),
        ({"at": (1,)}, ("at",)),
        ({"at": math.nan}, ("at",)),
        ({"at": -1.0}, ("at",)),
        ({"at": 1e300}, ("at",)),
        ({"step": "3"}, ("step",)),
        ({"step": True}, ("step",)),
        ({"step": 2**70, "path": 5}, ("step", "path")),
        ({"path": "x" * 2_000_000}, ("path",)),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], names: tuple[str, ...]) -> None:
    assert misfits(dataclasses.replace(SAVED, **change)) == names


@settings(max_examples=100, deadline=None)
@given(strategies.all_events)
def test_every_event_that_is_made_fits(event: ev.Event) -> None:
    assert misfits(event) == ()


@settings(max_examples=200, deadline=None)
@given(strategies.all_events, st.data())
def test_an_event_with_any_value_is_named_or_folds(event: ev.Event, data: st.DataObject) -> None:
    """A value that passes the check does not fail later for its type."""
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(event) if f.name != "job_id"]))
    changed = dataclasses.replace(event, **{name: data.draw(ODD)})
    if not misfits(changed):
        json.dumps(event_body(changed), allow_nan=False)


def test_a_stored_event_of_an_earlier_version_is_repaired() -> None:
    body = {"attempt": 1, "step": 3, "path": [1]}
    event = event_from("checkpoint_saved", body, job_id=ID, at=math.inf, cause="")
    assert event == ev.CheckpointSaved(job_id=ID, at=0.0, attempt=1, step=3, path="")


def test_a_stored_job_of_an_earlier_version_is_repaired_and_says_of_what() -> None:
    """An earlier version stored the values of a page without checking them."""
    job = in_state(JobState.RUNNING)
    row = json.loads(json.dumps(job_to_dict(job)))
    row["checkpoint_at"], row["durable_at"], row["checkpoint_path"] = math.inf, [1], 5
    row["attempts"][0]["first_step_at"] = "soon"
    row["notes"] = [1]
    found = job_from_dict(row)
    assert set(found.unusable) == {"checkpoint_at", "durable_at", "checkpoint_path", "notes", "attempts.first_step_at"}
    assert (found.checkpoints.at, found.checkpoints.durable_at, found.checkpoints.path) == (None, None, "")
    json.dumps(job_to_dict(found), allow_nan=False)
    assert "unusable" not in job_to_dict(found)
    assert fold(found, dataclasses.replace(SAVED, attempt=found.attempt_number)).checkpoints.step == 3


@pytest.mark.parametrize("value", [10**400, -(10**400), 2**70, math.inf, math.nan, 1e300])
def test_a_number_beyond_every_range_is_no_finite_one(value: float) -> None:
    assert not is_finite(value)
    assert not is_time(value)


def test_an_enum_has_no_stand_in() -> None:
    with pytest.raises(TypeError, match="purpose"):
        repaired(ev.StopRequested(job_id=ID, at=T0, purpose="x", by=ByUser(name="me"), deadline=T0))  # type: ignore[arg-type]
