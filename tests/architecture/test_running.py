"""A suite that is killed has already reported the tests that it waited for."""

from __future__ import annotations

import queue
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.running import LongRunning
from tests.support.stack import PATIENCE_SECONDS


def test_what_runs_for_long_is_told_once_in_a_while() -> None:
    told: list[str] = []
    running = LongRunning(told.append, long=100.0)
    running.pytest_runtest_logstart("a.py::slow")
    running.pytest_runtest_logstart("a.py::quick")
    begun = time.monotonic()
    running.pytest_runtest_logfinish("a.py::quick")
    for seconds in (90, 110, 130, 210, 290):
        running.look(begun + seconds)
    running.pytest_runtest_logfinish("a.py::slow")
    running.look(begun + 400)
    assert told == ["after 110 s still running: a.py::slow", "after 210 s still running: a.py::slow"]


@pytest.mark.parametrize(("outcome", "lines"), [("failed", ["failed, in its call: a.py::one"]), ("passed", [])])
def test_a_failure_is_told_at_once(outcome: str, lines: list[str]) -> None:
    told: list[str] = []
    report: Any = SimpleNamespace(failed=outcome == "failed", when="call", nodeid="a.py::one")
    LongRunning(told.append).pytest_runtest_logreport(report)
    assert told == lines


def test_it_is_told_while_it_runs() -> None:
    told: queue.Queue[str] = queue.Queue()
    running = LongRunning(told.put, long=1e-6, look=0.001)
    running.pytest_runtest_logstart("a.py::slow")
    running.pytest_sessionstart()
    try:
        assert "a.py::slow" in told.get(timeout=PATIENCE_SECONDS)
    finally:
        running.pytest_sessionfinish()
