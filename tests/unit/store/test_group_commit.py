"""Group commit: calls that wait together are committed together, answered after the commit, and refused separately."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core.states import JobState
from orchestrator.store.errors import JobExistsError, StoreError, VersionConflictError
from orchestrator.store.sql.schema import connect
from tests.unit.core.builders import ID, chain, finished, submission
from tests.unit.store.lives import add, note, notes_of, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.store.store import Store

    Run = Callable[..., Any]


class Held:
    """Blocks the store's writer, so that calls that arrive meanwhile form one group."""

    def __init__(self, path: Path) -> None:
        self._connection = connect(path)
        self._connection.execute("BEGIN IMMEDIATE")

    def let_go(self) -> None:
        self._connection.execute("ROLLBACK")
        self._connection.close()


async def grouped(store: Store, path: Path, *calls: Any) -> list[Any]:
    """Return the answers to ``calls``, which all wait in the queue before the first of them can be committed."""
    held = Held(path)
    tasks = [asyncio.create_task(call) for call in calls]
    await asyncio.sleep(0)  # each task runs up to its place in the queue
    held.let_go()
    return await asyncio.gather(*tasks, return_exceptions=True)


def trace(store: Store) -> list[str]:
    found: list[str] = []
    store._writer._connection.set_trace_callback(found.append)
    return found


def test_what_waits_together_is_committed_together(store: Store, path: Path, run: Run) -> None:
    found = trace(store)
    calls = [store.submit(submission(job_id=f"job-{n}")) for n in range(40)]
    answers = run(grouped(store, path, *calls))
    assert all(new for _, new in answers)
    assert found.count("COMMIT") <= 2, "the first may have been taken alone"
    assert sorted(job.submission.sequence for job, _ in answers) == list(range(1, 41))


def test_each_is_answered_after_its_commit(store: Store, path: Path, run: Run) -> None:
    async def ask_and_look(n: int) -> int:
        await store.submit(submission(job_id=f"job-{n}"))
        with closing(connect(path)) as connection:
            (count,) = connection.execute("SELECT count(*) FROM jobs WHERE id = ?", (f"job-{n}",)).fetchone()
        return int(count)

    async def all_at_once() -> list[int]:
        return await asyncio.gather(*(ask_and_look(n) for n in range(30)))

    assert run(all_at_once()) == [1] * 30


def test_one_that_fails_takes_nothing_from_the_others(store: Store, path: Path, run: Run) -> None:
    job = run(add(store, ID))
    one, two = chain(job, note(job, "one"), note(job, "two"))
    answers = run(
        grouped(
            store,
            path,
            store.append([one]),
            store.append(chain(job, note(job, "never"))),
            store.submit(submission(job_id="b-2")),
            store.submit(submission(job_id=ID, idempotency_key="other")),
            store.append([two]),
        )
    )
    assert isinstance(answers[1], VersionConflictError)
    assert isinstance(answers[3], JobExistsError)
    assert notes_of(run(store.job(ID))) == ("one", "two")
    assert answers[2][0].submission.sequence == 2
    assert run(store.verify()) == []


def test_a_job_may_be_accepted_change_and_end_in_one_group(store: Store, path: Path, run: Run) -> None:
    event = submission()

    async def live() -> list[Any]:
        job = (await store.submit(submission(job_id="other-1")))[0]
        changes = chain(job, note(job, "x"), finished(job, JobState.CANCELLED), note(job, "y"))
        return await grouped(
            store,
            path,
            store.submit(event),
            *(store.append([change]) for change in changes),
        )

    run(live())
    other = run(store.job("other-1"))
    assert other.state is JobState.CANCELLED
    assert notes_of(other) == ("x", "y")
    assert [j.id for j in run(store.load_live())] == [ID]
    assert run(store.verify()) == []


def test_a_group_that_cannot_be_committed_is_refused_and_the_next_is_not(store: Store, path: Path, run: Run) -> None:
    job = run(add(store, ID))
    store._writer._connection.execute("PRAGMA busy_timeout = 10")
    held = Held(path)
    with pytest.raises(StoreError, match=r"database is locked.*try again") as caught:
        run(write(store, [note(job, "never")]))
    assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
    held.let_go()
    assert notes_of(run(write(store, [note(job, "now")]))[0]) == ("now",)


def test_a_row_that_somebody_else_changed_is_not_overwritten(store: Store, path: Path, run: Run) -> None:
    job = run(add(store, ID))
    with closing(connect(path)) as connection:
        connection.execute("UPDATE jobs SET version = 7")
    with pytest.raises(VersionConflictError, match=r"no longer at version 1.*orch doctor"):
        run(store.append(chain(job, note(job, "never"))))
    with closing(connect(path)) as connection:
        assert connection.execute("SELECT version FROM jobs").fetchone() == (7,)
        connection.execute("UPDATE jobs SET version = 1")
    assert run(write(store, [note(job, "now")]))[0].version == 2


def test_a_caller_that_gives_up_does_not_disturb_the_others(store: Store, path: Path, run: Run) -> None:
    async def give_up() -> Any:
        held = Held(path)
        tasks = [asyncio.create_task(store.submit(submission(job_id=f"job-{n}"))) for n in range(3)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        held.let_go()
        return await asyncio.gather(*tasks, return_exceptions=True)

    first, second, third = run(give_up())
    assert isinstance(second, asyncio.CancelledError)
    assert (first[1], third[1]) == (True, True)
    assert len(run(store.load_live())) == 3, "its write was under way and stands"


def test_a_loop_that_is_gone_does_not_stop_the_writer(store: Store, path: Path) -> None:
    async def ask_and_leave() -> None:
        held = Held(path)
        asyncio.get_running_loop().call_later(0.0, held.let_go)
        task = asyncio.create_task(store.submit(submission()))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(ask_and_leave())
    assert asyncio.run(store.submit(submission(job_id="b-2")))[1]


def test_a_large_group_is_cut_into_several(store: Store, path: Path, run: Run) -> None:
    found = trace(store)
    job = run(add(store, ID))
    notes = chain(job, *(note(job, f"{n}") for n in range(300)))
    run(grouped(store, path, *(store.append([change]) for change in notes)))
    assert run(store.job(ID)).version == 301
    assert found.count("COMMIT") >= 3
