"""Steps read from printed lines, and a pattern that never ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.runtime.forkserver.masking import Masker
from orchestrator.runtime.ranks.logs import LogLimits, log_path
from orchestrator.runtime.ranks.output import LogProgress, RankOutput
from orchestrator.train.script.progress_reading import CheckpointFacts, ProgressSnapshot

BLANK = ProgressSnapshot(writer_pid=7, checkpoint=CheckpointFacts(saved_step=3))


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110  (another process answers)
            await asyncio.sleep(0.01)


def run(pattern: str, story: Callable[[LogProgress], Awaitable[None]], previous: int = 0, **changes: Any) -> list[str]:
    said: list[str] = []

    async def all_of_it() -> None:
        found = LogProgress(pattern, previous, said.append, **changes)
        try:
            await story(found)
        finally:
            await found.close()

    asyncio.run(all_of_it())
    return said


def test_the_newest_step_of_what_was_printed_is_shown_with_its_pace() -> None:
    async def story(found: LogProgress) -> None:
        assert found.over(BLANK) is BLANK
        found.feed("loading")
        found.feed("step 1/1,000 loss 3")
        await until(lambda: found.over(BLANK).step == 1)
        first = found.over(BLANK)
        assert (first.total_steps, first.steps_reported, first.step_seconds) == (1000, 1, None)
        assert (first.writer_pid, first.checkpoint) == (7, BLANK.checkpoint)
        for number in (2, 3, 4):
            found.feed(f"step {number}/1,000")
        await until(lambda: found.over(BLANK).step == 4)
        now = found.over(BLANK)
        assert now.step_seconds is not None
        assert now.step_seconds > 0
        assert now.recent_step_seconds
        found.feed("step 2/1,000")  # the counter starts again
        await until(lambda: found.over(BLANK).step == 2)
        again = found.over(BLANK)
        assert (again.max_step, again.steps_reported) == (4, now.steps_reported)
        assert again.last_report_at >= now.last_report_at  # type: ignore[operator]

    assert run(r"step ([\d,]+)/([\d,]+)", story) == []


def test_a_step_of_an_attempt_before_is_not_new() -> None:
    async def story(found: LogProgress) -> None:
        found.feed("step 7")
        await until(lambda: found.over(BLANK).step == 7)
        assert found.over(BLANK).new_step is None
        found.feed("step 9")
        await until(lambda: found.over(BLANK).step == 9)
        assert found.over(BLANK).new_step == 9

    run(r"step (\d+)", story, previous=8)


def test_what_the_script_reports_itself_comes_first() -> None:
    async def story(found: LogProgress) -> None:
        found.feed("step 7")
        await until(lambda: found.over(BLANK).step == 7)
        own = ProgressSnapshot(step=3)
        assert found.over(own) is own

    run(r"step (\d+)", story)


def test_a_pattern_that_never_ends_is_given_up_and_told() -> None:
    async def story(found: LogProgress) -> None:
        found.feed("a" * 60 + "!")
        await found.close()
        found.feed("a step")
        assert found.over(BLANK) is BLANK

    (said,) = run(r"((?:a+)+)$", story, deadline_seconds=0.5)
    assert "simplify it" in said


def test_without_a_pattern_nothing_is_searched() -> None:
    async def story(found: LogProgress) -> None:
        found.feed("step 7")
        await asyncio.sleep(0)
        assert found._task is None

    assert run("", story) == []


def test_a_search_that_dies_is_told() -> None:
    async def story(found: LogProgress) -> None:
        found.feed("step 7")
        await found.close()

    (said,) = run(r"step (\d+)", story, search_program="import sys; sys.exit(3)")
    assert "could not be searched for" in said


def test_a_number_that_no_counter_reaches_is_no_step() -> None:
    """A thousand digits would end the search with an error, and the rank's end would never be reported."""

    async def story(found: LogProgress) -> None:
        found.feed("step " + "9" * 900)
        found.feed("done")
        await until(lambda: found._process is not None and not found._lines)
        found.feed("step 5")
        await until(lambda: found.over(BLANK).step == 5)
        found.feed("step " + "9" * 900)

    assert run(r"step (\d+)", story) == []


@pytest.mark.parametrize("pattern", ["", r"step (\d+)"])
def test_the_end_of_a_rank_waits_for_no_more_lines(pattern: str) -> None:
    """With a pause of an hour between two searches, only a pause that the end cuts short lets this end."""

    async def story() -> None:
        found = LogProgress(pattern, 0, lambda _: None, batch_seconds=3600.0)
        found.feed("step 5 loss 0.1")
        await until(lambda: found.over(BLANK).step == 5)
        found.feed("step 6 loss 0.1")
        await found.close()
        assert found.over(BLANK).step == 6

    asyncio.run(story())


def test_a_bar_without_a_line_break_is_in_the_log_and_its_step_is_shown_while_the_rank_runs(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        read_end, write_end = os.pipe2(os.O_NONBLOCK)
        path = log_path(tmp_path, 1, 0)
        found = RankOutput(
            path, masker=Masker(()), limits=LogLimits(), progress_pattern="", previous_step=0, drawn_seconds=0.01
        )
        found.listen(read_end)
        for step in (24, 25):
            os.write(write_end, f"\rTraining:  41%|####      | {step}/60 [00:25<00:35,  1.00s/it]".encode())
        await until(lambda: found.over(BLANK).step == 25)
        await until(lambda: "25/60" in path.read_text())
        assert found.over(BLANK).total_steps == 60
        os.close(write_end)
        await found.close()

    asyncio.run(story())
