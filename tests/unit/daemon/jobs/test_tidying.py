"""Files that a job leaves outside its directory are removed at its end, or at the next daemon's start."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.ids import JobId
from orchestrator.daemon.jobs import tidying
from orchestrator.daemon.jobs.tidying import Tidying
from orchestrator.runtime.pools import Pool
from orchestrator.runtime.spawn.rank_locks import rank_lock_path
from orchestrator.spec.paths import Paths
from orchestrator.store.store import Store
from orchestrator.telemetry.logging import get_logger
from tests.support.deep_trees import MakeDeep
from tests.support.stores import new_store
from tests.unit.core.builders import ID
from tests.unit.store.lives import add, cancel, end

if TYPE_CHECKING:
    from collections.abc import Callable

OTHER = JobId("other-zzzzzz")
READY = asyncio.Event()
READY.set()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home that contains its node directories and pages."""
    monkeypatch.setattr(tidying, "page_directory", lambda _namespace: tmp_path / "pages")
    monkeypatch.setattr(tidying, "node_directory", lambda _namespace, node_id: tmp_path / "nodes" / node_id)
    return tmp_path


def leave(home: Path, job_id: JobId) -> list[Path]:
    """Write the files that a job of two ranks leaves; return their paths."""
    files = [
        Paths(home=home, socket=home / "sock").secrets(job_id),
        *(home / "pages" / f"{job_id}.{rank}.page" for rank in range(2)),
        home / "pages" / f"{job_id}.snapshots" / "rank-0.0",
        *(rank_lock_path(home / "nodes" / "abc", job_id, rank) for rank in range(2)),
    ]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file.write_text("" if file.suffix == ".lock" else "x")  # a lock's content would name a live tree
    return files


def tidy(home: Path, store: Store) -> Tidying:
    """Return the tidying of a daemon."""
    return Tidying(store, Paths(home=home, socket=home / "sock"), "orch-0", Pool("tidying", 1), get_logger("test"))


async def stored() -> Store:
    """Return a store with a job that ended and one that waits."""
    store = new_store()
    await end(store, await add(store, ID))
    await add(store, OTHER)
    return store


def test_a_daemon_removes_what_the_one_before_it_left_and_nothing_else(home: Path) -> None:
    ended, live = leave(home, ID), leave(home, OTHER)

    async def start() -> list[JobId]:
        store = await stored()
        assert await store.untidied() == [ID]
        await tidy(home, store).once(READY)
        return await store.untidied()

    assert asyncio.run(start()) == []
    assert not any(path.exists() for path in ended)
    assert not (home / "pages" / f"{ID}.snapshots").exists()
    assert all(path.exists() for path in live)


def test_what_cannot_be_removed_is_tried_again_at_the_next_start_and_secrets_go_first(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets, *_ = leave(home, ID)
    really, gone_before = tidying.remove_of_jobs, list[bool]()

    def failing(directory: Path, job_ids: frozenset[JobId]) -> dict[str, str]:
        gone_before.append(not secrets.exists())
        return really(directory, job_ids) if broken == 0 else {ID: "Input/output error"}

    monkeypatch.setattr(tidying, "remove_of_jobs", failing)

    async def starts() -> list[list[JobId]]:
        nonlocal broken
        store, found = await stored(), []
        for broken in (1, 0):  # noqa: B007  # read by what stands in for the removal
            await tidy(home, store).once(READY)
            found.append(await store.untidied())
        return found

    broken = 1
    assert asyncio.run(starts()) == [[ID], []]
    assert all(gone_before)
    assert not list((home / "pages").iterdir())


def test_nothing_is_tidied_before_the_daemon_answers(home: Path) -> None:
    left = leave(home, ID)

    async def starts() -> None:
        store, ready = await stored(), asyncio.Event()
        tidying_it = asyncio.create_task(tidy(home, store).once(ready))
        for _ in range(50):  # turns of the event loop
            await asyncio.sleep(0)
        assert all(path.exists() for path in left)
        ready.set()
        await tidying_it
        assert await store.untidied() == []

    asyncio.run(starts())


def test_a_job_that_cannot_be_tidied_holds_up_no_other_and_is_noted(
    home: Path, monkeypatch: pytest.MonkeyPatch, make_deep: MakeDeep
) -> None:
    left = leave(home, ID), leave(home, OTHER)
    make_deep(home / "pages" / f"{ID}.snapshots", 1_500)
    make_deep(home / "pages" / f"{OTHER}.snapshots", 1_500)
    really = tidying.remove_of_jobs

    def failing(directory: Path, job_ids: frozenset[JobId]) -> dict[str, str]:
        if ID in job_ids:
            raise RecursionError
        return really(directory, job_ids)

    monkeypatch.setattr(tidying, "remove_of_jobs", failing)

    async def starts() -> list[JobId]:
        store = new_store()
        for job_id in (ID, OTHER):
            await end(store, await add(store, job_id))
        await tidy(home, store).once(READY)
        return await store.untidied()

    assert asyncio.run(starts()) == [ID]
    assert not any(path.exists() for path in left[1][:-2])
    assert not (home / "pages" / f"{OTHER}.snapshots").exists()


def test_an_end_is_tidied_at_once(home: Path) -> None:
    left = leave(home, ID)

    async def ends() -> list[JobId]:
        store = await stored()
        tidying_now = tidy(home, store)
        tidying_now.drop_secrets(ID)
        assert not left[0].exists(), "before anything else is done"
        await tidying_now.after([ID])
        return await store.untidied()

    assert asyncio.run(ends()) == []
    assert not any(path.exists() for path in left)


def test_nothing_is_removed_through_a_link_in_place_of_a_job_s_directory(home: Path) -> None:
    (home / "mine").mkdir()
    (home / "mine" / "secrets").write_text("of another program")
    (home / "jobs").mkdir()
    (home / "jobs" / ID).symlink_to(home / "mine")

    async def ends() -> list[JobId]:
        store = await stored()
        await tidy(home, store).after([ID])
        return await store.untidied()

    assert asyncio.run(ends()) == [ID]
    assert (home / "mine" / "secrets").read_text() == "of another program"


@pytest.mark.parametrize("finish", [end, cancel])
def test_a_store_on_disk_remembers_what_is_to_be_tidied(tmp_path: Path, finish: Callable[..., Any]) -> None:
    from orchestrator.store.store import Store

    def opened() -> Store:
        return Store.open(tmp_path / "orch.db", reserve=None, min_free_bytes=0)

    async def before() -> None:
        store = opened()
        await finish(store, await add(store, ID))
        await add(store, OTHER)
        store.close()

    async def after() -> None:
        store = opened()
        assert await store.untidied() == [ID]
        await store.tidied([ID, JobId("nobody-aaaaaa")])
        assert await store.untidied() == []
        store.close()

    asyncio.run(before())
    asyncio.run(after())
