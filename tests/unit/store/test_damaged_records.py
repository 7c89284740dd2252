"""A damaged record affects its own job only: it is read from its events, or set aside, and named."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.store.backup import check_backup
from orchestrator.store.errors import UnreadableRecordError
from orchestrator.store.records import JobFilter
from orchestrator.store.sql.schema import connect
from tests.unit.store.lives import add, cancel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.core.job.record import Job
    from orchestrator.store.store import Store

    Open = Callable[..., Store]
    Run = Callable[..., Any]

DAMAGES = {
    "no JSON": "'{\"id\": '",
    "another shape": "'{}'",
    "of another job": "replace(record, 'two-aaaaaa', 'six-aaaaaa')",
    "bytes that are no text": "CAST(x'7BFF00FE7D' AS TEXT)",
}


@pytest.fixture
def jobs(open_store: Open, run: Run) -> list[Job]:
    """Store three jobs, of which the first has ended; return their records."""
    store = open_store()
    found = [run(add(store, f"{name}-aaaaaa", name=name)) for name in ("one", "two", "three")]
    run(cancel(store, found[0]))
    found = [run(store.job(job.id)) for job in found]
    store.close()
    return found


def damage(path: Path, job: Job, record: str, *, events: bool = False) -> None:
    with closing(connect(path)) as connection:
        connection.execute(f"UPDATE jobs SET record = {record} WHERE id = ?", (job.id,))
        if events:
            connection.execute(
                "UPDATE events SET body = '{' WHERE job = (SELECT sequence FROM jobs WHERE id = ?)", (job.id,)
            )


@pytest.mark.parametrize("record", DAMAGES.values(), ids=DAMAGES)
def test_it_is_read_from_its_events(path: Path, jobs: list[Job], open_store: Open, run: Run, record: str) -> None:
    for job in jobs[:2]:
        damage(path, job, record)
    store = open_store()
    assert run(store.load_live()) == jobs[1:]
    assert run(store.jobs(JobFilter())) == jobs[::-1]
    for job in jobs[:2]:
        assert run(store.job(job.id)) == run(store.find(job.name, 1000)).job == job
        assert run(store.accepted(1000, job.submission.idempotency_key)) == job
    changed = [found for found in run(store.damaged()) if found.rebuilt]
    assert {found.job_id for found in changed} <= {job.id for job in jobs[:2]}
    assert jobs[1].id in {found.job_id for found in changed}
    run(cancel(store, jobs[1]))
    assert jobs[1].id not in {found.job_id for found in run(store.damaged())}, "a change writes a sound record again"


@pytest.mark.parametrize("place", [0, 1], ids=["ended", "live"])
def test_it_is_set_aside_where_its_events_are_damaged_too(
    path: Path, jobs: list[Job], open_store: Open, run: Run, place: int
) -> None:
    damage(path, jobs[place], "'{}'", events=True)
    store = open_store()
    others = [job for number, job in enumerate(jobs) if number != place]
    assert run(store.load_live()) == [job for job in others if not job.state.is_terminal]
    assert run(store.jobs(JobFilter())) == others[::-1]
    (found,) = run(store.damaged())
    assert (found.job_id, found.rebuilt) == (jobs[place].id, False)
    for question in (store.job(jobs[place].id), store.find(jobs[place].name, 1000), store.events(jobs[place].id)):
        with pytest.raises(UnreadableRecordError, match=f"job {jobs[place].id} is damaged .* restore a backup"):
            run(question)
    assert run(store.archives()) == {job.id: "sha256:1" if job in others else None for job in jobs}
    run(cancel(store, others[-1]))
    store.close()
    with closing(connect(path)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM jobs WHERE id = ?", (jobs[place].id,)).fetchone()
    assert count == 1, "it is kept for recovery"


def test_other_damaged_rows_are_left_out_and_reported(path: Path, jobs: list[Job], open_store: Open, run: Run) -> None:
    with closing(connect(path)) as connection:
        connection.execute("INSERT INTO places VALUES ('node', 'torn', '{'), ('node', 'b', '{\"strikes\": []}')")
        connection.execute(
            "INSERT INTO queue_changes (name, body, changed_by, changed_at) VALUES ('low', '[', 'ada', 1)"
        )
        connection.execute("UPDATE finished SET state = 'BOGUS'")
    store = open_store()
    assert [place.name for place in run(store.places())] == ["b"]
    assert run(store.queue_changes()) == []
    assert run(store.finished_counts()) == []
    found = run(store.verify())
    assert [text.partition(":")[0] for text in found] == ["places", "queue_changes"]


def test_a_backup_with_a_forged_job_id_is_not_intact(path: Path, jobs: list[Job], open_store: Open, run: Run) -> None:
    with closing(connect(path)) as connection:
        connection.execute(
            "UPDATE jobs SET id = '../../etc', record = replace(record, ?, '../../etc') WHERE id = ?",
            (jobs[0].id, jobs[0].id),
        )
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    (problem,) = check_backup(path)
    assert problem == "job ../../etc: this is no job's id"
    store = open_store()
    assert run(store.jobs(JobFilter())) == jobs[:0:-1]
    assert [found.job_id for found in run(store.damaged())] == ["../../etc"]
