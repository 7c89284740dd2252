"""Requests for a trace from a rank that listens, does not listen, ends, fails, or takes too long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.runtime.ranks.progress import take_trace
from orchestrator.train.script import profiling as files
from orchestrator.train.script.profiling import TraceRefusedError
from orchestrator.train.script.progress import ProgressPage
from orchestrator.train.script.progress_reading import PageReader


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageReader]:
    """Yield the page of a rank that runs a training loop: this process."""
    made = PageReader.create(tmp_path / "page")
    rank = ProgressPage.open(tmp_path / "page")
    assert rank.claim()
    files.beside(made.path, files.READY_SUFFIX).write_text(str(os.getpid()))
    yield made
    rank.close()
    made.close()


def take(
    page: PageReader, *, seconds: float = 300.0, over: bool = False, meanwhile: Callable[[], None] | None = None
) -> bytes:
    async def within() -> bytes:
        asking = asyncio.create_task(take_trace(page, 0, 3, seconds, lambda: over))
        if meanwhile is not None:
            async with asyncio.timeout(300):
                while not files.beside(page.path, files.REQUEST_SUFFIX).exists():  # noqa: ASYNC110  (a file is polled)
                    await asyncio.sleep(0.001)
            meanwhile()
        return await asking

    return asyncio.run(within())


def left(page: PageReader) -> set[str]:
    return {path.name for path in page.path.parent.iterdir()} - {"page", "page.trace-ready"}


def answer(page: PageReader) -> None:
    """Answer the request as the training loop does."""
    request = files.beside(page.path, files.REQUEST_SUFFIX)
    assert files.steps_asked(request) == 3
    draft = files.beside(page.path, f"{files.TRACE_SUFFIX}.part")
    draft.write_bytes(b"trace")
    draft.rename(files.beside(page.path, files.TRACE_SUFFIX))  # another thread looks for it meanwhile
    request.unlink()


def test_a_rank_that_listens_answers(page: PageReader) -> None:
    assert take(page, meanwhile=lambda: answer(page)) == b"trace"
    assert not left(page)


def test_an_old_trace_is_nobody_s_answer(page: PageReader) -> None:
    files.beside(page.path, files.TRACE_SUFFIX).write_bytes(b"old")
    assert take(page, meanwhile=lambda: answer(page)) == b"trace"


def test_who_does_not_listen_is_not_waited_for(page: PageReader) -> None:
    ready = files.beside(page.path, files.READY_SUFFIX)
    for text in ("1", "no number"):  # of an earlier process; damaged
        ready.write_text(text)
        with pytest.raises(TraceRefusedError, match="runs no training loop"):
            take(page)
    assert not left(page)


@pytest.mark.parametrize(
    ("seconds", "over", "vanishes", "message"),
    [
        (60.0, True, False, "ended before the trace was complete"),
        (60.0, False, True, "could not write the trace"),
        (0.05, False, False, "did not complete the steps within 0.05 s"),
    ],
)
def test_why_there_is_none_is_said(page: PageReader, seconds: float, over: bool, vanishes: bool, message: str) -> None:
    request = files.beside(page.path, files.REQUEST_SUFFIX)
    with pytest.raises(TraceRefusedError, match=message):
        take(page, seconds=seconds, over=over, meanwhile=request.unlink if vanishes else None)
    assert not left(page)


def test_one_trace_at_a_time(page: PageReader) -> None:
    def ask_again() -> None:
        with pytest.raises(TraceRefusedError, match="being taken already"):
            files.request(page.path, 1)
        answer(page)

    assert take(page, meanwhile=ask_again) == b"trace"
