"""Records with values that do not fit the declarations of their fields, their JSON form, and messages."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import events as ev
from orchestrator.core.codec import RecordError, from_bytes, misfits, to_bytes, usable
from orchestrator.core.facts.faults import ProcessSignal
from orchestrator.core.states import JobState
from orchestrator.core.stored import event_body, event_from, job_from_dict, job_to_dict
from tests.support.records import replace
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
    assert misfits(replace(SAVED, **change)) == names


@settings(max_examples=100, deadline=None)
@given(strategies.all_events)
def test_every_event_that_is_made_fits(event: ev.Event) -> None:
    assert misfits(event) == ()


@settings(max_examples=80, deadline=None)
@given(strategies.all_events, st.data())
def test_an_event_with_any_value_is_named_or_folds(event: ev.Event, data: st.DataObject) -> None:
    """A value that passes the check does not fail later for its type."""
    name = data.draw(st.sampled_from([name for name in event.__struct_fields__ if name not in ("job_id", "spec")]))
    changed = replace(event, **{name: data.draw(ODD)})
    if not misfits(changed):
        json.dumps(event_body(changed), allow_nan=False)


@pytest.mark.parametrize("change", [{"path": [1]}, {"step": None}, {"later": 1}, {"step": 2**70}])
def test_a_stored_event_with_an_odd_value_is_refused(change: dict[str, Any]) -> None:
    body = event_body(SAVED) | change
    with pytest.raises(RecordError, match=next(iter(change))):
        event_from("checkpoint_saved", body, job_id=ID, at=T0, cause="")
    with pytest.raises(RecordError, match="at"):
        event_from("checkpoint_saved", event_body(SAVED), job_id=ID, at=math.inf, cause="")


@pytest.mark.parametrize(
    "change",
    [
        {"version": "3"},
        {"attempts": [{"number": 1}]},
        {"notes": [1]},
        {"priority": None},
        {"later": 1},
        {"submission": {}},
    ],
)
def test_a_stored_job_with_an_odd_value_is_refused(change: dict[str, Any]) -> None:
    row = json.loads(json.dumps(job_to_dict(in_state(JobState.RUNNING))))
    with pytest.raises(RecordError):
        job_from_dict(row | change)


END = {"rank": 1, "exit_code": 3, "signal": None, "at": T0}


@pytest.mark.parametrize(
    ("values", "expected", "names"),
    [
        ({**END, "signal": "9", "error_message": 5, "log_tail": ["a", 1], "heard_at": math.nan, "later": 1}, {}, ("signal", "error_message", "log_tail", "heard_at")),
        ({"rank": "1", "exit_code": None, "at": "now"}, {"rank": 0, "exit_code": None, "at": 0.0}, ("rank", "signal", "at")),
        ({**END, "memory": {"used_bytes": [], "limit_bytes": 6}}, {"memory": ev.MemoryUse(used_bytes=0, limit_bytes=6)}, ("memory.used_bytes",)),
    ],
)  # fmt: skip
def test_of_values_that_do_not_fit_the_others_are_kept(
    values: dict[str, Any], expected: dict[str, Any], names: tuple[str, ...]
) -> None:
    assert usable(ev.Exit, values) == (ev.Exit(**{**END, **expected}), names)


@settings(max_examples=100, deadline=None)
@given(
    strategies.all_events.filter(lambda event: "spec" not in event.__struct_fields__),
    st.sampled_from(["x\ud800", "plain"]),
)
def test_a_message_is_read_as_it_was(event: ev.Event, text: str) -> None:
    event = replace(event, cause=text) if "cause" in event.__struct_fields__ else event
    assert from_bytes(type(event), to_bytes(event)) == event


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xc1", b"[1]", b"\x80", b"\x81\xa2at\xcb\x7f\xf0\0\0\0\0\0\0", b"\x91" * 5000]
)
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(RecordError):
        from_bytes(ev.Exit, data)


def test_a_fact_with_an_odd_value_is_named_with_its_event() -> None:
    """It would be read back as an unreadable one, and its sentence would fail before."""
    odd = ProcessSignal(rank=1, signal="nine")  # type: ignore[arg-type]
    assert misfits(ev.JobNoted(job_id=ID, at=T0, note=odd)) == ("note",)
    assert misfits(ev.JobNoted(job_id=ID, at=T0, note="odd")) == ("note",)  # type: ignore[arg-type]
