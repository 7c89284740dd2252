"""Views survive conversion to JSON and back, ignore newer keys and refuse missing ones."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, get_args, get_origin, get_type_hints

import pytest

from orchestrator.api import views
from orchestrator.api.errors import ProtocolMismatchError
from orchestrator.api.views import JobView, LogLine, ProgressView, View

VIEWS = [cls for cls in vars(views).values() if isinstance(cls, type) and issubclass(cls, View) and cls is not View]


def filled(kind: Any) -> Any:
    """Return a value of the type, with every optional part present."""
    if isinstance(kind, type) and issubclass(kind, View):
        hints = get_type_hints(kind)
        return kind(**{field.name: filled(hints[field.name]) for field in dataclasses.fields(kind)})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return (filled(arguments[0]),)
    if origin is dict:
        return {"key": filled(arguments[1])}
    if arguments:  # a union: its first member
        return filled(arguments[0])
    return {str: "text", int: 7, float: 0.5, bool: True}.get(kind, "anything")


@pytest.mark.parametrize("cls", VIEWS)
def test_a_view_is_the_same_after_json(cls: type[View]) -> None:
    view = filled(cls)
    assert cls.from_json(json.loads(json.dumps(view.to_json()))) == view


@pytest.mark.parametrize("cls", VIEWS)
def test_keys_of_a_newer_daemon_are_ignored(cls: type[View]) -> None:
    view = filled(cls)
    assert cls.from_json({**view.to_json(), "brand_new": 1}) == view


def test_a_missing_key_is_a_mismatch_of_versions() -> None:
    with pytest.raises(ProtocolMismatchError, match="LogLine"):
        LogLine.from_json({"at": 1.0})


@pytest.mark.parametrize("junk", [None, 3, "text", []])
def test_what_is_no_object_is_a_mismatch_of_versions(junk: Any) -> None:
    with pytest.raises(ProtocolMismatchError):
        JobView.from_json(junk)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_answer_holds_what_json_lacks(value: float) -> None:
    """Values that JSON lacks become null at any depth, also in lists; bodies of events and balances contain some."""
    body = {"a": [value, {"b": [[value]]}], "c": (value,)}
    event = views.EventView(sequence=1, at=value, kind="k", attempt=None, summary="", cause="", body=body)
    assert json.loads(json.dumps(event.to_json(), allow_nan=False))["body"] == {
        "a": [None, {"b": [[None]]}],
        "c": [None],
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_diverged_loss_is_null_and_not_broken_json(value: float) -> None:
    text = json.dumps(ProgressView(metrics={"loss": value}, eta_seconds=value).to_json(), allow_nan=False)
    back = ProgressView.from_json(json.loads(text))
    assert back.metrics == {"loss": None}
    assert back.eta_seconds is None
