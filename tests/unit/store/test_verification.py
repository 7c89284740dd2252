"""Verification finds the faults of a store: each kind of tampering, by name."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.core import events as ev
from orchestrator.store.records import StoredEvent
from orchestrator.store.sql.requests import replay
from orchestrator.store.sql.schema import connect
from orchestrator.store.store import Store
from tests.unit.core.builders import ID, T0, submission
from tests.unit.store.lives import add, end, note, run_it

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from orchestrator.store.store import Store

    Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("tampering", "finding"),
    [
        ("UPDATE jobs SET state = 'FAILED' WHERE id = 'digits-abc234'", "differs from the fold of its events in state"),
        ("UPDATE jobs SET version = version + 1", "in version"),
        ("UPDATE jobs SET user = 'eve'", "in user"),
        ("UPDATE jobs SET ended_at = 1.0 WHERE id = 'digits-abc234'", "in ended_at"),
        ("UPDATE jobs SET record = json_set(record, '$.priority', 99)", "in record.priority"),
        ("UPDATE jobs SET record = json_set(record, '$.color', 'red')", "record.color"),
        ("UPDATE jobs SET record = json_remove(record, '$.phase')", "in record.phase"),
        ("UPDATE jobs SET record = 'nonsense'", "its events or its record cannot be read"),
        ("DELETE FROM events WHERE number = 1", "its events do not begin with a submission"),
        ("DELETE FROM events WHERE number = 2", "attempt_running"),
        ("DELETE FROM events", "its events do not begin with a submission"),
        ("DELETE FROM events WHERE number = 3 AND job = 1", "in version, state, record."),
        ("UPDATE events SET kind = 'job_teleported' WHERE number = 2", "upgrade orch"),
        ("UPDATE events SET body = '{}' WHERE number = 2", "cannot be read"),
        (
            "INSERT INTO events SELECT job, 99, kind, at, cause, body FROM events WHERE number = 2 AND job = 1",
            "event 99 (attempt_started) does not follow",
        ),
        ("DELETE FROM jobs WHERE id = 'digits-abc234'", "events row None has no jobs"),
    ],
)
def test_tampering_is_found(store: Store, path: Path, run: Run, tampering: str, finding: str) -> None:
    run(run_it(store, run(add(store, ID))))
    run(end(store, run(add(store, "b-2"))))
    assert run(store.verify()) == []
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys = OFF")
        connection.execute(tampering)
    found = run(store.verify())
    assert found
    assert all(isinstance(text, str) for text in found)
    assert any(finding in text for text in found), found


def test_damage_is_found_while_the_store_is_open(open_store: Callable[..., Store], path: Path, run: Run) -> None:
    store = open_store()
    for n in range(30):
        run(add(store, f"job-{n}"))
    store.close()
    store = open_store()
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(os.urandom(8192))
    assert run(store.verify())


def test_verifying_a_long_history_leaves_out_nothing(store: Store, path: Path, run: Run) -> None:
    async def many() -> None:
        for n in range(620):
            await store.submit(submission(job_id=f"job-{n}"))

    run(many())
    with closing(connect(path)) as connection:
        connection.execute("UPDATE jobs SET user = 'eve' WHERE sequence IN (1, 500, 501, 620)")
    assert [text.split(":")[0] for text in run(store.verify())] == [
        "job job-0",
        "job job-499",
        "job job-500",
        "job job-619",
    ]


def test_a_replay_wants_every_event_in_its_place() -> None:
    begin = StoredEvent(1, submission())
    change = ev.JobUpdated(job_id=ID, at=T0, by="ada", priority=70)
    assert replay([begin, StoredEvent(2, change)], 7).priority == 70
    with pytest.raises(ValueError, match="event 3"):
        replay([begin, StoredEvent(3, change)], 7)
    with pytest.raises(ValueError, match="event 3"):
        replay([begin, StoredEvent(2, change), StoredEvent(3, change)], 7)
    with pytest.raises(ValueError, match="do not begin"):
        replay([StoredEvent(1, change)], 7)
    assert note(replay([begin], 7), "x").job_id == ID
