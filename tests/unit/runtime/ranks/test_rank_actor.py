"""A rank's actor serves one gang at a time: calls for another are refused, and nothing of a job is left for the next."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.runtime.forkserver import linux
from orchestrator.runtime.ranks.fence import StaleAttemptError
from orchestrator.runtime.ranks.rank_actor import RankActor
from orchestrator.runtime.ranks.rank_events import PollCursor


@pytest.fixture(autouse=True)
def own_umask(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(linux, "adjust_oom_score", lambda _score: None)
    mask = os.umask(0o077)
    yield
    os.umask(mask)


def actor_of(tmp_path: Path) -> RankActor:
    return RankActor(job_id="a-abc234", gang=1, rank=0, node_dir=str(tmp_path), attempt=1, leased=False)


def test_a_call_for_another_gang_changes_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        actor = actor_of(tmp_path)
        with pytest.raises(StaleAttemptError, match="serves a-abc234-g1, not b-abc234-g1"):
            await actor.serve("b-abc234-g1", "kill", 1)
        with pytest.raises(StaleAttemptError):
            await actor.retire("b-abc234-g1")
        with pytest.raises(StaleAttemptError):
            await actor.take("b-abc234", 1, 1)
        await actor.take("a-abc234", 1, 1)  # it serves this gang already
        assert await actor.serve("a-abc234-g1", "prepare", 1, None) is None

    asyncio.run(run())


def test_the_next_gang_begins_with_nothing_and_late_calls_do_not_reach_it(tmp_path: Path) -> None:
    async def run() -> None:
        actor = actor_of(tmp_path)
        await actor.serve("a-abc234-g1", "prepare", 1, "127.0.0.1")
        await actor.serve("a-abc234-g1", "kill", 1)
        first = await actor.serve("a-abc234-g1", "poll", 1, PollCursor(), 0.0)
        assert [event.kind for event in first.events] == ["gone"]
        os.umask(0o002)
        assert await actor.retire("a-abc234-g1") == ()
        assert os.umask(0o077) == 0o077, "the next job's files must not be open to others"
        for late in ("kill", "prepare", "poll"):
            with pytest.raises(StaleAttemptError, match="serves no gang"):
                await actor.serve("a-abc234-g1", late, 1)
        await actor.take("b-abc234", 1, 1)
        with pytest.raises(StaleAttemptError, match="serves b-abc234-g1"):
            await actor.serve("a-abc234-g1", "kill", 1)
        await actor.serve("b-abc234-g1", "prepare", 1, None)
        second = await actor.serve("b-abc234-g1", "poll", 1, PollCursor(), 0.0)
        assert second.events == ()
        with pytest.raises(StaleAttemptError):
            await actor.retire("a-abc234-g1")

    asyncio.run(run())


def test_an_actor_with_something_of_the_job_serves_no_other(tmp_path: Path) -> None:
    async def run() -> None:
        actor = actor_of(tmp_path)
        end = threading.Event()
        thread = threading.Thread(target=end.wait, name="persister-0", daemon=True)
        thread.start()
        with (tmp_path / "model.pt").open("wb"):
            left = await actor.retire("a-abc234-g1")
        end.set()
        thread.join()
        assert left == (str(tmp_path / "model.pt"), "persister-0")
        with pytest.raises(StaleAttemptError, match="serves no gang"):
            await actor.take("b-abc234", 1, 1)

    asyncio.run(run())


def test_a_file_that_is_closed_a_moment_later_is_not_left(tmp_path: Path) -> None:
    async def run() -> None:
        actor = actor_of(tmp_path)
        log = (tmp_path / "rank0.log").open("wb")
        retired = asyncio.create_task(actor.retire("a-abc234-g1"))
        await asyncio.sleep(0)
        assert not retired.done()
        log.close()
        assert await retired == ()
        await actor.take("b-abc234", 1, 1)

    asyncio.run(run())
