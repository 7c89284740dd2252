"""queries.sql: every statement is named, explained and used, and goes through the index that it should."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from orchestrator.store.sql.requests import STATEMENTS
from orchestrator.store.sql.schema import connect
from tests.unit.core.builders import ID
from tests.unit.store.lives import add

if TYPE_CHECKING:
    from collections.abc import Callable

    from orchestrator.store.store import Store


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("live_jobs", "USING INDEX jobs_live"),
        ("select_jobs", "USING INTEGER PRIMARY KEY"),
        ("select_jobs_of_user", "USING INDEX jobs_by_user"),
        ("select_jobs_in_state", "USING INDEX jobs_by_state"),
        ("first_since", "USING COVERING INDEX jobs_by_time"),
        ("job_by_id", "USING INDEX sqlite_autoindex_jobs_1"),
        ("job_by_key", "USING INDEX jobs_by_key"),
        ("newest_by_name", "USING INDEX jobs_by_name"),
        ("count_by_name", "USING COVERING INDEX jobs_by_name"),
        ("uids_by_name", "USING COVERING INDEX jobs_by_name"),
        ("newest_place_by_name", "USING INDEX jobs_by_name"),
        ("uids_by_matrix_name", "USING COVERING INDEX jobs_by_matrix_name"),
        ("newest_of_matrix_name", "USING INDEX jobs_by_matrix_name"),
        ("uid_of_user", "USING INDEX jobs_by_user"),
        ("ids_by_prefix", "USING COVERING INDEX sqlite_autoindex_jobs_1"),
        ("events_of", "USING PRIMARY KEY"),
        ("count_states", "USING COVERING INDEX jobs_by_state"),
        ("ended_before", "USING INDEX jobs_ended"),
    ],
)
def test_no_question_reads_the_whole_history(store: Store, path: Path, name: str, index: str) -> None:
    connection = connect(path)
    try:
        count = max(STATEMENTS[name].count("?"), 0)
        values: object = (1,) * count or dict.fromkeys(("user", "first", "before", "since", "limit", "state"), 1)
        plan = [row[3] for row in connection.execute("EXPLAIN QUERY PLAN " + STATEMENTS[name], values)]
    finally:
        connection.close()
    assert any(index in line for line in plan), plan
    assert not any("TEMP B-TREE" in line for line in plan), plan


_HISTORY = """
INSERT INTO jobs (id, version, name, user, uid, idempotency_key, state, submitted_at, ended_at, record)
WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 20000)
SELECT 'old-' || i, 1, 'old', 'ada', 1000, 'key-' || i, 'SUCCEEDED', i, i, '{}' FROM n
"""


def test_live_jobs_are_found_beside_any_number_that_ended(store: Store, path: Path, run: Callable[..., Any]) -> None:
    with closing(connect(path)) as connection:
        connection.execute(_HISTORY)
    job = run(add(store, ID))
    thousands_of_steps: list[int] = []
    reading = store._reader._connection
    reading.set_progress_handler(lambda: thousands_of_steps.append(1), 1000)
    assert run(store.load_live()) == [job]
    assert run(store.find(ID, 1000)).job == job
    assert run(store.events(ID))[0].number == 1
    assert thousands_of_steps == []
