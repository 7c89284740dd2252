"""A job's log policies: the first that is found counts, and none takes longer than its deadline."""

from __future__ import annotations

import asyncio
import time

import psutil
import pytest

from orchestrator.runtime.log_policies import match_policies

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
    assert asyncio.run(match_policies(policies, "ran out of memory\nat last")) == (action, "")


def test_a_pattern_that_never_ends_is_left_out_in_time_and_leaves_no_process() -> None:
    async def case() -> tuple[tuple[str, str], int]:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        found = await match_policies([("x", "fail"), (CATASTROPHIC, "fail")], SLOW_TEXT, seconds=0.5)
        ticking.cancel()
        return found, ticks

    before = {p.pid for p in psutil.Process().children()}
    began = time.monotonic()
    (action, note), ticks = asyncio.run(case())
    assert time.monotonic() - began < 5
    assert action == ""
    assert repr(CATASTROPHIC) in note
    assert ticks > 10, "the loop went on meanwhile"
    assert {p.pid for p in psutil.Process().children()} <= before


def test_only_the_end_of_the_output_is_searched() -> None:
    assert asyncio.run(match_policies([("first", "fail")], "first" + "x" * 100_000)) == ("", "")
