"""The keeper reads all that its child wrote, and nobody else's."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from orchestrator.runtime.forkserver.reports import Reports, clip


@pytest.fixture(autouse=True)
def woken() -> Iterator[list[int]]:
    """Counts the signals that wake the keeper, which is this process."""
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def in_child(reports: Reports, *messages: dict[str, object], attach: bool = True) -> None:
    pid = os.fork()
    if pid == 0:
        if attach:
            reports.attach_writer()
        for message in messages:
            reports.send(message)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_messages_arrive_in_order_and_once(woken: list[int]) -> None:
    reports = Reports()
    assert reports.receive() == []
    in_child(reports, {"event": "started"}, {"event": "error", "message": "grüß \udcff"})
    assert reports.receive() == [{"event": "started"}, {"event": "error", "message": "grüß \udcff"}]
    assert reports.receive() == []
    assert woken


def test_processes_that_merely_inherited_it_say_nothing(woken: list[int]) -> None:
    reports = Reports()
    in_child(reports, {"event": "error"}, attach=False)
    assert (reports.receive(), woken) == ([], [])


def test_what_does_not_fit_is_dropped_and_the_rest_kept() -> None:
    reports = Reports()
    in_child(reports, {"n": 1}, {"n": "x" * 300_000}, {"n": 2})
    assert reports.receive() == [{"n": 1}, {"n": 2}]


def test_clip_keeps_both_ends() -> None:
    assert clip("short", 10) == "short"
    cut = clip("a" * 100 + "b" * 100, 40)
    assert cut.startswith("a" * 10)
    assert cut.endswith("b" * 30)
    assert "160 characters left out" in cut
