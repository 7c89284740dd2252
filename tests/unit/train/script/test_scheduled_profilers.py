"""A script's own profiler with a schedule and `orch profile` do not interfere. Each mistake ends the process (SIGSEGV)."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile, schedule

from orchestrator.train.script.profiling import REQUEST_SUFFIX, TRACE_SUFFIX, ScheduledProfilers, Tracer

STEPS = 9


def scheduled(recorded: list[int], plan: Any) -> profile:
    """Return a profiler that appends the number of events of each of its traces to ``recorded``."""

    def ready(done: profile) -> None:
        recorded.append(len(done.events()))

    return profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready)


@pytest.mark.parametrize(
    ("plan", "steps"),
    [((1, 2, 2), 1), ((1, 2, 2), STEPS), ((0, 6, 2), 3), ((2, 2, 3), 3), ((0, 1, 1), 1), ((8, 1, 1), STEPS)],
    ids=str,
)
def test_one_that_begins_within_a_trace_has_its_own_result(
    tmp_path: Path, plan: tuple[int, int, int], steps: int
) -> None:
    wait, warmup, active = plan
    recorded: list[int] = []
    tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    tracer.ask(steps)
    tracer.look()
    assert tracer.active
    own = scheduled(recorded, schedule(wait=wait, warmup=warmup, active=active, repeat=1))
    own.start()
    for _ in range(STEPS):
        torch.ones(3).add(1)
        if tracer.active:
            tracer.step_done()
        own.step()
    own.stop()
    assert len(recorded) == 1
    assert recorded[0] > 0
    assert not Path(f"{tmp_path / 'page'}{REQUEST_SUFFIX}").exists(), "who asked hears of it"
    tracer.ask(1)
    tracer.look()
    assert tracer.step_done() is not None, "the next trace is taken"


@pytest.mark.parametrize("before", [0, 3])
def test_a_trace_waits_for_one_that_has_started(tmp_path: Path, before: int) -> None:
    recorded: list[int] = []
    tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    own = scheduled(recorded, schedule(wait=1, warmup=1, active=2, repeat=1))
    own.start()
    for step in range(STEPS):
        if step == before:
            tracer.ask(1)
        tracer.look()
        assert tracer.active is (step == 4), "its four steps are over: it does nothing more, though it is not stopped"
        torch.ones(3).add(1)
        if tracer.active:
            tracer.step_done()
        own.step()
    own.stop()
    assert len(recorded) == 1
    assert Path(f"{tmp_path / 'page'}{TRACE_SUFFIX}").exists()


def test_a_schedule_of_the_script_s_own_is_not_asked(tmp_path: Path) -> None:
    asked: list[int] = []

    def count(step: int) -> ProfilerAction:
        asked.append(step)
        return ProfilerAction.NONE

    tracer = Tracer(tmp_path / "page", torch.device("cpu"))
    own = profile(activities=[ProfilerActivity.CPU], schedule=count)
    own.start()
    known = len(asked)
    tracer.ask(1)
    tracer.look()
    assert not tracer.active
    assert len(asked) == known
    own.stop()
    tracer.look()
    assert tracer.step_done() is not None


def test_one_that_was_found_is_not_searched_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []
    every = gc.get_objects

    def count() -> list[Any]:
        searches.append(1)
        return every()

    monkeypatch.setattr(gc, "get_objects", count)
    found = ScheduledProfilers()
    own = scheduled([], schedule(wait=5, warmup=1, active=1))
    assert not found.any_ahead()
    own.start()
    assert found.any_ahead()
    assert found.any_ahead()
    assert len(searches) == 2
    assert not found.any_prepared()
    own.stop()
    assert not found.any_ahead()
