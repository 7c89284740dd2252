"""Verifies the store: sound pages, and rows that equal the fold of their events."""

from __future__ import annotations

import json
import sqlite3
from typing import TYPE_CHECKING, Any

from orchestrator.spec.paths import is_job_id
from orchestrator.store.sql.requests import STATEMENTS, event_of, job_row, replay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.core.ids import JobId

_PAGE = 500
_COLUMNS = (
    "sequence",
    "id",
    "version",
    "name",
    "user",
    "uid",
    "idempotency_key",
    "state",
    "submitted_at",
    "ended_at",
    "record",
    "matrix",
    "matrix_name",
)


def problems(connection: sqlite3.Connection, *, after: int = 0) -> list[str]:
    """Return the errors, one sentence each; reads one consistent view: every page, and jobs that came ``after``."""
    connection.execute("BEGIN")
    try:
        found = [text for (text,) in connection.execute("PRAGMA integrity_check(20)") if text != "ok"]
        found += [
            f"{table} row {row} has no {parent}"
            for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check")
        ]
        for what, column, name in (("all_places", 2, 1), ("all_queue_changes", 1, 0)):
            for values in connection.execute(STATEMENTS[what]):
                if not _is_object(values[column]):
                    found.append(f"{what.removeprefix('all_')}: the row of {values[name]!r} is damaged, and is ignored")
        for row in _rows(connection, after):
            problem = _row_problem(connection, row)
            if problem:
                found.append(f"job {row['id']}: {problem}")
    except sqlite3.DatabaseError as error:
        return [f"the file is damaged: {error}"]
    finally:
        connection.execute("ROLLBACK")
    return found


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, TypeError):
        return False


def _rows(connection: sqlite3.Connection, last: int) -> Iterator[dict[str, Any]]:
    while page := connection.execute(STATEMENTS["all_jobs"], (last, _PAGE)).fetchall():
        for values in page:
            yield dict(zip(_COLUMNS, values, strict=True))
        last = page[-1][0]


def _row_problem(connection: sqlite3.Connection, row: dict[str, Any]) -> str:
    job_id: JobId = row["id"]
    if not is_job_id(job_id):
        return "this is no job's id"
    try:
        events = connection.execute(STATEMENTS["events_of"], (row["sequence"], 0, -1))
        expected = job_row(replay((event_of(job_id, e) for e in events), row["sequence"]))
        record = json.loads(row["record"])
    except Exception as error:  # the error of an unreadable event or record is the finding
        return f"its events or its record cannot be read: {error}"
    wanted = json.loads(expected.pop("record"))
    wrong = [name for name, value in expected.items() if row[name] != value]
    wrong += [
        f"record.{name}" for name in sorted(wanted.keys() | record.keys()) if wanted.get(name) != record.get(name)
    ]
    return f"its row differs from the fold of its events in {', '.join(wrong)}" if wrong else ""
