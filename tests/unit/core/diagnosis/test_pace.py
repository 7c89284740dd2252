"""A rank's own time excludes its waiting, and is measured in the same way for every rank of a job."""

from __future__ import annotations

import pytest

from orchestrator.core.diagnosis.observation import paces


def test_measured_parts_come_before_processor_time_and_only_where_every_rank_has_them() -> None:
    steps, busy = {0: 1.0, 1: 1.0}, {0: 0.3, 1: 0.9}
    parts = {0: {"data_seconds": 0.1, "forward_seconds": 0.4, "backward_seconds": 0.5}}
    assert [p.own_seconds for p in paces(steps, parts, busy)] == [0.3, 0.9]
    parts[1] = {"data_seconds": 0.2, "forward_seconds": 0.4, "backward_seconds": 0.4}
    assert [p.own_seconds for p in paces(steps, parts, busy)] == [pytest.approx(0.5), pytest.approx(0.6)]
    assert [p.own_seconds for p in paces(steps, {}, {0: 0.3, 1: None})] == [None, None]
