"""Suspicion follows a job's own pace."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.telemetry.stillness import LEAST_SECONDS, PATIENCE, allowed_seconds, still_for_too_long
from orchestrator.train.progress import ProgressSnapshot


def rank(**facts: Any) -> ProgressSnapshot:
    return ProgressSnapshot(**{"steps_reported": 100, "step_seconds": 10.0, "last_report_at": 1000.0, **facts})


@pytest.mark.parametrize(
    ("facts", "allowed"),
    [
        ({}, PATIENCE * 10.0),
        ({"step_seconds": 0.01}, LEAST_SECONDS),
        ({"step_seconds": 0.1, "recent_step_seconds": (0.1, 45.0)}, PATIENCE * 45.0),
        ({"steps_reported": 4}, None),
        ({"step_seconds": None}, None),
    ],
    ids=["by its steps", "short steps", "an evaluation among them", "too few steps", "no steps"],
)
def test_patience_follows_the_pace(facts: dict[str, Any], allowed: float | None) -> None:
    assert allowed_seconds(rank(**facts)) == allowed


def test_one_still_rank_is_enough() -> None:
    assert still_for_too_long([rank(), rank()], 1199.0) is False
    assert still_for_too_long([rank(last_report_at=1100.0), rank()], 1201.0) is True


def test_who_cannot_be_judged_is_not_suspected() -> None:
    assert still_for_too_long([], 9e9) is None
    assert still_for_too_long([rank(last_report_at=None), rank(steps_reported=0)], 9e9) is None
    assert still_for_too_long([rank(saving_since=1001.0)], 9e9) is None
