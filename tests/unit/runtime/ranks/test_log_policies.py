"""A job's log policies: the first that matches counts, and no search takes longer than its deadline."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from orchestrator.core.facts.notes import PoliciesLeftOut
from orchestrator.runtime.ranks.output import match_policies

CATASTROPHIC = r"(a+)+$"
SLOW_TEXT = "a" * 40 + "!"


@pytest.mark.parametrize(
    ("policies", "action"),
    [
        ([], ""),
        ([("out of memory", "fail")], "fail"),
        ([("disk on fire", "fail")], ""),
        ([("disk on fire", "fail"), (r"out of \w+", "fail")], "fail"),
        ([("out of memory", "restart"), ("out of memory", "fail")], "restart"),
    ],
)
def test_the_first_that_is_found_counts(policies: list[tuple[str, str]], action: str) -> None:
    assert asyncio.run(match_policies(policies, "ran out of memory\nat last")) == (action, None)


def test_a_pattern_that_never_ends_is_left_out_in_time_and_leaves_no_process() -> None:
    before = {p.pid for p in psutil.Process().children()}
    policies = [("x", "fail"), (CATASTROPHIC, "fail")]
    action, note = asyncio.run(match_policies(policies, SLOW_TEXT, seconds=0.5, patience=3600))
    assert action == ""
    assert note == PoliciesLeftOut(pattern=CATASTROPHIC, seconds=0.5)
    assert {p.pid for p in psutil.Process().children()} <= before


def test_a_search_that_gets_no_processor_blames_no_pattern() -> None:
    before = {p.pid for p in psutil.Process().children()}
    action, note = asyncio.run(match_policies([("x", "fail")], "x", patience=0.0))
    assert action == ""
    assert note == PoliciesLeftOut(seconds=0.0)
    assert {p.pid for p in psutil.Process().children()} <= before


def test_the_loop_goes_on_during_a_search_and_a_search_that_is_cancelled_leaves_no_process() -> None:
    before = {p.pid for p in psutil.Process().children()}

    async def case() -> None:
        search = asyncio.create_task(match_policies([(CATASTROPHIC, "fail")], SLOW_TEXT, seconds=3600, patience=3600))
        while {p.pid for p in psutil.Process().children()} <= before:  # noqa: ASYNC110  (a process starts)
            await asyncio.sleep(0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not search.done()
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)

    asyncio.run(case())
    assert {p.pid for p in psutil.Process().children()} <= before
